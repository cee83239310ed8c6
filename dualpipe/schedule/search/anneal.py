"""Better orders by simulated annealing: orders of work that change a little at a time, and are timed in microseconds.

An order has for each rank what its steps do, without micro-batches: ("F", 0), or ("F", 0), ("B", 7) for a pair. Each
stage takes its micro-batches in turn, and a "W" is the oldest that an "I" of its stage left, so that whatever is moved
stays complete, and on a V each stream of messages is taken as it is sent. An order that waits for itself, that holds
more than the memory allows or that blocking sends would stop (see `messages`) is no candidate.

Source: simulated annealing, Kirkpatrick et al., Science 220 (1983); the orders of a rank as the state is ours.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import inf, log
from typing import NamedTuple

from dualpipe.schedule.messages import RECEIVE_AHEAD, MessageStream, need, play, result, sent
from dualpipe.schedule.simulate import FREES, Costs
from dualpipe.schedule.types import Action, Kind, Schedule, Step
from dualpipe.schedule.validate import independent

Work = tuple[Kind, int]  # a kind, and the stage
Key = tuple[Kind, int, int]  # of an action
RankOrder = list[tuple[Work, ...]]
EVENLY = 0.02  # how much the mean of the ranks' ends counts beside the last: it leads over plateaus of equal makespan
COOLING = 50.0  # the first temperature over the last

assert RECEIVE_AHEAD == 1, "`plays` holds one message of a stream"


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """A step with micro-batches: its duration; what it takes (results by number, and their time on the way) and yields;
    by how much it fills and empties the memory; and the messages of other ranks: whether taken, stream, number."""

    step: Step
    duration: float
    takes: tuple[tuple[int, float], ...]
    yields: tuple[int, ...]
    fills: float
    frees: float
    traffic: tuple[tuple[bool, MessageStream, int], ...]


class Times(NamedTuple):
    """The steps of each rank, the work that is left at each, when each starts; when each result is there (below 0: not
    yet)."""

    ranks: list[list[Timed]]
    left: list[list[float]]
    starts: list[list[float]]
    there: list[float]

    def ends(self) -> list[float]:
        """When each rank has done its last step."""
        return [starts[-1] + steps[-1].duration if steps else 0.0 for steps, starts in zip(self.ranks, self.starts)]

    def score(self) -> float:
        """What is to become less: the makespan, and a little of all ranks' ends."""
        ends = self.ends()
        return max(ends) + EVENLY * sum(ends) / len(ends)


class Timing:
    """Times orders for the placement and the micro-batches of a schedule; steps that have been met are kept.

    memory: that a rank has, see `Timeline.peak_memory`.
    """

    def __init__(self, schedule: Schedule, costs: Costs, memory: float) -> None:
        self.schedule, self.costs, self.memory = schedule, costs, memory
        self._known: dict[tuple[Key, ...], Timed | None] = {}

    def ranks(self, orders: Sequence[RankOrder]) -> list[list[Timed]] | None:
        """The steps of all ranks; None where those of one cannot be."""
        ranks = [steps for order in orders if (steps := self.timed_steps(order)) is not None]
        return ranks if len(ranks) == len(orders) else None

    def timed_steps(self, order: RankOrder) -> list[Timed] | None:
        """The steps of a rank with their micro-batches; None where they cannot be, or do not fit the memory."""
        forwards, backwards = [0] * self.schedule.num_stages, [0] * self.schedule.num_stages
        deferred: defaultdict[int, deque[int]] = defaultdict(deque)
        held, steps, known = 0.0, [], self._known
        for works in order:
            actions = []
            for kind, stage in works:
                if kind == "W":
                    if not deferred[stage]:
                        return None
                    microbatch = deferred[stage].popleft()
                else:
                    turns = forwards if kind == "F" else backwards
                    microbatch = turns[stage]
                    turns[stage] += 1
                    if kind == "I":
                        deferred[stage].append(microbatch)
                actions.append((kind, stage, microbatch))
            key = tuple(actions)
            step = known[key] if key in known else self.timed_step(key)
            if step is None or held + step.fills > self.memory:
                return None
            held += step.fills - step.frees
            steps.append(step)
        return steps

    def timed_step(self, key: tuple[Key, ...]) -> Timed | None:
        """The step of these actions; None where they depend on each other."""
        if key in self._known:
            return self._known[key]
        schedule, costs, takes, taken = self.schedule, self.costs, [], []
        step = tuple(Action(*each) for each in key)
        for action in step:
            if source := need(schedule, action):
                src, dst = schedule.placement[source[1]], schedule.placement[action.stage]
                takes.append((self._number(*source), 0.0 if src == dst else costs.p2p))
                if src != dst:
                    taken.append((True, (src, dst, source[0]), takes[-1][0]))
        if len(taken) == 2 and taken[0][1] == taken[1][1]:
            taken.sort()  # by their micro-batches, as they are sent
        given = [(False, message.stream, self._number(*result(action)))
                 for action in step if (message := sent(schedule, action))]
        frees = sum(FREES[action.kind] for action in step)
        self._known[key] = timed = None if len(step) == 2 and not independent(*step) else Timed(
            step, costs.of(step), tuple(takes), tuple(self._number(*result(action)) for action in step),
            sum(action.kind == "F" for action in step), frees, (*taken, *given),
        )
        return timed

    def _number(self, kind: str, stage: int, microbatch: int) -> int:
        return ("FBW".index(kind) * self.schedule.num_stages + stage) * self.schedule.num_microbatches + microbatch

    def times(self, ranks: list[list[Timed]], limit: float = inf) -> Times | None:
        """When each step runs; None where one never does, or where it would take longer than `limit`."""
        nothing = [-1.0] * (3 * self.schedule.num_stages * self.schedule.num_microbatches)
        begun = Times(ranks, [*map(_left, ranks)], [[] for _ in ranks], nothing)
        return _run(begun, [0.0] * len(ranks), limit)

    def changed(self, times: Times, rank: int, steps: list[Timed], limit: float) -> Times | None:
        """`times` with other steps of one rank, as `times` would give them."""
        pairs = enumerate(zip(times.ranks[rank], steps))
        first = next((index for index, (old, new) in pairs if old is not new), 0)
        since = times.starts[rank][first - 1] + steps[first - 1].duration if first else 0.0
        there, kept, ends = times.there[:], [], [0.0] * len(times.ranks)
        for r, starts in enumerate(times.starts):  # whatever has started before is as it was
            count = first if r == rank else bisect_left(starts, since)
            for step in times.ranks[r][count:]:
                for number in step.yields:
                    there[number] = -1.0
            if count:
                ends[r] = starts[count - 1] + times.ranks[r][count - 1].duration
            kept.append(starts[:count])
        ranks, left = times.ranks[:], times.left[:]
        ranks[rank], left[rank] = steps, _left(steps)
        return _run(Times(ranks, left, kept, there), ends, limit)


def orders_of(schedule: Schedule) -> list[RankOrder]:
    """What its steps do, without micro-batches."""
    return [[tuple((action.kind, action.stage) for action in step) for step in steps] for steps in schedule.ranks]


def with_steps(schedule: Schedule, ranks: Sequence[Sequence[Timed]]) -> Schedule:
    """The schedule with other steps."""
    return replace(schedule, ranks=tuple(tuple(step.step for step in steps) for steps in ranks))


def plays(ranks: Sequence[Sequence[Timed]]) -> bool:
    """Return True if every stream is taken in its order and no rank waits forever where sends block."""
    in_flight: dict[MessageStream, int | None] = {}

    def move(_: int, item: tuple[bool, MessageStream, int]) -> bool:
        taking, stream, number = item
        if in_flight.get(stream) != (number if taking else None):
            return False
        in_flight[stream] = None if taking else number
        return True

    return not any(play([chain.from_iterable(step.traffic for step in steps) for steps in ranks], move))


def _left(steps: list[Timed]) -> list[float]:
    """The work from each step on: what shows early that a limit will be passed."""
    return [*accumulate((step.duration for step in reversed(steps)), initial=0.0)][::-1]


def _run(times: Times, ends: list[float], limit: float) -> Times | None:
    """Run what has not started yet, in place. A rank that waits for a result is woken by it, so each is asked once."""
    ranks, work_left, starts, there = times
    waiting: dict[int, int] = {}
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        steps, row, left, time = ranks[rank], starts[rank], work_left[rank], ends[rank]
        for index in range(len(row), len(steps)):
            step = steps[index]
            for number, on_the_way in step.takes:
                arrives = there[number]
                if arrives < 0:
                    waiting[number] = rank
                    break
                if arrives + on_the_way > time:
                    time = arrives + on_the_way
            else:
                if time + left[index] > limit:
                    return None
                row.append(time)
                time += step.duration
                for number in step.yields:
                    there[number] = time
                    if number in waiting:
                        ready.append(waiting.pop(number))
                continue
            break
        ends[rank] = time
    return times if all(len(row) == len(steps) for row, steps in zip(starts, ranks)) else None


def anneal(
    start: Schedule, costs: Costs, memory: float, iterations: int, temperature: float, cooling: float, seed: int
) -> tuple[float, Schedule]:
    """The best score and schedule met in so many random changes, from `start`, which must be possible.

    temperature: a change that makes the score worse by so much is taken once in e times; at the end by so much divided
    by `cooling`.
    """
    timing, chance, orders = Timing(start, costs, memory), random.Random(seed), orders_of(start)
    ranks = timing.ranks(orders) or []
    times = timing.times(ranks)
    assert ranks and times is not None and plays(ranks), "annealing starts from an order that can be run"
    score = times.score()
    best, found = score, ranks
    for i in range(iterations):
        rank = chance.randrange(len(orders))
        order = _change(orders[rank], chance)
        if order is None or (steps := timing.timed_steps(order)) is None:
            continue
        limit = score - temperature * cooling ** (-i / iterations) * log(1 - chance.random())
        changed = timing.changed(times, rank, steps, limit)
        if changed is None or changed.score() > limit or not plays(changed.ranks):
            continue
        times, score, orders = changed, changed.score(), [*orders[:rank], order, *orders[rank + 1 :]]
        if score < best - 1e-9:
            best, found = score, changed.ranks
    return best, with_steps(start, found)


def _change(order: RankOrder, chance: random.Random) -> RankOrder | None:
    """A copy of a rank's order with one step moved, paired, parted, or its backward split or made whole; None where
    what was drawn is not possible."""

    def near(mean: float) -> int:
        return i + chance.choice((-1, 1)) * (1 + int(chance.expovariate(1 / mean)))

    if not order:
        return None
    i, what, new = chance.randrange(len(order)), chance.random(), order[:]
    step = list(order[i])
    chance.shuffle(step)
    if what < 0.4:  # move
        j = near(4)
        if not 0 <= j < len(order) or order[i] == order[j]:
            return None
        new.insert(j, new.pop(i))
    elif what < 0.65:  # pair, or change partners
        j = near(2.5)
        if not 0 <= j < len(order) or len(order[j]) != 1:
            return None
        new[j] = (order[j][0], step[0]) if step[0][0] == "W" else (step[0], order[j][0])  # a "W" fills what is left
        new[i : i + 1] = [(step[1],)] if len(step) == 2 else []
    elif what < 0.8:  # part
        if len(step) == 1:
            return None
        new[i : i + 1] = [(step[0],), (step[1],)]
    elif step[0][0] == "B":  # split: its weight gradients come later
        new[i] = (("I", step[0][1]), *step[1:])
        j = min(len(order), i + 1 + int(chance.expovariate(0.3)))
        new.insert(j, (("W", step[0][1]),))
    elif step[0][0] == "I":  # whole
        weights: Work = ("W", step[0][1])
        j = next(j for j in range(i + 1, len(order)) if weights in order[j])
        new[i] = (("B", step[0][1]), *step[1:])
        rest = list(order[j])
        rest.remove(weights)
        new[j : j + 1] = [tuple(rest)] if rest else []
    else:
        return None
    return new
