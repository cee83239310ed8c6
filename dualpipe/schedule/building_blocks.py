"""Schedules on a V made of a building block: the order of one micro-batch, repeated, and then squeezed.

A building block says at which tick each rank runs F0, F1, I1 and I0 of the first micro-batch ("F0" is a forward on the
rank's first stage, on the way down the V). Those of each further micro-batch run `period` ticks later, and weight
gradients run at free ticks. Less time between a forward and its backward means less memory. `repeat` gives the order of
all ranks, and moves weight gradients forward where the memory would not suffice.

`squeeze` then runs any order again, without ticks and with the real costs: each rank runs what it can as soon as it
can, in about that order. It removes the idle time that a repeated block has at the start and the end of a step and
where actions do not take equally long.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362: building blocks, the search over
them, and their reordering at the beginning and the end of a step. `squeeze` is our own way to reorder: it keeps a valid
order of the remaining work at any time, so that it never gets stuck.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count, pairwise, product
from math import inf
from typing import Literal, NamedTuple

from dualpipe.schedule.simulate import FREES, Costs
from dualpipe.schedule.types import Action, Kind, Schedule

HOPS = (1, 2, 3)  # ticks from a rank to the next
PERIOD = 6  # ticks of a micro-batch if no rank idles: two each of F, I and W

Work = tuple[Kind, int]  # kind and stage of an action
RankOrder = list[tuple[Work, ...]]  # steps of a rank, without micro-batches


class BuildingBlock(NamedTuple):
    """Ticks at which rank 0 runs F0, F1, I1 and I0 of the first micro-batch, and how they change from rank to rank.

    Rank r runs F0 `r * hops[0]` ticks later than rank 0, F1 `r * hops[1]` earlier, I1 `r * hops[2]` later and I0
    `r * hops[3]` earlier.
    """

    starts: tuple[int, int, int, int]
    hops: Sequence[int]
    period: int = PERIOD

    def ticks(self, rank: int) -> tuple[int, int, int, int]:
        """Return the ticks of F0, F1, I1 and I0 of the first micro-batch on `rank`."""
        f0, f1, i1, i0 = self.starts
        return f0 + rank * self.hops[0], f1 - rank * self.hops[1], i1 + rank * self.hops[2], i0 - rank * self.hops[3]

    def is_possible(self, num_ranks: int) -> bool:
        """Return True if no rank has two actions at the same tick, of any micro-batches."""
        return all(len({tick % self.period for tick in self.ticks(rank)}) == 4 for rank in range(num_ranks))


def building_block(
    num_ranks: int, gaps: Sequence[int], hops: Sequence[int] = (1, 1, 1, 1), period: int = PERIOD
) -> BuildingBlock:
    """Return a building block by its hops and by the gaps at the turns of its way.

    Args:
        num_ranks: number of ranks.
        gaps: ticks from F0 to F1 on the last rank, from F1 to I1 on rank 0, and from I1 to I0 on the last rank.
        hops: ticks from a rank to the next on the way of F0, F1, I1 and I0.
        period: ticks from one micro-batch to the next.
    """
    down = num_ranks - 1
    f1 = hops[0] * down + gaps[0] + hops[1] * down
    i1 = f1 + gaps[1]
    i0 = i1 + hops[2] * down + gaps[2] + hops[3] * down
    return BuildingBlock((0, f1, i1, i0), hops, period)


def building_blocks(
    num_ranks: int, num_microbatches: int, memory: Sequence[float]
) -> Iterator[list[RankOrder]]:
    """Yield the orders of the building blocks that fit the memory, small hops first.

    They are those of all blocks without idle ticks whose hops and gaps are a few ticks. If none of them fits, one: that
    of the shortest period that fits.
    """
    is_any_fitting = False
    for hops in product(HOPS, repeat=4):
        for gaps in product(range(1, PERIOD + 1), repeat=3):
            block = building_block(num_ranks, gaps, hops)
            orders = repeat(block, num_ranks, num_microbatches, memory)
            if orders is not None:
                is_any_fitting = True
                yield orders
    for period in count(PERIOD + 1):
        if is_any_fitting:
            return
        block = building_block(num_ranks, (1, 1, 1), period=period)
        orders = repeat(block, num_ranks, num_microbatches, memory)
        if orders is not None:
            is_any_fitting = True
            yield orders


def repeat(
    block: BuildingBlock, num_ranks: int, num_microbatches: int, memory: Sequence[float]
) -> list[RankOrder] | None:
    """Return the order of every rank; None if one exceeds the memory or has two actions at the same tick.

    Args:
        block: the building block.
        num_ranks: number of ranks.
        num_microbatches: number of micro-batches.
        memory: stage activations that each rank may hold, see `Timeline.memory_by_rank`.
    """
    if not block.is_possible(num_ranks):
        return None
    # The memory of a rank changes in one direction from rank to rank: an order that does not fit is found early.
    orders: dict[int, RankOrder] = {}
    for rank in (0, num_ranks - 1, *range(1, num_ranks - 1)):
        order = _repeat_on_rank(block, rank, num_ranks, num_microbatches, memory[rank])
        if order is None:
            return None
        orders[rank] = order
    return [orders[rank] for rank in range(num_ranks)]


def _repeat_on_rank(
    block: BuildingBlock, rank: int, num_ranks: int, num_microbatches: int, memory: float
) -> RankOrder | None:
    """Return the order of a rank, with weight gradients at free ticks, and earlier where a forward needs the memory."""
    stages = (rank, 2 * num_ranks - 1 - rank)
    works: list[Work] = [("F", stages[0]), ("F", stages[1]), ("I", stages[1]), ("I", stages[0])]
    timed_works = sorted(
        (tick + block.period * microbatch, work)
        for tick, work in zip(block.ticks(rank), works)
        for microbatch in range(num_microbatches)
    )
    order: RankOrder = []
    deferred = deque[int]()  # stages
    held = 0.0
    for (tick, work), (next_tick, _) in pairwise([*timed_works, (inf, works[0])]):
        kind, stage = work
        if kind == "F":
            while deferred and held + 1 > memory:
                order.append((("W", deferred.popleft()),))
                held -= FREES["W"]
            if held + 1 > memory:
                return None
            held += 1
        else:
            deferred.append(stage)
            held -= FREES["I"]
        order.append((work,))
        free_ticks = next_tick - tick - 1
        while deferred and free_ticks > 0:
            order.append((("W", deferred.popleft()),))
            held -= FREES["W"]
            free_ticks -= 1
    return order


class Policy(NamedTuple):
    """Rules by which `squeeze` chooses among the actions that a rank can run.

    Args:
        first: kind to run first, "F" or "I"; "order" for the first in the order that is squeezed.
        patience: a weight gradient does not start if other work can within this fraction of its duration.
        split: split backwards into "I" and "W"; otherwise all are full backwards.
    """

    first: Literal["order", "F", "I"] = "order"
    patience: float = 0.0
    split: bool = True


def squeeze(
    empty: Schedule, orders: Sequence[RankOrder], costs: Costs, memory: Sequence[float], policy: Policy
) -> list[RankOrder]:
    """Run the orders of all ranks as early as possible, and return the orders in which the work then ran.

    A rank that is free runs the first action, by `policy`, whose input has arrived, even before others in its order.
    A forward may run early only if all work that it passes over still fits the memory after it. If nothing else can
    run, a deferred weight gradient does. Two actions that can run, and take less time as a pair, run as one.

    Args:
        empty: schedule whose placement and number of micro-batches to use.
        orders: valid orders of all ranks that fit the memory. Pairs in them are taken apart.
        costs: costs of the actions.
        memory: stage activations that each rank may hold, see `Timeline.memory_by_rank`.
        policy: how to choose.
    """
    run = _Squeeze(empty, orders, costs, memory, policy)
    events = [(0.0, rank) for rank in range(empty.num_ranks)]  # when a rank may be able to start a step
    while events:
        now, rank = heappop(events)
        if run.free_at[rank] <= now:
            for event in run.start_step(rank, now):
                heappush(events, event)
    assert not any(run.remaining), "the remaining work of a valid order can always run"
    return run.orders


class _Squeeze:
    """State of all ranks while `squeeze` runs them."""

    def __init__(
        self, empty: Schedule, orders: Sequence[RankOrder], costs: Costs, memory: Sequence[float], policy: Policy
    ) -> None:
        self._placement = empty.placement
        self._costs = costs
        self._memory = memory
        self._policy = policy
        self.remaining = [_single_works(order, split=policy.split) for order in orders]
        # Number of remaining actions by work, by rank; an entry goes when it is 0. "W" is not counted.
        self._num_remaining = [Counter(work for work in works if work[0] != "W") for works in self.remaining]
        self.orders: list[RankOrder] = [[] for _ in orders]
        self.free_at = [0.0] * len(orders)
        self._held = [0.0] * len(orders)  # stage activations, by rank
        self._deferred = [0] * empty.num_stages  # weight gradients that can run, by stage
        # End of each forward and each backward that has started, by stage, in the order of micro-batches.
        self._forward_ends: list[list[float]] = [[] for _ in range(empty.num_stages)]
        self._backward_ends: list[list[float]] = [[] for _ in range(empty.num_stages)]
        self._durations: dict[tuple[Work, ...], float] = {}
        self._can_pair = costs.FB is not None or bool(costs.pairs) or bool(costs.per_stage)

    def start_step(self, rank: int, now: float) -> list[tuple[float, int]]:
        """Start the best step that can run now, if any. Return when which ranks may be able to start another."""
        ready, next_arrival = self._ready(rank, now)
        if not ready or self._can_pair:
            ready += self._ready_weights(rank)
        if not ready:
            return []
        remaining = self.remaining[rank]
        first = remaining[ready[0]]
        if first[0] == "W" and next_arrival < now + self._policy.patience * self._duration((first,)):
            return [(next_arrival, rank)]
        indices = self._best_pair(ready, remaining) if self._can_pair else ready[:1]
        step = tuple([remaining[index] for index in indices])
        for index in sorted(indices, reverse=True):
            del remaining[index]
        end = now + self._duration(step)
        events = [(end, rank)]
        for work in step:
            self._record(rank, work, end)
            kind, stage = work
            next_stage = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and 0 <= next_stage < len(self._placement):
                events.append((end + self._costs.p2p, self._placement[next_stage]))
        self.orders[rank].append(step)
        self.free_at[rank] = end
        return events

    def _ready(self, rank: int, now: float) -> tuple[list[int], float]:
        """Return the forwards and backwards that can run now, best first, as indices into the remaining work.

        Also returns when the next input of other work arrives, if that is known; infinity if not.
        """
        remaining = self.remaining[rank]
        stop_at_first = self._policy.first == "order" and not self._can_pair
        num_unseen = len(self._num_remaining[rank])
        seen: set[Work] = set()
        ready: list[int] = []
        next_arrival = inf
        memory = self._memory[rank]
        held = self._held[rank]
        peak = held  # while the work before the current index runs
        for index, work in enumerate(remaining):
            if not num_unseen:
                break
            kind, stage = work
            if kind != "W" and work not in seen:
                seen.add(work)
                num_unseen -= 1
                if kind != "F" or peak + 1 <= memory:
                    arrival = self._arrival(kind, stage)
                    if arrival <= now:
                        ready.append(index)
                        if stop_at_first:
                            break
                    next_arrival = min(next_arrival, arrival)
            if kind == "F":
                held += 1
                peak = max(peak, held)
            else:
                held -= FREES[kind]
        if self._policy.first != "order":
            ready.sort(key=lambda index: (remaining[index][0] == "F") != (self._policy.first == "F"))
        return ready, next_arrival

    def _ready_weights(self, rank: int) -> list[int]:
        """Return the index of the next weight gradient of each stage that has one to run, in order."""
        works: list[Work] = [("W", stage) for stage, owner in enumerate(self._placement) if owner == rank]
        return sorted(self.remaining[rank].index(work) for work in works if self._deferred[work[1]])

    def _arrival(self, kind: Kind, stage: int) -> float:
        """Return when the input of the next micro-batch arrives; infinity if that is not known yet."""
        if kind == "F":
            microbatch = len(self._forward_ends[stage])
            source = stage - 1
            ends = self._forward_ends
            if source < 0:
                return 0.0
        else:
            microbatch = len(self._backward_ends[stage])
            source = stage + 1
            ends = self._backward_ends
            if source == len(self._placement):
                source = stage
                ends = self._forward_ends
        if microbatch >= len(ends[source]):
            return inf
        is_local = self._placement[source] == self._placement[stage]
        return ends[source][microbatch] + (0.0 if is_local else self._costs.p2p)

    def _best_pair(self, ready: list[int], remaining: list[Work]) -> list[int]:
        """Return the first index of `ready`, with that of the partner which saves most time, if any does."""
        first = remaining[ready[0]]
        best: list[int] = ready[:1]
        most_saved = 0.0
        for index in ready[1:]:
            partner = remaining[index]
            apart = self._duration((first,)) + self._duration((partner,))
            saved = apart - self._duration((first, partner))
            if saved > most_saved * (1 + 1e-9) and first[0] + partner[0] != "FF":
                most_saved = saved
                best = [ready[0], index]
        return best

    def _duration(self, step: tuple[Work, ...]) -> float:
        duration = self._durations.get(step)
        if duration is None:
            duration = self._costs.of(tuple(Action(kind, stage, 0) for kind, stage in step))
            self._durations[step] = duration
        return duration

    def _record(self, rank: int, work: Work, end: float) -> None:
        """Update the state of a rank with an action that ends at `end`."""
        kind, stage = work
        if kind == "W":
            self._deferred[stage] -= 1
            self._held[rank] -= FREES[kind]
            return
        if kind == "F":
            self._forward_ends[stage].append(end)
            self._held[rank] += 1
        else:
            self._backward_ends[stage].append(end)
            self._held[rank] -= FREES[kind]
            self._deferred[stage] += kind == "I"
        num_remaining = self._num_remaining[rank]
        num_remaining[work] -= 1
        if not num_remaining[work]:
            del num_remaining[work]


def _single_works(order: RankOrder, *, split: bool) -> list[Work]:
    """Return the work of a rank without pairs; backwards are all split, or all full, as `split` says."""
    works: list[Work] = []
    for kind, stage in chain.from_iterable(order):
        if kind == "F":
            works.append((kind, stage))
        elif not split:
            if kind != "W":
                works.append(("B", stage))
        elif kind == "B":
            works += [("I", stage), ("W", stage)]
        else:
            works.append((kind, stage))
    return works
