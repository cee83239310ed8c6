"""The `Storage` of stores that fsspec reaches: streamed writes, reads of byte ranges, and retries.

Needs no rename, no append and no up-to-date listing. Others see an object once its stream is closed. A read by key must
see what was written before, as it does in S3, GCS and Azure.

An error that may pass, such as a timeout, is retried: `_ATTEMPTS` attempts in 8 s. The final OSError names the action,
the number of attempts and the last reason. The answer to a write may be lost although the store has completed the
object: an object with the right size and checksum counts as written.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from dualpipe.runtime.files import CHECKSUMS, Written
from dualpipe.runtime.storage.location import LOCAL_FILES, RemotePath
from dualpipe.runtime.storage.protocol import Ranges, ReadInto

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


class RemoteStorage:
    """File operations by fsspec."""

    def write(self, path: RemotePath, pieces: Iterable[bytes | memoryview], checksum: str = "") -> Written:
        """Write an object and ask the store for its size. Every attempt starts anew."""
        return _retry(path, "written", lambda file_system, name: _write_once(file_system, name, pieces, checksum))

    def size(self, path: RemotePath) -> int:
        """Return the size of an object, by its key."""
        return _retry(path, "looked up", _size_once)

    def read(self, path: RemotePath) -> bytes:
        """Return the content of a small object."""

        def read_once(file_system: Any, name: str) -> bytes:
            with _from_store():
                return bytes(file_system.cat_file(name))

        return _retry(path, "read", read_once)

    @contextmanager
    def open_ranges(self, path: RemotePath, ranges: Ranges) -> Iterator[ReadInto]:
        """Open an object to read `ranges` of it in order; near ones are read in one request."""
        yield _RangeReader(path, _join_ranges(ranges()))

    def checksum(self, path: RemotePath, algorithm: str) -> str:
        """Read an object in windows; return its checksum."""
        hasher = CHECKSUMS[algorithm]()
        size = self.size(path)
        for start in range(0, size, _WINDOW):
            hasher.update(_read_window(path, start, min(start + _WINDOW, size)))
        digest: str = hasher.hexdigest()
        return digest

    def names(self, folder: RemotePath) -> Iterator[str]:
        """Yield the names that the store lists directly below a prefix."""

        def list_once(file_system: Any, name: str) -> list[str]:
            with _from_store():
                return [str(entry).rstrip("/").rpartition("/")[2] for entry in file_system.ls(name, detail=False)]

        try:
            names = _retry(folder, "listed", list_once)
        except FileNotFoundError:
            return
        yield from sorted({name for name in names if name and name != folder.name})

    def delete(self, path: RemotePath) -> None:
        """Delete an object, if there is one."""

        def delete_once(file_system: Any, name: str) -> None:
            with _from_store():
                file_system.rm_file(name)

        with suppress(FileNotFoundError):
            _retry(path, "deleted", delete_once)

    def delete_folder(self, folder: RemotePath) -> None:
        """Delete an empty folder, if the store has folders."""
        with suppress(Exception):  # stores without folders raise various errors
            file_system, name = _connect(folder)
            file_system.rmdir(name)


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
