"""Cutting a model's layers into the stages of a pipeline, and saying what of them is computed again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf
from operator import add

RECOMPUTE = ("attention", "experts", "norms", "layer", "dispatch")


class Recompute:
    """Which parts of which layers keep their inputs only, and run their forward again before their backward.

    Rules are "attention", "experts" (or the dense MLP), "norms" or "layer" (all of these), of all layers or, as
    "experts:0-7", of some. What other ranks sent to the experts is kept, unless the rule is "dispatch": routing and
    experts again, and the tokens sent again in between. "none" stands for no rule.

    num_layers: of the model, where it is known. Raises ValueError for rules that there are not, or of no such layers.
    """

    def __init__(self, rules: Iterable[str] = (), num_layers: int | None = None) -> None:
        self._rules = [_parse(rule, num_layers) for rule in rules if rule != "none"]

    def __call__(self, part: str, layer: int) -> bool:
        """Whether a part of a layer is computed again."""
        kinds = (part,) if part == "dispatch" else (part, "layer")
        return any(kind in kinds and layer in layers for kind, layers in self._rules)


def _parse(rule: str, num_layers: int | None) -> tuple[str, range]:
    found = re.fullmatch(r"(\w+)(?::(\d+)(?:-(\d+))?)?", rule)
    if found is None or found[1] not in RECOMPUTE:
        raise ValueError(f"cannot recompute {rule!r}; say none, or any of {', '.join(RECOMPUTE)}, with layers where it "
                         "is not for all of them, such as experts:0-7")
    if found[2] is None:
        return found[1], range(10**6)
    first, last = int(found[2]), int(found[3] or found[2])
    if last < first or (num_layers is not None and last >= num_layers):
        known = "layers are counted from 0" if num_layers is None else f"the model has layers 0 to {num_layers - 1}"
        raise ValueError(f"cannot recompute {rule!r}: {known}; name the first and the last, such as experts:0-7")
    return found[1], range(first, last + 1)


def split_layers(
    layers: int | Sequence[float], num_stages: int, layers_per_stage: Sequence[int] | None = None, *, head: float = 0.0
) -> list[range]:
    """Global layer indices of each stage: consecutive, as even as costs say, lighter at the ends.

    layers: how many, or what each costs; head: what the last stage has to do besides.
    layers_per_stage: the numbers, where they are to be others.

    The costliest stage costs as little as it can, the rest is as even as it can be, and what is still undecided goes to
    the middle: the first stage also has the embedding. The ends may have no layer at all. Raises `ValueError` where a
    middle stage would have nothing to do. Example: 6 layers in 4 stages are 1, 2, 2, 1.
    """
    costs = [1.0] * layers if isinstance(layers, int) else list(layers)
    if num_stages < 1 or len(costs) < max(0, num_stages - 2):
        raise ValueError(f"cannot cut {len(costs)} layers into {num_stages} stages; use 1 to {len(costs) + 2}")
    counts = list(layers_per_stage or ()) or _even(costs, num_stages, head)
    if len(counts) != num_stages or sum(counts) != len(costs) or min(counts) < 0 or 0 in counts[1:-1]:
        raise ValueError(f"layers_per_stage must be {num_stages} numbers that add up to {len(costs)}, only the first "
                         f"and the last may be 0; got {counts}")
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts)]


def _even(costs: Sequence[float], num_stages: int, head: float) -> list[int]:
    """How many layers each stage takes."""
    until = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        if start == stop and 0 < stage < num_stages - 1:
            return inf
        return until[stop] - until[start] + (head if stage == num_stages - 1 else 0.0)

    costliest, _ = _best_cuts(len(costs), num_stages, cost, max)
    limit, unit = costliest * (1 + 1e-9), (until[-1] + head) ** 2 or 1.0

    def unevenness(stage: int, start: int, stop: int) -> float:
        found, from_middle = cost(stage, start, stop), abs(2 * stage - num_stages + 1.1)  # of two alike, the earlier
        return inf if found > limit else found**2 / unit + 1e-9 * from_middle * (stop - start)

    return _best_cuts(len(costs), num_stages, unevenness, add)[1]


def _best_cuts(
    num_layers: int, num_stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least of what `join` makes of `cost(stage, start, stop)` of all stages, and how many layers each has."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] + [(inf, [])] * num_layers  # of the stages so far, by layers
    for stage in range(num_stages):
        best = [
            min((join(best[start][0], cost(stage, start, stop)), [*best[start][1], stop - start])
                for start in range(stop + 1))
            for stop in range(num_layers + 1)
        ]
    return best[-1]
