"""The place where a pipeline and the uncut model part."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dualpipe.schedule import Action
from dualpipe.train.anomaly.localize import ResultLocation


class Origin(NamedTuple):
    """The first place where the pipeline and the uncut model differ. name: of a parameter; where: such as "F(stage 1,
    micro-batch 0)"; hint: a likely cause, or nothing."""

    name: str
    relative: float
    where: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.name}: relative error {self.relative:.2g}; first differs in {self.where}{hint}"


def order_of(action: Action) -> tuple[int, ...]:
    """Return the order in which actions depend on each other: a cause comes before what follows from it."""
    kind: Literal["F", "B"] = "F" if action.kind == "F" else "B"
    return (*ResultLocation.of(Action(kind, action.stage, action.microbatch), 0).order, action.microbatch)
