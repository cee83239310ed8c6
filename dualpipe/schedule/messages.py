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

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from dualpipe.schedule.types import KINDS, Action, Schedule, Step

RECEIVE_AHEAD = 1  # receives of a stream that are posted at any time

MessageStream = tuple[int, int, str]  # source rank, destination rank, kind of message
Result = tuple[str, int, int]  # an activation "F" or a gradient "B" (or "W"), the stage that yields it, micro-batch
T = TypeVar("T")


class Message(NamedTuple):
    """An activation (for "F") or a gradient (for "B") for `stage`'s `microbatch`, on its way between two ranks."""

    kind: str
    stage: int
    microbatch: int
    src: int
    dst: int

    @property
    def stream(self) -> MessageStream:
        """The stream that this message is part of."""
        return self.src, self.dst, self.kind

    @property
    def title(self) -> str:
        """What it is, such as "the activation for stage 2, micro-batch 5"."""
        what = "activation" if self.kind == "F" else "gradient"
        return f"the {what} for stage {self.stage}, micro-batch {self.microbatch}"

    def __str__(self) -> str:
        what = "activation" if self.kind == "F" else "gradient"
        return f"{what} of micro-batch {self.microbatch} for stage {self.stage} (rank {self.src} to {self.dst})"


class StepMessages(NamedTuple):
    """What one step receives before it runs and sends after it, in order."""

    incoming: list[Message]
    outgoing: list[Message]


def result(action: Action) -> Result:
    """What `action` yields. An "I" yields what a "B" does; nothing takes what a "W" yields."""
    return "B" if action.kind == "I" else action.kind, action.stage, action.microbatch


def need(schedule: Schedule, action: Action) -> Result | None:
    """What `action` takes, from any rank; None for the first forward. A "W" takes what the "I" of its stage left."""
    kind, stage, mb = action.kind, action.stage, action.microbatch
    if kind == "F":
        return ("F", stage - 1, mb) if stage > 0 else None
    if kind == "W":
        return "B", stage, mb
    return ("F", stage, mb) if stage == schedule.num_stages - 1 else ("B", stage + 1, mb)


def sent(schedule: Schedule, action: Action) -> Message | None:
    """The message that `action` produces, or None where its result stays on its rank."""
    kind = "F" if action.kind == "F" else "B"
    target = action.stage + (1 if kind == "F" else -1)
    if action.kind == "W" or not 0 <= target < schedule.num_stages:
        return None
    src, dst = schedule.placement[action.stage], schedule.placement[target]
    return None if src == dst else Message(kind, target, action.microbatch, src, dst)


def streams(schedule: Schedule) -> dict[tuple[str, int], MessageStream]:
    """Which stream carries what a stage yields, an activation "F" or a gradient "B", where that leaves the rank."""
    first = (Action(kind, stage, 0) for kind in KINDS[:2] for stage in range(schedule.num_stages))
    return {result(each)[:2]: message.stream for each in first if (message := sent(schedule, each))}


def all_messages(schedule: Schedule) -> list[list[StepMessages]]:
    """For each rank and each of its steps, what it receives and what it sends.

    What it receives comes in the order of the step's actions, but two messages of one stream in the order in which
    they are sent. For a schedule that `validate` accepts, every stream is then taken in its order.
    """
    messages: dict[Result, Message] = {}  # in the order in which each rank sends them
    outgoing = [
        [[messages.setdefault(result(action), message) for action in step if (message := sent(schedule, action))]
         for step in steps]
        for steps in schedule.ranks
    ]
    ranks: list[list[StepMessages]] = []
    for steps, sends in zip(schedule.ranks, outgoing):
        ranks.append(row := [])
        for step, leaving in zip(steps, sends):
            # What an "I" sends on is nothing that its "W" takes.
            taken = (messages.get(found) for action in step if action.kind != "W" and (found := need(schedule, action)))
            row.append(StepMessages([message for message in taken if message is not None], leaving))
    sequence: dict[Message, int] = {}
    for incoming in (step.incoming for row in ranks for step in row):
        if len(incoming) == 2 and incoming[0].stream == incoming[1].stream:
            sequence = sequence or {message: number for number, message in enumerate(messages.values())}
            incoming.sort(key=sequence.__getitem__)
    return ranks


def completed(steps: Sequence[Step], kinds: str = "BW") -> tuple[tuple[int, ...], ...]:
    """For each step, the stages whose last action of `kinds` it holds, ascending: their gradients are complete.

    That is where data parallelism reduces them. The place follows from the order of the actions, so that a schedule
    need not hold it and one from elsewhere has it too.

    Example: of the steps (0I0), (0I1), (0W0), (0W1) the last one completes stage 0. With kinds "F", stages are done
    after their last forward, as in an evaluation.
    """
    last = {action.stage: i for i, step in enumerate(steps) for action in step if action.kind in kinds}
    done: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    for stage in sorted(last):
        done[last[stage]] += (stage,)
    return tuple(done.get(i, ()) for i in range(len(steps)))


def play(programs: Iterable[Iterable[T]], do: Callable[[int, T], bool]) -> list[deque[T]]:
    """Take every rank through its program, each as far as `do(rank, item)` is true of the next item; what is left.

    The order of play does not matter where, as for messages and inputs, nothing takes back what lets an item go on.
    """
    left = [deque(program) for program in programs]
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(left):
            while program and do(rank, program[0]):
                program.popleft()
                moving = True
    return left
