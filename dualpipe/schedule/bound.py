"""The least time that any order of the work can take, for each rank: its work, and the fill that no order avoids.

A rank's work is at least the sum of prices of its actions, where no action's price is above its cost alone and no two
prices are together above the cost of their pair: a solution of the dual of covering the work by steps. Before its first
action a rank waits for a forward through all stages before it; after its last forward or backward there is still the
way of a gradient back to stage 0, and on each rank only weight gradients can be put off until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import KINDS, Action, Kind


def lower_bounds(placement: Sequence[int], num_microbatches: int, costs: Costs) -> tuple[float, ...]:
    """For each rank the time before which a step of `num_microbatches` cannot be done; the greatest holds for all."""
    stages = range(len(placement))
    mine = [[s for s in stages if placement[s] == rank] for rank in range(1 + max(placement))]
    fastest = {(kind, s): _fastest(kind, s, mine[placement[s]], costs) for kind in KINDS for s in stages}
    back = [min(fastest["B", s], fastest["I", s]) for s in stages]
    hop = [costs.p2p if s and placement[s] != placement[s - 1] else 0.0 for s in stages]  # on the way to stage s
    into = [sum(fastest["F", earlier] + hop[earlier + 1] for earlier in range(s)) for s in stages]
    out = [sum(back[earlier] + hop[earlier + 1] for earlier in range(s)) for s in stages]
    last = min(fastest["B", 0], fastest["I", 0] + fastest["W", 0]) - back[0]  # the weights of stage 0 come after all
    way = into[-1] + fastest["F", stages[-1]] + back[-1] + out[-1] + last  # of one micro-batch, there and back
    bounds = []
    for owned in mine:
        whole, urgent = (num_microbatches * _least_work(owned, costs, weights=weights) for weights in (True, False))
        head, tail = min((into[s] for s in owned), default=0.0), min((out[s] for s in owned), default=0.0)
        bounds.append(max(way, head + whole, head + urgent + tail))
    return tuple(bounds)


def least_work(placement: Sequence[int], num_microbatches: int, costs: Costs) -> float:
    """The time that the fullest rank computes at least: what a makespan has above it is bubble, or work in worse
    pairs than there could be."""
    owned = ([s for s, owner in enumerate(placement) if owner == rank] for rank in range(1 + max(placement)))
    return num_microbatches * max(_least_work(stages, costs, weights=True) for stages in owned)


def _fastest(kind: Kind, stage: int, owned: Sequence[int], costs: Costs) -> float:
    """The shortest step with this action in it."""
    action = Action(kind, stage, 0)
    others = [(Action(other, each, 1),) for other in KINDS for each in owned]
    return min(costs.of((action, *other)) for other in [(), *others])


def _least_work(owned: Sequence[int], costs: Costs, *, weights: bool) -> float:
    """The least time that a rank computes for one micro-batch in its stages; `weights`: with what an "I" puts off.

    A price is the cost less a discount; of two kinds the discounts are at least what their pair saves on any stage.
    Lowered one after the other as far as that allows, in every order, the best of which counts.
    """
    alone = {(kind, s): costs.of((Action(kind, s, 0),)) for kind in KINDS for s in owned}
    saved = {
        (a, b): max([0.0, *(alone[a, s] + alone[b, s] - costs.of((Action(a, s, 0), Action(b, s, 1))) for s in owned)])
        for a, b in product(KINDS, KINDS)
    }
    best = 0.0
    for order in permutations(KINDS):
        discount = {a: max(saved[a, b] for b in KINDS) for a in KINDS}
        for a in order:
            discount[a] = max(saved[a, a] / 2, *(saved[a, b] - discount[b] for b in KINDS if b != a))
        price = {(kind, s): alone[kind, s] - discount[kind] for kind, s in alone}
        split = {s: price["I", s] + (price["W", s] if weights else min(0.0, price["W", s])) for s in owned}
        best = max(best, sum(price["F", s] + min(price["B", s], split[s]) for s in owned))
    return best
