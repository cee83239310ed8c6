"""Division of the tests that are one case of very many into parts: CI runs one a day, and so all in two weeks."""

from __future__ import annotations

import zlib

PARTS = 14


def part_of(name: str) -> int:
    """Return the part, from 0 to `PARTS` - 1, that the test or configuration of this name belongs to.

    A checksum of the name decides, so that a new test moves no other one to another part.
    """
    return zlib.crc32(name.encode()) % PARTS
