"""Printed lines of a run. The run goes on when its output can no longer be written."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console


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
