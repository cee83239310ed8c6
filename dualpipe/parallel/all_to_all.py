"""Rows between the ranks of a group as bytes, beside the computing.

On CUDA everything is given to one stream of its own, which waits for what is to be sent and for nothing else; the
computing stream waits where the rows are needed, by events. On CPU the backend's threads send while the host computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.runtime import device
from dualpipe.runtime.recorder import Recorder

# On its way: on CPU its work, on a device what comes after it; and what it is called, for which no class: 0.2 us.
Exchange = tuple[dist.Work | None, device.Event | None, str]


class AsyncAllToAll(Protocol):
    """Sends rows between the ranks of a group, all of which start the same exchanges in one order."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None  # None: not one of torch.distributed

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> dist.Work:
        """Send `sent_rows[r]` rows to each rank r, one after the other in `sent`; `received` likewise by source; both
        contiguous and of one dtype. On CUDA it comes after what the current stream has been given, and `wait` of the
        result makes the current stream wait, not the host."""


class GroupAllToAll:
    """An `AsyncAllToAll` over the process group of a one-dimensional mesh, by gloo or NCCL."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group: dist.ProcessGroup | None = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.device = device.current() if mesh.device_type == "cuda" else torch.device(mesh.device_type)

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> dist.Work:
        sizes = list(received_rows), list(sent_rows)
        return dist.all_to_all_single(received, sent, *sizes, group=self.group, async_op=True)


class CommStream:
    """What all layers share: the all-to-all, the stream beside the computing one, and the count of bytes sent."""

    def __init__(self, all_to_all: AsyncAllToAll, title: str = "rows to or from experts") -> None:
        self._title = title  # of what is sent, in traces
        self.all_to_all, self.group, self.size = all_to_all, all_to_all.group, all_to_all.size
        self.device, self.sent_bytes = all_to_all.device, 0
        self._stream = device.new_stream(self.device)

    def beside(self, made: device.Event | None, *tensors: Tensor | None) -> AbstractContextManager[None]:
        """Give to the stream beside what reads `tensors`, which exist after `made`; on CPU there is no other stream."""
        return device.beside(self._stream, made, *(tensor for tensor in tensors if tensor is not None))

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Exchange:
        """Start to exchange rows as an `AsyncAllToAll` does, within `beside`."""
        recorder, title = Recorder.current(), self._title
        if recorder.whole:  # while a trace is taken, in which waits are told apart
            title = f"{title}, number {recorder.count('exchange')}"
            recorder.begin("exchange", title, (), sent.nbytes)
        try:
            work = self.all_to_all.start(received, sent, received_rows, sent_rows)
            if self._stream is None:
                return work, None, title
            work.wait()  # the stream does: what follows on it may read what has arrived, and reuse what was sent
            return None, device.record(self.device), title
        finally:
            if recorder.whole:
                recorder.end()

    def wait(self, exchange: Exchange) -> None:
        """Have the current stream wait for an exchange, on CPU the host."""
        (work, arrived, title), recorder = exchange, Recorder.current()
        if work is None:
            with recorder.doing("all_to_all", title) if recorder.whole else nullcontext():
                device.wait(arrived, self.device)  # orders: the arrival, then what reads it
        else:
            with recorder.collective("all_to_all", title, recorder.members(self.group)):
                work.wait()


class PendingRows:
    """Rows on their way to all ranks, made by all that the current stream has been given; as bytes, so that a rank can
    take in what it knows nothing about. besides: what `wait` returns behind the rows; context: for a backward."""

    failure: BaseException | None = None  # of what was to be sent

    def __init__(self, stream: CommStream, *, besides: tuple[Any, ...] = (), context: Any = None) -> None:
        self._stream, self._made = stream, device.record(stream.device)
        self._besides, self.context = besides, context
        self._received: list[tuple[Tensor, torch.dtype | None]] = []
        # On CPU all, with what is sent, so that it stays; on a device the last one, which comes after the others.
        self._exchanges: list[tuple[Exchange, Tensor | None]] = []

    def send(
        self, rows: Tensor | None, row_bytes: int, sent: Sequence[int], received: Sequence[int],
        dtype: torch.dtype | None, room: int | None = None, *, fill: int = 0,
    ) -> Self:
        """Start to send `rows` of `row_bytes`, `sent` of them to each rank, and to receive `received` from each into
        the first of `room`, as `dtype` (None: for nobody here). Without `rows` their bytes are `fill`; also where an
        error comes before they are sent, the `failure`: the other ranks count on them."""
        try:
            announced = sum(sent), row_bytes
            assert rows is None or (rows.shape[0], row_bytes_of(rows)) == announced, "not the rows announced"
            self._start(rows, row_bytes, sent, received, dtype, room, fill)
        except BaseException as error:
            self.failure = self.failure or error
            self._start(None, row_bytes, sent, received, None, room, fill)
        return self

    def _start(
        self, rows: Tensor | None, row_bytes: int, sent: Sequence[int], received: Sequence[int],
        dtype: torch.dtype | None, room: int | None, fill: int,
    ) -> None:
        stream, total = self._stream, sum(received)
        with stream.beside(self._made, rows):
            if rows is None:
                rows = torch.full((sum(sent), row_bytes), fill, dtype=torch.uint8, device=stream.device)
            rows = rows.contiguous().view(torch.uint8)
            buffer = torch.empty(total if room is None else room, row_bytes, dtype=torch.uint8, device=stream.device)
            exchange = stream.start(buffer[:total], rows, received, sent)
        self.add(exchange, rows)
        self._received.append((buffer, dtype))
        stream.sent_bytes += row_bytes * (sum(sent) - sent[stream.all_to_all.rank])

    def add(self, exchange: Exchange, sent: Tensor) -> None:
        """Have `receive` wait for an exchange of `sent`."""
        if exchange[0] is None:
            self._exchanges = [(exchange, None)]
        else:
            self._exchanges.append((exchange, sent))

    def receive(self) -> list[Any]:
        """What was received, (rows, ...) or None: the current stream waits for it, on CPU the host."""
        while self._exchanges:
            self._stream.wait(self._exchanges.pop(0)[0])
        received, self._received = self._received, []  # the caller's from now on
        device.keep(*(buffer for buffer, _ in received))  # made beside, used here
        return [None if dtype is None else buffer.view(dtype) for buffer, dtype in received]

    def take_failure(self) -> BaseException | None:
        """See `dualpipe.nn.segments.Pending`; not kept, as this is in its traceback, with all that was to be sent."""
        failure, self.failure = self.failure, None
        return failure

    def advance(self) -> None:
        """All of it is on its way."""

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """See `dualpipe.nn.segments.Pending`."""
        return (*self.receive(), *self._besides), self.context


def row_bytes_of(matrix: Tensor) -> int:
    return matrix.shape[1] * matrix.itemsize
