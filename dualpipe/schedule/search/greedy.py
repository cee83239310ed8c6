"""An order for any placement and any memory: each rank does at once what it can, backwards first.

It is a start of the search where no known family fits the memory. A rank begins nothing whose message would have to
wait for the one before it to be taken, so that the order also holds where sends block.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from math import inf

from dualpipe.schedule.messages import MessageStream
from dualpipe.schedule.search.anneal import Key, Timed, Timing, Work, with_steps
from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import Kind, Schedule


def fill(empty: Schedule, costs: Costs, memory: float) -> Schedule | None:
    """`empty` with the order in which ranks that never wait by choice do it; None where they come to a stop.

    Weight gradients come where there is nothing else to do. A forward leaves room for one in each later stage of its
    rank, so that the micro-batch that is ahead can always go on.
    """
    timing, ranks = Timing(empty, costs, memory), [list[Timed]() for _ in empty.ranks]
    held, free = [0.0] * len(ranks), [0.0] * len(ranks)
    turns, there, in_flight = Counter[Work](), dict[int, float](), set[MessageStream]()

    def ready(kind: Kind, rank: int, now: float) -> Key | None:
        """The next that can be done of this kind, of the latest stage that has one."""
        room = memory - held[rank]
        for stage in reversed(empty.rank_stages(rank)):
            key = kind, stage, turns[kind, stage]
            step = timing.timed_step((key,)) if key[2] < empty.num_microbatches else None
            if (
                step and step.fills <= room and all(there.get(number, inf) + way <= now for number, way in step.takes)
                and in_flight.isdisjoint(stream for taking, stream, _ in step.traffic if not taking)
            ):
                return key
            room -= kind == "F"
        return None

    def choose(rank: int, now: float) -> tuple[Key, ...]:
        back, forward, weights = (ready(kind, rank, now) for kind in ("I", "F", "W"))
        both = timing.timed_step((forward, back)) if back and forward else None
        if forward and back and both and both.duration < sum(costs.of((each,)) for each in both.step):
            return forward, back
        one = back or forward or weights
        return (one,) if one else ()

    events = [0.0]
    while events:
        now = heappop(events)
        for rank, steps in enumerate(ranks):
            if free[rank] > now or not (keys := choose(rank, now)):
                continue
            step = timing.timed_step(keys)
            assert step is not None, "it was chosen"
            free[rank] = now + step.duration
            heappush(events, free[rank])
            heappush(events, free[rank] + costs.p2p)
            there |= dict.fromkeys(step.yields, free[rank])
            for taking, stream, _ in step.traffic:
                (in_flight.discard if taking else in_flight.add)(stream)
            held[rank] += step.fills - step.frees
            turns.update(key[:2] for key in keys)
            steps.append(step)
    return with_steps(empty, ranks) if len(there) == 3 * empty.num_stages * empty.num_microbatches else None
