"""A store like S3, kept in files: objects appear whole when their stream is closed, and nothing can be renamed.

`FAULTS` makes it slow or failing, in this process. Its URLs are object:///path/of/a/folder.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import fsspec
from fsspec.implementations.local import LocalFileSystem

_PARTIAL = ".uploading-"
_BLOCK = 2**16  # bytes that a stream buffers before it sends them


@dataclass
class Faults:
    """Faults of the store, and a log of its requests.

    delay: seconds that each request takes.
    outage: number of requests from now on that fail.
    every: one request in this number fails; 0: none.
    broken: requests for keys for which this returns True always fail.
    lost: like `broken`, but the request takes effect before it fails: its answer is lost.
    at_write: called with the key and the bytes so far, when a stream has received some, and when it is closed (-1).
    requests: all so far, as (kind, key, bytes).
    """

    delay: float = 0.0
    outage: int = 0
    every: int = 0
    broken: Callable[[str, str], bool] = lambda kind, key: False
    lost: Callable[[str, str], bool] = lambda kind, key: False
    at_write: Callable[[str, int], None] = lambda key, size: None
    requests: list[tuple[str, str, int]] = field(default_factory=list)

    def request(self, kind: str, key: str, size: int = 0) -> None:
        """Take the time of a request, or fail."""
        time.sleep(self.delay)
        self.requests.append((kind, key, size))
        if self.broken(kind, key):
            raise OSError(f"the store refuses to {kind}")
        self.outage -= 1
        if self.outage >= 0 or (self.every and len(self.requests) % self.every == 0):
            raise TimeoutError("the store took too long")

    def answer(self, kind: str, key: str) -> None:
        """Answer a request that has taken effect, or lose the answer."""
        if self.lost(kind, key):
            raise TimeoutError(f"the store did not answer the request to {kind}")


FAULTS = Faults()


def set_faults(**changes: object) -> Faults:
    """Replace all faults of this process."""
    FAULTS.__init__(**changes)
    return FAULTS


def kill_when(name: str, at: str) -> Callable[[str, int], None]:
    """Return an `at_write` that kills this process at the object `name`: "begun", "half" written, or "closed"."""

    def kill(key: str, size: int) -> None:
        reached = size > 0 if at == "half" else size == {"begun": 0, "closed": -1}[at]
        if key.endswith(name) and reached:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


class ObjectStore(LocalFileSystem):
    """The store. Its keys are paths of files."""

    protocol = "object"
    cachable = False

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("object://"))

    def open(self, path, mode="rb", **options):
        key = self._strip_protocol(path)
        FAULTS.request("open", key)
        assert mode in ("rb", "wb"), "objects are written once, whole"
        return _Upload(key) if mode == "wb" else super().open(path, mode, **options)

    def cat_file(self, path, start=None, end=None, **options):
        key = self._strip_protocol(path)
        FAULTS.request("read", key, (end or os.path.getsize(key)) - (start or 0) if os.path.exists(key) else 0)
        with open(key, "rb") as file:
            file.seek(start or 0)
            return file.read(-1 if end is None else end - (start or 0))

    def info(self, path, **options):
        key = self._strip_protocol(path)
        FAULTS.request("look up", key)
        if not os.path.isfile(key):  # folders are not objects
            raise FileNotFoundError(path)
        return {"name": key, "size": os.path.getsize(key), "type": "file"}

    def ls(self, path, detail=False, **options):
        folder = self._strip_protocol(path)
        FAULTS.request("list", folder)
        names = objects_in(folder)
        if not names:
            raise FileNotFoundError(path)
        return sorted({os.path.join(folder, name.split("/")[0]) for name in names})

    def rm_file(self, path):
        key = self._strip_protocol(path)
        FAULTS.request("delete", key)
        os.remove(key)
        FAULTS.answer("delete", key)

    def mv(self, *arguments, **options):
        raise NotImplementedError("this store renames nothing")

    rename = move = mv_file = copy = cp_file = rmdir = mv


class _Upload:
    """The stream of an object, which appears when it is closed."""

    def __init__(self, key):
        self._key, self._size, self.closed = key, 0, False
        os.makedirs(os.path.dirname(key), exist_ok=True)
        self._partial = os.path.join(os.path.dirname(key), f"{_PARTIAL}{os.getpid()}-{os.path.basename(key)}")
        FAULTS.at_write(key, 0)
        self._file = open(self._partial, "wb")  # noqa: SIM115

    def write(self, data):
        blocks = self._size // _BLOCK
        self._size += len(data)
        if self._size == len(data) or self._size // _BLOCK > blocks:  # the first block is sent early: streams fail soon
            FAULTS.request("write", self._key, len(data))
        self._file.write(data)
        self._file.flush()
        FAULTS.at_write(self._key, self._size)

    def close(self):
        FAULTS.request("complete", self._key)
        self._file.close()
        os.replace(self._partial, self._key)
        self.closed = True
        FAULTS.at_write(self._key, -1)
        FAULTS.answer("complete", self._key)

    def discard(self):
        self._file.close()
        os.remove(self._partial)

    def __del__(self):
        if not self.closed:  # as fsspec's own streams do
            self.close()


fsspec.register_implementation("object", ObjectStore, clobber=True)


def objects_in(folder):
    """Return the keys of all objects below a folder, relative to it; a store hides unfinished uploads."""
    found = [os.path.relpath(os.path.join(parent, name), folder) for parent, _, files in os.walk(folder)
             for name in files if not name.startswith(_PARTIAL)]
    return sorted(found)
