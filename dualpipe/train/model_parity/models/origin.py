"""The first place where the pipeline and the unpipelined model differ."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dualpipe.schedule import Action
from dualpipe.train.anomaly.localize import ResultLocation


class Origin(NamedTuple):
    """The first place where the pipeline and the unpipelined model differ."""

    name: str  # of a parameter
    relative: float  # error of its gradient
    where: str  # such as "F(stage 1, micro-batch 0)"
    hint: str = ""  # a likely cause, or ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.name}: relative error {self.relative:.2g}; first differs in {self.where}{hint}"


def order_of(action: Action) -> tuple[int, ...]:
    """Return a sort key for actions: an action sorts before those that depend on it."""
    kind: Literal["F", "B"] = "F" if action.kind == "F" else "B"
    return (*ResultLocation.of(Action(kind, action.stage, action.microbatch), 0).order, action.microbatch)
