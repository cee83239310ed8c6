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

from collections.abc import Iterable, Sequence
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


def needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions, of any rank, any one of which yields the input of `action`; none for the first forward."""
    kind, stage, mb = action.kind, action.stage, action.microbatch
    if kind == "F":
        return (Action("F", stage - 1, mb),) if stage > 0 else ()
    if kind == "W":
        return (Action("I", stage, mb),)
    if stage == schedule.num_stages - 1:
        return (Action("F", stage, mb),)
    return (Action("B", stage + 1, mb), Action("I", stage + 1, mb))


def received(schedule: Schedule, action: Action) -> Message | None:
    """The message that `action` waits for, or None where its input is already on its rank."""
    sources = needs(schedule, action)
    return _message(schedule, action, sources[0].stage, action.stage) if sources else None


def sent(schedule: Schedule, action: Action) -> Message | None:
    """The message that `action` produces, or None where its result stays on its rank."""
    target = action.stage + {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
    return _message(schedule, action, action.stage, target) if 0 <= target < schedule.num_stages else None


def _message(schedule: Schedule, action: Action, source: int, target: int) -> Message | None:
    src, dst = schedule.stage_rank(source), schedule.stage_rank(target)
    return None if src == dst else Message("F" if action.kind == "F" else "B", target, action.microbatch, src, dst)


def all_messages(schedule: Schedule) -> list[list[StepMessages]]:
    """For each rank and each of its steps, what it receives and what it sends.

    What it receives comes in the order of the step's actions, but two messages of one stream in the order in which
    they are sent. For a schedule that `validate` accepts, every stream is then taken in its order.
    """
    ranks = [[_step_messages(schedule, step) for step in steps] for steps in schedule.ranks]
    sequence = {message: i for i, message in enumerate(m for steps in ranks for step in steps for m in step.outgoing)}
    for incoming in (step.incoming for steps in ranks for step in steps):
        if len(incoming) == 2 and incoming[0].stream == incoming[1].stream:
            incoming.sort(key=sequence.__getitem__)
    return ranks


def _step_messages(schedule: Schedule, step: Step) -> StepMessages:
    incoming = [m for action in step if (m := received(schedule, action)) is not None]
    outgoing = [m for action in step if (m := sent(schedule, action)) is not None]
    return StepMessages(incoming, outgoing)


def completed(steps: Sequence[Step], kinds: Iterable[str] = "BW") -> tuple[tuple[int, ...], ...]:
    """For each step, the stages whose last action of `kinds` it holds, ascending: their gradients are complete.

    That is where data parallelism reduces them. The place follows from the order of the actions, so that a schedule
    need not hold it and one from elsewhere has it too.

    Example: of the steps (0I0), (0I1), (0W0), (0W1) the last one completes stage 0. With kinds "F", stages are done
    after their last forward, as in an evaluation.
    """
    wanted, seen = set(kinds), set[int]()
    stages_of_step = []
    for step in reversed(steps):
        last = {action.stage for action in step if action.kind in wanted} - seen
        seen |= last
        stages_of_step.append(tuple(sorted(last)))
    return tuple(reversed(stages_of_step))
