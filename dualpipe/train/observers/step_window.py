"""A window of steps that a tool observes: `--trace steps=10..12` and `--profile steps=10..12`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Self

from dualpipe.runtime.printing import say


class Steps(NamedTuple):
    """Steps of a run to observe, from 1, the last one among them; file: where to, "" for a name of the tool's."""

    first: int
    last: int
    file: str = ""


def parse_steps(text: str, steps: int, option: str, *, with_file: bool = False) -> Steps | None:
    """Parse an `option` such as "steps=10..12" of a run of so many steps; None where it is empty.

    with_file: it may end in ",file=PATH". Raises ValueError for what cannot be.
    """
    if not text:
        return None
    match = re.fullmatch(r"steps=(\d{1,12})(?:\.\.(\d{1,12}))?(?:,file=(.+))?", text)
    if match is None or (match[3] and not with_file):
        perhaps = ", and perhaps ,file=PATH behind it" if with_file else ""
        raise ValueError(f"{option}: {text!r} is not understood; give steps=10..12, or steps=10{perhaps}")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= steps:
        raise ValueError(f"{option}: steps={first}..{last} are not steps of this run, which has 1 to {steps}; give "
                         "some of these, the first one first")
    return Steps(first, last, match[3] or "")


class StepWindow(ABC):
    """Opens a tool before the first wanted step of a run, and closes it after the last. Every rank calls it alike.

    For a `with` around all steps: an error inside closes the tool too.
    """

    product: ClassVar[str]  # of the tool, such as "trace"

    def __init__(self, wanted: Steps | None, rank: int) -> None:
        """wanted: the steps, None for none; rank: 0 prints."""
        self._wanted = wanted
        self._rank = rank

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Return True while the tool observes."""

    @abstractmethod
    def _open(self, step: int, last: int) -> None:
        """Begin to observe, from `step` to `last`."""

    @abstractmethod
    def _close(self) -> None:
        """End observing and write the file."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the tool where it is open still."""

    def before(self, step: int) -> None:
        """Open the tool if `step`, which comes now, is wanted: also the first step after others were resumed from."""
        if self._wanted is None or self.is_open or step < self._wanted.first:
            return
        if step <= self._wanted.last:
            self._open(step, self._wanted.last)
            return
        product, last = self.product, self._wanted.last
        self._say(f"no {product} is taken: the run goes on behind step {last}, the last one to {product}")
        self._wanted = None

    def ends(self, step: int) -> bool:
        """Return True if `step`, which was done, is the last one that is observed."""
        return self.is_open and self._wanted is not None and step >= self._wanted.last

    def after(self, step: int, *, run_ends: bool) -> None:
        """Close the tool after the last wanted step, or where the run ends before that."""
        if self.is_open and (run_ends or self.ends(step)):
            self._close()

    def _say(self, text: str) -> None:
        if self._rank == 0:
            say(text)
