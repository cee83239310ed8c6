"""Lowering: one rank's steps as a flat program of receives, computes and sends, made once per schedule."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

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
    incoming: dict[int, tuple[Message, ...]]  # by source rank, in the order in which they are taken
    destinations: tuple[int, ...]

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
    destinations = set()
    for i in instructions:
        for message in i.incoming:
            incoming[message.src].append(message)
        destinations.update(m.dst for m in i.sends())
    streams = {src: tuple(messages) for src, messages in incoming.items()}
    return Program(tuple(instructions), streams, tuple(sorted(destinations)))


def edges(schedule: Schedule) -> list[tuple[int, int]]:
    """The (source, destination) pairs of ranks between which tensors flow, sorted."""
    neighbours = list(zip(schedule.placement, schedule.placement[1:]))
    return sorted({edge for a, b in neighbours if a != b for edge in ((a, b), (b, a))})
