"""The right of one job to save below a URL, for stores that have no locks.

    .lock          names the holder: written when a job begins to save there, and at no other time
    .lock-ID       written every few seconds by the holder ID, so that others see that it lives

A job that finds a holder watches it. A holder that writes nothing for the time of the watch is taken for dead, and one
whose process is gone from this machine at once: a run that is started again does not wait. Should the first holder only
have been slow, it learns of its loss at the next `check`, which comes after every commit.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.runtime.storage.location import RemotePath
from dualpipe.runtime.storage.remote import RemoteStorage

LOCK = ".lock"
_BEAT_SECONDS = 3.0
_POLL_SECONDS = 0.5


class LeaseLost(OSError):
    """Another job saves to the same place now."""


class _Holder(NamedTuple):
    """The content of the lock."""

    id: str
    machine: str  # with the namespace of its process numbers
    process: int
    started: str  # when the process started: its number may be used again

    @classmethod
    def here(cls) -> _Holder:
        """Return a new holder in this process."""
        return cls(secrets.token_hex(8), _machine(), os.getpid(), _start_of(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Return True if its process ran on this machine and has ended."""
        return self.machine == _machine() and _start_of(self.process) != self.started


class Lease:
    """The right to save below a URL, until `release`. A thread of this process shows that it lives.

    Args:
        folder: the URL.
        patience: seconds to wait for another job that is about to end. At least three beats, if there is another job.

    Raises:
        ValueError: another job saves there.
        OSError: the store cannot be reached or written to.
    """

    def __init__(self, folder: RemotePath, patience: float) -> None:
        self._folder = folder
        self._store = RemoteStorage()
        self._holder = _Holder.here()
        self._wait_for_others(max(patience, 3 * _BEAT_SECONDS + 1))
        self._store.write(folder / LOCK, [json.dumps(self._holder._asdict()).encode()])
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="checkpoint lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost if another job has the lease now, and OSError if the store cannot be reached."""
        holder = self._read_holder()
        if holder is None or holder.id != self._holder.id:
            raise LeaseLost(f"another job saves to {self._folder} now; end one of the two, or give each a directory")

    def release(self) -> None:
        """Give the lease up. If the store cannot be reached, the next job has to watch it for a few seconds."""
        self._released.set()
        self._thread.join(timeout=10.0)
        with suppress(OSError):
            self.check()
            self._store.delete(self._folder / LOCK)
        with suppress(OSError):
            self._store.delete(self._sign_of(self._holder.id))

    def _beat(self) -> None:
        """Show that this job lives, as long as it has the lease."""
        count = 0
        while not self._released.wait(_BEAT_SECONDS):
            count += 1
            try:
                self.check()
                self._store.write(self._sign_of(self._holder.id), [str(count).encode()])
            except LeaseLost:
                return
            except OSError:
                continue  # the store may be back at the next beat

    def _wait_for_others(self, seconds: float) -> None:
        """Return when no other job saves there; raise ValueError if one still does after `seconds`."""
        deadline = time.monotonic() + seconds
        first_sign: bytes | None = None
        other: _Holder | None = None
        lives = False
        while True:
            holder = self._read_holder()
            if holder is None or holder.is_gone:
                if holder is not None:
                    self._store.delete(self._sign_of(holder.id))
                return
            sign = self._read_sign(holder.id)
            if holder != other:
                lives = other is not None  # a job that has begun meanwhile
                other, first_sign = holder, sign
            lives = lives or sign != first_sign
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        if lives:
            raise ValueError(f"another job saves to {self._folder}; end it, or give each a directory")
        self._store.delete(self._sign_of(holder.id))

    def _read_holder(self) -> _Holder | None:
        """Return the holder, or None if there is none."""
        try:
            content: dict[str, Any] = json.loads(self._store.read(self._folder / LOCK))
            return _Holder(**content)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # half written, in a store that shows that
            return _Holder("", "", 0, "")

    def _read_sign(self, holder: str) -> bytes | None:
        try:
            return self._store.read(self._sign_of(holder))
        except FileNotFoundError:
            return None

    def _sign_of(self, holder: str) -> RemotePath:
        return self._folder / f"{LOCK}-{holder}"


def _machine() -> str:
    """Return a name for this boot of this machine and the namespace of its process numbers; "" if it has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(process: int) -> str:
    """Return when a process of this machine started, in ticks since the boot; "" if it is gone."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
