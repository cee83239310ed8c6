"""Proves that a schedule can be run: complete, in order, and free of deadlocks. Runs nothing.

torch.distributed.pipelining's own check accepts duplicated actions and some wrong orders; this one accepts a schedule
only where every rank reaches the end with blocking sends and each stream of messages matches in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import NoReturn

from dualpipe.schedule.messages import RECEIVE_AHEAD, Message, Stream, all_messages, needs, play
from dualpipe.schedule.types import KINDS, Action, Schedule, ScheduleError

Place = tuple[int, int]  # where an action stands: the rank, and the number of the step


def validate(schedule: Schedule) -> None:
    """Raises ScheduleError, naming rank, step and cause, unless `schedule` can be run as it stands.

    Proves that
    - ranks, stages, micro-batches and kinds are in range, and each step is one action or two independent ones;
    - each (stage, micro-batch) has one "F", one of "B" or "I", and one "W" if and only if it has an "I";
    - each action is on the rank that owns its stage, after everything that it needs;
    - between two ranks, activations are taken in the order in which they are sent, and so are gradients;
    - no rank waits forever, even if a send blocks until its receive is posted (see `messages.RECEIVE_AHEAD`).
    """
    name = f"schedule {schedule.name!r}"
    for what in ("num_ranks", "num_stages", "num_microbatches"):
        size = getattr(schedule, what)
        if not isinstance(size, int) or size < 1:
            raise ScheduleError(f"{name}: {what} is {size!r}; it must be an integer of 1 or more")
    if len(schedule.ranks) != schedule.num_ranks:
        raise ScheduleError(f"{name} has steps for {len(schedule.ranks)} ranks, but num_ranks is {schedule.num_ranks}")
    if len(schedule.placement) != schedule.num_stages:
        raise ScheduleError(f"{name} places {len(schedule.placement)} stages, but num_stages is {schedule.num_stages}")
    for stage, rank in enumerate(schedule.placement):
        if not isinstance(rank, int) or not 0 <= rank < schedule.num_ranks:
            where = "on no rank: it has no actions" if rank == -1 else f"on rank {rank!r}"
            raise ScheduleError(f"{name}: stage {stage} is {where}; ranks are 0 to {schedule.num_ranks - 1}")
    places = _places(schedule)
    for action, (rank, index) in places.items():
        for need in needs(schedule, action):
            there = places.get(need, (-1, -1))
            if there[0] == rank and there[1] >= index:  # of two ranks, the messages decide
                _refuse(schedule, rank, index, f"{action} needs {need}, which comes later, at step {there[1]}")
    _check_messages(schedule)


def independent(a: Action, b: Action) -> bool:
    """Whether neither action needs the other's result, directly or through other actions.

    Micro-batches never need each other. Within one, the forwards and the backwards form a single chain; a "W" hangs on
    the "I" of its stage, hence on all that comes before it in the chain.
    """
    if a.microbatch != b.microbatch:
        return True
    if a.kind == "W" and b.kind == "W":
        return a.stage != b.stage
    return any(w.kind == "W" and other.kind in "BI" and other.stage < w.stage for w, other in ((a, b), (b, a)))


def _refuse(schedule: Schedule, rank: int, index: int, cause: str) -> NoReturn:
    step = " & ".join(map(str, schedule.ranks[rank][index])) or "empty"
    raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}, step {index} ({step}): {cause}")


def _places(schedule: Schedule) -> dict[Action, Place]:
    """Where each action stands, having checked that each may be there and that none is missing."""
    places: dict[Action, Place] = {}
    for rank, index, step in ((r, i, step) for r, steps in enumerate(schedule.ranks) for i, step in enumerate(steps)):
        if len(step) not in (1, 2):
            _refuse(schedule, rank, index, f"a step has one action or two, not {len(step)}")
        for action in step:
            if action.kind not in KINDS:
                _refuse(schedule, rank, index, f"{action!r} is not an Action of kind {', '.join(KINDS)}")
            for what, value, size in (
                ("stage", action.stage, schedule.num_stages),
                ("micro-batch", action.microbatch, schedule.num_microbatches),
            ):
                if not isinstance(value, int) or not 0 <= value < size:
                    _refuse(schedule, rank, index, f"{what} {value} of {action} is not one of 0 to {size - 1}")
            owner = schedule.stage_rank(action.stage)
            if owner != rank:
                _refuse(schedule, rank, index, f"stage {action.stage} of {action} is placed on rank {owner}")
            if action in places:
                _refuse(schedule, rank, index, "{} is also at rank {}, step {}".format(action, *places[action]))
            places[action] = rank, index
        if len(step) == 2 and not independent(*step):
            _refuse(schedule, rank, index, "these two depend on each other, so they cannot overlap")
    for stage, rank in enumerate(schedule.placement):
        for mb in range(schedule.num_microbatches):
            forward, full, inputs, weights = (Action(kind, stage, mb) for kind in KINDS)
            if forward not in places:
                raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: {forward} is missing")
            if full not in places and inputs not in places:
                raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: {full} (or {inputs}) is missing")
            if full in places and inputs in places:
                _refuse(schedule, *places[inputs], f"{full} at step {places[full][1]} is the whole backward already")
            if inputs in places and weights not in places:
                _refuse(schedule, *places[inputs], f"its weight gradients, {weights}, are missing")
            if weights in places and inputs not in places:
                _refuse(schedule, *places[weights], f"there is no {inputs} that defers weight gradients to it")
    return places


def _check_messages(schedule: Schedule) -> None:
    """Every stream is taken in its order, and all takes and sends can be played; computing takes no time here."""
    messages = all_messages(schedule)
    programs = [
        [(index, message) for index, step in enumerate(steps) for message in (*step.incoming, *step.outgoing)]
        for steps in messages
    ]
    arriving: defaultdict[Stream, deque[Message]] = defaultdict(deque)
    for message in (message for steps in messages for step in steps for message in step.outgoing):
        arriving[message.stream].append(message)
    for rank, program in enumerate(programs):
        for index, message in program:
            if message.dst == rank and (other := arriving[message.stream].popleft()) != message:
                _refuse(schedule, rank, index, f"takes the {message}, but the next to arrive is the {other}")
    in_flight: Counter[Stream] = Counter()  # sent and not yet taken

    def move(rank: int, item: tuple[int, Message]) -> bool:
        takes, stream = item[1].dst == rank, item[1].stream
        if in_flight[stream] == (0 if takes else RECEIVE_AHEAD):
            return False
        in_flight[stream] += -1 if takes else 1
        return True

    stuck = [(rank, *program[0]) for rank, program in enumerate(play(programs, move)) if program]
    if stuck:
        waits = "; ".join(
            f"rank {rank} waits at step {index} to {'take' if message.dst == rank else 'send'} the {message}"
            for rank, index, message in stuck
        )
        _refuse(schedule, *stuck[0][:2], f"deadlock: {waits}")
