"""Files that are whole or not there, on the disk when that matters, and of one job at a time."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

CHECKSUMS: dict[str, Any] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
_FALLOCATE, _KEEP_SIZE = getattr(ctypes.CDLL(None), "fallocate", None), 1  # of <fcntl.h>; on Linux
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_POLLED = 0.1  # seconds between two looks at a lock that another has
_PIECE = 2**22  # bytes that are hashed, and then written while they are in the cache
_REPORTED = 2**26  # bytes after which a writer is heard of
_FLUSHED = 2**30  # bytes that the system may hold back: the flush at the end tells of no progress


class Written(NamedTuple):
    """The size and checksum of a file that was written."""

    size: int  # bytes
    checksum: str  # "" where none was wanted


def node_of(path: Path) -> int | None:
    """Return the number that tells a file from a later one of its name; None where there is none."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


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


def write_file(path: Path, pieces: Iterable[bytes | memoryview], checksum: str = "") -> Written:
    """Write a new file, on the disk when this returns; with the checksum (of `CHECKSUMS`) of its bytes.

    Raises OSError where the file exists or the disk refuses.
    """
    total = CHECKSUMS[checksum]() if checksum else None
    with open(path, "xb") as out:
        for piece in pieces:
            view = memoryview(piece)
            if _FALLOCATE is not None and len(view) > _PIECE:  # set aside at once, it is written a quarter faster
                _FALLOCATE(out.fileno(), _KEEP_SIZE, ctypes.c_int64(out.tell()), ctypes.c_int64(len(view)))
            for start in range(0, len(view), _PIECE):
                part = view[start : start + _PIECE]
                if total is not None:
                    total.update(part)
                out.write(part)
                if out.tell() % _FLUSHED < len(part):
                    os.fdatasync(out.fileno())
        out.flush()
        os.fsync(out.fileno())
        return Written(out.tell(), "" if total is None else total.hexdigest())


def write_files(
    folder: Path, files: Mapping[str, Iterable[bytes | memoryview]], checksum: str = ""
) -> dict[str, Written]:
    """Write new files by name into a folder, each as `write_file` does."""
    return {name: write_file(folder / name, pieces, checksum) for name, pieces in files.items()}


class reporting:
    """The same bytes for `write_file`, in pieces after each of which `report` is called with its size, once written.

    Can be iterated as often as `pieces`.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview], report: Callable[[int], None]) -> None:
        self._pieces = pieces
        self._report = report

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _REPORTED):
                part = view[start : start + _REPORTED]
                yield part
                self._report(len(part))


def checksum_of(path: Path, checksum: str) -> str:
    """The checksum of a file; raises OSError where it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, CHECKSUMS[checksum]).hexdigest()


def replace_file(
    path: Path, content: str | Iterable[bytes | memoryview], *, is_shared: bool = False, flush: bool = True
) -> None:
    """Give a file other content: at any moment, after a crash of the system too, it has the one or the other, whole.

    is_shared: other processes may write it at the same time, so each writes aside under a name of its own. flush: wait
    for the disk; without, a crash of the system may leave an empty file.
    """
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}" if is_shared else f".tmp-{path.name}")
    pieces = [content.encode()] if isinstance(content, str) else content
    try:
        temporary.unlink(missing_ok=True)  # of a process that died here
        if flush:
            write_file(temporary, pieces)
        else:
            temporary.write_bytes(b"".join(pieces))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_wanted(*wanted: tuple[str | Path | None, Callable[[], str]]) -> Iterator[str]:
    """Write a text into each file that is given; a line on it."""
    for path, content in wanted:
        if path:
            Path(path).write_text(content(), encoding="utf-8")
            yield f"wrote {path}"


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """Return the content of a TOML file; ValueError where it cannot be read.

    what: the name of the file in errors, such as "the config ".
    """
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {what}{path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


class Lock:
    """A lock on a file or directory, until `release` or the end of this process; made by `hold`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Free it; any thread may."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # first: a forked child keeps what is only closed
        os.close(self._descriptor)


def hold(path: Path, patience: float = 0.0) -> Lock:
    """Lock a directory, or a file, which is made where there is none. It is freed with the process.

    Not the mere existence of a file is the lock, which a process that is killed would leave.

    Raises BlockingIOError where another holder has it for `patience` seconds; OSError where that cannot be, as on a
    file system without locks.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o644)
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return Lock(descriptor)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLLED)
    except BaseException:
        os.close(descriptor)
        raise


def lock(file: Path, patience: float) -> Lock | None:
    """Lock a directory for one job by a file in it, as `hold` does; None where the file system has no locks.

    Raises ValueError where another job has it for `patience` seconds: one that was just killed may take a moment.
    """
    try:
        return hold(file, patience)
    except BlockingIOError:
        raise ValueError(f"another job saves to {file.parent}; end it, or give each a directory") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(f"{file.parent} is on a file system without locks: let no other job save there", stacklevel=2)
        return None
