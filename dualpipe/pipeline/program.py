"""Lowering: one rank's steps as a flat program of receives, computes and sends, made once per schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from dualpipe.schedule import build
from dualpipe.schedule.messages import Message, Stream, all_messages, completed, sent
from dualpipe.schedule.types import Action, Schedule, ScheduleError
from dualpipe.schedule.validate import validate


class Transfer(NamedTuple):
    """A message as the engine handles it. `boundary` is the stage after the boundary that it crosses, forward or back:
    a gradient has the shapes of the activation that crossed there."""

    message: Message
    stream: Stream
    boundary: int

    @staticmethod
    def of(message: Message) -> Transfer:
        boundary = message.stage if message.kind == "F" else message.stage + 1
        return Transfer(message, message.stream, boundary)


class Instruction(NamedTuple):
    """Take `incoming`, run `actions` (two of them overlap), send `outgoing`.

    `outgoing` runs parallel to `actions`: what carries the action's result away, or None where it stays here.
    `completes`: the stages that have nothing left to do; those whose gradients are complete, in training.
    """

    incoming: tuple[Transfer, ...]
    actions: tuple[Action, ...]
    outgoing: tuple[Transfer | None, ...]
    completes: tuple[int, ...]
    name: str

    def sends(self) -> tuple[Transfer, ...]:
        return tuple(t for t in self.outgoing if t is not None)


@dataclass(frozen=True)
class Program:
    """What one rank does in one step of the pipeline."""

    instructions: tuple[Instruction, ...]
    incoming: dict[Stream, tuple[Transfer, ...]]  # in the order in which they are taken
    outgoing: tuple[Stream, ...]

    def forward_only(self) -> Program:
        """The same order without backwards, for evaluation."""
        kept = []
        for i, completes in zip(self.instructions, completed([i.actions for i in self.instructions], "F")):
            pairs = [(a, t) for a, t in zip(i.actions, i.outgoing) if a.kind == "F"]
            if pairs:
                actions, outgoing = zip(*pairs)
                incoming = tuple(t for t in i.incoming if t.message.kind == "F")
                kept.append(Instruction(incoming, actions, outgoing, completes, _name(actions)))
        return _program(kept)


def fitting(
    schedule: str | Schedule, num_microbatches: int, *, num_ranks: int, rank: int, num_modules: int
) -> Schedule:
    """The schedule for a number of micro-batches; ValueError where it does not fit the modules of `rank`."""
    if isinstance(schedule, str):
        options = {"stages_per_rank": num_modules} if schedule == "interleaved_1f1b" else {}
        schedule = build(schedule, num_ranks, num_microbatches, **options)
    if schedule.num_ranks != num_ranks:
        raise ValueError(f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks, got {num_ranks}")
    if schedule.num_microbatches != num_microbatches:
        raise ValueError(
            f"schedule {schedule.name!r} is for {schedule.num_microbatches} micro-batches, got {num_microbatches}"
        )
    validate(schedule)
    stages = schedule.rank_stages(rank)
    if len(stages) != num_modules:
        raise ValueError(
            f"rank {rank} has {num_modules} modules, but schedule {schedule.name!r} gives it "
            f"{len(stages)} stages {stages}"
        )
    return schedule


def lower(schedule: Schedule, rank: int) -> Program:
    """The program of `rank`. The schedule must be valid."""
    instructions, steps = [], schedule.ranks[rank]
    for step, messages, completes in zip(steps, all_messages(schedule)[rank], completed(steps), strict=True):
        results = [sent(schedule, action) for action in step]
        outgoing = tuple(None if m is None else Transfer.of(m) for m in results)
        incoming = tuple(map(Transfer.of, messages.incoming))
        instructions.append(Instruction(incoming, step, outgoing, completes, _name(step)))
    return _program(instructions)


def one_at_a_time(schedule: Schedule) -> Schedule:
    """The same order without pairs: where nothing overlaps, the first result of a pair may leave before the second is
    begun. The schedule itself where that could deadlock."""
    steps = (((action,) for step in rank for action in step) for rank in schedule.ranks)
    candidate = replace(schedule, ranks=tuple(map(tuple, steps)))
    try:
        validate(candidate)
    except ScheduleError:
        return schedule
    return candidate


def _name(actions: tuple[Action, ...]) -> str:
    return ";".join(map(str, actions))


def _program(instructions: list[Instruction]) -> Program:
    incoming = defaultdict(list)
    for transfer in chain.from_iterable(i.incoming for i in instructions):
        incoming[transfer.stream].append(transfer)
    outgoing = {transfer.stream for i in instructions for transfer in i.sends()}
    return Program(tuple(instructions), {s: tuple(ts) for s, ts in incoming.items()}, tuple(sorted(outgoing)))


def streams(schedule: Schedule) -> list[Stream]:
    """All streams of a schedule's placement, sorted."""
    boundaries = [(a, b) for a, b in zip(schedule.placement, schedule.placement[1:]) if a != b]
    return sorted({stream for a, b in boundaries for stream in ((a, b, "F"), (b, a, "B"))})
