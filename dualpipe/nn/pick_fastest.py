"""Choose between implementations of the same operator by timing them, with one choice for all ranks.

    choice = pick_fastest(("dualpipe", "grouped_mm"), run, device, ranks, default="dualpipe")
    choice.name       "grouped_mm"
    str(choice)       "2.1 ms by 'dualpipe', 1.9 ms by 'grouped_mm'"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from dualpipe.runtime.device import min_seconds
from dualpipe.runtime.errors import first_line
from dualpipe.runtime.ranks.rank_sync import RankSync

_TIMED_CALLS = 5


class Choice(NamedTuple):
    """The candidate that was chosen.

    seconds: time of each candidate that runs on all ranks, on the slowest; {} if no rank had anything to run. failures:
    why the others do not run.
    """

    name: str
    seconds: Mapping[str, float]
    failures: Mapping[str, str]

    def __str__(self) -> str:
        times = ", ".join(f"{1e3 * seconds:.3g} ms by {name!r}" for name, seconds in self.seconds.items())
        failures = "; ".join(f"{name!r}, {failure}" for name, failure in self.failures.items())
        return f"{times} (not running here: {failures})" if failures else times


def pick_fastest(
    candidates: Sequence[str], run: Callable[[str], object] | None, device: torch.device, ranks: RankSync, *,
    default: str,
) -> Choice:
    """Return the candidate that takes the least time on the rank that is slowest with it. Collective over `ranks`.

    Times differ from start to start, so with deterministic algorithms the first candidate that runs is chosen.

    Args:
        candidates: names, the same on all ranks.
        run: runs a candidate once, or raises an error if it cannot; None on a rank with nothing to run.
        device: device on which candidates run.
        ranks: ranks that make the same choice.
        default: the choice if there is nothing to run, or no candidate runs on all ranks.
    """

    def measure() -> dict[str, float | str]:
        return {} if run is None else {name: _seconds_or_failure(partial(run, name), device) for name in candidates}

    measured_ranks = [measured for measured in ranks.gather(measure) if measured]
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name in candidates if measured_ranks else ():
        results = [measured[name] for measured in measured_ranks]
        failed = next((result for result in results if isinstance(result, str)), None)
        if failed is not None:
            failures[name] = failed
        else:
            seconds[name] = max(result for result in results if isinstance(result, float))
    if not seconds:
        return Choice(default, seconds, failures)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    fastest = next(iter(seconds)) if is_deterministic else min(seconds, key=lambda name: seconds[name])
    return Choice(fastest, seconds, failures)


def check_runs(run: Callable[[], object], what: str, expected: str) -> None:
    """Raise ValueError, naming what does not run and what is expected, if `run` raises any error."""
    try:
        run()
    except Exception as error:  # whatever a package raises that is not installed or refuses the operands
        raise ValueError(f"{what} does not run here ({_failure_text(error)}); expected {expected}") from error


def _seconds_or_failure(run: Callable[[], object], device: torch.device) -> float | str:
    """Return the seconds of a call, or the text of its error."""
    try:
        return min_seconds(run, device, num_calls=_TIMED_CALLS)
    except Exception as error:  # as in `check_runs`
        return _failure_text(error)


def _failure_text(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"
