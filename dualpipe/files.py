"""Files that are whole or not there, on the disk when that matters, and of one job at a time."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_PIECE = 2**20  # bytes that are hashed and then written: they are still in the cache


class Hash(Protocol):
    """A checksum in the making, of hashlib or xxhash."""

    def update(self, data: bytes | memoryview, /) -> None: ...


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of what is written inside names the file, as those of a full disk do not."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def new_file(path: Path, checksum: Hash | None = None) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yield what appends bytes to a new file; all are in `checksum` and on the disk when this is left.

    Raises OSError, which names the file, where it exists or the disk refuses.
    """
    with naming(path), open(path, "xb") as out:

        def append(data: bytes | memoryview) -> None:
            if checksum is None:
                out.write(data)
                return
            view = memoryview(data)
            for start in range(0, len(view), _PIECE):
                checksum.update(view[start : start + _PIECE])
                out.write(view[start : start + _PIECE])

        yield append
        out.flush()
        os.fsync(out.fileno())


def replace_file(path: Path, content: str) -> None:
    """Give a file other content, on the disk when this returns: at any moment it has the one or the other, whole."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.unlink(missing_ok=True)  # of a process that died here
        with new_file(temporary) as append:
            append(content.encode())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def lock(file: Path, patience: float) -> FileLock | None:
    """What holds `file` until its `release`, None where the file system has no locks. It is freed with the process.

    Raises ValueError where another process has it for `patience` seconds: one that was just killed may take a moment.
    """
    # Not by the mere existence of the file, which a process that is killed leaves; and whatever thread releases it.
    held = FileLock(file, timeout=patience, thread_local=False, poll_interval=0.1, fallback_to_soft=False)
    try:
        held.acquire()
    except Timeout:
        raise ValueError(f"another job saves to {file.parent}; end it, or give each a directory") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(f"{file.parent} is on a file system without locks: let no other job save there", stacklevel=2)
        return None
    return held
