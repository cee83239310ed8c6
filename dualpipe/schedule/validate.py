"""Proves that a schedule can be run: complete, in order, and free of deadlocks. Runs nothing.

torch.distributed.pipelining's own check accepts duplicated actions and some wrong orders; this one accepts a schedule
only where every rank reaches the end with blocking sends and each stream of messages matches in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import chain, islice
from typing import NoReturn, cast

from dualpipe.schedule.messages import (
    RECEIVE_AHEAD,
    Message,
    MessageStream,
    Result,
    all_messages,
    need,
    play,
    result,
    sent,
    streams,
)
from dualpipe.schedule.types import KINDS, Action, Kind, Schedule, ScheduleError


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
    _check_actions(schedule)
    _check_order(schedule)
    _check_messages(schedule)


def independent(a: Action, b: Action) -> bool:
    """Return True if neither action needs the other's result, directly or through other actions.

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


def _check_actions(schedule: Schedule) -> None:
    """Each action may be where it is, and none is missing."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    found = [[""] * microbatches for _ in range(stages)]  # kinds
    for rank, index, step in ((r, i, step) for r, steps in enumerate(schedule.ranks) for i, step in enumerate(steps)):
        if len(step) not in (1, 2):
            _refuse(schedule, rank, index, f"a step has one action or two, not {len(step)}")
        for action in step:
            kind, stage, mb = action.kind, action.stage, action.microbatch
            if kind not in KINDS:
                _refuse(schedule, rank, index, f"{action!r} is not an Action of kind {', '.join(KINDS)}")
            if not (isinstance(stage, int) and 0 <= stage < stages):
                _refuse(schedule, rank, index, f"stage {stage} of {action} is not one of 0 to {stages - 1}")
            if not (isinstance(mb, int) and 0 <= mb < microbatches):
                _refuse(schedule, rank, index, f"micro-batch {mb} of {action} is not one of 0 to {microbatches - 1}")
            if (owner := schedule.placement[stage]) != rank:
                _refuse(schedule, rank, index, f"stage {stage} of {action} is placed on rank {owner}")
            if kind in found[stage][mb]:
                there = _place(schedule, action)
                _refuse(schedule, rank, index, "{} is also at rank {}, step {}".format(action, *there))
            found[stage][mb] += kind
        if len(step) == 2 and not independent(*step):
            _refuse(schedule, rank, index, "these two depend on each other, so they cannot overlap")
    for stage, rank in enumerate(schedule.placement):
        for mb, kinds in enumerate(found[stage]):
            if "".join(sorted(kinds)) in ("BF", "FIW"):
                continue
            forward, full, inputs, weights = (Action(kind, stage, mb) for kind in KINDS)
            if "F" not in kinds:
                raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: {forward} is missing")
            if "B" not in kinds and "I" not in kinds:
                raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: {full} (or {inputs}) is missing")
            if "B" in kinds and "I" in kinds:
                whole = _place(schedule, full)[1]
                _refuse(schedule, *_place(schedule, inputs), f"{full} at step {whole} is the whole backward already")
            if "I" in kinds:
                _refuse(schedule, *_place(schedule, inputs), f"its weight gradients, {weights}, are missing")
            _refuse(schedule, *_place(schedule, weights), f"there is no {inputs} that defers weight gradients to it")


def _place(schedule: Schedule, action: Action) -> tuple[int, int]:
    """Where `action` stands first: the rank, and the number of the step."""
    return next((r, i) for r, steps in enumerate(schedule.ranks) for i, step in enumerate(steps) if action in step)


def _check_order(schedule: Schedule) -> None:
    """What an action takes from its own rank comes in an earlier step; of two ranks, the messages decide."""
    for rank, steps in enumerate(schedule.ranks):
        yielded: set[Result] = set()
        for index, step in enumerate(steps):
            for action in step:
                taken = need(schedule, action)
                if taken and taken not in yielded and schedule.placement[taken[1]] == rank:
                    source = next(other for step in steps for other in step if result(other) == taken)
                    there = _place(schedule, source)[1]
                    _refuse(schedule, rank, index, f"{action} needs {source}, which comes later, at step {there}")
            yielded.update(map(result, step))


def _check_messages(schedule: Schedule) -> None:
    """Every stream is taken in its order, and all takes and sends can be played; computing takes no time here."""
    carrier = streams(schedule)
    arriving: defaultdict[MessageStream, deque[Result]] = defaultdict(deque)
    for action in (action for steps in schedule.ranks for step in steps for action in step):
        yielded = result(action)
        if stream := carrier.get(yielded[:2]):
            arriving[stream].append(yielded)

    def message_of(rank: int, number: int) -> tuple[int, Message]:
        """The step, and the message, of this place in the rank's program."""
        steps = all_messages(schedule)[rank]
        program = ((index, message) for index, step in enumerate(steps) for message in chain(*step))
        return next(islice(program, number, None))

    programs: list[list[MessageStream]] = [[] for _ in schedule.ranks]  # of messages taken and sent
    for rank, (steps, program) in enumerate(zip(schedule.ranks, programs)):
        for step in steps:
            taken = [found for action in step if action.kind != "W" and (found := need(schedule, action))]
            for each in taken:
                if stream := carrier.get(each[:2]):
                    if (other := arriving[stream].popleft()) not in taken:
                        index, message = message_of(rank, len(program))
                        arrives = sent(schedule, Action(cast("Kind", other[0]), *other[1:]))
                        _refuse(schedule, rank, index, f"takes the {message}, but the next to arrive is the {arrives}")
                    program.append(stream)
            program += [stream for action in step if (stream := carrier.get(result(action)[:2]))]
    in_flight: Counter[MessageStream] = Counter()  # sent and not yet taken

    def move(rank: int, stream: MessageStream) -> bool:
        taking = stream[1] == rank
        if in_flight[stream] == (0 if taking else RECEIVE_AHEAD):
            return False
        in_flight[stream] += -1 if taking else 1
        return True

    left = play(programs, move)
    stuck = [(rank, *message_of(rank, len(programs[rank]) - len(rest))) for rank, rest in enumerate(left) if rest]
    if stuck:
        waits = "; ".join(
            f"rank {rank} waits at step {index} to {'take' if message.dst == rank else 'send'} the {message}"
            for rank, index, message in stuck
        )
        _refuse(schedule, *stuck[0][:2], f"deadlock: {waits}")
