"""Types of a schedule: actions, steps of one or two actions, and the placement of stages on ranks.

Pure Python: importing `dualpipe.schedule` must not import torch.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, cast

Kind = Literal["F", "B", "I", "W"]
"""The kind of an action: see `Action`."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class ScheduleError(ValueError):
    """Error of a schedule that cannot be run; the message names the rank, the step and the cause."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work: `kind` for `microbatch` on `stage`. Written 3F5 for the forward of micro-batch 5 on stage 3.

    Args:
        kind: "F" for the forward; "B" for the full backward (input and weight gradients); "I" for the backward of the
            input only, whose weight gradients are deferred; "W" for the deferred weight gradients of an earlier "I".
        stage: number of the stage, from 0.
        microbatch: number of the micro-batch, from 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def read(text: str) -> Action:
        """Parse an action from text such as "3F5". Raises ScheduleError if the text is not an action."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an action like 0F7")
        stage, kind, microbatch = match.groups()
        return Action(cast("Kind", kind), int(stage), int(microbatch))

    @property
    def title(self) -> str:
        """Text for messages, such as "F(stage 2, micro-batch 5)"."""
        return f"{self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


Step = tuple[Action, ...]
"""One action, or two independent actions that overlap."""


@dataclass(frozen=True)
class Schedule:
    """Order of the work of every rank, with the placement of stages on ranks.

    Args:
        name: name of the schedule, for messages and drawings.
        num_ranks: number of pipeline ranks.
        num_stages: number of stages.
        num_microbatches: number of micro-batches in a step of training.
        ranks: steps of each rank, in order; `ranks[r]` belongs to rank r.
        placement: rank of each stage. If empty, each stage is placed on the rank that has most of its actions, or on
            rank -1 if it has no actions, so that a schedule written by hand needs no placement.
        messages_in_flight: number of messages from one rank to another, of activations or of gradients, that may be
            sent before they are received. A further send waits. Most schedules need only one; a schedule in which ranks
            would then wait for each other forever needs more. The engine keeps a copy of each.

    Raises:
        ScheduleError: a step is not a tuple of actions.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]
    placement: tuple[int, ...] = field(default=(), repr=False)
    messages_in_flight: int = 1

    def __post_init__(self) -> None:
        ranks = tuple(tuple(steps) for steps in self.ranks)
        for step in chain.from_iterable(ranks):
            self._check_step(step)
        placement = tuple(self.placement) or self._infer_placement(ranks)
        object.__setattr__(self, "ranks", tuple(tuple(map(tuple, steps)) for steps in ranks))
        object.__setattr__(self, "placement", placement)

    def _check_step(self, step: object) -> None:
        if isinstance(step, Action):
            raise ScheduleError(f"schedule {self.name!r}: {step} stands alone; a step is a tuple of actions: ({step},)")
        if not isinstance(step, tuple | list) or not all(isinstance(action, Action) for action in step):
            raise ScheduleError(f"schedule {self.name!r}: {step!r} is not a step; a step is a tuple of actions")

    def _infer_placement(self, ranks: Sequence[Sequence[Step]]) -> tuple[int, ...]:
        """Return, for each stage, the rank with most of its actions; -1 for a stage without actions."""
        num_actions: list[Counter[int]] = [Counter() for _ in range(self.num_stages)]  # by stage, then rank
        for rank, steps in enumerate(ranks):
            for action in chain.from_iterable(steps):
                if 0 <= action.stage < self.num_stages:
                    num_actions[action.stage][rank] += 1
        return tuple(by_rank.most_common(1)[0][0] if by_rank else -1 for by_rank in num_actions)

    def stage_rank(self, stage: int) -> int:
        """Return the rank that owns `stage`."""
        return self.placement[stage]

    def rank_stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` owns, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def to_torch_csv(self) -> str:
        """Return the compute-only CSV of torch.distributed.pipelining, with one line per rank.

        A cell is `<stage><kind><micro-batch>`, such as 0F7, or a forward that overlaps a full backward, with the
        forward first: (0F7;7B3)OVERLAP_F_B. torch has no cell for other pairs, so their actions are written one after
        the other.
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
    def from_torch_csv(text: str, name: str = "csv", *, messages_in_flight: int = 1) -> Schedule:
        """Parse the CSV that `to_torch_csv` writes. Empty cells are idle time.

        The schedule has stages and micro-batches up to the highest that occurs in the cells. It is not validated; call
        `validate` to find out if it can be run. `messages_in_flight` is that of `Schedule`; the CSV does not have it.

        Raises:
            ScheduleError: a cell is malformed (the message names row and cell), or the CSV has no actions.
        """
        ranks = tuple(
            tuple(_read_cell(cell.strip(), row, column) for column, cell in enumerate(cells) if cell.strip())
            for row, cells in enumerate(csv.reader(text.rstrip("\r\n").splitlines(keepends=True)))
        )
        actions = list(chain.from_iterable(chain.from_iterable(ranks)))
        if not actions:
            raise ScheduleError(f"schedule {name!r}: the CSV has no actions; give cells like 0F7")
        num_stages = 1 + max(action.stage for action in actions)
        if num_stages > len(actions):  # checked before memory is allocated for every stage
            raise ScheduleError(f"schedule {name!r}: stage {num_stages - 1} among only {len(actions)} actions; number "
                                "the stages from 0 without gaps")
        num_microbatches = 1 + max(action.microbatch for action in actions)
        return Schedule(
            name, len(ranks), num_stages, num_microbatches, ranks, messages_in_flight=messages_in_flight)


def _read_cell(cell: str, row: int, column: int) -> Step:
    overlap = _OVERLAP.fullmatch(cell)
    texts = overlap.groups() if overlap else (cell,)
    try:
        return tuple(Action.read(text.strip()) for text in texts)
    except ScheduleError as error:
        raise ScheduleError(f"row {row}, cell {column}: {error}, nor a pair like (0F7;7B3)OVERLAP_F_B") from None


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Return the placement of a V with two stages per rank: down through the ranks and back up.

    Rank 0 holds both the first and the last stage. Example: 2 ranks give (0, 1, 1, 0).
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))
