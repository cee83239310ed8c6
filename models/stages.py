"""Cutting a model's layers into the stages of a pipeline."""

from __future__ import annotations


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Global layer indices of each stage: consecutive, as even as possible, lighter at the ends.

    The first stage also has the embedding and the last the head, so what does not divide evenly goes to the middle, and
    the ends may have no layer at all. Raises `ValueError` where a middle stage would have nothing to do.
    Example: 6 layers in 4 stages are 1, 2, 2, 1.
    """
    if num_stages < 1 or num_layers < max(0, num_stages - 2):
        raise ValueError(f"cannot cut {num_layers} layers into {num_stages} stages; use 1 to {num_layers + 2}")
    each, extra = divmod(num_layers, num_stages)
    from_middle = sorted(range(num_stages), key=lambda stage: abs(2 * stage - (num_stages - 1)))
    heavier = set(from_middle[:extra])
    ranges, start = [], 0
    for stage in range(num_stages):
        end = start + each + (stage in heavier)
        ranges.append(range(start, end))
        start = end
    return ranges
