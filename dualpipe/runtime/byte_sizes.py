"""Sizes in bytes as text: "5GB" on a command line, "1.5 KB" in printed lines."""

from __future__ import annotations

import re

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """Return the bytes of "5GB", "500 MB", "2GiB" or a plain number. Raises ValueError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match is not None else None
    size = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if size < 1:
        raise ValueError(f"a size must be such as 5GB, 500MB or 2GiB; got {text!r}")
    return int(size)


def format_bytes(size: int) -> str:
    """Return a size as text: 1500 -> "1.5 KB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size} B"
