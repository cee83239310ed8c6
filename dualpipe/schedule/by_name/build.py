"""Schedules by name: the known ones, and "auto", which searches for a better one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dualpipe.runtime.errors import nearest
from dualpipe.schedule.builders import KNOWN, check_size
from dualpipe.schedule.search.driver import EFFORT, search
from dualpipe.schedule.search.progress import SearchProgress
from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import Schedule


def build(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Build the schedule called `name`, for 1 or more pipeline ranks and 1 or more micro-batches.

    "dualpipev", "dualpipev_full", "zbv" and "1f1b" take no options; "interleaved_1f1b" takes `stages_per_rank` (2).
    "auto" searches for the best; it takes `costs`, `memory`, `seed`, `effort`, `progress`: see `search.driver.search`.
    Raises ValueError for an unknown name or option, or a size that is not a positive integer.
    """

    def remedy(given: str, known: Sequence[str]) -> str:
        near = nearest(str(given).lower(), known)
        return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}" if known else "it takes none"

    builder = BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"no schedule is called {name!r}; {remedy(name, list(BUILDERS))}")
    check_size("num_ranks", num_ranks)
    check_size("num_microbatches", num_microbatches)
    if builder is not auto:  # which checks its own options
        for option, value in options.items():
            check_size(option, value)
    known = [p.name for p in inspect.signature(builder).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ValueError(f"schedule {name!r} has no option {option!r}; {remedy(option, known)}")
    return builder(num_ranks, num_microbatches, **options)


def auto(
    num_ranks: int, num_microbatches: int, *, costs: Costs | None = None, memory: float | None = None, seed: int = 0,
    effort: int | None = None, progress: Callable[[float, float], None] | None = None,
) -> Schedule:
    """Search for the best order; the first time it takes up to a minute. See `search.driver.search`."""
    found = search(num_ranks, num_microbatches, costs=costs, memory=memory, seed=seed,
                   effort=EFFORT if effort is None else effort, progress=progress)
    return found.timeline.schedule


def search_with_progress(num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Build the schedule "auto" and print the progress of the search on stderr."""
    with SearchProgress(f"a schedule of {num_ranks} ranks and {num_microbatches} micro-batches") as progress:
        return build("auto", num_ranks, num_microbatches, progress=progress, **options)


BUILDERS: dict[str, Callable[..., Schedule]] = {**KNOWN, "auto": auto}
