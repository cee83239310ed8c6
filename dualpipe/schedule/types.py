"""The schedule as data: actions, steps of one or two actions, and which rank runs which stage.

Pure Python; importing `dualpipe.schedule` must not import torch.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, cast

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


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

    @staticmethod
    def read(text: str) -> Action:
        """The action that "3F5" names; ScheduleError where it names none."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action like 0F7")
        stage, kind, microbatch = match.groups()
        return Action(cast("Kind", kind), int(stage), int(microbatch))

    @property
    def title(self) -> str:
        """Such as "F(stage 2, micro-batch 5)"."""
        return f"{self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


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
        ranks, placement = tuple(map(tuple, self.ranks)), tuple(self.placement)
        for step in chain.from_iterable(ranks):
            if isinstance(step, Action):
                raise ScheduleError(f"schedule {self.name!r}: {step} stands alone; a step is a tuple of actions: "
                                    f"({step},)")
            if not isinstance(step, tuple | list) or not all(isinstance(action, Action) for action in step):
                raise ScheduleError(f"schedule {self.name!r}: {step!r} is not a step; a step is a tuple of actions")
        if not placement:
            votes: list[Counter[int]] = [Counter() for _ in range(self.num_stages)]
            for rank, steps in enumerate(ranks):
                for action in chain.from_iterable(steps):
                    if 0 <= action.stage < self.num_stages:
                        votes[action.stage][rank] += 1
            placement = tuple(vote.most_common(1)[0][0] if vote else -1 for vote in votes)
        object.__setattr__(self, "ranks", tuple(tuple(map(tuple, steps)) for steps in ranks))
        object.__setattr__(self, "placement", placement)

    def stage_rank(self, stage: int) -> int:
        """The rank that owns `stage`."""
        return self.placement[stage]

    def rank_stages(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` owns, ascending."""
        return tuple(s for s, owner in enumerate(self.placement) if owner == rank)

    def to_torch_csv(self) -> str:
        """The order as the compute-only CSV of torch.distributed.pipelining, one line a rank.

        A cell is `<stage><kind><micro-batch>`, such as 0F7, or a forward overlapped with a whole backward:
        (0F7;7B3)OVERLAP_F_B, in which the forward comes first. torch has no cell for other pairs; their actions are
        written one after the other.
        """
        rows: list[list[str]] = [[] for _ in self.ranks]
        for steps, row in zip(self.ranks, rows):
            for step in steps:
                if len(step) == 2 and {action.kind for action in step} == {"F", "B"}:
                    forward, backward = sorted(step, key=lambda action: action.kind != "F")
                    row.append(f"({forward};{backward})OVERLAP_F_B")
                else:
                    row += map(str, step)
        return "".join(",".join(row) + "\n" for row in rows)

    @staticmethod
    def from_torch_csv(text: str, name: str = "csv") -> Schedule:
        """The schedule in such a CSV, with as many stages and micro-batches as it names; empty cells are idle time.

        Raises ScheduleError, naming row and cell, where a cell is malformed. Use `validate` to know whether it can be
        run.
        """
        ranks = tuple(
            tuple(_read_cell(cell.strip(), row, column) for column, cell in enumerate(cells) if cell.strip())
            for row, cells in enumerate(csv.reader(text.rstrip("\r\n").splitlines(keepends=True)))
        )
        actions = list(chain.from_iterable(chain.from_iterable(ranks)))
        if not actions:
            raise ScheduleError(f"schedule {name!r}: the CSV has no actions")
        num_stages = 1 + max(action.stage for action in actions)
        if num_stages > len(actions):  # before anything is made for each stage
            raise ScheduleError(f"schedule {name!r}: stage {num_stages - 1} among only {len(actions)} actions")
        return Schedule(name, len(ranks), num_stages, 1 + max(action.microbatch for action in actions), ranks)


def _read_cell(cell: str, row: int, column: int) -> Step:
    overlap = _OVERLAP.fullmatch(cell)
    try:
        return tuple(Action.read(text.strip()) for text in (overlap.groups() if overlap else (cell,)))
    except ScheduleError as error:
        raise ScheduleError(f"row {row}, cell {column}: {error}, nor a pair like (0F7;7B3)OVERLAP_F_B") from None


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank in a V: down through the ranks and back up, so that rank 0 holds the first and the last."""
    return (*range(num_ranks), *reversed(range(num_ranks)))
