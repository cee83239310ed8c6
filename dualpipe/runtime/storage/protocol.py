"""The interface `Storage`: the file operations that checkpoints need, local or remote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dualpipe.runtime.files import Written

ReadInto = Callable[[memoryview, int], int]  # fills a buffer from an offset on; returns the bytes read, 0 at the end
Ranges = Callable[[], Iterable[tuple[int, int]]]  # start and size of every range that will be read


class Storage(Protocol):
    """File operations. All raise FileNotFoundError if there is no such file, and OSError for other failures."""

    def write(self, path: Any, pieces: Iterable[bytes | memoryview], checksum: str = "") -> Written:
        """Write a file; return its size and checksum. On return it is as durable as the storage makes it.

        pieces: may be iterated several times, once for each attempt.
        """
        ...

    def size(self, path: Any) -> int:
        """Return the size of a file, in bytes; raise ValueError if it is not a plain file."""
        ...

    def read(self, path: Any) -> bytes:
        """Return the content of a small file."""
        ...

    def open_ranges(self, path: Any, ranges: Ranges) -> AbstractContextManager[ReadInto]:
        """Open a file to read byte ranges of it.

        ranges: the ranges that will be read, in order. A remote store reads near ones in one request.
        """
        ...

    def checksum(self, path: Any, algorithm: str) -> str:
        """Read a file; return its checksum."""
        ...

    def names(self, folder: Any) -> Iterator[str]:
        """Yield the names in a folder. A remote store may list late: new names may be missing, deleted ones there."""
        ...

    def delete(self, path: Any) -> None:
        """Delete a file, if there is one."""
        ...
