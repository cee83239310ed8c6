"""What each kind of work costs, in any one unit of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import cast

from dualpipe.schedule.types import KINDS, Kind, Step


@dataclass(frozen=True)
class Costs:
    """Costs of the actions of one stage, of overlapping them, and of sending.

    F, B, W, I: a forward, a whole backward, the weight gradients, a backward for the input only. I is B - W unless
        given.
    FB: a forward overlapped with a whole backward; F + B, nothing saved, unless given.
    pairs: costs of other overlapped pairs by their two kinds, in either order: {("F", "I"): 1.7}. Their sum unless
        given.
    p2p: from the end of a step until its result is on another rank. It takes no time of either rank.
    per_stage: the Costs of stages that differ from these, by stage; a sequence gives them from stage 0 on. Their own
        `p2p` and `per_stage` are not used. A pair from two stages saves the mean of what it saves on each.
    R: reducing a stage's gradients over data-parallel ranks, once they are complete and beside the computing.

    Raises ValueError for a cost that is negative or not finite.
    """

    F: float = 1.0
    B: float = 2.0
    W: float = 1.0
    I: float | None = None  # noqa: E741 - the name of the kind
    FB: float | None = None
    pairs: Mapping[tuple[str, str], float] | None = None
    p2p: float = 0.0
    per_stage: Mapping[int, Costs] | Sequence[Costs] | None = None
    R: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.per_stage, Sequence):
            object.__setattr__(self, "per_stage", dict(enumerate(self.per_stage)))
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("pairs", "per_stage")}
        given |= {"&".join(kinds): cost for kinds, cost in (self.pairs or {}).items()}
        for name, cost in given.items():
            if cost is not None and not (isfinite(cost) and cost >= 0):
                raise ValueError(f"cost {name} is {cost}; give a number of 0 or more")
        if self.I is None and self.W > self.B:
            raise ValueError(f"cost W is {self.W}, more than the whole backward B = {self.B}; lower it, or give I too")
        for kinds in self.pairs or {}:
            if len(kinds) != 2 or not set(kinds) <= set(KINDS):
                raise ValueError(f"pairs has a cost for {kinds!r}; give two kinds out of {', '.join(KINDS)}")

    def of(self, step: Step) -> float:
        """How long `step` takes."""
        alone = [self.on(action.stage)._alone(action.kind) for action in step]
        if len(step) == 1:
            return alone[0]
        (a, on_a), (b, on_b) = ((action.kind, self.on(action.stage)) for action in step)
        if on_a is on_b:
            return on_a._pair(a, b)
        return sum(alone) - sum(on._alone(a) + on._alone(b) - on._pair(a, b) for on in (on_a, on_b)) / 2

    def on(self, stage: int) -> Costs:
        """The costs of `stage`."""
        return cast("Mapping[int, Costs]", self.per_stage or {}).get(stage, self)

    def scaled(self, factor: float) -> Costs:
        """The same for stages that are `factor` times as big; what crosses between them, `p2p`, stays as it is."""
        given = {name: cost for name in ("F", "B", "W", "I", "FB", "R") if (cost := getattr(self, name)) is not None}
        stages = cast("Mapping[int, Costs] | None", self.per_stage)
        return replace(
            self,
            **{name: cost * factor for name, cost in given.items()},
            pairs=self.pairs and {kinds: cost * factor for kinds, cost in self.pairs.items()},
            per_stage=stages and {stage: costs.scaled(factor) for stage, costs in stages.items()},
        )

    def _alone(self, kind: Kind) -> float:
        return self.B - self.W if kind == "I" and self.I is None else getattr(self, kind)

    def _pair(self, a: Kind, b: Kind) -> float:
        if self.FB is not None and {a, b} == {"F", "B"}:
            return self.FB
        given = self.pairs or {}
        return given.get((a, b), given.get((b, a), self._alone(a) + self._alone(b)))
