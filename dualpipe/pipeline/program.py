"""Lowering: one rank's steps as a flat program of receives, computes and sends, made once per schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from dualpipe.pipeline.transport import Stream
from dualpipe.schedule.messages import Message, rank_messages, sent
from dualpipe.schedule.types import Action, Schedule


class Instruction(NamedTuple):
    """Take `incoming`, run `actions` (two of them overlap), send `outgoing`.

    `outgoing` runs parallel to `actions`: the message that carries the action's result, or None where it stays here.
    """

    incoming: tuple[Message, ...]
    actions: tuple[Action, ...]
    outgoing: tuple[Message | None, ...]
    name: str

    def sends(self) -> tuple[Message, ...]:
        return tuple(m for m in self.outgoing if m is not None)


@dataclass(frozen=True)
class Program:
    """What one rank does in one step of the pipeline."""

    instructions: tuple[Instruction, ...]
    incoming: dict[Stream, tuple[Message, ...]]  # in the order in which they are taken
    outgoing: tuple[Stream, ...]

    def forward_only(self) -> Program:
        """The same order without backwards, for evaluation."""
        kept = []
        for i in self.instructions:
            pairs = [(a, m) for a, m in zip(i.actions, i.outgoing) if a.kind == "F"]
            if pairs:
                actions, outgoing = zip(*pairs)
                incoming = tuple(m for m in i.incoming if m.kind == "F")
                kept.append(Instruction(incoming, actions, outgoing, _name(actions)))
        return _program(kept)


def lower(schedule: Schedule, rank: int) -> Program:
    """The program of `rank`. The schedule must be valid."""
    steps = zip(schedule.ranks[rank], rank_messages(schedule, rank), strict=True)
    return _program(
        [
            Instruction(tuple(messages.incoming), step, tuple(sent(schedule, action) for action in step), _name(step))
            for step, messages in steps
        ]
    )


def _name(actions: tuple[Action, ...]) -> str:
    return ";".join(map(str, actions))


def _program(instructions: list[Instruction]) -> Program:
    incoming = defaultdict(list)
    for message in chain.from_iterable(i.incoming for i in instructions):
        incoming[stream_of(message)].append(message)
    outgoing = {stream_of(m) for i in instructions for m in i.sends()}
    return Program(tuple(instructions), {s: tuple(ms) for s, ms in incoming.items()}, tuple(sorted(outgoing)))


def stream_of(message: Message) -> Stream:
    """The stream that a message is part of: all that goes one way between two ranks, by kind."""
    return message.src, message.dst, message.kind


def streams(schedule: Schedule) -> list[Stream]:
    """All streams of a schedule's placement, sorted."""
    boundaries = [(a, b) for a, b in zip(schedule.placement, schedule.placement[1:]) if a != b]
    return sorted({stream for a, b in boundaries for stream in ((a, b, "F"), (b, a, "B"))})
