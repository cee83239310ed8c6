"""The cases of tests that a short run takes: a few of each test, or a part of all, and another day other ones."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Case(Protocol):
    """A test with one choice of its parameters, as pytest collects it."""

    nodeid: str


C = TypeVar("C", bound=Case)
PARTS = 14  # of the tests that are one case of very many: CI runs one a day, and so all in two weeks


def part_of(name: str) -> int:
    """Return the part, from 0 to `PARTS` - 1, that the test or configuration of this name belongs to.

    A checksum of the name decides, so that a new test moves no other one to another part.
    """
    return zlib.crc32(name.encode()) % PARTS


def few_cases(cases: Iterable[C], most: int, turn: int = 0) -> Iterator[C]:
    """Yield at most `most` cases of each test; all turns together yield every case.

    The cases of a test are dealt out to as few turns as will do, in the order of checksums of their names: in the order
    of their parameters, one turn could have all those with some value of a parameter.
    """
    by_test: defaultdict[str, list[C]] = defaultdict(list)
    for case in cases:
        by_test[case.nodeid.partition("[")[0]].append(case)
    for of_test in by_test.values():
        of_test.sort(key=lambda case: zlib.crc32(case.nodeid.encode()))
        turns = math.ceil(len(of_test) / most)
        yield from of_test[turn % turns :: turns]
