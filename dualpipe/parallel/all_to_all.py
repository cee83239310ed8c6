"""All-to-all of rows between the ranks of a group, overlapped with compute.

On CUDA all exchanges run on a side stream, which waits only until the rows to send are computed; the compute stream
waits, by an event, before the received rows are used. On the CPU the backend's threads send while the host computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.runtime import device
from dualpipe.runtime.ranks.process_groups import yield_to_gloo
from dualpipe.runtime.recorder import Recorder

# An exchange in flight: (work, None, title) on the CPU, (None, event after the exchange, title) on a device. A tuple:
# an object of a class takes 0.2 us more.
Exchange = tuple[dist.Work | None, device.Event | None, str]


class AllToAll:
    """All-to-all between the ranks of a one-dimensional mesh, which all start the same exchanges in the same order."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group: dist.ProcessGroup | None = mesh.get_group()  # None in a subclass without ranks of torch.distributed
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        self.device = device.current() if mesh.device_type == "cuda" else torch.device(mesh.device_type)

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> dist.Work:
        """Send `sent_rows[r]` rows of `sent` to each rank r, in rank order, and fill `received` in the same order.

        Both tensors are contiguous and of one dtype. On CUDA the exchange runs after all work of the current stream,
        and `wait` of the result blocks the current stream, not the host.
        """
        work = dist.all_to_all_single(
            received, sent, list(received_rows), list(sent_rows), group=self.group, async_op=True)
        if sent.is_cpu:
            yield_to_gloo()
        return work


class CommStream:
    """State shared by all layers: the all-to-all, its side stream, and the counts of bytes sent to other ranks.

    title: the name of the exchanges in traces. node: the ranks of the group in this rank's node; None: all of them.

    Attributes:
        sent_bytes: bytes sent to other ranks.
        sent_between_nodes: those of them sent to ranks of other nodes.
    """

    def __init__(
        self, all_to_all: AllToAll, title: str = "rows to or from experts", *, node: range | None = None
    ) -> None:
        self._title = title
        self.all_to_all = all_to_all
        self.group = all_to_all.group
        self.size = all_to_all.size
        self.device = all_to_all.device
        self.node = range(all_to_all.size) if node is None else node
        self.sent_bytes = 0
        self.sent_between_nodes = 0
        self._stream = device.new_stream(self.device)

    def count(self, row_bytes: int, sent: Sequence[int]) -> None:
        """Count the bytes of `sent[r]` rows to each rank r."""
        total = sum(sent)
        self.sent_bytes += row_bytes * (total - sent[self.all_to_all.rank])
        self.sent_between_nodes += row_bytes * (total - sum(sent[self.node.start : self.node.stop]))

    def beside(self, ready: device.Event | None, *tensors: Tensor) -> AbstractContextManager[None]:
        """Return a context for work on the side stream that reads `tensors` after `ready`; on the CPU a no-op."""
        return device.use_stream(self._stream, ready, *tensors)

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Exchange:
        """Start an exchange as `AllToAll.start` does, inside of `beside`."""
        recorder = Recorder.current()
        title = self._title
        if recorder.keeps_all:  # a trace is recorded: number the exchanges, so that their waits can be told apart
            title = f"{title}, number {recorder.count('exchange')}"
            recorder.begin("exchange", title, (), sent.nbytes)
        try:
            work = self.all_to_all.start(received, sent, received_rows, sent_rows)
            if self._stream is None:
                return work, None, title
            work.wait()  # orders: the exchange, then the side stream, which may read `received` and reuse `sent`
            return None, device.record(self.device), title
        finally:
            if recorder.keeps_all:
                recorder.end()

    def wait(self, exchange: Exchange) -> None:
        """Make the current stream wait for an exchange; on the CPU, block the host."""
        work, arrived, title = exchange
        recorder = Recorder.current()
        if work is None:
            with recorder.doing("all_to_all", title) if recorder.keeps_all else nullcontext():
                device.wait(arrived, self.device)  # orders: the arrival, then the readers of the rows
        else:
            with recorder.collective("all_to_all", title, recorder.members(self.group)):
                work.wait()


class PendingRows:
    """Rows in flight between all ranks of a group.

    They are sent after all work that was queued on the current stream before this object was created.

    extra: results that `wait` returns after the rows. context: the context that `wait` returns for the backward.
    """

    def __init__(self, stream: CommStream, *, extra: tuple[Any, ...] = (), context: Any = None) -> None:
        self._stream = stream
        self._ready = device.record(stream.device)
        self._extra = extra
        self._context = context
        self._received: list[Tensor] = []
        # On the CPU all exchanges, with the tensors they send, which must live until the exchange ends. On a device
        # only the last exchange: it ends after all others.
        self._exchanges: list[tuple[Exchange, Tensor | None]] = []

    def send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], *, capacity: int | None = None) -> Self:
        """Start to send `sent[r]` of `rows` (N, C) to each rank r, and to receive `received[r]` rows from it.

        The received tensor has the width and dtype of `rows`. capacity: its number of rows (default: the number of
        received rows); the received rows come first, the rest is uninitialized.
        """
        assert rows.shape[0] == sum(sent), f"{rows.shape[0]} rows to send, but {sum(sent)} were announced"
        stream = self._stream
        total = sum(received)
        with stream.beside(self._ready, rows):
            sent_bytes = rows.contiguous().view(torch.uint8)  # gloo refuses some dtypes
            shape = (total if capacity is None else capacity, rows.shape[1])
            buffer = torch.empty(shape, dtype=rows.dtype, device=stream.device)
            exchange = stream.start(buffer[:total].view(torch.uint8), sent_bytes, received, sent)
        if exchange[0] is None:
            self._exchanges = [(exchange, None)]
        else:
            self._exchanges.append((exchange, sent_bytes))
        self._received.append(buffer)
        stream.count(row_bytes_of(rows), sent)
        return self

    def receive(self) -> list[Tensor]:
        """Return the received tensors, one for each `send`.

        The current stream waits for them, on the CPU the host.
        """
        while self._exchanges:
            self._stream.wait(self._exchanges.pop(0)[0])
        received = self._received
        self._received = []  # the caller owns them now
        device.record_stream(*received)  # record_stream: allocated on the side stream, used on the current one
        return received

    def advance(self) -> None:
        """Do nothing: there is no second part, all rows are in flight. See `dualpipe.nn.segments.Pending`."""

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Return the received tensors with `extra`, and the context; see `dualpipe.nn.segments.Pending`."""
        return (*self.receive(), *self._extra), self._context


def gradient_rows(
    gradient: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the gradient to send, or zeros if it is None: the other ranks receive these rows in both cases."""
    if gradient is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    assert gradient.shape == shape and gradient.dtype is dtype, (
        f"got a gradient {tuple(gradient.shape)} in {gradient.dtype} for rows {shape} in {dtype}")
    return gradient


def row_bytes_of(matrix: Tensor) -> int:
    """Return the size of one row in bytes."""
    return matrix.shape[1] * matrix.itemsize
