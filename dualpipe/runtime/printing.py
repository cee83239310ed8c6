"""Lines that a run prints. Where nobody can read them any more, the run goes on without."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console


def say(text: str, console: rich.console.Console | None = None) -> None:
    """Print a line."""
    try:
        print(text, flush=True) if console is None else console.print(text, markup=False)
    except OSError as error:
        go_on_without(error)


def warn(text: str) -> None:
    """Print a line on stderr, if that is possible."""
    with suppress(OSError):
        print(f"WARNING: {text}", file=sys.stderr, flush=True)


def go_on_without(error: OSError) -> None:
    """Discard what is printed from now on, after stdout has failed with `error`, and say so on stderr."""
    with suppress(OSError):  # where stdout is no file of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = "nobody reads it any more" if isinstance(error, BrokenPipeError) else error.strerror or str(error)
    warn(f"what is printed is lost from here on: {reason}; the run goes on without it (Ctrl-C ends it)")
