"""Moments of AdamW in pinned host memory, brought to the device for the update, bucket by bucket.

    in stream      load 0 | load 1 | .......| load 2 | .......| load 3
    computing              | update 0 | ......| update 1 | ......| update 2
    out stream                        | store 0 |       | store 1 |

Two buffers on the device hold bucket k and bucket k + 1: while one is updated, the other is loaded or stored. Links to
the host carry both directions at once, so loads and stores have a stream each. On the CPU there are no streams, and the
same code makes plain copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualpipe.nn.accumulators import local
from dualpipe.runtime import device as devices

BUCKET_BYTES = 2**27  # of the moments in a bucket, unless those of one parameter are more
ALIGNMENT = 128  # bytes; every moment starts at a multiple


class MomentPlace(NamedTuple):
    """Place of a moment in the bytes of its bucket, with the strides of the parameter."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the moment."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return the moment in the bytes of a bucket, sharing memory."""
        values = memory[self.start : self.start + self.nbytes].view(self.dtype)
        return values.as_strided(self.shape, self.strides)


class Bucket:
    """Moments of some parameters.

    Attributes:
        parameters: the parameters that the optimizer updates.
        places: places of the moments of each parameter.
        memory: the moments, as bytes in host memory; pinned if the parameters are on a device.
        stored: recorded after the last store into `memory`; None before the first one, and on the CPU.
    """

    def __init__(self, parameters: Sequence[Tensor], places: Sequence[tuple[MomentPlace, ...]], nbytes: int) -> None:
        self.parameters = parameters
        self.places = places
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        self.stored: devices.Event | None = None
        if nbytes and parameters[0].device.type == "cuda":
            # Registered, because torch's own allocator of pinned memory rounds up to a power of two.
            weakref.finalize(self.memory, devices.pin(self.memory)).atexit = False


class HostMoments:
    """Moments of parameters in host memory. Begin as zeros.

    Args:
        parameters: that an optimizer updates, on one device.
        dtype: of the moments. None: that of each parameter.
        num_moments: of each parameter.
    """

    def __init__(self, parameters: Iterable[Tensor], *, dtype: torch.dtype | None, num_moments: int) -> None:
        self.buckets = list(_make_buckets(parameters, dtype, num_moments))
        self._device = self.buckets[0].parameters[0].device if self.buckets else torch.device("cpu")
        self._in_stream = devices.new_stream(self._device)
        self._out_stream = devices.new_stream(self._device)

    def moments(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield each parameter with its moments in host memory, distributed like it. Call `wait` before reading."""
        for bucket in self.buckets:
            for parameter, places in zip(bucket.parameters, bucket.places):
                yield parameter, [_distributed_as(parameter, place.view(bucket.memory)) for place in places]

    def wait(self) -> None:
        """Make the host wait until all updates are stored, before it reads or writes the moments."""
        for bucket in self.buckets:
            if bucket.stored is not None:
                bucket.stored.synchronize()  # orders: the store of the bucket, then the host
                bucket.stored = None

    def update(self, run: Callable[[Tensor, list[Tensor]], None]) -> None:
        """Call `run(parameter, moments)` for each parameter, with its moments on the device, as plain tensors.

        The host does not wait: the next `update` comes after the stores on the device; before the host reads or writes
        the moments, call `wait`.
        """
        if not self.buckets:
            return
        size = max(bucket.memory.numel() for bucket in self.buckets)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in self.buckets[:2]]
        # Per buffer, the event after which it may be overwritten: at first, the end of earlier uses of its memory.
        free = [devices.record(self._device) for _ in buffers]
        loaded = [self._load(bucket, buffer, event) for bucket, buffer, event in zip(self.buckets, buffers, free)]
        for number, bucket in enumerate(self.buckets):
            slot = number % 2
            devices.wait(loaded[slot], self._device)  # orders: the load, then the update
            for parameter, places in zip(bucket.parameters, bucket.places):
                run(parameter, [place.view(buffers[slot]) for place in places])
            bucket.stored = self._store(bucket, buffers[slot])
            if number + 2 < len(self.buckets):
                loaded[slot] = self._load(self.buckets[number + 2], buffers[slot], bucket.stored)

    def _load(self, bucket: Bucket, buffer: Tensor, free: devices.Event | None) -> devices.Event | None:
        """Start copying a bucket to a buffer that may be overwritten after `free`; return the event after the copy."""
        with devices.use_stream(self._in_stream, free, buffer):
            devices.wait(bucket.stored, self._device)  # orders: the store of the last step, then this load
            buffer[: bucket.memory.numel()].copy_(bucket.memory, non_blocking=True)
            return devices.record(self._device)

    def _store(self, bucket: Bucket, buffer: Tensor) -> devices.Event | None:
        """Start copying an updated bucket back; return the event after the copy."""
        updated = devices.record(self._device)  # orders: the update, then the store
        with devices.use_stream(self._out_stream, updated, buffer):
            bucket.memory.copy_(buffer[: bucket.memory.numel()], non_blocking=True)
            return devices.record(self._device)


def _make_buckets(parameters: Iterable[Tensor], dtype: torch.dtype | None, num_moments: int) -> Iterator[Bucket]:
    """Yield buckets of parameters in their order, each of at most `BUCKET_BYTES` or one parameter."""
    members: list[Tensor] = []
    places: list[tuple[MomentPlace, ...]] = []
    end = 0
    for parameter in parameters:
        like = torch.empty_like(local(parameter.detach()), dtype=dtype, device="meta")  # the strides of its moments
        nbytes = _padded(like.nbytes)
        if members and end + num_moments * nbytes > BUCKET_BYTES:
            yield Bucket(members, places, end)
            members = []
            places = []
            end = 0
        starts = range(end, end + num_moments * nbytes, nbytes) if nbytes else [end] * num_moments
        places.append(tuple(MomentPlace(start, like.dtype, tuple(like.shape), like.stride()) for start in starts))
        members.append(parameter)
        end += num_moments * nbytes
    if members:
        yield Bucket(members, places, end)


def _distributed_as(parameter: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor in host memory that is distributed like a parameter. shard: the part of this rank."""
    if not isinstance(parameter, DTensor):
        return shard
    like = cast(DTensor, torch.empty_like(parameter, dtype=shard.dtype))
    return DTensor(shard, like._spec, requires_grad=False)  # `from_local` would copy it to the device of the mesh


def buffer_bytes(moments: int, largest: int) -> int:
    """Return the bytes of the buffers on the device. moments: all bytes; largest: of one parameter's moments."""
    bucket = max(BUCKET_BYTES, largest)
    return 2 * bucket if moments > bucket else moments


def _padded(nbytes: int) -> int:
    """Return the bytes that a moment takes in a bucket."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
