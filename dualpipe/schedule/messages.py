"""Data flow between stages: the input of an action, its result, and the messages between ranks.

A forward passes its output to the next stage's forward. A backward ("B" or "I") passes its input gradient to the
previous stage's backward. Nothing is sent between two stages on the same rank.

All messages of one kind (activations or gradients) from one rank to another form a stream. A stream is received in the
order in which it is sent, which is the order of the sender's steps and, within a step, of its actions: NCCL has no tags
to tell messages apart. Activations and gradients are separate streams because DeepSeek's order does not receive them in
the order in which they were sent: rank 0 sends an activation and then a gradient to rank 1, which receives the gradient
first.

A step receives all its messages, then computes, then sends. `validate` proves that this is free of deadlocks even if a
send blocks while `Schedule.messages_in_flight` earlier messages of its stream are not received. An engine must hold at
least so many, in receives that are posted ahead and in sends that it does not wait for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from dualpipe.schedule.types import Action, Schedule, Step

MessageStream = tuple[int, int, str]  # source rank, destination rank, kind of message
# Key of the result of an action: kind, stage that computes it, micro-batch. The kind is "F" for an activation, "B" for
# an input gradient, and "W" for weight gradients.
Result = tuple[str, int, int]
T = TypeVar("T")


class Message(NamedTuple):
    """An activation (kind "F") or a gradient (kind "B") of `microbatch`, sent from rank `src` to `dst`.

    `stage` is the stage that receives it, unlike in `Result`, which has the stage that computes it.
    """

    kind: str
    stage: int
    microbatch: int
    src: int
    dst: int

    @property
    def stream(self) -> MessageStream:
        """Stream that carries this message."""
        return self.src, self.dst, self.kind

    @property
    def route(self) -> str:
        """Text with both ranks, such as "activation of micro-batch 5 for stage 2 (rank 0 to 1)"."""
        return f"{self._noun} of micro-batch {self.microbatch} for stage {self.stage} (rank {self.src} to {self.dst})"

    def __str__(self) -> str:
        return f"the {self._noun} for stage {self.stage}, micro-batch {self.microbatch}"

    @property
    def _noun(self) -> str:
        return "activation" if self.kind == "F" else "gradient"


class StepMessages(NamedTuple):
    """Messages that a step receives before it computes, and sends after it, in order."""

    incoming: list[Message]
    outgoing: list[Message]


def result(action: Action) -> Result:
    """Return the key of the result of `action`. "I" and "B" have the same result; no action needs that of a "W"."""
    return "B" if action.kind == "I" else action.kind, action.stage, action.microbatch


def required_input(schedule: Schedule, action: Action) -> Result | None:
    """Return the result that `action` needs, on whichever rank it is computed; None for the forward of stage 0.

    A "W" needs the "I" of its stage. The backward of the last stage needs the forward of that stage.
    """
    kind = action.kind
    stage = action.stage
    microbatch = action.microbatch
    if kind == "F":
        return ("F", stage - 1, microbatch) if stage > 0 else None
    if kind == "W":
        return "B", stage, microbatch
    if stage == schedule.num_stages - 1:
        return "F", stage, microbatch
    return "B", stage + 1, microbatch


def message_input(schedule: Schedule, action: Action) -> Result | None:
    """Return the result that `action` needs and that a message can carry; None for a "W".

    A "W" receives no tensor: it only has to run after its "I", on the same rank. `required_input` expresses this order
    by the result of the "I", an input gradient, which may be sent to another rank.
    """
    return None if action.kind == "W" else required_input(schedule, action)


def sent_message(schedule: Schedule, action: Action) -> Message | None:
    """Return the message that `action` sends, or None if its result stays on its rank."""
    if action.kind == "W":
        return None
    kind = "F" if action.kind == "F" else "B"
    target = action.stage + 1 if kind == "F" else action.stage - 1
    if not 0 <= target < schedule.num_stages:
        return None
    src = schedule.placement[action.stage]
    dst = schedule.placement[target]
    return None if src == dst else Message(kind, target, action.microbatch, src, dst)


def outgoing_streams(schedule: Schedule) -> dict[tuple[str, int], MessageStream]:
    """Return the stream on which each result is sent to another rank, by kind ("F" or "B") and stage of the result."""
    streams: dict[tuple[str, int], MessageStream] = {}
    for stage in range(schedule.num_stages):
        for action in (Action("F", stage, 0), Action("B", stage, 0)):
            message = sent_message(schedule, action)
            if message is not None:
                streams[action.kind, stage] = message.stream
    return streams


def all_messages(schedule: Schedule) -> list[list[StepMessages]]:
    """Return the messages of each step of each rank: `all_messages(schedule)[rank][index]`.

    Messages that a step receives are in the order of the step's actions, except that two messages of one stream are in
    the order in which they are sent. In a schedule that `validate` accepts, every stream is then received in order.
    """
    messages: dict[Result, Message] = {}  # by the result they carry, rank after rank in the order of sending
    for steps in schedule.ranks:
        for step in steps:
            for action in step:
                message = sent_message(schedule, action)
                if message is not None:
                    messages.setdefault(result(action), message)
    send_order = {message: position for position, message in enumerate(messages.values())}
    return [[_messages_of_step(schedule, step, messages, send_order) for step in steps] for steps in schedule.ranks]


def _messages_of_step(
    schedule: Schedule, step: Step, messages: dict[Result, Message], send_order: dict[Message, int]
) -> StepMessages:
    incoming: list[Message] = []
    outgoing: list[Message] = []
    for action in step:
        needed = message_input(schedule, action)
        if needed in messages:
            incoming.append(messages[needed])
        if result(action) in messages:
            outgoing.append(messages[result(action)])
    if len(incoming) == 2 and incoming[0].stream == incoming[1].stream:
        incoming.sort(key=send_order.__getitem__)
    return StepMessages(incoming, outgoing)


def completed_stages(steps: Sequence[Step], kinds: str = "BW") -> tuple[tuple[int, ...], ...]:
    """Return, for each step, the stages that have their last action of `kinds` in it, ascending.

    With the default kinds the gradients of these stages are complete after the step, so that data parallelism can
    reduce them. A `Schedule` does not store this: it follows from the steps, also for a schedule read from a CSV.
    With `kinds="F"`, stages are complete after their last forward, as in an evaluation.

    Example: of the steps (0I0), (0I1), (0W0), (0W1), the last one completes stage 0.
    """
    last_step = {action.stage: index for index, step in enumerate(steps) for action in step if action.kind in kinds}
    stages_at: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    for stage in sorted(last_step):
        stages_at[last_step[stage]] += (stage,)
    return tuple(stages_at.get(index, ()) for index in range(len(steps)))


def merged_weights(steps: Sequence[Step]) -> list[tuple[Action, ...]]:
    """Return for each step of a rank the actions that its "W" is merged with, itself included, in order.

    An engine may compute the weight gradients of one stage together. Consecutive steps that are a single "W" form a
    run. Any other step ends the run, even a pair that includes a "W". Within a run, all "W" of one stage are merged,
    even with a "W" of another stage between them. No step is moved: a stage's gradients are complete after the same
    step as before.

    The tuple of a step that is not merged is empty. Example: in 3W0 4W0 3W1 4W1 4W2, 3W0 is merged with 3W1, and 4W0
    with 4W1 and 4W2.
    """
    merged: list[tuple[Action, ...]] = []
    for is_single_w, run in groupby(steps, key=_is_single_w):
        neighbours = list(run)
        if not is_single_w:
            merged += [()] * len(neighbours)
            continue
        of_stage: defaultdict[int, list[Action]] = defaultdict(list)
        for (action,) in neighbours:
            of_stage[action.stage].append(action)
        for (action,) in neighbours:
            actions = of_stage[action.stage]
            merged.append(tuple(actions) if len(actions) > 1 else ())
    return merged


def _is_single_w(step: Step) -> bool:
    return len(step) == 1 and step[0].kind == "W"


def play(programs: Iterable[Iterable[T]], try_run: Callable[[int, T], bool]) -> list[deque[T]]:
    """Run the programs of all ranks as far as they go, and return the items of each rank that could not run.

    This is the one player of schedules. A callback runs the items: the steps that `simulate` and the search time, and
    the messages of which `validate` and the search prove that no rank waits forever.

    The result does not depend on the order in which ranks take turns, provided that an item that can run stays able to
    run whatever other ranks do. Messages and inputs have this property.

    Args:
        programs: items of each rank, in order.
        try_run: called with a rank and its next item; runs the item and returns True, or returns False if the item
            cannot run yet.
    """
    remaining = [deque(program) for program in programs]
    is_progressing = True
    while is_progressing:
        is_progressing = False
        for rank, program in enumerate(remaining):
            while program and try_run(rank, program[0]):
                program.popleft()
                is_progressing = True
    return remaining
