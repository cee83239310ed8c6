"""Schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from dualpipe.errors import nearest
from dualpipe.schedule.dualpipev import dualpipev
from dualpipe.schedule.one_f_one_b import interleaved_1f1b, one_f_one_b
from dualpipe.schedule.types import Schedule
from dualpipe.schedule.zbv import zbv

BUILDERS: dict[str, Callable[..., Schedule]] = {
    "dualpipev": dualpipev,
    "zbv": zbv,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
}


def build(name: str, num_ranks: int, num_microbatches: int, **options: int) -> Schedule:
    """The schedule called `name` for `num_ranks` pipeline ranks and `num_microbatches` micro-batches, both at least 1.

    "dualpipev", "zbv" and "1f1b" take no options; "interleaved_1f1b" takes `stages_per_rank` (2).
    Raises ValueError for an unknown name or option, or a size that is not a positive integer.
    """
    builder = BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"no schedule is called {name!r}; {_remedy(name, list(BUILDERS))}")
    for what, size in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches), *options.items()):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{what} is {size!r}; give an integer of 1 or more")
    known = [p.name for p in inspect.signature(builder).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ValueError(f"schedule {name!r} has no option {option!r}; {_remedy(option, known)}")
    return builder(num_ranks, num_microbatches, **options)


def _remedy(given: str, known: list[str]) -> str:
    if not known:
        return "it takes none"
    near = nearest(str(given).lower(), known)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
