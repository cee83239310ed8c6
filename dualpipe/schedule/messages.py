"""What an action needs and what it hands on: the one place that knows how data flows between stages.

A forward hands its output to the next stage's forward, a backward ("B" or "I") its input gradient to the previous
stage's backward. Where both stages live on one rank nothing is sent.

All messages of one kind from one rank to another form a stream. It must be taken in the order in which it is sent: that
of the sender's steps and, within a step, of its actions (NCCL has no tags that could tell messages apart). Activations
and gradients are streams apart, for DeepSeek's order mixes them in different ways on the two sides: rank 1 takes its
first gradients from rank 0 before an activation that was sent earlier.

The receives of a stream are posted ahead: `RECEIVE_AHEAD` at the start, and one more each time that a message is taken.
A step takes all its messages, then runs, then sends. This is what `validate` proves free of deadlocks where each send
blocks until its receive is posted, and the least that an engine must do.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from dualpipe.schedule.types import Action, Schedule, Step

RECEIVE_AHEAD = 1  # receives of a stream that are posted at any time

Stream = tuple[int, int, str]  # source rank, destination rank, kind of message


@dataclass(frozen=True, slots=True)
class Message:
    """An activation (for "F") or a gradient (for "B") for `stage`'s `microbatch`, on its way between two ranks."""

    kind: str
    stage: int
    microbatch: int
    src: int
    dst: int

    @property
    def stream(self) -> Stream:
        """The stream that this message is part of."""
        return self.src, self.dst, self.kind

    def __str__(self) -> str:
        what = "activation" if self.kind == "F" else "gradient"
        return f"{what} of micro-batch {self.microbatch} for stage {self.stage} (rank {self.src} to {self.dst})"


class StepMessages(NamedTuple):
    """What one step receives before it runs and sends after it, in order."""

    incoming: list[Message]
    outgoing: list[Message]


def received(schedule: Schedule, action: Action) -> Message | None:
    """The message that `action` waits for, or None where its input is already on its rank."""
    source = {"F": action.stage - 1, "B": action.stage + 1, "I": action.stage + 1}.get(action.kind, -1)
    return _message(schedule, action.kind, source, action.stage, action.microbatch)


def sent(schedule: Schedule, action: Action) -> Message | None:
    """The message that `action` produces, or None where its result stays on its rank."""
    target = {"F": action.stage + 1, "B": action.stage - 1, "I": action.stage - 1}.get(action.kind, -1)
    return _message(schedule, action.kind, action.stage, target, action.microbatch)


def _message(schedule: Schedule, kind: str, source: int, target: int, microbatch: int) -> Message | None:
    if not (0 <= source < schedule.num_stages and 0 <= target < schedule.num_stages):
        return None
    src, dst = schedule.stage_rank(source), schedule.stage_rank(target)
    return None if src == dst else Message("F" if kind == "F" else "B", target, microbatch, src, dst)


def step_messages(schedule: Schedule, step: Step) -> StepMessages:
    """What a step receives and sends, each in the order of its actions."""
    incoming = [m for action in step if (m := received(schedule, action)) is not None]
    outgoing = [m for action in step if (m := sent(schedule, action)) is not None]
    return StepMessages(incoming, outgoing)


def sending_order(schedule: Schedule) -> dict[Stream, list[Message]]:
    """The messages of each stream in the order in which they are sent."""
    order: dict[Stream, list[Message]] = defaultdict(list)
    for steps in schedule.ranks:
        for step in steps:
            for message in step_messages(schedule, step).outgoing:
                order[message.stream].append(message)
    return dict(order)


def rank_messages(schedule: Schedule, rank: int) -> list[StepMessages]:
    """For each step of `rank`, what it receives and what it sends.

    What it receives comes in the order of the step's actions, but two messages of one stream in the order in which
    they are sent. For a schedule that `validate` accepts, every stream is then taken in its order.
    """
    return all_messages(schedule)[rank]


def all_messages(schedule: Schedule) -> list[list[StepMessages]]:
    """`rank_messages` of every rank."""
    ranks = [[step_messages(schedule, step) for step in steps] for steps in schedule.ranks]
    sequence = {message: i for i, message in enumerate(m for steps in ranks for step in steps for m in step.outgoing)}
    for incoming in (step.incoming for steps in ranks for step in steps):
        if len(incoming) == 2 and incoming[0].stream == incoming[1].stream:
            incoming.sort(key=sequence.__getitem__)
    return ranks
