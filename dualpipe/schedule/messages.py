"""What an action needs and what it hands on: the one place that knows how data flows between stages.

A forward hands its output to the next stage's forward, a backward ("B" or "I") its input gradient to the previous
stage's backward. Where both stages live on one rank nothing is sent. All messages from one rank to another form a
single stream that must be received in the order in which it is sent (NCCL has no tags); within one step the sender
chooses the order: that of the actions in its step.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualpipe.schedule.types import Action, Schedule, Step


@dataclass(frozen=True, slots=True)
class Message:
    """An activation (for "F") or a gradient (for "B") for `stage`'s `microbatch`, on its way between two ranks."""

    kind: str
    stage: int
    microbatch: int
    src: int
    dst: int

    def __str__(self) -> str:
        what = "activation" if self.kind == "F" else "gradient"
        return f"{what} of micro-batch {self.microbatch} for stage {self.stage} (rank {self.src} to {self.dst})"


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


def step_messages(schedule: Schedule, step: Step) -> tuple[list[Message], list[Message]]:
    """What a step receives before it runs and sends after it, each in the order of its actions."""
    incoming = [m for action in step if (m := received(schedule, action)) is not None]
    outgoing = [m for action in step if (m := sent(schedule, action)) is not None]
    return incoming, outgoing
