"""The schedule of a run: by its name, or found by one rank for all."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

from dualpipe.ranks import RankSync
from dualpipe.schedule import Schedule, build
from dualpipe.schedule.command import parse_costs
from dualpipe.schedule.progress import SearchProgress
from dualpipe.train.config import Config
from dualpipe.train.launch import in_background

TURN = 2.0  # seconds that ranks wait for the search at a time: less than any timeout of theirs


def build_schedule(config: Config, ranks: RankSync | None = None) -> Schedule:
    """The schedule that `config.parallel` and `train.num_chunks` say. Collective over `ranks`, where there are several.

    "auto" is searched for on rank 0 alone, in a thread: the ranks meet every `TURN` seconds until there is one, so that
    none runs into its timeout. The result is the same object on all, also where their machines find other ones.

    Raises ValueError, on all ranks, for costs or a memory that cannot be.
    """
    parallel, num_chunks = config.parallel, config.train.num_chunks
    if parallel.schedule != "auto":
        return build(parallel.schedule, parallel.pp, num_chunks)

    def find() -> Schedule:
        try:
            costs = parse_costs(parallel.schedule_costs)
        except (OSError, ValueError) as error:
            raise ValueError(f"parallel.schedule_costs = {parallel.schedule_costs!r}: {error}") from error
        with SearchProgress(f"a schedule of {parallel.pp} ranks and {num_chunks} micro-batches") as progress:
            return build("auto", parallel.pp, num_chunks, costs=costs, memory=parallel.schedule_memory or None,
                         progress=progress)

    if ranks is None or ranks.size == 1:
        return find()
    # A run that fails meanwhile does not wait for it.
    search = in_background(find) if ranks.rank == 0 else Future[Schedule]()

    def wait() -> Schedule | None:
        try:
            return search.result(TURN)
        except NotYet:
            return None

    while (schedule := ranks.first(wait)) is None:
        pass
    return schedule
