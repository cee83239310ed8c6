"""Copies of a rank's tensors in host memory, which a save in the background writes while training goes on.

The memory is kept for the next save: one copy of what the rank holds, never two. To be shared with another process it
is an anonymous file, given away by its descriptor; no limit on /dev/shm applies to that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dualpipe.checkpoint.native_state import Part
from dualpipe.device import pin, synchronize

_ALIGNMENT = 64  # bytes; any dtype, and whole cache lines


class Place(NamedTuple):
    """Of a copied part: where it lies in the memory, beside what a part is."""

    start: int
    dtype: torch.dtype
    local_shape: torch.Size
    shape: torch.Size
    offsets: torch.Size


class HostMemory:
    """Holds one copy of a rank's parts, the last that was made. `shared`: with another process, by `descriptor`."""

    def __init__(self, *, shared: bool) -> None:
        self.descriptor = -1
        self.size = 0
        self._shared, self._map = shared, None
        self._unpin: Callable[[], None] | None = None

    @torch.no_grad()
    def copy(self, parts: Mapping[str, Part]) -> dict[str, Place]:
        """Copy the parts over what was here; done when it returns, so that they may change."""
        places, size = _lay_out(parts)
        on_gpu = any(part.tensor.is_cuda for part in parts.values())
        if size > self.size:
            self.close()
            if self._shared:
                self.descriptor = os.memfd_create("checkpoint")
                os.ftruncate(self.descriptor, size)
            self._map, self.size = mmap.mmap(self.descriptor, size), size  # of this process alone with -1
            if on_gpu:
                self._unpin = _pin(self._map, size)
        for name, copied in view(self._map, places).items():
            copied.tensor.copy_(parts[name].tensor, non_blocking=True)
        if on_gpu:
            synchronize()
        return places

    def parts(self, places: Mapping[str, Place]) -> dict[str, Part]:
        """The copies, sharing memory."""
        return view(self._map, places)

    def close(self) -> None:
        """Give the memory back, once nothing uses it."""
        if self._unpin is not None:
            self._unpin()  # while it is still mapped
            self._unpin = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._map, self.size = -1, None, 0


def view(memory: mmap.mmap, places: Mapping[str, Place]) -> dict[str, Part]:
    """The parts in a memory: each as a tensor whose storage is no larger than itself, which is written as it is."""
    return {name: Part(p.shape, p.offsets, _tensor(memory, p)) for name, p in places.items()}


def _tensor(memory: mmap.mmap, place: Place) -> Tensor:
    if not (count := place.local_shape.numel()):
        return torch.empty(place.local_shape, dtype=place.dtype, device="cpu")
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start).view(place.local_shape)


def _lay_out(parts: Mapping[str, Part]) -> tuple[dict[str, Place], int]:
    places, end = {}, 0
    for name, (shape, offsets, tensor) in parts.items():
        places[name] = Place(end, tensor.dtype, tensor.shape, shape, offsets)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, _ALIGNMENT)


def _pin(memory: mmap.mmap, size: int) -> Callable[[], None]:
    """Have the GPU copy into `memory` directly, until what is returned is called."""
    return pin(torch.frombuffer(memory, dtype=torch.uint8, count=size))
