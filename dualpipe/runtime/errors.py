"""Errors that every rank raises together, how they are said, and how processes end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import TypeVar

E = TypeVar("E", bound=BaseException)
_LINES = 200  # of a list of problems
USER_ERROR = 2  # exit status of what the user can put right: a ValueError


class PipelineError(RuntimeError):
    """A step failed on some rank while it ran; the message names the rank, the action and the cause.

    is_loss: a rank did not come or has left without a word, so that not all ranks raise this.
    """

    def __init__(self, text: str, *, is_loss: bool = False) -> None:
        super().__init__(text)
        self.is_loss = is_loss


class RankLost(PipelineError):
    """Another rank did not come in time, or is gone; the message says what was waited for, how long, and from whom.

    ranks: those that were waited for (global numbers).
    """

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text, is_loss=True)
        self.ranks = tuple(ranks)


PLAIN = (ValueError, FloatingPointError, OSError, RankLost)  # said in a line, without a traceback


def exit_status(error: BaseException) -> int:
    """The exit status of a process that ends with `error`."""
    return USER_ERROR if isinstance(error, ValueError) else 1


def error_line(error: BaseException) -> str:
    """Return the line that is printed for an error, with one more for each of its notes."""
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])


_MIXED_DTYPES = (
    " Tensors of two dtypes meet: cast one of them. Where fully_shard was used: it casts neither buffers nor what a "
    "module of another dtype returns; dualpipe.parallel.shard does."
)
_REMEDIES = {  # for errors of torch that say nothing of a pipeline
    "leaf Variable that requires grad": " A stage must not begin with an operation in place: its input is a leaf, from "
    "which the stage before gets its gradient, and so are parameters. Write x = x + 1 instead of x += 1.",
    "must have the same dtype": _MIXED_DTYPES,
    "same dtype, but got": _MIXED_DTYPES,
}


def describe_error(error: BaseException) -> str:
    """Return the text of an error for other ranks: a ValueError speaks for itself, others are named by their type."""
    try:
        text = str(error)
    except Exception as raised:
        text = f"(its text raised {type(raised).__name__})"
    text += next((remedy for phrase, remedy in _REMEDIES.items() if phrase in text), "")
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def naming_ranks(error: E) -> E:
    """Mark an error whose text names the ranks that it came up on; return it."""
    error.names_ranks = True  # type: ignore[attr-defined]
    return error


def names_ranks(error: BaseException) -> bool:
    """Return True for an error that `naming_ranks` has marked."""
    return getattr(error, "names_ranks", False)


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
