"""The cases of tests on a GPU that a short run takes: a few of each test, spread over all of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Case(Protocol):
    """A test with one choice of its parameters, as pytest collects it."""

    nodeid: str


C = TypeVar("C", bound=Case)


def spread_cases(cases: Iterable[C], most: int) -> Iterator[C]:
    """Yield at most `most` cases of each test, at even distances: 0, 3, 6 and 9 of the ten of a test, where most is 4.

    Parameters that are even in number would repeat at a distance that they divide, so distances need not be whole.
    """
    by_test: defaultdict[str, list[C]] = defaultdict(list)
    for case in cases:
        by_test[case.nodeid.partition("[")[0]].append(case)
    for found in by_test.values():
        taken = min(most, len(found))
        for number in range(taken):
            yield found[round(number * (len(found) - 1) / max(1, taken - 1))]
