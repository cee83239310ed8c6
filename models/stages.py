"""Cutting a model's layers into the stages of a pipeline, and saying what of them is computed again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

RECOMPUTE = ("attention", "experts", "norms", "layer")


class Recompute:
    """Which parts of which layers keep their inputs only, and run their forward again before their backward.

    Rules are "attention", "experts" (or the dense MLP), "norms" or "layer" (all of these), of all layers or, as
    "experts:0-7", of some. "none" stands for no rule.
    """

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._rules = [_parse(rule) for rule in rules if rule != "none"]

    def __call__(self, part: str, layer: int) -> bool:
        """Whether a part of a layer is computed again."""
        return any(kind in (part, "layer") and layer in layers for kind, layers in self._rules)


def _parse(rule: str) -> tuple[str, range]:
    found = re.fullmatch(r"(\w+)(?::(\d+)(?:-(\d+))?)?", rule)
    if found is None or found[1] not in RECOMPUTE:
        raise ValueError(f"cannot recompute {rule!r}; say none, or any of {', '.join(RECOMPUTE)}, with layers where it "
                         "is not for all of them, such as experts:0-7")  # fmt: skip
    first, last = found[2], found[3] or found[2]
    return found[1], range(10**6) if first is None else range(int(first), int(last) + 1)


def split_layers(num_layers: int, num_stages: int, layers_per_stage: Sequence[int] | None = None) -> list[range]:
    """Global layer indices of each stage: consecutive, as even as possible, lighter at the ends.

    The first stage also has the embedding and the last the head, so what does not divide evenly goes to the middle, and
    the ends may have no layer at all. `layers_per_stage` says it otherwise. Raises `ValueError` where a middle stage
    would have nothing to do.
    Example: 6 layers in 4 stages are 1, 2, 2, 1.
    """
    if layers_per_stage:
        counts = list(layers_per_stage)
        if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 0 or 0 in counts[1:-1]:
            raise ValueError(f"layers_per_stage must be {num_stages} numbers with the sum {num_layers}, and none but "
                             f"the first and the last may be 0; got {counts}")  # fmt: skip
    else:
        counts = _even(num_layers, num_stages)
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts)]


def _even(num_layers: int, num_stages: int) -> list[int]:
    if num_stages < 1 or num_layers < max(0, num_stages - 2):
        raise ValueError(f"cannot cut {num_layers} layers into {num_stages} stages; use 1 to {num_layers + 2}")
    each, extra = divmod(num_layers, num_stages)
    from_middle = sorted(range(num_stages), key=lambda stage: abs(2 * stage - (num_stages - 1)))
    heavier = set(from_middle[:extra])
    return [each + (stage in heavier) for stage in range(num_stages)]
