"""An order for any placement and any memory: each rank does at once what it can, backwards first.

With the memory of DualPipeV it is close to it; with half of that it is what the V-half family is for (Qi et al.,
"Pipeline Parallelism with Controllable Memory", arXiv:2405.15362), whose fixed offsets it does not need.
"""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush

from dualpipe.schedule.anneal import Problem, RankOrder
from dualpipe.schedule.messages import Result, Stream, need, result, sent
from dualpipe.schedule.simulate import FREES
from dualpipe.schedule.types import Action, Kind, Step


def fill(problem: Problem, backward: Kind) -> list[RankOrder] | None:
    """The order in which ranks that never wait by choice do `problem`; None where they come to a stop.

    backward: "B", or "I" with its "W" where there is nothing else to do. A forward leaves room for one in each later
    stage of its rank, so that the micro-batch that is ahead can always go on. A rank begins nothing whose message would
    have to wait for the one before it to be taken, so that the order also holds where sends block.
    """
    empty, costs = problem.empty(), problem.costs
    ranks: list[RankOrder] = [[] for _ in empty.ranks]
    turns: defaultdict[tuple[bool, int], int] = defaultdict(int)
    deferred: list[deque[Action]] = [deque() for _ in ranks]
    there: dict[Result, tuple[float, int]] = {}
    held, free, in_flight = [0.0] * len(ranks), [0.0] * len(ranks), set[Stream]()

    def ready(kind: Kind, rank: int, now: float) -> Action | None:
        """The next that can be done of this kind, of the latest stage that has one."""
        for stage in reversed(empty.rank_stages(rank)):
            action = Action(kind, stage, turns[kind == "F", stage])
            source, message = need(empty, action), sent(empty, action)
            if action.microbatch == problem.num_microbatches or (message and message.stream in in_flight):
                continue
            if source is not None:
                time, owner = there.get(source, (float("inf"), rank))
                if time + (costs.p2p if owner != rank else 0.0) > now:
                    continue
            later = sum(each > stage for each in empty.rank_stages(rank))
            if kind != "F" or held[rank] + 1 + later <= problem.memory:
                return action
        return None

    def choose(rank: int, now: float) -> Step:
        back, forward = ready(backward, rank, now), ready("F", rank, now)
        if back and forward and forward.microbatch != back.microbatch:
            pair = forward, back
            if costs.of(pair) < costs.of(pair[:1]) + costs.of(pair[1:]):
                return pair
        if chosen := back or forward:
            return (chosen,)
        return (deferred[rank].popleft(),) if deferred[rank] else ()

    def begin(rank: int, step: Step, now: float) -> None:
        free[rank] = now + costs.of(step)
        heappush(events, free[rank])
        heappush(events, free[rank] + costs.p2p)
        for action in step:
            source, message = need(empty, action), sent(empty, action)
            if source and action.kind != "W" and (owner := empty.placement[source[1]]) != rank:
                in_flight.discard((owner, rank, source[0]))
            if message:
                in_flight.add(message.stream)
            if action.kind == "I":
                deferred[rank].append(Action("W", action.stage, action.microbatch))
            if action.kind != "W":
                turns[action.kind == "F", action.stage] += 1
                there[result(action)] = free[rank], rank
            held[rank] += (action.kind == "F") - FREES[action.kind]
        ranks[rank].append(tuple((action.kind, action.stage) for action in step))

    events = [0.0]
    while events:
        now = heappop(events)
        for rank in range(len(ranks)):
            if free[rank] <= now and (step := choose(rank, now)):
                begin(rank, step, now)
    done = len(turns) and min(turns[way, stage] for way in (True, False) for stage in range(empty.num_stages))
    return ranks if done == problem.num_microbatches and not any(deferred) else None
