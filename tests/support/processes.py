"""Processes as /proc shows them (Linux)."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int | str) -> bool:
    """Return True for a process that exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
