"""Lowering: one rank's steps as a flat program of receives, computes and sends, made once per schedule."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from dualpipe.schedule import build
from dualpipe.schedule.merged_weights import merged_weights
from dualpipe.schedule.messages import Message, MessageStream, all_messages, completed, sent
from dualpipe.schedule.types import Action, Schedule, ScheduleError
from dualpipe.schedule.validate import validate


class Instruction(NamedTuple):
    """Take `incoming`, run `actions` (two of them overlap), send `outgoing`.

    `outgoing` runs parallel to `actions`: what carries the action's result away, or None where it stays here.
    `completes`: the stages that have nothing left to do; those whose gradients are complete, in training.
    `merged`: of a "W", all actions "W" whose weight gradients are merged with its own, this one among them, in their
    order; none: nothing is merged. Each still is an instruction of its own, with its share of their work.
    """

    incoming: tuple[Message, ...]
    actions: tuple[Action, ...]
    outgoing: tuple[Message | None, ...]
    completes: tuple[int, ...]
    name: str
    kinds: str  # such as "F", or "FB" for a pair
    merged: tuple[Action, ...] = ()

    def __str__(self) -> str:
        return " and ".join(action.title for action in self.actions)


@dataclass(frozen=True)
class Program:
    """The instructions of one rank in one step of the pipeline."""

    instructions: tuple[Instruction, ...]
    incoming: dict[MessageStream, list[Message]]  # in the order in which they are taken
    outgoing: tuple[MessageStream, ...]
    merges: bool = False  # whether weight gradients of several micro-batches are merged


def lower(schedule: Schedule, rank: int, *, train: bool, merge: bool = False) -> Program:
    """The program of `rank`, in the same order without backwards for an evaluation. The schedule must be valid.

    merge: merge the weight gradients of neighbouring actions "W", as `merged_weights` says.
    """
    kinds = "FBIW" if train else "F"
    steps = [tuple(action for action in step if action.kind in kinds) for step in schedule.ranks[rank]]
    instructions, incoming, outgoing = [], defaultdict(list), set()
    ends = completed(steps, "BW" if train else "F")
    for step, messages, completes in zip(steps, all_messages(schedule)[rank], ends, strict=True):
        if step:
            taken = tuple(message for message in messages.incoming if message.kind in kinds)
            results = tuple(sent(schedule, action) for action in step)
            name = ";".join(map(str, step))
            step_kinds = "".join(action.kind for action in step)
            instructions.append(Instruction(taken, step, results, completes, name, step_kinds))
            for message in taken:
                incoming[message.stream].append(message)
            outgoing |= {message.stream for message in results if message is not None}
    if merge:
        merged = merged_weights([instruction.actions for instruction in instructions])
        instructions = [i._replace(merged=actions) for i, actions in zip(instructions, merged)]
    return Program(
        tuple(instructions), dict(incoming), tuple(sorted(outgoing)), merges=any(i.merged for i in instructions))


def one_at_a_time(schedule: Schedule) -> Schedule:
    """The schedule without pairs; as it is, where that could deadlock."""
    steps = (((action,) for step in rank for action in step) for rank in schedule.ranks)
    single = replace(schedule, ranks=tuple(map(tuple, steps)))
    with suppress(ScheduleError):
        validate(single)
        return single
    return schedule


class Programs:
    """The programs of `rank`, by the number of micro-batches, each lowered once; for training and for evaluation.

    schedule: a name, or a `Schedule` whose number of micro-batches is the only one; num_modules: stages of the rank.
    "auto" is searched for by the caller, once for all ranks; until then its order is DualPipeV's.
    """

    def __init__(self, schedule: str | Schedule, *, num_ranks: int, rank: int, num_modules: int) -> None:
        self._schedule, self._num_ranks, self._rank, self._num_modules = schedule, num_ranks, rank, num_modules
        self._found: dict[int, Schedule] = {}  # of "auto", by the number of micro-batches
        self.pairs = True  # whether pairs stay together
        self.merges = False  # whether the weight gradients of neighbouring "W" are merged
        self._lowered: dict[int, dict[bool, Program]] = {}  # and by whether they are for training

    def is_to_search(self, num_microbatches: int) -> bool:
        """Return True if the schedule for a number of micro-batches is still to be searched for."""
        return self._schedule == "auto" and num_microbatches not in self._found

    def add(self, found: Schedule) -> None:
        """Take a schedule that was searched for."""
        self._found[found.num_microbatches] = found

    def program(self, num_microbatches: int, *, train: bool) -> Program:
        """The program for a number of micro-batches, forward only unless in training. Raises ValueError where the
        schedule does not fit."""
        if num_microbatches not in self._lowered:
            schedule = self.schedule(num_microbatches)
            if not self.pairs:  # as nothing overlaps, the first result may leave before the second is begun
                schedule = one_at_a_time(schedule)
            lowered = {train: lower(schedule, self._rank, train=train, merge=self.merges) for train in (True, False)}
            self._lowered[num_microbatches] = lowered
        return self._lowered[num_microbatches][train]

    def schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule for a number of micro-batches (default: the fewest); ValueError where it does not fit."""
        schedule, num_ranks = self._schedule, self._num_ranks
        if num_microbatches is None:
            num_microbatches = getattr(schedule, "num_microbatches", 1)
        if schedule == "auto" and num_microbatches in self._found:
            schedule = self._found[num_microbatches]
        elif schedule == "auto":  # placed as any that is found
            schedule = replace(build("dualpipev", num_ranks, num_microbatches), name="auto")
        elif isinstance(schedule, str):
            options = {"stages_per_rank": self._num_modules} if schedule == "interleaved_1f1b" else {}
            schedule = build(schedule, num_ranks, num_microbatches, **options)
        if schedule.num_ranks != num_ranks:
            raise ValueError(f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks, got {num_ranks}")
        if schedule.num_microbatches != num_microbatches:
            raise ValueError(f"schedule {schedule.name!r} is for {schedule.num_microbatches} micro-batches, got "
                             f"{num_microbatches}")
        validate(schedule)
        stages = schedule.rank_stages(self._rank)
        if len(stages) != self._num_modules:
            raise ValueError(f"rank {self._rank} has {self._num_modules} modules, but schedule {schedule.name!r} gives "
                             f"it {len(stages)} stages {stages}")
        return schedule
