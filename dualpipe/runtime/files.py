"""Atomic file writes, checksums, flushes to the disk, and locks between jobs."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


def _xxh3_128(data: bytes = b"") -> Any:
    """Return a hash object of xxhash."""
    import xxhash  # not at the top: the search for schedules uses this file, and needs the standard library alone

    return xxhash.xxh3_128(data)


CHECKSUMS: dict[str, Callable[..., Any]] = {"xxh3_128": _xxh3_128, "sha256": hashlib.sha256}
_FALLOCATE = getattr(ctypes.CDLL(None), "fallocate", None)  # Linux only
_FALLOC_FL_KEEP_SIZE = 1  # of <fcntl.h>
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LOCK_POLL = 0.1  # seconds between two attempts at a lock that another holder has
_CHUNK = 2**22  # bytes that are hashed, and then written while they are in the cache
_REPORT_INTERVAL = 2**26  # bytes between two reports of a writer
_FLUSH_INTERVAL = 2**30  # bytes between two flushes: the last flush reports no progress, so it must be short


class Written(NamedTuple):
    """Size and checksum of a written file."""

    size: int  # bytes
    checksum: str  # "" if none was asked for


def inode(path: Path) -> int | None:
    """Return the inode of a file, which changes when the file is replaced; None if there is no file."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file name to an OSError inside of a `with` that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_file(path: Path, pieces: Iterable[bytes | memoryview], checksum: str = "") -> Written:
    """Write a new file and flush it to the disk; return its size and checksum.

    checksum: name of an algorithm in `CHECKSUMS`; "": none. Raises OSError if the file exists or the disk fails.
    """
    digest = CHECKSUMS[checksum]() if checksum else None
    with open(path, "xb") as out:
        for piece in pieces:
            view = memoryview(piece)
            if _FALLOCATE is not None and len(view) > _CHUNK:  # a preallocated file is written a quarter faster
                _FALLOCATE(out.fileno(), _FALLOC_FL_KEEP_SIZE, ctypes.c_int64(out.tell()), ctypes.c_int64(len(view)))
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                if digest is not None:
                    digest.update(chunk)
                out.write(chunk)
                if out.tell() % _FLUSH_INTERVAL < len(chunk):
                    os.fdatasync(out.fileno())
        out.flush()
        os.fsync(out.fileno())
        return Written(out.tell(), "" if digest is None else digest.hexdigest())


def report_writes(pieces: Iterable[bytes | memoryview], report: Callable[[int], None]) -> Iterable[memoryview]:
    """Split `pieces` for `write_file`, and call `report` with the size of every part once it has been written.

    The result can be iterated as often as `pieces`.
    """
    return _ReportedPieces(pieces, report)


class _ReportedPieces:
    """The iterable that `report_writes` returns."""

    def __init__(self, pieces: Iterable[bytes | memoryview], report: Callable[[int], None]) -> None:
        self._pieces = pieces
        self._report = report

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _REPORT_INTERVAL):
                part = view[start : start + _REPORT_INTERVAL]
                yield part
                self._report(len(part))


def checksum_of(path: Path, checksum: str) -> str:
    """Return the checksum of a file by an algorithm in `CHECKSUMS`. Raises OSError if the file cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, CHECKSUMS[checksum]).hexdigest()


def replace_file(
    path: Path, content: str | Iterable[bytes | memoryview], *, is_shared: bool = False, flush: bool = True
) -> None:
    """Replace the content of a file atomically: even a crash of the system leaves the old content or the new one.

    is_shared: other processes may write the file at the same time, so the temporary file is named after this process.
    flush: wait for the disk; without it, a crash of the system may leave an empty file.
    """
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}" if is_shared else f".tmp-{path.name}")
    pieces = [content.encode()] if isinstance(content, str) else content
    try:
        temporary.unlink(missing_ok=True)  # left by a process that died while writing
        if flush:
            write_file(temporary, pieces)
        else:
            temporary.write_bytes(b"".join(pieces))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_parent(path: Path) -> None:
    """Raise ValueError if the directory of the file `path`, which is to be written, does not exist."""
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no directory {path.parent}; give the path of a new file")


def write_texts(*files: tuple[str | Path | None, Callable[[], str]]) -> Iterator[str]:
    """Write the text of every file that has a path; yield a printable line for each.

    Without a path, the function that returns the text is not called. Raises ValueError for a file that cannot be
    written.
    """
    for path, content in files:
        if path:
            text = content()
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ValueError(f"cannot write {path}: {error.strerror}; give the path of a new file") from error
            yield f"wrote {path}"


def read_toml(path: Path, role: str = "") -> dict[str, Any]:
    """Return the content of a TOML file. Raises ValueError if it cannot be read.

    role: put before the path in errors, such as "the config ".
    """
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {role}{path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


class Lock:
    """A lock on a file or directory, held until `release` or the end of this process; made by `hold`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, from any thread."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # after a close alone, a forked child would keep the lock
        os.close(self._descriptor)


def hold(path: Path, patience: float = 0.0) -> Lock:
    """Lock a directory or a file, which is created if it does not exist; the lock ends with the process.

    The lock is not the existence of the file: a killed process would leave that behind.

    Raises BlockingIOError if another holder keeps it for `patience` seconds; OSError on a file system without locks.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return Lock(descriptor)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOCK_POLL)
    except BaseException:
        os.close(descriptor)
        raise


def lock(file: Path, patience: float) -> Lock | None:
    """Reserve the directory of `file` for one job by a lock on `file`; None, with a warning, if there are no locks.

    Raises ValueError if another job holds it for `patience` seconds: one that was just killed may take a moment.
    """
    try:
        return hold(file, patience)
    except BlockingIOError:
        raise ValueError(f"another job saves to {file.parent}; end it, or give every job its own directory") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(f"{file.parent} is on a file system without locks: let no other job save there", stacklevel=2)
        return None
