"""Text for people: the printed lines of a run, which goes on when its output can no longer be written, and sizes.

A size is "5GB" on a command line, and "1.5 KB" in printed lines.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def say(text: str, console: rich.console.Console | None = None) -> None:
    """Print a line to stdout, or to a console of rich; discard further output if that fails."""
    try:
        print(text, flush=True) if console is None else console.print(text, markup=False)
    except OSError as error:
        discard_output(error)


def warn(text: str) -> None:
    """Print a warning to stderr; do nothing if that fails."""
    with suppress(OSError):
        print(f"WARNING: {text}", file=sys.stderr, flush=True)


def discard_output(error: OSError) -> None:
    """Discard further output after stdout has failed with `error`, and say so on stderr."""
    with suppress(OSError):  # stdout has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = "nobody reads it any more" if isinstance(error, BrokenPipeError) else error.strerror or str(error)
    warn(f"what is printed is lost from here on: {reason}; the run goes on without it (Ctrl-C ends it)")


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
