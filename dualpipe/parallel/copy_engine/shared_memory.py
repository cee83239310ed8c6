"""Memory of peers on one host's CPU: each rank has a file in memory, which all ranks of the group map.

It stands in for `symmetric_memory` where there is no GPU. A signal is a counter in the memory of the peer; the waiting
thread polls it.

Failure: each rank holds a lock on its file, which the system releases when the process ends, however it ends. A rank
that fails in a step releases its lock itself. A rank that waits for a peer tries the peer's lock: it raises as soon as
the peer is gone, and at the timeout of the group if the peer is there and does not come. Later exchanges on this rank
raise the same error.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dualpipe.parallel.copy_engine.peer_memory import SlotLayout
from dualpipe.runtime.background import run_in_background
from dualpipe.runtime.ranks.process_groups import timeout_of
from dualpipe.runtime.ranks.rank_sync import RankSync

_COUNTER_BYTES = 64  # a cache line for each counter
_FOLDER = Path("/dev/shm")  # a file system in memory, on Linux
_SHORTEST_POLL = 2e-5  # seconds between two reads of a counter, at first
_LONGEST_POLL = 1e-3
_CHECK = 0.1  # seconds between two checks that a peer is alive


class SharedMemory:
    """A `PeerMemory` of processes on one host; the constructor is collective over a group that can carry host tensors.

    Raises ValueError, on all ranks, if a rank cannot map the memory of another one.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup, buffer_bytes: int) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._layout = SlotLayout.within(self.size, buffer_bytes)
        self.slot_bytes = self._layout.slot_bytes
        self._timeout = timeout_of(group).total_seconds()
        self._names = dist.get_process_group_ranks(group)
        self._signals = [0] * self.size  # signals to each peer so far, and from it
        self._last: Future[None] | None = None  # the last exchange
        self._has_hung_up = False
        nbytes = self.size * _COUNTER_BYTES + self._layout.nbytes
        folder = _FOLDER if _FOLDER.is_dir() else Path(tempfile.gettempdir())
        path = folder / f"dualpipe-{os.getpid()}-{uuid.uuid4().hex}"
        ranks = RankSync(group)
        ranks.gather(lambda: None)  # a rank that is killed while it waits for the others leaves no file
        try:
            paths = ranks.gather(lambda: self._create(path, nbytes))
            ranks.gather(lambda: self._map_peers(paths, nbytes))
        finally:
            path.unlink(missing_ok=True)  # the memory lives as long as it is mapped

    def _create(self, path: Path, nbytes: int) -> Path:
        """Create, lock and map the memory of this rank; return `path`, that of its file."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # without room it fails here, not at a write
        except OSError as error:
            os.close(descriptor)
            raise ValueError(f"no room for {nbytes} bytes of shared memory in {path.parent}: {error}; enlarge it, or "
                             "use parallel.all_to_all = \"nccl\"") from error
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._own = _Segment(descriptor, nbytes, self.size * _COUNTER_BYTES)
        return path

    def _map_peers(self, paths: Sequence[Path], nbytes: int) -> None:
        """Map the memory of all ranks."""
        self._segments: list[_Segment] = []
        for rank, path in enumerate(paths):
            if rank == self.rank:
                self._segments.append(self._own)
                continue
            try:
                descriptor = os.open(path, os.O_RDWR)
            except OSError as error:
                raise ValueError(f"the memory of rank {self._names[rank]} cannot be mapped: {error}; start all ranks "
                                 "of the group on one host, or use parallel.all_to_all = \"nccl\"") from error
            self._segments.append(_Segment(descriptor, nbytes, self.size * _COUNTER_BYTES))

    def slot(self, owner: int, source: int, number: int) -> Tensor:
        """Return a slot; see `PeerMemory.slot`."""
        return self._layout.slot(self._segments[owner].slots, owner, source, number)

    def meet_all(self) -> None:
        """Meet all peers; see `PeerMemory.meet_all`."""
        self.meet([peer for peer in range(self.size) if peer != self.rank])

    def meet(self, peers: Sequence[int]) -> None:
        """Signal the peers and wait for them; see `PeerMemory.meet`.

        Raises DistNetworkError for a peer that has ended or failed or does not come in time, and after `hang_up`.
        """
        self._check_is_open()
        for peer in peers:
            self._signals[peer] += 1
            self._segments[peer].counters[self._place(self.rank)] = self._signals[peer]
        for peer in peers:
            self._await_signal(peer)

    def _await_signal(self, peer: int) -> None:
        """Wait until a peer has signalled as often as this rank."""
        began = time.monotonic()
        checked = began
        pause = _SHORTEST_POLL
        while not self._has_signalled(peer):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
            now = time.monotonic()
            if now - began > self._timeout:
                raise dist.DistNetworkError(
                    f"timed out after {self._timeout:g} s: rank {self._names[peer]} did not come")
            if now - checked > _CHECK:
                checked = now
                self._check_is_open()
                # A peer signals and then ends: look for the signal after its end.
                if self._segments[peer].is_abandoned() and not self._has_signalled(peer):
                    raise dist.DistNetworkError(f"shared memory closed by peer: rank {self._names[peer]} has ended or "
                                                "failed")

    def _check_is_open(self) -> None:
        """Raise DistNetworkError after `hang_up`."""
        if self._has_hung_up:
            raise dist.DistNetworkError("a step failed and closed the shared memory of this rank")

    def _has_signalled(self, peer: int) -> bool:
        """Return True once the peer has signalled as often as this rank."""
        return self._own.counters[self._place(peer)] >= self._signals[peer]

    @staticmethod
    def _place(source: int) -> int:
        """Return the index of the counter for signals from `source`."""
        return source * _COUNTER_BYTES // 8

    def hang_up(self) -> None:
        """Release the lock, which ends the waits of peers as the end of the process does; see `PeerMemory.hang_up`."""
        self._has_hung_up = True
        self._own.abandon()
        if self._last is not None:
            wait([self._last], 10 * _CHECK)  # a process that ends while its thread is inside a copy aborts

    def run(self, exchange: Callable[[], None]) -> dist.Work:
        """Run the exchange on a thread, after the last one; see `PeerMemory.run`."""
        last = self._last

        def run_after_last() -> None:
            if last is not None:
                last.result()  # raises its error: the counters no longer match those of the peers
            with torch.no_grad():
                exchange()

        self._last = run_in_background(run_after_last, "all-to-all")
        return ThreadWork(self._last)


class ThreadWork(dist.Work):
    """Work of a thread."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future

    def is_completed(self) -> bool:
        """Return True if the exchange has ended."""
        return self._future.done()

    def wait(self, timeout: object = None) -> bool:
        """Block the host until the exchange has ended. Raises its error."""
        self._future.result()
        return True


class _Segment:
    """Memory of one rank: counters of the signals from each rank, then its slots."""

    def __init__(self, descriptor: int, nbytes: int, counter_bytes: int) -> None:
        self._descriptor = descriptor
        memory = mmap.mmap(descriptor, nbytes)
        self.counters = memoryview(memory)[:counter_bytes].cast("q")
        self.slots = torch.frombuffer(memory, dtype=torch.uint8)[counter_bytes:]

    def abandon(self) -> None:
        """Release the lock of this rank's own memory."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def is_abandoned(self) -> bool:
        """Return True if the process of the rank has ended, or has hung up: its lock can be had."""
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
            return True
        return False

    def __del__(self) -> None:
        os.close(self._descriptor)
