"""Rows between the ranks of a group as bytes, beside the computing.

On CUDA everything is given to one stream of its own, which waits for what is to be sent and for nothing else; the
computing stream waits where the rows are needed, by events. On CPU the backend's threads send while the host computes.

Dimension letters: G ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualpipe import device


class AllToAll(Protocol):
    """Sends rows between the ranks of a group, all of which start the same exchanges in one order."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None  # None: not one of torch.distributed

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> dist.Work:
        """Send `sent_rows[r]` rows to each rank r, one after the other in `sent`; `received` likewise by source.

        The tensors are contiguous and of one dtype. On CUDA it comes after what the current stream has been given, and
        `wait` of the result makes the current stream wait, not the host.
        """


class GroupAllToAll:
    """Over the process group of a one-dimensional mesh, by gloo or NCCL."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.device = device.current() if mesh.device_type == "cuda" else torch.device(mesh.device_type)

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> dist.Work:
        """See `AllToAll`."""
        return dist.all_to_all_single(
            received, sent, list(received_rows), list(sent_rows), group=self.group, async_op=True
        )


@dataclass(frozen=True)
class Sizes:
    """What the host knows of an exchange: rows for and from each rank, and bytes of what a row consists of."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    row: int  # bytes of the hidden state
    weights: int
    ids: int


def agreed_sizes(sent: list[list[int]], received: list[list[int]]) -> Sizes:
    """From the records for and from each rank: rows, pairs, and bytes of what a row consists of."""
    told = {tuple(record[2:]) for record in (*sent, *received)} - {(0, 0, 0)}  # nothing from a rank without inputs
    if len(told) > 1:
        raise ValueError(f"the ranks' rows consist of different numbers of bytes (hidden state, weights, choices): "
                         f"{sorted(told)}; give the layer the same sizes and dtypes everywhere")
    counts = (tuple(record[0] for record in records) for records in (sent, received))
    return Sizes(*counts, *(told.pop() if told else (0, 0, 0)))


def row_bytes_of(matrix: Tensor) -> int:
    return matrix.shape[1] * matrix.itemsize


class Wire:
    """What all layers share: the connection, the stream beside the computing one, and the count of bytes."""

    def __init__(self, all_to_all: AllToAll) -> None:
        self.all_to_all, self.device, self.size = all_to_all, all_to_all.device, all_to_all.size
        self.group = all_to_all.group
        self._stream = device.new_stream(self.device)
        self.sent_bytes = 0

    def mark(self) -> device.Event | None:
        """After all that the current stream has been given: what is to be sent has been made."""
        return device.record(self.device)

    def beside(self, made: device.Event | None, *tensors: Tensor) -> AbstractContextManager[None]:
        """Give to the stream beside what reads `tensors`, which exist after `made`; on CPU there is no other stream."""
        return device.beside(self._stream, made, *tensors)

    def after(self, work: dist.Work) -> device.Event | None:
        """Within `beside`: what comes after `work`; None on CPU, where the host waits for it."""
        if self._stream is None:
            return None
        work.wait()  # the stream does: what follows on it may read what has arrived, and reuse what was sent
        return device.record(self.device)

    def count(self, row_bytes: int, rows: Sequence[int]) -> None:
        self.sent_bytes += row_bytes * (sum(rows) - rows[self.all_to_all.rank])


class Counts:
    """The numbers of rows on their way, and what is in a row: from the device to the other ranks and to the host."""

    def __init__(
        self, wire: Wire, counts: Tensor | None, row: tuple[int, int, int], made: device.Event | None
    ) -> None:
        self._copied: device.Event | None = None
        with wire.beside(made, *(() if counts is None else (counts,))):
            both = torch.zeros(2, wire.size, 5, dtype=torch.int64, device=wire.device)  # sent, received
            if counts is not None:
                both[0, :, :2] = counts
                for column, size in enumerate(row, 2):
                    both[0, :, column].fill_(size)
            each = [1] * wire.size
            self._host, self._work = both, wire.all_to_all.start(both[1], both[0], each, each)
            if wire.after(self._work) is not None:
                self._host = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=True)
                self._host.copy_(both, non_blocking=True)
                self._copied = device.record(wire.device)

    def read(self) -> list[list[list[int]]]:
        """The records for and from each rank; the host waits for them."""
        if self._copied is None:
            self._work.wait()
        else:
            self._copied.synchronize()  # orders: the copy, then the host, which alone waits here
        return self._host.tolist()


class Flight:
    """Rows on their way to all ranks, as bytes, so that a rank can take in what it knows nothing about."""

    def __init__(self, wire: Wire, made: device.Event | None) -> None:
        self._wire, self._made = wire, made
        self._buffers: list[Tensor] = []
        self._works: list[tuple[dist.Work, Tensor]] = []  # on CPU; with what is sent, so that it stays
        self._arrived: device.Event | None = None

    def add(
        self, rows: Tensor | None, row_bytes: int, sent: Sequence[int], received: Sequence[int], room: int | None = None
    ) -> None:
        """Start to send `rows`, zeros where there are none, and to receive into the first of `room` rows."""
        assert rows is None or (rows.shape[0], row_bytes_of(rows)) == (sum(sent), row_bytes), "not the rows announced"
        wire, total = self._wire, sum(received)
        with wire.beside(self._made, *(() if rows is None else (rows,))):
            if rows is None:
                rows = torch.zeros(sum(sent), row_bytes, dtype=torch.uint8, device=wire.device)
            rows = rows.contiguous().view(torch.uint8)
            buffer = torch.empty(total if room is None else room, row_bytes, dtype=torch.uint8, device=wire.device)
            work = wire.all_to_all.start(buffer[:total], rows, received, sent)
            self._arrived = wire.after(work)
            if self._arrived is None:
                self._works.append((work, rows))
        self._buffers.append(buffer)
        wire.count(row_bytes, sent)

    def land(self) -> list[Tensor]:
        """What was received (rows, bytes): the current stream waits for it, on CPU the host."""
        while self._works:
            self._works.pop(0)[0].wait()
        if self._arrived is not None:
            device.wait(self._arrived, self._wire.device)  # orders: the arrival, then what reads it
            device.keep(*self._buffers)  # made beside, used here
        buffers, self._buffers = self._buffers, []  # they are the caller's from now on
        return buffers


class Landing:
    """Rows of known numbers under way. dtypes: of what is received; None: the result is None."""

    def __init__(self, flight: Flight, dtypes: tuple[torch.dtype | None, ...], context: Any) -> None:
        self._flight, self._dtypes, self._context = flight, dtypes, context

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        buffers = [*self._flight.land(), *[None] * len(self._dtypes)]
        return tuple(None if dtype is None else b.view(dtype) for b, dtype in zip(buffers, self._dtypes)), self._context
