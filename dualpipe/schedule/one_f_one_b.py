"""1F1B and interleaved 1F1B: after a warm-up of forwards, one forward and one backward in turn.

Sources: PipeDream-flush, arXiv:2006.09503; Megatron-LM's interleaved schedule, arXiv:2104.04473.
"""

from __future__ import annotations

from dualpipe.schedule.types import Action, Schedule, Step, first_microbatches


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """One stage a rank."""
    return _build("1f1b", num_ranks, num_microbatches, stages_per_rank=1)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """`stages_per_rank` stages a rank, stage s on rank s % P.

    Megatron wants a multiple of P micro-batches; for other numbers this is the order for the next multiple, without
    the micro-batches that do not exist.
    """
    return _build("interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank)


def _build(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    full = -(-num_microbatches // num_ranks) * num_ranks
    orders = (_rank_order(num_ranks, full, stages_per_rank, rank) for rank in range(num_ranks))
    ranks = tuple(first_microbatches(order, num_microbatches) for order in orders)
    placement = tuple(range(num_ranks)) * stages_per_rank
    return Schedule(name, num_ranks, len(placement), num_microbatches, ranks, placement)


def _rank_order(num_ranks: int, num_microbatches: int, stages_per_rank: int, rank: int) -> list[Step]:
    """Warm up until the first backward can arrive, then forward and backward in turn, then the backwards left over.

    Groups of P micro-batches go through one of the rank's stages after the other.
    """
    groups = range(0, num_microbatches, num_ranks)
    turns = [(chunk, start + i) for start in groups for chunk in range(stages_per_rank) for i in range(num_ranks)]
    forwards = [Action("F", chunk * num_ranks + rank, mb) for chunk, mb in turns]
    backwards = [Action("B", (stages_per_rank - 1 - chunk) * num_ranks + rank, mb) for chunk, mb in turns]
    after = num_ranks - rank - 1
    warmup = after if stages_per_rank == 1 else 2 * after + (stages_per_rank - 1) * num_ranks
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        order += [forward, backward]
    order += backwards[max(0, len(forwards) - warmup) :]
    return [(action,) for action in order]
