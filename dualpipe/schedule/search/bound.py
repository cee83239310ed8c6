"""The least time that any order of the work can take, for each rank: its work, and the fill that no order avoids.

A rank's work is at least the sum of prices of its actions, where no action's price is above its cost alone and no two
prices are together above the cost of their pair: a solution of the dual of covering the work by steps. Before its first
action a rank waits for a forward through all stages before it; before its first backward for the way through all
others, and back, during which it can do no more forwards than it has memory for. After its last forward or backward
there is still the way of a gradient back to stage 0, and only weight gradients can be put off until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import inf

from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import KINDS, Action, Kind


def lower_bounds(
    placement: Sequence[int], num_microbatches: int, costs: Costs, memory: float = inf
) -> tuple[float, ...]:
    """For each rank the time before which a step of `num_microbatches` cannot be done; the greatest holds for all.

    memory: of stage activations at most, see `Timeline.peak_memory`.
    """
    stages = range(len(placement))
    mine = [[s for s in stages if placement[s] == rank] for rank in range(1 + max(placement))]
    fastest = {(kind, s): _fastest(kind, s, mine[placement[s]], costs) for kind in KINDS for s in stages}
    back = [min(fastest["B", s], fastest["I", s]) for s in stages]
    hop = [costs.p2p if s and placement[s] != placement[s - 1] else 0.0 for s in stages]  # on the way to stage s
    into = [sum(fastest["F", earlier] + hop[earlier + 1] for earlier in range(s)) for s in stages]
    out = [sum(back[earlier] + hop[earlier + 1] for earlier in range(s)) for s in stages]
    turn = into[-1] + fastest["F", stages[-1]]  # when the first gradient can be computed
    last = min(fastest["B", 0], fastest["I", 0] + fastest["W", 0]) - back[0]  # the weights of stage 0 come after all
    way = turn + back[-1] + out[-1] + last  # of one micro-batch, there and back
    bounds = []
    for owned in mine:
        top = owned[-1]
        head, tail = into[owned[0]], out[owned[0]]
        first = turn + out[-1] + back[-1] - out[top] - back[top]  # its first backward can begin
        held = min(memory // 1, num_microbatches * len(owned))  # forwards before it, at most
        bounds.append(max([way, *(
            num_microbatches * work + max(head, first - held * forward) + after
            for weights, after in ((True, 0.0), (False, tail))
            for work, forward in _prices(owned, costs, weights=weights)
        )]))
    return tuple(bounds)


def least_work(placement: Sequence[int], num_microbatches: int, costs: Costs) -> float:
    """The time that the fullest rank computes at least: what a makespan has above it is bubble, or work in worse
    pairs than there could be."""
    owned = ([s for s, owner in enumerate(placement) if owner == rank] for rank in range(1 + max(placement)))
    return num_microbatches * max(work for stages in owned for work, _ in _prices(stages, costs, weights=True))


def _fastest(kind: Kind, stage: int, owned: Sequence[int], costs: Costs) -> float:
    """The shortest step with this action in it."""
    action = Action(kind, stage, 0)
    others = [(Action(other, each, 1),) for other in KINDS for each in owned]
    return min(costs.of((action, *other)) for other in [(), *others])


def _prices(owned: Sequence[int], costs: Costs, *, weights: bool) -> Iterator[tuple[float, float]]:
    """The least time that a rank computes for a micro-batch in its stages, and for a forward at most, by some prices.

    weights: with what an "I" puts off. A price is the cost less a discount; of two kinds the discounts are at least
    what their pair saves on any stage. They are lowered one after the other as far as that allows, in every order.
    """
    alone = {(kind, s): costs.of((Action(kind, s, 0),)) for kind in KINDS for s in owned}
    saved = {
        (a, b): max([0.0, *(alone[a, s] + alone[b, s] - costs.of((Action(a, s, 0), Action(b, s, 1))) for s in owned)])
        for a, b in product(KINDS, KINDS)
    }
    for order in permutations(KINDS):
        discount = {a: max(saved[a, b] for b in KINDS) for a in KINDS}
        for a in order:
            discount[a] = max(saved[a, a] / 2, *(saved[a, b] - discount[b] for b in KINDS if b != a))
        price = {(kind, s): alone[kind, s] - discount[kind] for kind, s in alone}
        split = {s: price["I", s] + (price["W", s] if weights else min(0.0, price["W", s])) for s in owned}
        forwards = [price["F", s] for s in owned]
        yield sum(forwards) + sum(min(price["B", s], split[s]) for s in owned), max(0.0, *forwards)
