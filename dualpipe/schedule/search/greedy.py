"""Greedy schedule for any placement and any memory: each rank runs what it can as soon as it can, backwards first.

The search starts from it where no known schedule fits the memory. A rank starts no action whose message would have to
wait until the previous one is received, so that the order is also free of deadlocks if sends block.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from math import inf

from dualpipe.schedule.messages import MessageStream
from dualpipe.schedule.search.anneal import Key, TimedStep, Timing, Work, with_steps
from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import Kind, Schedule


def fill(empty: Schedule, costs: Costs, memory: float) -> Schedule | None:
    """Return `empty` with the steps of a greedy run; None if the run stops before all work is done.

    Weight gradients run when nothing else can. A forward runs only if the memory can then still hold one stage
    activation for each later stage of its rank, so that the micro-batch furthest ahead can always continue.

    Args:
        empty: schedule without steps; gives the placement and the number of micro-batches.
        costs: costs of the actions.
        memory: stage activations that a rank may hold, see `Timeline.peak_memory`.
    """
    ranks = _GreedyRanks(empty, costs, memory)
    events = [0.0]  # times at which a rank becomes free or a result arrives
    while events:
        now = heappop(events)
        for rank in range(empty.num_ranks):
            if ranks.free_at[rank] <= now:
                for event in ranks.start_step(rank, now):
                    heappush(events, event)
    return with_steps(empty, ranks.steps) if ranks.is_complete() else None


class _GreedyRanks:
    """State of all ranks while `fill` runs them."""

    def __init__(self, empty: Schedule, costs: Costs, memory: float) -> None:
        self._empty = empty
        self._costs = costs
        self._memory = memory
        self._timing = Timing(empty, costs, memory)
        self._held = [0.0] * empty.num_ranks  # stage activations
        self._next_microbatch = Counter[Work]()
        self._result_times: dict[int, float] = {}  # by number of the result
        self._in_flight: set[MessageStream] = set()
        self.steps: list[list[TimedStep]] = [[] for _ in empty.ranks]
        self.free_at = [0.0] * empty.num_ranks

    def is_complete(self) -> bool:
        """Return True if every stage has run a forward, a backward and its weight gradients for every micro-batch."""
        return len(self._result_times) == 3 * self._empty.num_stages * self._empty.num_microbatches

    def start_step(self, rank: int, now: float) -> list[float]:
        """Start the best step that can run now, if any. Return the times of its end and of its results' arrival."""
        keys = self._choose(rank, now)
        step = self._timing.timed_step(keys) if keys else None
        if step is None:
            return []
        end = now + step.duration
        self.free_at[rank] = end
        self._result_times |= dict.fromkeys(step.results, end)
        for is_receive, stream, _ in step.messages:
            if is_receive:
                self._in_flight.discard(stream)
            else:
                self._in_flight.add(stream)
        self._held[rank] += step.allocates - step.frees
        self._next_microbatch.update((kind, stage) for kind, stage, _ in keys)
        self.steps[rank].append(step)
        return [end, end + self._costs.p2p]

    def _choose(self, rank: int, now: float) -> tuple[Key, ...]:
        """Return the actions of the step to run now: a pair that saves time, else an "I", "F" or "W"."""
        backward = self._ready("I", rank, now)
        forward = self._ready("F", rank, now)
        if forward and backward:
            pair = self._timing.timed_step((forward, backward))
            if pair and pair.duration < sum(self._costs.of((action,)) for action in pair.step):
                return forward, backward
        action = backward or forward or self._ready("W", rank, now)
        return (action,) if action else ()

    def _ready(self, kind: Kind, rank: int, now: float) -> Key | None:
        """Return the next action of a kind that can run now, on the latest stage that has one."""
        room = self._memory - self._held[rank]
        for stage in reversed(self._empty.rank_stages(rank)):
            microbatch = self._next_microbatch[kind, stage]
            if microbatch < self._empty.num_microbatches:
                key = (kind, stage, microbatch)
                step = self._timing.timed_step((key,))
                if step and step.allocates <= room and self._has_inputs(step, now) and self._can_send(step):
                    return key
            if kind == "F":
                room -= 1
        return None

    def _has_inputs(self, step: TimedStep, now: float) -> bool:
        return all(self._result_times.get(number, inf) + transfer <= now for number, transfer in step.inputs)

    def _can_send(self, step: TimedStep) -> bool:
        return self._in_flight.isdisjoint(stream for is_receive, stream, _ in step.messages if not is_receive)
