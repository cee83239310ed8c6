"""The operations that checkpoints need from a place, local or remote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dualpipe.runtime.files import Written

ReadInto = Callable[[memoryview, int], int]  # fills a buffer from an offset on; returns the bytes read, 0 at the end
Ranges = Callable[[], Iterable[tuple[int, int]]]  # start and size of every range that will be read


class Storage(Protocol):
    """File operations. Every one raises OSError if it fails, and FileNotFoundError if there is no such file."""

    can_rename: bool  # a directory gets another name in one step that other processes see whole or not at all

    def write(self, path: Any, pieces: Iterable[bytes | memoryview], checksum: str = "") -> Written:
        """Write a file; return its size and checksum. On return it is as safe as the place makes it.

        pieces: may be iterated several times, once for each attempt.
        """
        ...

    def size(self, path: Any) -> int:
        """Return the size of a file, in bytes; raise ValueError for what is no plain file."""
        ...

    def read(self, path: Any) -> bytes:
        """Return the content of a small file."""
        ...

    def open_ranges(self, path: Any, ranges: Ranges) -> AbstractContextManager[ReadInto]:
        """Open a file to read byte ranges of it.

        ranges: those that will be read, in order. A remote store joins near ones in one request.
        """
        ...

    def checksum(self, path: Any, algorithm: str) -> str:
        """Read a file; return its checksum."""
        ...

    def names(self, folder: Any) -> Iterator[str]:
        """Yield the names of files and folders in a folder. A remote store may list late: too few, or deleted ones."""
        ...

    def delete(self, path: Any) -> None:
        """Delete a file, if there is one."""
        ...
