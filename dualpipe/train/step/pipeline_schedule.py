"""The schedule of a run's pipeline, as [parallel] says."""

from __future__ import annotations

from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule import Schedule, build
from dualpipe.schedule.by_name.build import search_with_progress
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.train.config.schema import ParallelConfig


def build_schedule(parallel: ParallelConfig, num_microbatches: int, ranks: RankSync | None = None) -> Schedule:
    """The schedule that [parallel] says. Collective over `ranks`, where there are several.

    "auto" is searched for on rank 0 alone, however long that takes. The result is the same object on all, also where
    their machines find other ones.

    Raises ValueError, on all ranks, for costs or a memory that cannot be.
    """
    if parallel.schedule == "auto":
        return _search(parallel, num_microbatches, ranks)
    return build(parallel.schedule, parallel.pp, num_microbatches)


def _search(parallel: ParallelConfig, num_microbatches: int, ranks: RankSync | None) -> Schedule:
    """Search, on one of the ranks, for the schedule that takes least time by the costs that [parallel] gives."""

    def find() -> Schedule:
        try:
            costs = parse_costs(parallel.schedule_costs)
        except (OSError, ValueError) as error:
            raise ValueError(f"parallel.schedule_costs = {parallel.schedule_costs!r}: {error}") from error
        return search_with_progress(parallel.pp, num_microbatches, costs=costs, memory=parallel.schedule_memory or None)

    if ranks is None or ranks.size == 1:
        return find()
    return ranks.first_in_turns(find)
