"""Lower bounds on the makespan of any schedule, for each rank: its work, and the bubble that no order avoids.

Give each action a price. It is at most the cost of the action without overlap, and the prices of any two actions add up
to at most the cost of their pair. Then the work of a rank takes at least the sum of the prices of its actions. (The
prices are a solution of the dual of the linear program that covers the work by steps.)

Before its first action, a rank waits for a forward through all earlier stages. Before its first backward, it waits
until a micro-batch has passed through all other stages and back; meanwhile it can run only as many forwards as it has
memory for. After its last forward or backward, a gradient still has to reach stage 0, and only weight gradients can be
deferred until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from typing import NamedTuple

from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import KINDS, Action, Kind


class _Path(NamedTuple):
    """Least times on the way of one micro-batch through all stages and back, in the unit of the costs."""

    into: list[float]  # until its forward can start, by stage
    out: list[float]  # from the end of its backward on a stage until the end of its backward on stage 0, by stage
    backward: list[float]  # of a "B" or "I", by stage
    turn: float  # until the first backward can start
    total: float  # there and back, with the weight gradients of stage 0


def lower_bounds(
    placement: Sequence[int], num_microbatches: int, costs: Costs, memory: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return, for each rank, a time before which a step of training cannot end. The greatest is the tightest bound.

    Args:
        placement: rank of each stage.
        num_microbatches: number of micro-batches in a step of training.
        costs: costs of the actions.
        memory: stage activations that each rank may hold, see `Timeline.memory_by_rank`; as much as
            they need if None.
    """
    rank_stages = _stages_by_rank(placement)
    path = _fastest_path(placement, rank_stages, costs)
    bounds = []
    for rank, stages in enumerate(rank_stages):
        first = stages[0]
        last = stages[-1]
        # The rank's first backward can start after the turn and the backwards of all later stages.
        first_backward = path.turn + path.out[-1] + path.backward[-1] - path.out[last] - path.backward[last]
        forwards_before = num_microbatches * len(stages)  # at most, before the first backward
        if memory is not None:
            forwards_before = min(forwards_before, int(memory[rank]))
        rank_bounds = [path.total]
        # Two more bounds: all work of the rank; and its work without deferred weight gradients, followed by the
        # backwards that take its last gradient to stage 0.
        for with_weights, tail in ((True, 0.0), (False, path.out[first])):
            for work, forward in _priced_work(stages, costs, with_weights=with_weights):
                head = max(path.into[first], first_backward - forwards_before * forward)
                rank_bounds.append(num_microbatches * work + head + tail)
        bounds.append(max(rank_bounds))
    return tuple(bounds)


def least_work(placement: Sequence[int], num_microbatches: int, costs: Costs) -> float:
    """Return the least time that the busiest rank computes.

    The rest of a makespan is bubble, and time lost because some actions run alone or in pairs that save little.
    """
    work_by_rank = (
        max(work for work, _ in _priced_work(stages, costs, with_weights=True)) for stages in _stages_by_rank(placement)
    )
    return num_microbatches * max(work_by_rank)


def _stages_by_rank(placement: Sequence[int]) -> list[list[int]]:
    return [[stage for stage, owner in enumerate(placement) if owner == rank] for rank in range(1 + max(placement))]


def _fastest_path(placement: Sequence[int], rank_stages: Sequence[Sequence[int]], costs: Costs) -> _Path:
    stages = range(len(placement))
    fastest = {(kind, s): _fastest(kind, s, rank_stages[placement[s]], costs) for kind in KINDS for s in stages}
    backward = [min(fastest["B", s], fastest["I", s]) for s in stages]
    hop = [costs.p2p if s and placement[s] != placement[s - 1] else 0.0 for s in stages]  # between s - 1 and s
    into = [sum(fastest["F", earlier] + hop[earlier + 1] for earlier in range(s)) for s in stages]
    out = [sum(backward[earlier] + hop[earlier + 1] for earlier in range(s)) for s in stages]
    turn = into[-1] + fastest["F", stages[-1]]
    stage_0_weights = min(fastest["B", 0], fastest["I", 0] + fastest["W", 0]) - backward[0]  # the last work of a step
    total = turn + backward[-1] + out[-1] + stage_0_weights
    return _Path(into, out, backward, turn, total)


def _fastest(kind: Kind, stage: int, stages_of_rank: Sequence[int], costs: Costs) -> float:
    """Return the duration of the shortest step that has this action, alone or in a pair."""
    action = Action(kind, stage, 0)
    partners = [(Action(other_kind, other_stage, 1),) for other_kind in KINDS for other_stage in stages_of_rank]
    return min(costs.of((action, *partner)) for partner in [(), *partners])


def _priced_work(stages: Sequence[int], costs: Costs, *, with_weights: bool) -> Iterator[tuple[float, float]]:
    """Yield, for several sets of prices, the least work of a rank for a micro-batch, and the greatest price of an "F".

    The price of an action is its cost minus the discount of its kind. The discounts of two kinds must add up to at
    least the time that their pair saves on any stage. Starting from large discounts, those of the four kinds are
    lowered one after the other, each as far as this condition allows. Each order of the kinds gives a set of prices.

    with_weights: include the weight gradients that an "I" defers.
    """
    alone = {(kind, s): costs.of((Action(kind, s, 0),)) for kind in KINDS for s in stages}
    savings = {(a, b): max(0.0, *(_saving(a, b, s, costs) for s in stages)) for a, b in product(KINDS, KINDS)}
    for order in permutations(KINDS):
        discounts = {a: max(savings[a, b] for b in KINDS) for a in KINDS}
        for a in order:
            discounts[a] = max(savings[a, a] / 2, *(savings[a, b] - discounts[b] for b in KINDS if b != a))
        prices = {(kind, s): cost - discounts[kind] for (kind, s), cost in alone.items()}
        forwards = [prices["F", s] for s in stages]
        backwards = []
        for s in stages:
            # Without `with_weights`, the "W" may be deferred and then costs 0. A price can be negative: take the lower.
            weights = prices["W", s] if with_weights else min(0.0, prices["W", s])
            backwards.append(min(prices["B", s], prices["I", s] + weights))
        yield sum(forwards) + sum(backwards), max(0.0, *forwards)


def _saving(a: Kind, b: Kind, stage: int, costs: Costs) -> float:
    """Return the time that a pair of two kinds on one stage saves over running them apart."""
    apart = costs.of((Action(a, stage, 0),)) + costs.of((Action(b, stage, 0),))
    return apart - costs.of((Action(a, stage, 0), Action(b, stage, 1)))
