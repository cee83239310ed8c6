"""Sizes in bytes as text: "5GB" on a command line, "1.5 KB" in what is printed."""

from __future__ import annotations

import re

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes of "5GB", "500 MB", "2GiB" or a number alone; raises `ValueError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) * _UNITS[found[2].upper()] < 1:
        raise ValueError(f"a size must be such as 5GB, 500MB or 2GiB; got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def format_bytes(size: int) -> str:
    """1500 -> "1.5 KB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size} B"
