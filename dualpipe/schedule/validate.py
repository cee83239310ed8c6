"""Validation of a schedule: complete, in order, and free of deadlocks. Runs nothing.

torch.distributed.pipelining's own check accepts duplicated actions and some wrong orders. This one accepts a schedule
only if every rank completes its steps even if sends block, and every stream of messages is received in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import chain, islice
from typing import NoReturn, cast

from dualpipe.schedule.messages import (
    Message,
    MessageStream,
    Result,
    StepMessages,
    all_messages,
    message_input,
    outgoing_streams,
    play,
    required_input,
    result,
    sent_message,
)
from dualpipe.schedule.types import KINDS, Action, Kind, Schedule, ScheduleError, Step


def validate(schedule: Schedule) -> None:
    """Raise ScheduleError, naming rank, step and cause, unless `schedule` can be run as it is.

    Proves that

    - ranks, stages, micro-batches and kinds are in range, and each step is one action or two independent ones;
    - each (stage, micro-batch) has one "F", one of "B" or "I", and one "W" if and only if it has an "I";
    - each action is on the rank that owns its stage, after everything that it needs;
    - between two ranks, activations are received in the order in which they are sent, and so are gradients;
    - no rank waits forever, even if a send blocks while `messages_in_flight` messages of its stream are not received.
    """
    _check_sizes(schedule)
    kinds_run = [[""] * schedule.num_microbatches for _ in range(schedule.num_stages)]  # by stage, then micro-batch
    for rank, steps in enumerate(schedule.ranks):
        for index in range(len(steps)):
            _check_step(schedule, rank, index, kinds_run)
    _check_completeness(schedule, kinds_run)
    _check_order(schedule)
    _check_messages(schedule)


def independent(a: Action, b: Action) -> bool:
    """Return True if neither action needs the other's result, directly or through other actions.

    Micro-batches never need each other. The forwards and backwards of one micro-batch form a single chain. A "W" needs
    the "I" of its stage, and so everything before that in the chain. It is independent of the rest of the chain, the
    backwards of earlier stages, and of the "W" of other stages.
    """
    if a.microbatch != b.microbatch:
        return True
    if a.kind == "W" and b.kind == "W":
        return a.stage != b.stage
    return any(w.kind == "W" and other.kind in "BI" and other.stage < w.stage for w, other in ((a, b), (b, a)))


def _refuse(schedule: Schedule, rank: int, index: int, cause: str) -> NoReturn:
    step = " & ".join(map(str, schedule.ranks[rank][index])) or "empty"
    raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}, step {index} ({step}): {cause}")


def _check_sizes(schedule: Schedule) -> None:
    """Check the numbers of ranks, stages, micro-batches and messages, and that every stage is placed on a rank."""
    name = f"schedule {schedule.name!r}"
    for field in ("num_ranks", "num_stages", "num_microbatches", "messages_in_flight"):
        size = getattr(schedule, field)
        if not isinstance(size, int) or size < 1:
            raise ScheduleError(f"{name}: {field} is {size!r}; it must be an integer of 1 or more")
    if len(schedule.ranks) != schedule.num_ranks:
        raise ScheduleError(f"{name} has steps for {len(schedule.ranks)} ranks, but num_ranks is {schedule.num_ranks}")
    if len(schedule.placement) != schedule.num_stages:
        raise ScheduleError(f"{name} places {len(schedule.placement)} stages, but num_stages is {schedule.num_stages}")
    for stage, rank in enumerate(schedule.placement):
        if not isinstance(rank, int) or not 0 <= rank < schedule.num_ranks:
            place = "on no rank: it has no actions" if rank == -1 else f"on rank {rank!r}"
            raise ScheduleError(f"{name}: stage {stage} is {place}; ranks are 0 to {schedule.num_ranks - 1}")


def _check_step(schedule: Schedule, rank: int, index: int, kinds_run: Sequence[list[str]]) -> None:
    """Check that the actions of a step are in range, on their rank, not duplicated, and independent.

    kinds_run: kinds of the actions so far, by stage and micro-batch; those of the step are added.
    """
    step = schedule.ranks[rank][index]
    if len(step) not in (1, 2):
        _refuse(schedule, rank, index, f"a step has one action or two, not {len(step)}")
    last_stage = schedule.num_stages - 1
    last_microbatch = schedule.num_microbatches - 1
    for action in step:
        kind = action.kind
        stage = action.stage
        mb = action.microbatch
        if kind not in KINDS:
            _refuse(schedule, rank, index, f"{action!r} is not an Action of kind {', '.join(KINDS)}")
        if not (isinstance(stage, int) and 0 <= stage <= last_stage):
            _refuse(schedule, rank, index, f"stage {stage} of {action} is not one of 0 to {last_stage}")
        if not (isinstance(mb, int) and 0 <= mb <= last_microbatch):
            _refuse(schedule, rank, index, f"micro-batch {mb} of {action} is not one of 0 to {last_microbatch}")
        owner = schedule.placement[stage]
        if owner != rank:
            _refuse(schedule, rank, index, f"stage {stage} of {action} is placed on rank {owner}")
        if kind in kinds_run[stage][mb]:
            other_rank, other_index = _find(schedule, action)
            _refuse(schedule, rank, index, f"{action} is also at rank {other_rank}, step {other_index}")
        kinds_run[stage][mb] += kind
    if len(step) == 2 and not independent(*step):
        _refuse(schedule, rank, index, "these two depend on each other, so they cannot overlap")


def _check_completeness(schedule: Schedule, kinds_run: Sequence[Sequence[str]]) -> None:
    """Check that each stage runs "F" and "B", or "F", "I" and "W", for each micro-batch."""
    for stage, rank in enumerate(schedule.placement):
        for mb, kinds in enumerate(kinds_run[stage]):
            if "".join(sorted(kinds)) in ("BF", "FIW"):
                continue
            forward, full, inputs, weights = (Action(kind, stage, mb) for kind in KINDS)
            if "F" not in kinds:
                raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: {forward} is missing")
            if "B" not in kinds and "I" not in kinds:
                raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: {full} (or {inputs}) is missing")
            if "B" in kinds and "I" in kinds:
                _, full_index = _find(schedule, full)
                cause = f"{full} at step {full_index} is the whole backward already"
                _refuse(schedule, *_find(schedule, inputs), cause)
            if "I" in kinds:
                _refuse(schedule, *_find(schedule, inputs), f"its weight gradients, {weights}, are missing")
            _refuse(schedule, *_find(schedule, weights), f"there is no {inputs} that defers weight gradients to it")


def _find(schedule: Schedule, action: Action) -> tuple[int, int]:
    """Return the rank and the index of the first step that has `action`."""
    return next((r, i) for r, steps in enumerate(schedule.ranks) for i, step in enumerate(steps) if action in step)


def _check_order(schedule: Schedule) -> None:
    """Check that an input from the action's own rank is computed in an earlier step.

    Inputs from another rank are checked by `_check_messages`.
    """
    for rank, steps in enumerate(schedule.ranks):
        computed: set[Result] = set()
        for index, step in enumerate(steps):
            for action in step:
                needed = required_input(schedule, action)
                if needed and needed not in computed and schedule.placement[needed[1]] == rank:
                    source = next(other for step in steps for other in step if result(other) == needed)
                    _, source_index = _find(schedule, source)
                    cause = f"{action} needs {source}, which comes later, at step {source_index}"
                    _refuse(schedule, rank, index, cause)
            computed.update(map(result, step))


def _check_messages(schedule: Schedule) -> None:
    """Check that every stream is received in order, and that all receives and sends can complete."""
    streams = outgoing_streams(schedule)
    programs = [_message_program(schedule, rank, streams) for rank in range(schedule.num_ranks)]
    _check_stream_order(schedule, streams)
    in_flight: Counter[MessageStream] = Counter()  # messages sent and not yet received

    def try_move(rank: int, stream: MessageStream) -> bool:
        """Receive from the stream if `rank` is its destination, else send; False if that has to wait."""
        is_receive = stream[1] == rank
        if in_flight[stream] == (0 if is_receive else schedule.messages_in_flight):
            return False
        in_flight[stream] += -1 if is_receive else 1
        return True

    remaining = play(programs, try_move)
    if any(remaining):
        messages = all_messages(schedule)
        stuck = [
            (rank, *_message_at(messages[rank], len(programs[rank]) - len(rest)))
            for rank, rest in enumerate(remaining) if rest
        ]
        waits = "; ".join(
            f"rank {rank} waits at step {index} to {'receive' if message.dst == rank else 'send'} the {message.route}"
            for rank, index, message in stuck
        )
        first_rank, first_index, _ = stuck[0]
        _refuse(schedule, first_rank, first_index, f"deadlock: {waits}")


def _received_results(
    schedule: Schedule, step: Step, streams: dict[tuple[str, int], MessageStream]
) -> list[Result]:
    """Return the results that a step receives from other ranks, in the order of its actions."""
    sources = (message_input(schedule, action) for action in step)
    return [source for source in sources if source is not None and source[:2] in streams]


def _message_program(
    schedule: Schedule, rank: int, streams: dict[tuple[str, int], MessageStream]
) -> list[MessageStream]:
    """Return the stream of each message that a rank receives or sends, in order, leaving out computation."""
    program: list[MessageStream] = []
    for step in schedule.ranks[rank]:
        sent_results = (result(action) for action in step)
        carried = [*_received_results(schedule, step, streams), *sent_results]
        program += [streams[kind, stage] for kind, stage, _ in carried if (kind, stage) in streams]
    return program


def _check_stream_order(schedule: Schedule, streams: dict[tuple[str, int], MessageStream]) -> None:
    """Check that the messages that a step receives are the next to arrive on their streams.

    A step may receive two messages of one stream in either order, as it computes after both.
    """
    arriving: defaultdict[MessageStream, deque[Result]] = defaultdict(deque)
    for action in chain.from_iterable(chain.from_iterable(schedule.ranks)):
        kind, stage, microbatch = result(action)
        if (kind, stage) in streams:
            arriving[streams[kind, stage]].append((kind, stage, microbatch))
    for rank, steps in enumerate(schedule.ranks):
        for index, step in enumerate(steps):
            received = _received_results(schedule, step, streams)
            for position, (kind, stage, _) in enumerate(received):
                arrived = arriving[streams[kind, stage]].popleft()
                if arrived not in received:
                    message = all_messages(schedule)[rank][index].incoming[position]
                    next_message = sent_message(schedule, Action(cast("Kind", arrived[0]), *arrived[1:]))
                    assert next_message is not None, "`arriving` has only results that are sent"
                    cause = f"receives the {message.route}, but the next to arrive is the {next_message.route}"
                    _refuse(schedule, rank, index, cause)


def _message_at(steps: Sequence[StepMessages], position: int) -> tuple[int, Message]:
    """Return the index of the step, and the message, at a position of the receives and sends of a rank's steps."""
    program = ((index, message) for index, step in enumerate(steps) for message in chain(*step))
    return next(islice(program, position, None))
