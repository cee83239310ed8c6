"""What a run prints. Where nobody can read it any more, the run goes on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import rich.console


class Console(rich.console.Console):
    """Rich's console, which would end the process where the reader of a pipe has gone."""

    def on_broken_pipe(self) -> None:
        _go_on_without(BrokenPipeError())


def say(text: str, console: rich.console.Console | None = None) -> None:
    """Print a line."""
    try:
        print(text, flush=True) if console is None else console.print(text, markup=False)
    except OSError as error:
        _go_on_without(error)


def warn(text: str) -> None:
    """Print a line on stderr, if that is possible."""
    with suppress(OSError):
        print(f"WARNING: {text}", file=sys.stderr, flush=True)


def _go_on_without(error: OSError) -> None:
    with suppress(OSError):  # where stdout is no file of the system's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = "nobody reads it any more" if isinstance(error, BrokenPipeError) else error.strerror or str(error)
    warn(f"what is printed is lost from here on: {reason}; the run goes on without it (Ctrl-C ends it)")
