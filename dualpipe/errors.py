"""Errors that every rank raises together, how errors are said, and the names that a mistyped one may have meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

PLAIN = (ValueError, FloatingPointError, OSError)  # said in a line, without a traceback
_LINES = 200  # of a list of problems
USER_ERROR = 2  # exit status of what the user can put right: a ValueError


class PipelineError(RuntimeError):
    """A step failed on some rank while it ran; the message names the rank, the action and the cause."""


class UpstreamFailed(Exception):
    """Another rank could not send what this one needs; that rank reports the cause."""


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
