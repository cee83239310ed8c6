"""The schedule as data: actions, steps of one or two actions, and which rank runs which stage.

Pure Python; importing `dualpipe.schedule` must not import torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")


class ScheduleError(ValueError):
    """A schedule that must not be run; the message names the rank, the step and the cause."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work: `kind` of `stage` for `microbatch`.

    kind: "F" forward; "B" full backward (input and weight gradients); "I" backward for the input only, its weight
    gradients deferred; "W" the deferred weight gradients of an earlier "I".
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Step = tuple[Action, ...]  # one action, or two that overlap; neither depends on the other


@dataclass(frozen=True)
class Schedule:
    """The order of work of every rank, with the placement of stages on ranks.

    ranks[r] holds the steps of rank r in order. `placement[s]` is the rank of stage s; where it is not given it is
    read off the steps (the rank that holds most of a stage's actions), so that a hand-written schedule needs none.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]
    placement: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        ranks = tuple(tuple(_as_step(self.name, step) for step in steps) for steps in self.ranks)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "placement", tuple(self.placement) or self._placement_of_steps())

    def _placement_of_steps(self) -> tuple[int, ...]:
        votes = [Counter() for _ in range(self.num_stages)]
        for rank, steps in enumerate(self.ranks):
            for step in steps:
                for action in step:
                    if 0 <= action.stage < self.num_stages:
                        votes[action.stage][rank] += 1
        return tuple(vote.most_common(1)[0][0] if vote else -1 for vote in votes)

    def stage_rank(self, stage: int) -> int:
        """The rank that owns `stage`."""
        return self.placement[stage]

    def rank_stages(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns, ascending."""
        return tuple(s for s, owner in enumerate(self.placement) if owner == rank)

    def to_torch_csv(self) -> str:
        """The order as the compute-only CSV of torch.distributed.pipelining; see `torch_csv`."""
        from dualpipe.schedule.torch_csv import to_torch_csv

        return to_torch_csv(self)

    @staticmethod
    def from_torch_csv(text: str, name: str = "csv") -> Schedule:
        """Reads such a CSV. Raises ScheduleError, naming row and cell, where it is malformed."""
        from dualpipe.schedule.torch_csv import from_torch_csv

        return from_torch_csv(text, name)


def _as_step(name: str, step: Step) -> Step:
    if isinstance(step, Action):
        raise ScheduleError(f"schedule {name!r}: {step} stands alone; a step is a tuple of actions: ({step},)")
    if not isinstance(step, tuple | list) or not all(isinstance(action, Action) for action in step):
        raise ScheduleError(f"schedule {name!r}: {step!r} is not a step; a step is a tuple of actions")
    return tuple(step)
