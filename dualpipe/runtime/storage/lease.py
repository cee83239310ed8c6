"""A lease on a URL, so that one job at a time saves there: stores have no locks.

    .lock          names the last holder; written once, when a job takes the lease, and never deleted
    .lock-ID       heartbeat of the holder ID, rewritten every few seconds; "released" after the end of the job

Once it has the lease, a holder writes nothing but its own heartbeat, also to release the lease. A release that is
repeated because its answer was lost can therefore not end the lease of the next job.

A job that finds another holder watches its heartbeat, and considers the holder dead if the heartbeat does not change
for some seconds. A holder on this machine whose process has ended is considered dead at once, so that a restarted run
does not wait. If the first holder was only slow, it learns at its next `check` that it has lost the lease; a `check`
follows every commit.
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
_RELEASED = b"released"
_BEAT_SECONDS = 3.0
_POLL_SECONDS = 0.5


class LeaseLost(OSError):
    """Another job has taken the lease."""


class _Holder(NamedTuple):
    """The content of the lock."""

    id: str
    machine: str  # from `_machine`
    process: int
    started: str  # start time of the process, whose number may be reused

    @classmethod
    def here(cls) -> _Holder:
        """Return a new holder in this process."""
        return cls(secrets.token_hex(8), _machine(), os.getpid(), _start_of(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """True if the process ran on this machine and has ended."""
        return self.machine == _machine() and _start_of(self.process) != self.started


class Lease:
    """The right to save below a URL, until `release`. A thread writes the heartbeat.

    Args:
        folder: the URL.
        patience: seconds to wait for another job that is about to end. If there is one, at least three heartbeats.

    Raises:
        ValueError: another job saves there.
        OSError: the store cannot be reached or written to.
    """

    def __init__(self, folder: RemotePath, patience: float) -> None:
        self._folder = folder
        self._store = RemoteStorage()
        self._holder = _Holder.here()
        former = self._wait_for_others(max(patience, 3 * _BEAT_SECONDS + 1))
        self._store.write(folder / LOCK, [json.dumps(self._holder._asdict()).encode()])
        if former is not None:
            with suppress(OSError):  # the object has no use any more, and does no harm
                self._store.delete(self._heartbeat_path(former.id))
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="checkpoint lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost if another job has the lease now, and OSError if the store cannot be reached."""
        holder = self._read_holder()
        if holder is None or holder.id != self._holder.id:
            raise LeaseLost(f"another job saves to {self._folder} now; end one of the two, or give every job its own "
                            "directory")

    def release(self) -> None:
        """Give up the lease. If the store cannot be reached, the next job has to wait for a few seconds."""
        self._released.set()
        self._thread.join(timeout=10.0)
        heartbeat = self._heartbeat_path(self._holder.id)
        with suppress(OSError):
            try:
                self.check()
                self._store.write(heartbeat, [_RELEASED])
            except LeaseLost:
                self._store.delete(heartbeat)

    def _beat(self) -> None:
        """Write the heartbeat as long as this job has the lease."""
        count = 0
        while not self._released.wait(_BEAT_SECONDS):
            count += 1
            try:
                self.check()
                self._store.write(self._heartbeat_path(self._holder.id), [str(count).encode()])
            except LeaseLost:
                return
            except OSError:
                continue  # the store may be back at the next beat

    def _wait_for_others(self, seconds: float) -> _Holder | None:
        """Return the former holder, if any, when no other job saves there.

        Raises ValueError if a job still does after `seconds`.
        """
        deadline = time.monotonic() + seconds
        watched: _Holder | None = None
        first_heartbeat: bytes | None = None
        is_alive = False
        while True:
            holder = self._read_holder()
            if holder is None:
                return None
            heartbeat = self._read_heartbeat(holder.id)
            if heartbeat == _RELEASED or holder.is_gone:
                return holder
            if holder != watched:
                is_alive = watched is not None  # a job that has started meanwhile
                watched = holder
                first_heartbeat = heartbeat
            is_alive = is_alive or heartbeat != first_heartbeat
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        if is_alive:
            raise ValueError(f"another job saves to {self._folder}; end it, or give every job its own directory")
        return holder

    def _read_holder(self) -> _Holder | None:
        """Return the holder, or None if there is none."""
        try:
            content: dict[str, Any] = json.loads(self._store.read(self._folder / LOCK))
            return _Holder(**content)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # half written, in a store that shows incomplete objects
            return _Holder("", "", 0, "")

    def _read_heartbeat(self, holder: str) -> bytes | None:
        try:
            return self._store.read(self._heartbeat_path(holder))
        except FileNotFoundError:
            return None

    def _heartbeat_path(self, holder: str) -> RemotePath:
        return self._folder / f"{LOCK}-{holder}"


def _machine() -> str:
    """Return an id of this boot of this machine and of the namespace of process numbers; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(process: int) -> str:
    """Return the start time of a process on this machine, in ticks since the boot; "" if it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
