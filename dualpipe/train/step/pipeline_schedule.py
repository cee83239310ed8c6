"""The schedule of a run's pipeline, as configured in [parallel]."""

from __future__ import annotations

from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule import Schedule, build
from dualpipe.schedule.by_name import search_with_progress
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.train.config.schema import ParallelConfig


def build_schedule(parallel: ParallelConfig, num_microbatches: int, ranks: RankSync | None = None) -> Schedule:
    """Return the schedule that [parallel] selects. Collective over `ranks`, unless None.

    "auto" is searched for on rank 0 alone, without a timeout, and sent to the others: all ranks have the same schedule
    even if their own searches would differ.

    Raises ValueError, on all ranks, for invalid costs or an insufficient memory limit.
    """
    if parallel.schedule == "auto":
        return _search(parallel, num_microbatches, ranks)
    return build(parallel.schedule, parallel.pp, num_microbatches)


def _search(parallel: ParallelConfig, num_microbatches: int, ranks: RankSync | None) -> Schedule:
    """Search on one rank for the fastest schedule under the costs in [parallel]."""

    def find() -> Schedule:
        try:
            costs = parse_costs(parallel.schedule_costs)
        except ValueError as error:
            raise ValueError(f"parallel.schedule_costs = {parallel.schedule_costs!r}: {error}") from error
        return search_with_progress(parallel.pp, num_microbatches, costs=costs, memory=parallel.schedule_memory or None)

    if ranks is None or ranks.size == 1:
        return find()
    return ranks.first_in_turns(find)
