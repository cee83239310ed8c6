"""A window of steps that a tool observes, as in `--trace steps=10..12` and `--profile steps=10..12`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Self

from dualpipe.runtime.printing import say


class Steps(NamedTuple):
    """Steps of a run to observe, counted from 1. last: included; file: output path, "" for the tool's default."""

    first: int
    last: int
    file: str = ""


def parse_steps(text: str, steps: int, option: str, *, with_file: bool = False) -> Steps | None:
    """Parse the value of an option such as "steps=10..12"; return None for "".

    Args:
        steps: number of steps of the run.
        option: name of the option, for errors.
        with_file: accept ",file=PATH" at the end.

    Raises ValueError for other text, and for steps that the run does not have.
    """
    if not text:
        return None
    match = re.fullmatch(r"steps=(\d{1,12})(?:\.\.(\d{1,12}))?(?:,file=(.+))?", text)
    if match is None or (match[3] and not with_file):
        file_option = ", optionally with ,file=PATH at the end" if with_file else ""
        raise ValueError(f"{option}: {text!r} is not understood; give steps=10..12, or steps=10{file_option}")
    first = int(match[1])
    last = int(match[2] or match[1])
    if not 1 <= first <= last <= steps:
        raise ValueError(f"{option}: steps={first}..{last} are not steps of this run, which has 1 to {steps}; give "
                         "some of these, the first one first")
    return Steps(first, last, match[3] or "")


class StepWindow(ABC):
    """Opens a tool before the first of some steps and closes it after the last. All ranks make the same calls.

    A context manager around all steps: an error inside closes the tool too.
    """

    output: ClassVar[str]  # name of what the tool writes, such as "trace"

    def __init__(self, steps: Steps | None, rank: int) -> None:
        """steps: to observe, None for none. rank: of this process; rank 0 prints."""
        self._steps = steps
        self._rank = rank

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True while the tool observes."""

    @abstractmethod
    def _open(self, step: int, last: int) -> None:
        """Begin to observe the steps from `step` to `last`."""

    @abstractmethod
    def _close(self) -> None:
        """End observing and write the file."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the tool if it is still open."""

    def before(self, step: int) -> None:
        """Open the tool if `step`, which runs next, is in the window. A run may resume in the middle of a window."""
        if self._steps is None or self.is_open or step < self._steps.first:
            return
        last = self._steps.last
        if step <= last:
            self._open(step, last)
            return
        self._say(f"no {self.output} is taken: the run resumes after step {last}, the last one to {self.output}")
        self._steps = None

    def ends(self, step: int) -> bool:
        """Return True if `step`, which is completed, is the last one of an open window."""
        return self.is_open and self._steps is not None and step >= self._steps.last

    def after(self, step: int, *, run_ends: bool) -> None:
        """Close the tool after the last step of the window, or if the run ends before it."""
        if self.is_open and (run_ends or self.ends(step)):
            self._close()

    def _say(self, text: str) -> None:
        """Print `text` on rank 0."""
        if self._rank == 0:
            say(text)
