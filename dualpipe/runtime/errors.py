"""Errors that every rank raises together, how they are said, and how processes end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterable
from difflib import get_close_matches

_LINES = 200  # of a list of problems
USER_ERROR = 2  # exit status of what the user can put right: a ValueError


class PipelineError(RuntimeError):
    """A step failed on some rank while it ran; the message names the rank, the action and the cause."""


class RankLost(PipelineError):
    """Another rank did not come in time, or is gone; the message says what was waited for, how long, and from whom."""


class UpstreamFailed(Exception):
    """Another rank could not send what this one needs; that rank reports the cause."""


PLAIN = (ValueError, FloatingPointError, OSError, RankLost)  # said in a line, without a traceback


def exit_status(error: BaseException) -> int:
    """The exit status of a process that ends with `error`."""
    return USER_ERROR if isinstance(error, ValueError) else 1


def error_line(error: BaseException) -> str:
    """What is said of an error, with a line more for each of its notes."""
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])


def nearest(name: str, known: Collection[str], count: int = 1, *, cutoff: float = 0.6) -> list[str]:
    """The `count` of the known names that are most like `name`, best first; with `cutoff` 0 whatever they are."""
    return get_close_matches(name, known, n=count, cutoff=cutoff)


def raise_for(what: str, problems: Iterable[str]) -> None:
    """Raise one ValueError with a line for every problem, if there is any."""
    problems = list(problems)
    if problems:
        rest = [f"... and {len(problems) - _LINES} more"] if len(problems) > _LINES else []
        raise ValueError("\n  ".join([what, *problems[:_LINES], *rest]))


def die_with(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends; on Linux alone.

    `parent` is the process of that thread: where it has gone already, this one ends now.
    """
    if sys.platform == "linux":
        import ctypes  # not at the top: for processes that are started by others

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <sys/prctl.h>
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
