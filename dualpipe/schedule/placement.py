"""Which rank runs which stage, for the schedules that `build` knows."""

from __future__ import annotations


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank in a V: down through the ranks and back up, so that rank 0 holds the first and the last."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def looped_placement(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """`stages_per_rank` rounds through the ranks, always in the same direction."""
    return tuple(range(num_ranks)) * stages_per_rank
