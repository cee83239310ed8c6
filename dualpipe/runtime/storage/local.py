"""The `Storage` of local file systems."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dualpipe.runtime.files import Written, checksum_of, write_file
from dualpipe.runtime.storage.protocol import Ranges, ReadInto


class LocalStorage:
    """File operations by system calls."""

    def write(self, path: Path, pieces: Iterable[bytes | memoryview], checksum: str = "") -> Written:
        """Write a new file and flush it to the disk."""
        return write_file(path, pieces, checksum)

    def size(self, path: Path) -> int:
        """Return the size of a file, without following a link."""
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a plain file; refused")
        return status.st_size

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""
        return path.read_bytes()

    @contextmanager
    def open_ranges(self, path: Path, ranges: Ranges) -> Iterator[ReadInto]:
        """Open a file to read from any offset. Does not use `ranges`."""
        with open(path, "rb", buffering=0) as file:
            descriptor = file.fileno()
            yield lambda buffer, start: os.preadv(descriptor, [buffer], start)

    def checksum(self, path: Path, algorithm: str) -> str:
        """Read a file; return its checksum."""
        return checksum_of(path, algorithm)

    def names(self, folder: Path) -> Iterator[str]:
        """Yield the names in a directory; nothing if it does not exist."""
        try:
            yield from (path.name for path in folder.iterdir())
        except FileNotFoundError:
            return

    def delete(self, path: Path) -> None:
        """Delete a file, if there is one."""
        path.unlink(missing_ok=True)
