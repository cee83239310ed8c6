"""A rank's files in host memory, as they will be on the disk: what is written while training goes on.

The memory is kept for the next save: one copy of what the rank writes, never two. To be shared with another process it
is an anonymous file, given away by its descriptor; no limit on /dev/shm applies to that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from dualpipe.checkpoint.tensors import NewFile
from dualpipe.checkpoint.writer import Places, pieces
from dualpipe.device import pin, synchronize

_PAGE = 2**16  # bytes; a file begins at a multiple, so any dtype is aligned in it, and the next header may be longer


class HostMemory:
    """Holds the files of one save, the last that was made. `shared`: with another process, by `descriptor`."""

    def __init__(self, *, shared: bool) -> None:
        self.descriptor = -1
        self._shared, self._size = shared, 0
        self._map: mmap.mmap | None = None
        self._unpin: Callable[[], None] | None = None

    @torch.no_grad()
    def fill(self, files: Sequence[NewFile], tensors: Mapping[str, Tensor]) -> Places:
        """Make these files over what was here; done when it returns, so that the tensors may change."""
        places, end = {}, 0
        for file in files:
            places[file.name] = end, end + file.size
            end += -(-file.size // _PAGE) * _PAGE
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._map is None or end > self._size:
            self.close()
            if self._shared:
                self.descriptor = os.memfd_create("checkpoint")
                os.ftruncate(self.descriptor, end)
            self._map, self._size = mmap.mmap(self.descriptor, end), end  # of this process alone with -1
            if on_gpu:  # which then copies into it directly
                self._unpin = pin(torch.frombuffer(self._map, dtype=torch.uint8))
        for file in files:
            start, _ = places[file.name]
            self._map[start : start + len(file.head)] = file.head
            for name, header in file.tensors.items():
                if count := prod(header.shape):
                    copied = torch.frombuffer(self._map, dtype=header.dtype, count=count, offset=start + header.start)
                    copied.view(header.shape).copy_(tensors[name], non_blocking=True)
        if on_gpu:
            synchronize()
        return places

    def pieces(self, places: Places) -> dict[str, list[memoryview]]:
        """The bytes of each file, for `write_files`."""
        assert self._map is not None
        return pieces(self._map, places)

    def close(self) -> None:
        """Give the memory back, once nothing uses it."""
        if self._unpin is not None:
            self._unpin()  # while it is still mapped
            self._unpin = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._map, self._size = -1, None, 0
