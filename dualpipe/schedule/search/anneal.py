"""Simulated annealing of schedules: a rank's order of work changes a little at a time, and is then timed again.

An order lists the steps of a rank by the kinds and stages of their actions: (("F", 0),), or (("F", 0), ("B", 7)) for a
pair. It names no micro-batches: each stage runs them in sequence, and a "W" belongs to the oldest "I" of its stage that
has none. So every change keeps the order complete, and on a V each message stream is received in the order of sending.
An order is not a candidate if its steps wait for each other in a circle, if it exceeds the memory, or if it deadlocks
with blocking sends (see `messages`).

Source: simulated annealing, Kirkpatrick et al., Science 220 (1983). Annealing the orders of ranks is our own idea.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import inf, log
from random import Random
from typing import NamedTuple

from dualpipe.schedule.building_blocks import RankOrder, Work
from dualpipe.schedule.messages import MessageStream, play, required_input, result, sent_message
from dualpipe.schedule.simulate import FREES, Costs
from dualpipe.schedule.types import Action, Kind, Schedule, Step
from dualpipe.schedule.validate import independent

EVENLY = 0.02  # weight of the ranks' mean end time in the score, which decides between orders of the same makespan
COOLING = 50.0  # ratio of the first to the last temperature
NOT_YET = -1.0  # time of a result that is not computed

Key = tuple[Kind, int, int]  # kind, stage and micro-batch of an action


@dataclass(frozen=True, slots=True, eq=False)
class TimedStep:
    """A step with its micro-batches, as far as timing needs it. Results are numbered, see `Timing`.

    Args:
        step: the actions.
        duration: time that it takes.
        inputs: number of each result that it needs, and the time to transfer it from another rank.
        results: numbers of its results.
        allocates: stage activations allocated at its start.
        frees: stage activations freed at its end.
        messages: for each message, True if it is received, its stream, and the number of the result it carries.
    """

    step: Step
    duration: float
    inputs: tuple[tuple[int, float], ...]
    results: tuple[int, ...]
    allocates: float
    frees: float
    messages: tuple[tuple[bool, MessageStream, int], ...]


class OrderTimes(NamedTuple):
    """Times at which the steps of all ranks run.

    Args:
        ranks: steps of each rank.
        remaining_work: for each rank and step, the total duration of that step and the later ones.
        starts: for each rank, the start of each step.
        result_times: time of each result by its number; `NOT_YET` if it is not computed.
    """

    ranks: list[list[TimedStep]]
    remaining_work: list[list[float]]
    starts: list[list[float]]
    result_times: list[float]

    def ends(self) -> list[float]:
        """Return the end of each rank's last step."""
        return [starts[-1] + steps[-1].duration if steps else 0.0 for steps, starts in zip(self.ranks, self.starts)]

    def score(self) -> float:
        """Return the value that annealing minimizes: the makespan, and a little of the mean of all ranks' ends."""
        ends = self.ends()
        return max(ends) + EVENLY * sum(ends) / len(ends)


class Timing:
    """Computes when the steps of an order run, for the placement and the micro-batches of a schedule.

    Results are numbered by kind ("F", "B", "W"), stage and micro-batch. Steps are cached, so that an order made of
    known steps is timed without building any.

    Args:
        schedule: gives the placement and the number of micro-batches; its steps are not used.
        costs: costs of the actions.
        memory: stage activations that each rank may hold, see `Timeline.memory_by_rank`.
    """

    def __init__(self, schedule: Schedule, costs: Costs, memory: Sequence[float]) -> None:
        self.schedule = schedule
        self.costs = costs
        self.memory = memory
        self._cached_steps: dict[tuple[Key, ...], TimedStep | None] = {}

    def ranks(self, orders: Sequence[RankOrder]) -> list[list[TimedStep]] | None:
        """Return the steps of all ranks; None if the order of one of them is impossible or exceeds the memory."""
        ranks = []
        for rank, order in enumerate(orders):
            steps = self.timed_steps(rank, order)
            if steps is None:
                return None
            ranks.append(steps)
        return ranks

    def timed_steps(self, rank: int, order: RankOrder) -> list[TimedStep] | None:
        """Return the steps of a rank with their micro-batches; None if they are impossible or exceed the memory."""
        next_forward = [0] * self.schedule.num_stages  # micro-batch, by stage
        next_backward = [0] * self.schedule.num_stages
        deferred: defaultdict[int, deque[int]] = defaultdict(deque)  # micro-batches of weight gradients, by stage
        memory = self.memory[rank]
        held = 0.0
        steps = []
        cached_steps = self._cached_steps
        for works in order:
            keys = []
            for kind, stage in works:
                if kind == "W":
                    if not deferred[stage]:
                        return None
                    microbatch = deferred[stage].popleft()
                else:
                    next_microbatch = next_forward if kind == "F" else next_backward
                    microbatch = next_microbatch[stage]
                    next_microbatch[stage] += 1
                    if kind == "I":
                        deferred[stage].append(microbatch)
                keys.append((kind, stage, microbatch))
            step_key = tuple(keys)
            step = cached_steps[step_key] if step_key in cached_steps else self.timed_step(step_key)
            if step is None or held + step.allocates > memory:
                return None
            held += step.allocates - step.frees
            steps.append(step)
        return steps

    def timed_step(self, keys: tuple[Key, ...]) -> TimedStep | None:
        """Return the step of these actions; None if they depend on each other."""
        if keys not in self._cached_steps:
            actions = tuple(Action(*key) for key in keys)
            is_possible = len(actions) == 1 or independent(*actions)
            self._cached_steps[keys] = self._build(actions) if is_possible else None
        return self._cached_steps[keys]

    def _build(self, step: Step) -> TimedStep:
        placement = self.schedule.placement
        inputs = []
        received = []
        sent = []
        for action in step:
            source = required_input(self.schedule, action)
            if source is not None:
                src = placement[source[1]]
                dst = placement[action.stage]
                number = self._number(*source)
                inputs.append((number, 0.0 if src == dst else self.costs.p2p))
                if src != dst:
                    received.append((True, (src, dst, source[0]), number))
            message = sent_message(self.schedule, action)
            if message is not None:
                sent.append((False, message.stream, self._number(*result(action))))
        if len(received) == 2 and received[0][1] == received[1][1]:
            received.sort()  # by micro-batch, as they are sent
        return TimedStep(
            step=step,
            duration=self.costs.of(step),
            inputs=tuple(inputs),
            results=tuple(self._number(*result(action)) for action in step),
            allocates=sum(action.kind == "F" for action in step),
            frees=sum(FREES[action.kind] for action in step),
            messages=(*received, *sent),
        )

    def _number(self, kind: str, stage: int, microbatch: int) -> int:
        return ("FBW".index(kind) * self.schedule.num_stages + stage) * self.schedule.num_microbatches + microbatch

    def times(self, ranks: list[list[TimedStep]], limit: float = inf) -> OrderTimes | None:
        """Return the times of all steps; None if one of them never runs, or if the makespan would exceed `limit`."""
        num_results = 3 * self.schedule.num_stages * self.schedule.num_microbatches
        times = OrderTimes(ranks, [*map(_remaining_work, ranks)], [[] for _ in ranks], [NOT_YET] * num_results)
        return _run(times, [0.0] * len(ranks), limit)

    def changed(self, times: OrderTimes, rank: int, steps: list[TimedStep], limit: float) -> OrderTimes | None:
        """Return the result that `Timing.times` would have after the steps of one rank are replaced by `steps`.

        Steps that start before the first changed one keep their times and are not timed again.
        """
        pairs = enumerate(zip(times.ranks[rank], steps))
        # If one list is a prefix of the other, 0: all steps are timed again.
        first_changed = next((index for index, (old, new) in pairs if old is not new), 0)
        change_time = 0.0
        if first_changed:
            change_time = times.starts[rank][first_changed - 1] + steps[first_changed - 1].duration
        result_times = times.result_times[:]
        unchanged_starts = []
        ends = [0.0] * len(times.ranks)
        for other, starts in enumerate(times.starts):
            num_unchanged = first_changed if other == rank else bisect_left(starts, change_time)
            for step in times.ranks[other][num_unchanged:]:
                for number in step.results:
                    result_times[number] = NOT_YET
            if num_unchanged:
                ends[other] = starts[num_unchanged - 1] + times.ranks[other][num_unchanged - 1].duration
            unchanged_starts.append(starts[:num_unchanged])
        ranks = times.ranks[:]
        ranks[rank] = steps
        remaining_work = times.remaining_work[:]
        remaining_work[rank] = _remaining_work(steps)
        return _run(OrderTimes(ranks, remaining_work, unchanged_starts, result_times), ends, limit)


def orders_of(schedule: Schedule) -> list[RankOrder]:
    """Return the orders of all ranks: the work of their steps, without micro-batches."""
    return [[tuple((action.kind, action.stage) for action in step) for step in steps] for steps in schedule.ranks]


def with_steps(schedule: Schedule, ranks: Sequence[Sequence[TimedStep]]) -> Schedule:
    """Return a copy of `schedule` with the steps `ranks`."""
    return replace(schedule, ranks=tuple(tuple(timed.step for timed in steps) for steps in ranks))


def plays(ranks: Sequence[Sequence[TimedStep]], messages_in_flight: int) -> bool:
    """Return True if every stream is received in order and no rank waits forever with blocking sends.

    messages_in_flight: as in `Schedule`.
    """
    in_flight: defaultdict[MessageStream, deque[int]] = defaultdict(deque)  # numbers of the results that are sent

    def try_move(_: int, message: tuple[bool, MessageStream, int]) -> bool:
        is_receive, stream, number = message
        sent = in_flight[stream]
        if is_receive:
            if not sent or sent[0] != number:
                return False
            sent.popleft()
        else:
            if len(sent) == messages_in_flight:
                return False
            sent.append(number)
        return True

    return not any(play([chain.from_iterable(step.messages for step in steps) for steps in ranks], try_move))


def _remaining_work(steps: list[TimedStep]) -> list[float]:
    """Return for each step the duration of it and all later steps, which shows early that a limit will be exceeded."""
    return [*accumulate((step.duration for step in reversed(steps)), initial=0.0)][::-1]


def _run(times: OrderTimes, ends: list[float], limit: float) -> OrderTimes | None:
    """Run the steps that have not started yet, and update `times`; None as `Timing.times` returns it.

    ends: for each rank, the end of its last step that has started.
    """
    ranks, all_remaining_work, all_starts, result_times = times

    def try_run(rank: int, step: TimedStep) -> bool:
        time = ends[rank]
        for number, transfer in step.inputs:
            result_time = result_times[number]
            if result_time < 0:
                return False
            if result_time + transfer > time:
                time = result_time + transfer
        starts = all_starts[rank]
        if time + all_remaining_work[rank][len(starts)] > limit:
            return False
        starts.append(time)
        time += step.duration
        ends[rank] = time
        for number in step.results:
            result_times[number] = time
        return True

    not_started = [steps[len(starts) :] for steps, starts in zip(ranks, all_starts)]
    return None if any(play(not_started, try_run)) else times


def random_change(order: RankOrder, random: Random) -> RankOrder | None:
    """Return a copy of a rank's order with one random change; None if the change that was drawn is impossible.

    The changes, with their probabilities: move a step (40%), pair it with another or exchange partners (25%), unpair
    two actions (15%), and split a full backward or join a split one (20%). In `order`, every "I" must have its "W"
    later.
    """
    if not order:
        return None
    index = random.randrange(len(order))
    draw = random.random()
    step = list(order[index])
    random.shuffle(step)
    if draw < 0.4:
        return _move(order, index, _near(index, 4, random))
    if draw < 0.65:
        return _pair(order, index, step, _near(index, 2.5, random))
    if draw < 0.8:
        return _unpair(order, index, step)
    if step[0][0] == "B":
        return _split(order, index, step, later=1 + int(random.expovariate(0.3)))
    if step[0][0] == "I":
        return _join(order, index, step)
    return None


def _near(index: int, mean_distance: float, random: Random) -> int:
    """Return a random index before or after `index`; it may be out of range."""
    return index + random.choice((-1, 1)) * (1 + int(random.expovariate(1 / mean_distance)))


def _move(order: RankOrder, index: int, target: int) -> RankOrder | None:
    """Move a step to another place, unless an equal step is there."""
    if not 0 <= target < len(order) or order[index] == order[target]:
        return None
    new = order[:]
    new.insert(target, new.pop(index))
    return new


def _pair(order: RankOrder, index: int, step: list[Work], target: int) -> RankOrder | None:
    """Add the first action of a step to the single action at `target`; the second action, if any, stays alone."""
    if not 0 <= target < len(order) or len(order[target]) != 1:
        return None
    other = order[target][0]
    new = order[:]
    # A "W" comes second in a pair: it runs while the first action communicates.
    new[target] = (other, step[0]) if step[0][0] == "W" else (step[0], other)
    new[index : index + 1] = [(action,) for action in step[1:]]
    return new


def _unpair(order: RankOrder, index: int, step: list[Work]) -> RankOrder | None:
    """Replace a pair by two steps of one action; None for a step that is no pair."""
    if len(step) == 1:
        return None
    new = order[:]
    new[index : index + 1] = [(action,) for action in step]
    return new


def _split(order: RankOrder, index: int, step: list[Work], later: int) -> RankOrder:
    """Split a full backward: defer its weight gradients to a step of their own, `later` steps later."""
    _, stage = step[0]
    new = order[:]
    new[index] = (("I", stage), *step[1:])
    new.insert(min(len(order), index + later), (("W", stage),))
    return new


def _join(order: RankOrder, index: int, step: list[Work]) -> RankOrder:
    """Join an "I" and the next "W" of its stage into a full backward."""
    _, stage = step[0]
    weights: Work = ("W", stage)
    weights_index = next(later for later in range(index + 1, len(order)) if weights in order[later])
    remaining = list(order[weights_index])
    remaining.remove(weights)
    new = order[:]
    new[index] = (("B", stage), *step[1:])
    new[weights_index : weights_index + 1] = [tuple(remaining)] if remaining else []
    return new


def anneal(
    start: Schedule, costs: Costs, memory: Sequence[float], iterations: int, temperature: float, cooling: float,
    seed: int,
) -> tuple[float, Schedule]:
    """Anneal a schedule, and return the best score and the schedule that has it.

    Args:
        start: first schedule; it must be valid and fit the memory.
        costs: costs of the actions.
        memory: stage activations that each rank may hold, see `Timeline.memory_by_rank`.
        iterations: number of random changes.
        temperature: a change that makes the score worse by this much is accepted with probability 1/e.
        cooling: ratio of the first to the last temperature.
        seed: seed of the random changes.
    """
    timing = Timing(start, costs, memory)
    random = Random(seed)
    in_flight = start.messages_in_flight
    orders = orders_of(start)
    first_ranks = timing.ranks(orders) or []
    times = timing.times(first_ranks)
    assert first_ranks and times is not None and plays(first_ranks, in_flight), "annealing starts from a valid order"
    score = times.score()
    best_score = score
    best_ranks = first_ranks
    for i in range(iterations):
        rank = random.randrange(len(orders))
        order = random_change(orders[rank], random)
        steps = None if order is None else timing.timed_steps(rank, order)
        if order is None or steps is None:
            continue
        # The Metropolis criterion, drawn before timing, so that `Timing.changed` can stop at the limit.
        limit = score - temperature * cooling ** (-i / iterations) * log(1 - random.random())
        changed = timing.changed(times, rank, steps, limit)
        if changed is None:
            continue
        changed_score = changed.score()
        if changed_score > limit or not plays(changed.ranks, in_flight):
            continue
        times = changed
        score = changed_score
        orders = [*orders[:rank], order, *orders[rank + 1 :]]
        if score < best_score - 1e-9:
            best_score = score
            best_ranks = changed.ranks
    return best_score, with_steps(start, best_ranks)
