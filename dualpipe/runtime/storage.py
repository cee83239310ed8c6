"""Files of checkpoints: local ones, or objects in a store that fsspec reaches by a URL such as s3://bucket/run.

A location is a `Path` or, for a URL, a `RemotePath`. Every operation takes both. It raises FileNotFoundError if there
is no such file, and OSError for other failures.

A store needs no rename and no append. Others see an object once its stream is closed. A read or a listing must show
what was written before, as it does in S3, GCS and Azure. An error of a store that may pass, such as a timeout, is
retried: `_ATTEMPTS` attempts in 8 s. The final OSError names the action, the number of attempts and the last reason.
The answer to a write may be lost although the store has completed the object: an object with the right size and
checksum counts as written.

Imports no torch: the process that writes checkpoints uses it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dualpipe.runtime.files import CHECKSUMS, Written, checksum_of, write_file

if TYPE_CHECKING:
    from dualpipe.runtime.ranks.rank_sync import RankSync

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
LOCAL_FILES = ("file", "local")  # fsspec's protocols for the file system of this machine
_URL_AS_PATH = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")  # `Path` drops one of the two slashes
_ATTEMPTS = 5
_FIRST_PAUSE = 0.5  # seconds, which double with every attempt
_PERMANENT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError,
              NotImplementedError)
_CHUNK = 2**22  # bytes that are hashed and handed on at a time
_BLOCK = 2**26  # bytes that fsspec holds before it uploads them: S3 takes 10,000 blocks of an object, so 640 GB
_REQUEST = 2**23  # bytes of one request; a window is read by several at once
_WINDOW = 2**26  # bytes of a file that are read at a time and held in memory
_ANY_CHECKSUM = "xxh3_128"  # to recognize an object, where the caller names no algorithm
_GAP = 2**20  # bytes between two ranges that cost less to read than another request

T = TypeVar("T")

ReadInto: TypeAlias = Callable[[memoryview, int], int]  # fills a buffer from an offset on; returns the bytes read


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL such as s3://bucket/run, with the part of `Path`'s interface that needs no access to the store.

    Not a `PathLike`: code for local files raises TypeError instead of making a folder called "s3:".

    Args:
        protocol: fsspec's name for the kind of store, such as "s3" or "file".
        key: the rest of the URL, without a slash at its end.
    """

    protocol: str
    key: str

    def __str__(self) -> str:
        return f"{self.protocol}://{self.key}"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.protocol, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last component, as of a `Path`."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The URL without its last component."""
        return RemotePath(self.protocol, self.key.rpartition("/")[0])


Location: TypeAlias = Path | RemotePath
StrLocation: TypeAlias = str | PathLike[str] | RemotePath  # arguments of public functions


def as_location(path: StrLocation) -> Location:
    """Return a string or path as a location. A string with "://" is a URL.

    Raises:
        ValueError: a URL in a `Path`, which changes it; a chain of stores such as simplecache::s3://bucket; or the
            URL of files on another host, such as file://host/path.
    """
    if isinstance(path, RemotePath):
        return path
    text = fspath(path)
    match = _URL.fullmatch(text) if isinstance(path, str) else None
    if match:
        protocol, key = match.groups()
        if protocol in LOCAL_FILES and key and not key.startswith("/"):
            raise ValueError(f"{text} names {key.partition('/')[0]!r} as the host of the files, but only those of this "
                             f"machine can be reached; give {protocol}:///path, with three slashes")
        return RemotePath(protocol, key.rstrip("/"))
    if _URL_AS_PATH.match(text):
        raise ValueError(f"{text} looks like a URL that was made a Path, which drops a slash; give it as a string")
    if "::" in text and "://" in text:
        raise ValueError(f"{text} is a chain of stores; give the URL of the store itself: a cache may be out of date")
    return Path(path)


def absolute(location: Location) -> Location:
    """Return a location that does not depend on the working directory."""
    return location if isinstance(location, RemotePath) else location.absolute()


def resolve(location: Location) -> Location:
    """Return the location with symbolic links resolved; URLs have none."""
    return location if isinstance(location, RemotePath) else location.resolve()


def contains(outer: Location, inner: Location) -> bool:
    """Return True if `inner` is `outer` or in it."""
    if isinstance(outer, RemotePath) or isinstance(inner, RemotePath):
        return inner == outer or str(inner).startswith(f"{outer}/")
    return outer.resolve() in (inner.resolve(), *inner.resolve().parents)


def write(path: Location, pieces: Iterable[bytes | memoryview], checksum: str = "") -> Written:
    """Write a file; return its size and checksum. On return it is as durable as the storage makes it.

    Args:
        path: a new file, or an object that may exist.
        pieces: iterated once for each attempt.
        checksum: name of an algorithm in `CHECKSUMS`; "": none.
    """
    if isinstance(path, RemotePath):
        return _retry(path, "written", lambda file_system, name: _write_once(file_system, name, pieces, checksum))
    return write_file(path, pieces, checksum)


def write_files(
    folder: Location, contents: Mapping[str, Iterable[bytes | memoryview]], checksum: str = ""
) -> dict[str, Written]:
    """Write files by name into a folder; return their sizes and checksums. See `write`."""
    return {name: write(folder / name, pieces, checksum) for name, pieces in contents.items()}


def size(path: Location) -> int:
    """Return the size of a file, in bytes; raise ValueError for a link and anything else that is no plain file."""
    if isinstance(path, RemotePath):
        return _retry(path, "looked up", _size_once)
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a plain file; refused")
    return status.st_size


def read(path: Location) -> bytes:
    """Return the content of a small file."""
    if isinstance(path, RemotePath):
        return _retry(path, "read", _read_once)
    return path.read_bytes()


@contextmanager
def open_ranges(path: Location, ranges: Callable[[], Iterable[tuple[int, int]]]) -> Iterator[ReadInto]:
    """Open a file to read byte ranges of it.

    ranges: returns start and size of the ranges that will be read, in order. A store reads near ones in one request.
    """
    if isinstance(path, RemotePath):
        yield _RangeReader(path, _join_ranges(ranges()))
        return
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        yield lambda buffer, start: os.preadv(descriptor, [buffer], start)


def checksum(path: Location, algorithm: str) -> str:
    """Read a file; return its checksum."""
    if not isinstance(path, RemotePath):
        return checksum_of(path, algorithm)
    hasher = CHECKSUMS[algorithm]()
    end = size(path)
    for start in range(0, end, _WINDOW):
        hasher.update(_read_window(path, start, min(start + _WINDOW, end)))
    digest: str = hasher.hexdigest()
    return digest


def list_names(folder: Location) -> list[str]:
    """Return the names in a folder, sorted; none if it does not exist."""
    try:
        if not isinstance(folder, RemotePath):
            return sorted(os.listdir(folder))
        names = _retry(folder, "listed", _list_once)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({name for name in names if name and name != folder.name})


def exists(path: Location) -> bool:
    """Return True if there is such a file."""
    try:
        size(path)
    except FileNotFoundError:
        return False
    return True


def remove(path: Location) -> None:
    """Delete a file, if there is one."""
    if not isinstance(path, RemotePath):
        path.unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        _retry(path, "deleted", _delete_once)


def remove_folder(folder: Location, report_progress: Callable[[], None]) -> None:
    """Delete a folder with its files. Large files take long, so call `report_progress` after each of them."""
    if isinstance(folder, RemotePath):
        for name in list_names(folder):
            remove(folder / name)
            report_progress()
        with suppress(Exception):  # stores without folders raise various errors
            file_system, name = _connect(folder)
            file_system.rmdir(name)
        return
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
        return
    for file in folder.iterdir():
        if file.is_file():
            file.unlink()
            report_progress()
    shutil.rmtree(folder)


def require_shared(location: Location, num_processes: int) -> None:
    """Raise ValueError if the processes of a job would each have a storage of their own at a location."""
    if isinstance(location, RemotePath) and location.protocol == "memory" and num_processes > 1:
        raise ValueError(f"{location} is in the memory of one process, and this job has {num_processes}; give a "
                         "directory or URL that all of them reach, or start one process")


def check_shared(folder: Path, ranks: RankSync, patience: float = 30.0) -> None:
    """Raise ValueError, on all ranks, if one does not see the files that rank 0 writes to a directory. Collective.

    folder: read on rank 0. patience: seconds to wait for a file, because nodes may see each other's files late.
    """
    if ranks.size == 1:
        return
    probe = ranks.first(lambda: _write_probe(folder))

    def look() -> None:
        deadline = time.monotonic() + patience
        while not probe.exists():
            if time.monotonic() > deadline:
                raise ValueError(f"{probe.parent} is not the directory that rank 0 has by this name; give one on a "
                                 "file system that all nodes see")
            time.sleep(0.1)

    try:
        ranks.agree(look)
    finally:
        if ranks.rank == 0:
            probe.unlink(missing_ok=True)


def _write_probe(folder: Path) -> Path:
    """Write an empty file with a new name, and return its path."""
    path = folder / f".tmp-{secrets.token_hex(8)}"
    path.touch()
    return path


class _StoreError(Exception):
    """Wraps an error of the store, so that `_retry` does not retry errors of its caller."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _from_store() -> Iterator[None]:
    """Wrap errors that are raised inside of a `with` as `_StoreError`."""
    try:
        yield
    except Exception as error:
        raise _StoreError(error) from error


def _connect(path: RemotePath) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. fsspec keeps one for each thread.

    Raises:
        ValueError: fsspec or its package for this protocol is not installed, or the protocol is unknown.
        _StoreError: the store refuses, for example because there are no keys.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ValueError(f"{path} is a URL, which needs fsspec, but fsspec is not installed; run pip install "
                         "'dualpipe[remote]', or give a local directory") from None
    options = {"auto_mkdir": True} if path.protocol in LOCAL_FILES else {}
    try:
        file_system, name = url_to_fs(str(path), **options)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{path} cannot be opened: {error}; give a URL that fsspec knows, and install the package for "
                         "it, such as s3fs for s3:// or gcsfs for gs://") from error
    except Exception as error:
        raise _StoreError(error) from error
    file_system.invalidate_cache()  # its cache of listings may be out of date
    return file_system, name


def _retry(path: RemotePath, action: str, call: Callable[[Any, str], T]) -> T:
    """Return `call(file_system, name)`; retry errors that may pass.

    Args:
        path: the object.
        action: what `call` does, for the message: "written".
        call: raises _StoreError for errors of the store.

    Raises:
        FileNotFoundError: there is no such object.
        OSError: all attempts failed, or one with an error that does not pass.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call(*_connect(path))
        except _StoreError as raised:
            error = raised.error
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"{path} does not exist") from error
            if isinstance(error, _PERMANENT) or attempt == _ATTEMPTS:
                times = "" if attempt == 1 else f" in {attempt} attempts"
                raise OSError(f"{path} could not be {action}{times}: {type(error).__name__}: {error}") from error
        time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _read_once(file_system: Any, name: str) -> bytes:
    with _from_store():
        return bytes(file_system.cat_file(name))


def _list_once(file_system: Any, name: str) -> list[str]:
    with _from_store():
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in file_system.ls(name, detail=False)]


def _delete_once(file_system: Any, name: str) -> None:
    with _from_store():
        file_system.rm_file(name)


def _write_once(
    file_system: Any, name: str, pieces: Iterable[bytes | memoryview], checksum: str
) -> Written:
    """Write an object. An error is no failure if the store has the object, and only its answer was lost."""
    content = _Content(pieces, checksum or _ANY_CHECKSUM)
    try:
        _stream(file_system, name, content)
        stored = _size_once(file_system, name)
        if stored != content.size:
            raise _StoreError(OSError(f"the store has {stored} bytes of {content.size}"))
    except _StoreError as raised:
        may_be_stored = content.is_complete or isinstance(raised.error, FileExistsError)
        if not may_be_stored or not _is_stored(file_system, name, content):
            if isinstance(raised.error, FileNotFoundError):  # the store has forgotten the upload: it is repeated
                raise _StoreError(OSError(f"FileNotFoundError: {raised.error}")) from raised
            raise
    return Written(content.size, content.checksum if checksum else "")


def _stream(file_system: Any, name: str, content: _Content) -> None:
    """Write an object in one stream. After an error the stream is never closed, which would complete the object."""
    with _from_store():
        out = file_system.open(name, "wb", block_size=_BLOCK)
    try:
        for part in content.parts():
            with _from_store():
                out.write(part)
        with _from_store():
            out.close()
    except BaseException:
        _abandon(out)
        raise


class _Content:
    """The content of an object that is written, and its size and checksum once `parts` is exhausted.

    Args:
        pieces: may be iterated several times.
        algorithm: name of the checksum.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview], algorithm: str) -> None:
        self.algorithm = algorithm
        self.size = 0
        self.checksum = ""
        self._pieces = pieces

    @property
    def is_complete(self) -> bool:
        """True if size and checksum are those of all pieces."""
        return bool(self.checksum)

    def parts(self) -> Iterator[memoryview]:
        """Yield the content in parts of at most `_CHUNK` bytes."""
        hasher = CHECKSUMS[self.algorithm]()
        self.size = 0
        for piece in self._pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                hasher.update(part)
                self.size += len(part)
                yield part
        self.checksum = hasher.hexdigest()


def _is_stored(file_system: Any, name: str, content: _Content) -> bool:
    """Return True if the object in the store has the size and checksum of `content`."""
    if not content.is_complete:
        for _ in content.parts():
            pass
    try:
        if _size_once(file_system, name) != content.size:
            return False
        hasher = CHECKSUMS[content.algorithm]()
        for start in range(0, content.size, _WINDOW):
            end = min(start + _WINDOW, content.size)
            hasher.update(_read_window_once(file_system, name, start, end))
    except _StoreError as raised:
        if isinstance(raised.error, FileNotFoundError):
            return False
        raise
    return bool(hasher.hexdigest() == content.checksum)


def _abandon(out: Any) -> None:
    """Give up a stream: Python closes one that is only dropped, which would complete the object."""
    with suppress(Exception):  # not all can discard; a partial object belongs to no committed checkpoint
        out.discard()
    with suppress(AttributeError):  # read-only in some stores
        out.closed = True


def _size_once(file_system: Any, name: str) -> int:
    with _from_store():
        file_system.invalidate_cache()
        info = file_system.info(name)
        if info.get("type") == "directory":
            raise FileNotFoundError(name)
        return int(info["size"])


def _join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join near ranges (start, size), which are in order; return start and end of the spans that contain them."""
    spans: list[tuple[int, int]] = []
    for start, size in ranges:
        if spans and start - spans[-1][0] >= 0 and start - spans[-1][1] <= _GAP:
            spans[-1] = (spans[-1][0], max(spans[-1][1], start + size))
        else:
            spans.append((start, start + size))
    return spans


class _RangeReader:
    """Reads planned spans of an object, a window at a time.

    Args:
        path: the object.
        spans: start and end of the spans, in reading order.
    """

    def __init__(self, path: RemotePath, spans: list[tuple[int, int]]) -> None:
        self._path = path
        self._spans = spans
        self._starts = [start for start, _ in spans]
        self._start = 0
        self._window = memoryview(b"")

    def __call__(self, buffer: memoryview, start: int) -> int:
        """Fill the buffer from offset `start`, up to the end of the window; return the number of bytes."""
        if not self._start <= start < self._start + len(self._window):
            self._advance(start, start + len(buffer))
        offset = start - self._start
        part = self._window[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def _advance(self, start: int, end: int) -> None:
        """Read a window that begins at `start`."""
        index = bisect_right(self._starts, start) - 1
        if index >= 0:
            end = max(end, self._spans[index][1])
        self._window = memoryview(_read_window(self._path, start, min(end, start + _WINDOW)))
        self._start = start


def _read_window(path: RemotePath, start: int, end: int) -> bytes:
    """Return the bytes from `start` to `end`, by several requests at once where fsspec can."""
    return _retry(path, "read", lambda file_system, name: _read_window_once(file_system, name, start, end))


def _read_window_once(file_system: Any, name: str, start: int, end: int) -> bytes:
    starts = list(range(start, end, _REQUEST))
    ends = [min(first + _REQUEST, end) for first in starts]
    with _from_store():
        parts = file_system.cat_ranges([name] * len(starts), starts, ends, on_error="raise")
        for part in parts:
            if isinstance(part, Exception):  # fsspec before 2026 returns errors nevertheless
                raise part
        received = sum(map(len, parts))
        if [len(part) for part in parts] != [last - first for first, last in zip(starts, ends)]:
            raise OSError(f"the store gave {received} of the {end - start} bytes from {start} on")
    return b"".join(parts)
