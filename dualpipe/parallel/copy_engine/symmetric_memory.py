"""Memory of peers in one NVLink domain: `torch.distributed._symmetric_memory` and its signals.

A copy of contiguous bytes into a peer's memory is one `cudaMemcpyAsync`, which copy engines run. For a copy within the
device, such as from a slot to the received rows, the driver may choose a kernel on all multiprocessors, which is short.
A signal is a kernel of one block, and so is the meeting of all ranks: a waiting block takes a part of one
multiprocessor, where NCCL's all-to-all takes up to 16. Not run on a GPU yet.

Failure: a kernel that waits longer than the timeout of the group traps. The next call of CUDA on that rank raises, and
the process cannot use the device any more: the ranks have to be restarted. Nothing ends such a wait earlier: it is no
operation of the process group, whose abort ends NCCL's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dualpipe.parallel.copy_engine.peer_memory import SlotLayout
from dualpipe.runtime import device
from dualpipe.runtime.ranks.process_groups import timeout_of

# Channels of the signals. With NVLink's multicast, `barrier` counts arrivals in the memory of its channel's signals:
# signals between two ranks have a channel of their own.
_ALL = 0
_PAIRS = 1


class SymmetricMemory:
    """A `PeerMemory` on CUDA devices that can access each other's memory; the constructor is collective.

    Raises ValueError if memory cannot be shared.
    """

    def __init__(self, group: dist.ProcessGroup, buffer_bytes: int) -> None:
        from torch.distributed import _symmetric_memory  # not at the top: loads operators that only this needs

        self.rank = group.rank()
        self.size = group.size()
        self.device = device.current()
        self._layout = SlotLayout.within(self.size, buffer_bytes)
        self.slot_bytes = self._layout.slot_bytes
        self._timeout_ms = round(timeout_of(group).total_seconds() * 1000)
        try:
            self._buffer = _symmetric_memory.empty(self._layout.nbytes, dtype=torch.uint8, device=self.device)
            self._handle = _symmetric_memory.rendezvous(self._buffer, group)
        except RuntimeError as error:
            raise ValueError(
                f"{self._layout.nbytes} bytes cannot be shared between the {self.size} GPUs of an all-to-all by copy "
                f"engines: {error}; use GPUs of one NVLink domain, or parallel.all_to_all = \"nccl\"") from error
        self._memories = [
            self._handle.get_buffer(rank, (self._layout.nbytes,), torch.uint8) for rank in range(self.size)]
        self._last: device.Event | None = None  # the end of the last exchange

    def slot(self, owner: int, source: int, number: int) -> Tensor:
        """Return a slot; see `PeerMemory.slot`."""
        return self._layout.slot(self._memories[owner], owner, source, number)

    def meet_all(self) -> None:
        """Queue one kernel that signals all peers and waits for them; see `PeerMemory.meet_all`."""
        self._handle.barrier(_ALL, self._timeout_ms)

    def meet(self, peers: Sequence[int]) -> None:
        """Queue signals to the peers and the waits for theirs; see `PeerMemory.meet`."""
        for peer in peers:
            self._handle.put_signal(peer, _PAIRS, self._timeout_ms)
        for peer in peers:
            self._handle.wait_signal(peer, _PAIRS, self._timeout_ms)

    def hang_up(self) -> None:
        """Do nothing: waiting kernels end at their timeout."""

    def run(self, exchange: Callable[[], None]) -> dist.Work:
        """Queue the exchange on the current stream, after the last one, which may be on another stream."""
        device.wait(self._last, self.device)  # orders: reads of the last exchange, then writes and signals of this one
        exchange()
        self._last = device.record(self.device)
        return QueuedWork(self._last, self.device)


class QueuedWork(dist.Work):
    """Work that ends with an event."""

    def __init__(self, done: device.Event | None, on: torch.device) -> None:
        super().__init__()
        self._done = done
        self._device = on

    def wait(self, timeout: object = None) -> bool:
        """Make the current stream wait for the exchange."""
        device.wait(self._done, self._device)  # orders: the exchange, then the readers of its rows
        return True
