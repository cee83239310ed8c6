"""torch's symmetric memory for ranks that are threads on a pretend device, and all-to-alls by copies over it.

    with pretend_cuda() as device, pretend_symmetric_memory():
        run_threads(fn, 2, device="cuda")       # in fn: copy_engine(rank, "ep", (0, 1))

Work queued on a stream runs at once, so a wait for a signal blocks the thread until the peer has queued the signal. On
the device only the stream waits, by the event that the signal carries. As in torch, a signal is one bit for each
channel and pair: it is put when the one before has been taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory

from device_book import Event, the_device
from dualpipe.parallel.copy_engine import symmetric_memory
from dualpipe.parallel.copy_engine.exchange import CopyEngineAllToAll
from dualpipe.parallel.copy_engine.symmetric_memory import SymmetricMemory
from threads import Rank, ThreadGroup, World


class Shared:
    """Memory of each rank of a world, and its signals that are put and not yet taken."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, int], tuple[Tensor, Event]] = {}
        self.signals: dict[tuple[str, int, int, int], Event] = {}  # by group, channel, source and destination


_shared: dict[World, Shared] = {}


class Handle:
    """Stand-in for torch's _SymmetricMemory."""

    def __init__(self, group: ThreadGroup, shared: Shared) -> None:
        self._group = group
        self._world = group.of.world
        self._shared = shared

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        memory, _ = self._shared.memory[self._group.name, rank]
        return memory.view(dtype)[storage_offset:][: sizes[0]]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        peers = [rank for rank in range(self._group.size()) if rank != self._group.rank()]
        for peer in peers:
            self.put_signal(peer, channel, timeout_ms)
        for peer in peers:
            self.wait_signal(peer, channel, timeout_ms)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        key = self._group.name, channel, self._group.rank(), dst_rank
        self._world.until(lambda: key not in self._shared.signals, f"signal {key}")
        with self._world.changed:
            self._shared.signals[key] = torch.cuda.current_stream().record_event()
            self._world.changed.notify_all()

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        key = self._group.name, channel, src_rank, self._group.rank()
        self._world.until(lambda: key in self._shared.signals, f"signal {key}")
        with self._world.changed:
            event = self._shared.signals.pop(key)
            self._world.changed.notify_all()
        self.order(event)

    def order(self, event: Event) -> None:
        """Make the current stream wait for the signal of a peer."""
        with the_device().of_thread.trace.paused():  # a trace has only the waits within one rank
            torch.cuda.current_stream().wait_event(event)


def rendezvous(memory: Tensor, group: ThreadGroup) -> Handle:
    world, size = group.of.world, group.size()
    with world.changed:
        shared = _shared.setdefault(world, Shared())
        shared.memory[group.name, group.rank()] = memory, torch.cuda.current_stream().record_event()
        world.changed.notify_all()
    names = [(group.name, rank) for rank in range(size)]
    world.until(lambda: all(name in shared.memory for name in names), f"memory of {group.name}")
    handle = Handle(group, shared)
    for name in names:  # the real one synchronizes the host
        handle.order(shared.memory[name][1])
    return handle


def copy_engine(rank: Rank, name: str, members: Sequence[int], buffer_bytes: int) -> CopyEngineAllToAll:
    """Return the all-to-all of a rank with `members`, for `ExpertParallel`."""
    return CopyEngineAllToAll(SymmetricMemory(ThreadGroup(rank, name, tuple(members)), buffer_bytes))


@contextmanager
def pretend_symmetric_memory() -> Iterator[None]:
    """Share memory of the pretend device between ranks that are threads."""

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def timeout_of(group: ThreadGroup) -> timedelta:
        return timedelta(seconds=30)

    with (mock.patch.object(_symmetric_memory, "empty", empty),
          mock.patch.object(_symmetric_memory, "rendezvous", rendezvous),
          mock.patch.object(symmetric_memory, "timeout_of", timeout_of)):
        try:
            yield
        finally:
            _shared.clear()
