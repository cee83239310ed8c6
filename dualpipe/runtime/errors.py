"""Errors that all ranks raise together, their texts, and the exit status of processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple, TypeVar

E = TypeVar("E", bound=BaseException)
_MAX_PROBLEMS = 200  # lines of a list of problems
USER_ERROR = 2  # exit status of an error that the user can put right: a ValueError


class Wait(NamedTuple):
    """A wait that ended with the loss of a rank.

    rank: global rank that waited. ranks: global ranks that were being waited on. text: names what it waited for, the
    duration, and the ranks being waited on.
    """

    rank: int
    ranks: Sequence[int]
    text: str


class PipelineError(RuntimeError):
    """A step failed on some rank while it ran; the message names the rank, the action and the cause.

    is_loss: a rank did not reach a communication in time, or has left without publishing a cause, so that
    it is not certain that all ranks raise this.
    wait: the wait of some rank that ended with the loss, if it is known.
    """

    def __init__(self, text: str, *, is_loss: bool = False, wait: Wait | None = None) -> None:
        super().__init__(text)
        self.is_loss = is_loss
        self.wait = wait


class RankLost(PipelineError):
    """Another rank did not reach a communication in time, or is gone. The message describes the wait of this rank."""

    def __init__(self, text: str, wait: Wait | None = None) -> None:
        super().__init__(text, is_loss=True, wait=wait)

    @property
    def ranks(self) -> Sequence[int]:
        """Return the global ranks that were being waited on."""
        return self.wait.ranks if self.wait is not None else ()


ONE_LINE_ERRORS = (ValueError, FloatingPointError, OSError, RankLost)  # printed as one line, without a traceback


class CheckFailed(ValueError):
    """A check found something, such as a damaged file. The exit status is 1: the command itself is right."""


def exit_status(error: BaseException) -> int:
    """Return the exit status of a process that ends with `error`."""
    return USER_ERROR if isinstance(error, ValueError) and not isinstance(error, CheckFailed) else 1


def error_line(error: BaseException) -> str:
    """Return the printed line of an error, followed by a line for each of its notes."""
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])


_MIXED_DTYPES = (
    " Tensors of two dtypes meet: cast one of them. fully_shard casts neither buffers nor the outputs of a module of "
    "another dtype; dualpipe.parallel.shard does."
)
_REMEDIES = {  # remedies for errors of torch that do not mention the pipeline, by a phrase of their text
    "leaf Variable that requires grad": " A stage must not begin with an in-place operation: its input is a leaf, "
    "like a parameter, and its gradient goes to the stage before. Write x = x + 1 instead of x += 1.",
    "modified by an inplace operation": " Other micro-batches run between a forward and its backward: a stage or a "
    "criterion must not fill a tensor again that the backward reads. Make a new one in each forward.",
    "does not require grad and does not have a grad_fn": " The first forward of a recomputed segment runs without a "
    "graph: call autograd.grad under torch.enable_grad(), with an input that requires a gradient, or do not recompute.",
    "backward through the graph a second time": " Every micro-batch runs a backward of its own: a tensor with a graph "
    "that several of them use must be an input or a target of the step, or be computed in each forward.",
    "must have the same dtype": _MIXED_DTYPES,
    "same dtype, but got": _MIXED_DTYPES,
}


def describe_error(error: BaseException) -> str:
    """Return the text of an error for other ranks, with its type in front unless it is a ValueError."""
    try:
        text = str(error)
    except Exception as raised:
        text = f"(its text raised {type(raised).__name__})"
    remedies = (remedy for phrase, remedy in _REMEDIES.items() if phrase in text)
    text += next(remedies, "")
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the type of an error without one."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def mark_names_ranks(error: E) -> E:
    """Mark an error whose text names the failed ranks; return it."""
    error.names_ranks = True  # type: ignore[attr-defined]
    return error


def names_ranks(error: BaseException) -> bool:
    """Return True if `mark_names_ranks` has marked an error."""
    return getattr(error, "names_ranks", False)


def nearest(name: str, known: Collection[str], count: int = 1, *, cutoff: float = 0.6) -> list[str]:
    """Return at most `count` of the known names that resemble `name`, best first; with `cutoff` 0 at any distance."""
    return get_close_matches(name, known, n=count, cutoff=cutoff)


def raise_for(heading: str, problems: Iterable[str], error: type[ValueError] = ValueError) -> None:
    """Raise one error with a heading and a line for every problem; do nothing if there are none."""
    problems = list(problems)
    if not problems:
        return
    lines = [heading, *problems[:_MAX_PROBLEMS]]
    if len(problems) > _MAX_PROBLEMS:
        lines.append(f"... and {len(problems) - _MAX_PROBLEMS} more")
    raise error("\n  ".join(lines))


def die_with(parent: int) -> None:
    """Ask the system to kill this process when the thread that started it ends (Linux only).

    parent: the process of that thread. If it has ended already, this process ends now.
    """
    if sys.platform == "linux":
        import ctypes  # not at the top: only processes that others start need it

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <sys/prctl.h>
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
