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
    """Build the schedule called `name`.

    Args:
        name: one of `builders.KNOWN`, such as "dualpipev", or "auto", which searches for the best schedule.
        num_ranks: number of pipeline ranks, 1 or more.
        num_microbatches: number of micro-batches in a step of training, 1 or more.
        options: `stages_per_rank` (2) for "interleaved_1f1b"; `costs`, `memory`, `seed`, `effort` and `progress` for
            "auto", see `search.driver.search`. The others take none.

    Raises:
        ValueError: an unknown name or option, or a size that is not a positive integer.
    """
    builder = BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"no schedule is called {name!r}; {_remedy(name, list(BUILDERS))}")
    check_size("num_ranks", num_ranks)
    check_size("num_microbatches", num_microbatches)
    if builder is not auto:  # `search` checks the options of "auto"
        for option, value in options.items():
            check_size(option, value)
    known_options = [p.name for p in inspect.signature(builder).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known_options:
            raise ValueError(f"schedule {name!r} has no option {option!r}; {_remedy(option, known_options)}")
    return builder(num_ranks, num_microbatches, **options)


def _remedy(name: str, known: Sequence[str]) -> str:
    """Return the end of an error message that suggests the known name nearest to `name`, or lists all."""
    suggestions = nearest(str(name).lower(), known)
    if suggestions:
        return f"did you mean {suggestions[0]!r}?"
    return f"known are {', '.join(known)}" if known else "it takes none"


def auto(
    num_ranks: int, num_microbatches: int, *, costs: Costs | None = None,
    memory: float | Sequence[float] | None = None, seed: int = 0,
    effort: int | None = None, progress: Callable[[float, float], None] | None = None,
) -> Schedule:
    """Search for the best schedule, for about ten seconds; the result is cached. See `search.driver.search`."""
    effort = EFFORT if effort is None else effort
    result = search(num_ranks, num_microbatches, costs=costs, memory=memory, seed=seed, effort=effort,
                    progress=progress)
    return result.timeline.schedule


def search_with_progress(num_ranks: int, num_microbatches: int, **options: Any) -> Schedule:
    """Build the schedule "auto" and print the progress of the search on stderr."""
    with SearchProgress(f"a schedule of {num_ranks} ranks and {num_microbatches} micro-batches") as progress:
        return build("auto", num_ranks, num_microbatches, progress=progress, **options)


BUILDERS: dict[str, Callable[..., Schedule]] = {**KNOWN, "auto": auto}
