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

BOTH = "FB"  # kind of the streams of activations that gradients travel with


class Transfer(NamedTuple):
    """A message as the engine handles it. `boundary` is the stage after the boundary that it crosses, forward or back:
    a gradient has the shapes of the activation that crossed there. second: a gradient that travels with an activation.
    """

    message: Message
    stream: Stream
    boundary: int
    second: Transfer | None = None

    @staticmethod
    def of(message: Message) -> Transfer:
        boundary = message.stage if message.kind == "F" else message.stage + 1
        return Transfer(message, message.stream, boundary)

    def together_with(self, second: Transfer) -> Transfer:
        """An activation and a gradient as one message, of a stream of such."""
        return self._replace(stream=(*self.stream[:2], BOTH), second=second)


class Instruction(NamedTuple):
    """Take `incoming`, run `actions` (two of them overlap), send `outgoing`.

    `outgoing` runs parallel to `actions`: what carries the action's result away, or None where it stays here; of two
    results that travel together both have the same.
    `completes`: the stages that have nothing left to do; those whose gradients are complete, in training.
    """

    incoming: tuple[Transfer, ...]
    actions: tuple[Action, ...]
    outgoing: tuple[Transfer | None, ...]
    completes: tuple[int, ...]
    name: str

    def sends(self) -> tuple[Transfer, ...]:
        return tuple(dict.fromkeys(t for t in self.outgoing if t is not None))


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


class Programs:
    """The programs of `rank`, by the number of micro-batches, each lowered once; for training and for evaluation.

    schedule: a name, or a `Schedule` whose number of micro-batches is the only one; num_modules: stages of the rank.
    """

    def __init__(self, schedule: str | Schedule, *, num_ranks: int, rank: int, num_modules: int) -> None:
        self._schedule, self._num_ranks, self._rank, self._num_modules = schedule, num_ranks, rank, num_modules
        self.pairs = True  # whether pairs stay together
        self.packs = False  # whether what a pair sends to one rank goes as one message
        self._lowered: dict[int, tuple[Program, Program, Program]] = {}

    def programs(self, num_microbatches: int, *, train: bool) -> tuple[Program, Program]:
        """That for micro-batches of two sizes, and that for micro-batches of one; forward only where no gradients are
        wanted. Raises ValueError where the schedule does not fit."""
        if num_microbatches not in self._lowered:
            schedule = self.schedule(num_microbatches)
            program = lower(schedule if self.pairs else _one_at_a_time(schedule), self._rank)
            packed = _packed(schedule, self._rank) if self.packs else program
            self._lowered[num_microbatches] = program, packed, program.forward_only()
        program, packed, evaluation = self._lowered[num_microbatches]
        return (program, packed) if train else (evaluation, evaluation)

    def schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule for a number of micro-batches (default: the fewest); ValueError where it does not fit."""
        schedule, num_ranks = self._schedule, self._num_ranks
        if num_microbatches is None:
            num_microbatches = getattr(schedule, "num_microbatches", 1)
        if isinstance(schedule, str):
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


def lower(schedule: Schedule, rank: int) -> Program:
    """The program of `rank`. The schedule must be valid."""
    instructions, steps = [], schedule.ranks[rank]
    for step, messages, completes in zip(steps, all_messages(schedule)[rank], completed(steps), strict=True):
        results = [sent(schedule, action) for action in step]
        outgoing = tuple(None if m is None else Transfer.of(m) for m in results)
        incoming = tuple(map(Transfer.of, messages.incoming))
        instructions.append(Instruction(incoming, step, outgoing, completes, _name(step)))
    return _program(instructions)


def _one_at_a_time(schedule: Schedule) -> Schedule:
    """The same order without pairs: where nothing overlaps, the first result of a pair may leave before the second is
    begun. The schedule itself where that could deadlock."""
    steps = (((action,) for step in rank for action in step) for rank in schedule.ranks)
    candidate = replace(schedule, ranks=tuple(map(tuple, steps)))
    try:
        validate(candidate)
    except ScheduleError:
        return schedule
    return candidate


def _packed(schedule: Schedule, rank: int) -> Program:
    """The program with one message for the activation and the gradient that a pair sends to one rank.

    Only where that rank takes both in one step, so that each receive is posted no later than those of their own would
    be; and behind the first activation of a boundary, which tells what crosses there.
    """
    seconds = _sent_together(schedule)
    instructions = []
    for instruction in lower(schedule, rank).instructions:
        found: dict[Message, Transfer] = {}
        for transfer in (*instruction.incoming, *instruction.sends()):
            if (second := seconds.get(transfer.message)) is not None:
                found[transfer.message] = found[second] = transfer.together_with(Transfer.of(second))
        incoming = dict.fromkeys(found.get(t.message, t) for t in instruction.incoming)
        outgoing = tuple(t and found.get(t.message, t) for t in instruction.outgoing)
        instructions.append(instruction._replace(incoming=tuple(incoming), outgoing=outgoing))
    return _program(instructions)


def _sent_together(schedule: Schedule) -> dict[Message, Message]:
    """The gradients that travel with activations, by these."""
    ranks = all_messages(schedule)
    taken = {m: (r, i) for r, steps in enumerate(ranks) for i, step in enumerate(steps) for m in step.incoming}
    found, crossed = {}, set()
    for step in chain.from_iterable(ranks):
        forward, backward = ([m for m in step.outgoing if m.kind == kind] for kind in "FB")
        pair = len(forward) == len(backward) == 1 and taken[forward[0]] == taken[backward[0]]
        if pair and forward[0].stage in crossed:
            found[forward[0]] = backward[0]
        crossed |= {message.stage for message in forward}
    return found


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
