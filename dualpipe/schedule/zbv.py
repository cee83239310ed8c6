"""ZB-V: the zero-bubble schedule on a V, with the memory of 1F1B.

Source: section 6 of Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241. The order has no bubble in its
steady state where F, I and W cost the same.
"""

from __future__ import annotations

from dualpipe.schedule.types import Schedule, Step, first_microbatches, in_turn, v_placement


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order for at least 2P-1 micro-batches; where there are fewer, that order without those that do not exist."""
    full = max(num_microbatches, 2 * num_ranks - 1)
    ranks = [first_microbatches(_rank_order(num_ranks, full, rank), num_microbatches) for rank in range(num_ranks)]
    return Schedule("zbv", num_ranks, 2 * num_ranks, num_microbatches, tuple(ranks), v_placement(num_ranks))


def _rank_order(num_ranks: int, num_microbatches: int, rank: int) -> list[Step]:
    """As many forwards as fill the V, then F0 I0 W0 F1 I1 W1 in turn, then what is left, inputs first.

    Half 0 of the V is the way down, half 1 the way back.
    """
    below = num_ranks - rank  # this rank and those further down the V
    warmup = 2 * num_ranks - 1 - rank  # forwards of half 0 before its first backward
    pattern = ["F0"] * (2 * below - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * below
    pattern += ["F0", "I0", "W0", "F1", "I1", "W1"] * (num_microbatches - warmup)
    pattern += ["I0", "W0", "F1", "I1", "W1"] * (warmup - num_ranks)
    pattern += ["I0", "I1"] * rank + ["I0", "W0"] * below + ["W1"] * rank + ["W0"] * rank
    return in_turn(pattern, (rank, 2 * num_ranks - 1 - rank))
