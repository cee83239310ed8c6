"""Lowering of a rank's steps into a flat program of receives, actions and sends, once per schedule."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from dualpipe.schedule import build
from dualpipe.schedule.messages import (
    Message,
    MessageStream,
    all_messages,
    completed_stages,
    merged_weights,
    sent_message,
)
from dualpipe.schedule.types import Action, Schedule, ScheduleError
from dualpipe.schedule.validate import validate


class Instruction(NamedTuple):
    """Receive the `incoming` messages, run one action or two that overlap, send the `outgoing` messages.

    Attributes:
        incoming: messages that the actions need.
        actions: one action, or a pair.
        outgoing: for each action, the message with its result; None if the result stays on this rank.
        completes: stages without later actions; in training, their gradients are complete.
        name: the actions as text.
        kinds: the kinds of the actions, such as "F", or "FB" for a pair.
        merged: for a "W" whose weight gradients are merged, all actions of the merge in their order, itself included;
            otherwise none. Each of them stays an instruction, with its share of the merged work.
    """

    incoming: tuple[Message, ...]
    actions: tuple[Action, ...]
    outgoing: tuple[Message | None, ...]
    completes: tuple[int, ...]
    name: str
    kinds: str
    merged: tuple[Action, ...] = ()

    def __str__(self) -> str:
        return " and ".join(action.title for action in self.actions)


@dataclass(frozen=True)
class Program:
    """Instructions of one rank for one step of the pipeline, and its messages by stream."""

    instructions: tuple[Instruction, ...]
    incoming: dict[MessageStream, list[Message]]  # in the order of the instructions
    outgoing: tuple[MessageStream, ...]
    messages_in_flight: int  # as in `Schedule`


def lower(schedule: Schedule, rank: int, *, train: bool, merge: bool = False) -> Program:
    """Return the program of a rank. The schedule must be valid.

    train: False for an evaluation, which has only the forwards, in the same order. merge: merge the weight gradients of
    neighbouring actions "W", see `dualpipe.schedule.messages.merged_weights`.
    """
    kinds = "FBIW" if train else "F"
    steps = [tuple(action for action in step if action.kind in kinds) for step in schedule.ranks[rank]]
    instructions: list[Instruction] = []
    incoming: defaultdict[MessageStream, list[Message]] = defaultdict(list)
    outgoing: set[MessageStream] = set()
    completions = completed_stages(steps, "BW" if train else "F")
    for step, step_messages, completes in zip(steps, all_messages(schedule)[rank], completions, strict=True):
        if not step:
            continue
        instruction = Instruction(
            incoming=tuple(message for message in step_messages.incoming if message.kind in kinds),
            actions=step,
            outgoing=tuple(sent_message(schedule, action) for action in step),
            completes=completes,
            name=";".join(map(str, step)),
            kinds="".join(action.kind for action in step),
        )
        instructions.append(instruction)
        for message in instruction.incoming:
            incoming[message.stream].append(message)
        outgoing |= {message.stream for message in instruction.outgoing if message is not None}
    if merge:
        merges = merged_weights([instruction.actions for instruction in instructions])
        instructions = [
            instruction._replace(merged=merged) for instruction, merged in zip(instructions, merges, strict=True)]
    return Program(tuple(instructions), dict(incoming), tuple(sorted(outgoing)), schedule.messages_in_flight)


def without_pairs(schedule: Schedule) -> Schedule:
    """Return the schedule with one action per step; `schedule` itself if that could deadlock."""
    steps = (((action,) for step in rank for action in step) for rank in schedule.ranks)
    single = replace(schedule, ranks=tuple(map(tuple, steps)))
    with suppress(ScheduleError):
        validate(single)
        return single
    return schedule


class ProgramCache:
    """Programs of a rank by number of micro-batches, each lowered once, for training and for evaluation.

    For the schedule "auto", the caller searches once for all ranks and passes the result to `add`. Until then,
    `schedule` returns DualPipeV's order under the name "auto".

    Args:
        schedule: a name, or a `Schedule`, which fixes the number of micro-batches.
        num_ranks: number of ranks of the pipeline.
        rank: the rank.
        num_modules: number of stages of the rank.
    """

    def __init__(self, schedule: str | Schedule, *, num_ranks: int, rank: int, num_modules: int) -> None:
        self._schedule = schedule
        self._num_ranks = num_ranks
        self._rank = rank
        self._num_modules = num_modules
        self.overlaps_pairs = True  # False: the actions of a pair run one after the other
        self.merges = False  # True: the weight gradients of neighbouring "W" are merged
        self._searched: dict[int, Schedule] = {}  # results of searches for "auto", by number of micro-batches
        self._lowered: dict[int, dict[bool, Program]] = {}  # by number of micro-batches, and True for training

    def needs_search(self, num_microbatches: int) -> bool:
        """Return True if the schedule for a number of micro-batches must be searched for."""
        return self._schedule == "auto" and num_microbatches not in self._searched

    def add(self, schedule: Schedule) -> None:
        """Add the result of a search."""
        self._searched[schedule.num_microbatches] = schedule

    def program(self, num_microbatches: int, *, train: bool) -> Program:
        """Return the program for a number of micro-batches; of forwards only unless `train`.

        Raises ValueError if the schedule does not match the pipeline.
        """
        if num_microbatches not in self._lowered:
            schedule = self.schedule(num_microbatches)
            if not self.overlaps_pairs:  # then the first result can be sent before the second action begins
                schedule = without_pairs(schedule)
            self._lowered[num_microbatches] = {
                True: lower(schedule, self._rank, train=True, merge=self.merges),
                False: lower(schedule, self._rank, train=False),
            }
        return self._lowered[num_microbatches][train]

    def schedule(self, num_microbatches: int | None = None) -> Schedule:
        """Return the schedule for a number of micro-batches (default: the smallest possible).

        Raises ValueError if it does not match the pipeline.
        """
        if num_microbatches is None:
            num_microbatches = self._schedule.num_microbatches if isinstance(self._schedule, Schedule) else 1
        schedule = self._build_schedule(num_microbatches)
        if schedule.num_ranks != self._num_ranks:
            raise ValueError(f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks, got {self._num_ranks}")
        if schedule.num_microbatches != num_microbatches:
            raise ValueError(f"schedule {schedule.name!r} is for {schedule.num_microbatches} micro-batches, got "
                             f"{num_microbatches}; pass that number, or the name of a schedule")
        validate(schedule)
        stages = schedule.rank_stages(self._rank)
        if len(stages) != self._num_modules:
            raise ValueError(f"rank {self._rank} has {self._num_modules} modules, but schedule {schedule.name!r} gives "
                             f"it {len(stages)} stages {stages}; pass one module per stage")
        return schedule

    def _build_schedule(self, num_microbatches: int) -> Schedule:
        """Return the schedule that the caller has passed, or build the named one."""
        schedule = self._schedule
        if isinstance(schedule, Schedule):
            return schedule
        if schedule == "auto":
            if num_microbatches in self._searched:
                return self._searched[num_microbatches]
            # Before the search: DualPipeV, whose placement every result of a search has.
            return replace(build("dualpipev", self._num_ranks, num_microbatches), name="auto")
        options = {"stages_per_rank": self._num_modules} if schedule == "interleaved_1f1b" else {}
        return build(schedule, self._num_ranks, num_microbatches, **options)
