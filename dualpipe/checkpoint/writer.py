"""A rank's files in host memory, as they will be on the disk, and another process that writes them while training goes
on, without holding the rank's interpreter.

That process talks to its rank alone, so it needs no process group, and no port that another job might have. It dies
with its rank: what would be written afterwards, nobody could commit. Each save starts one: this file run as a script,
which imports no torch, and so takes 0.1 s and 20 MB.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from dualpipe.files import Written, write_files
from dualpipe.lifetime import die_with

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe.checkpoint.tensors import NewFile

Places = Mapping[str, tuple[int, int]]  # where the bytes of each file begin and end in the memory
_PAGE = 2**16  # bytes; a file begins at a multiple, so any dtype is aligned in it, and the next header may be longer


class HostMemory:
    """Holds the files of one save, the last that was made: one copy of what the rank writes, never two.

    is_shared: with another process, as an anonymous file that is given away by its descriptor; no limit on /dev/shm
        applies to that.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self.descriptor, self._size, self._is_shared = -1, 0, is_shared
        self._map: mmap.mmap | None = None
        self._unpin: Callable[[], None] | None = None

    def fill(self, files: Sequence[NewFile], tensors: Mapping[str, Tensor]) -> Places:
        """Make these files over what was here; done when it returns, so that the tensors may change."""
        import torch

        from dualpipe.device import pin, synchronize

        places, end = {}, 0
        for file in files:
            places[file.name] = end, end + file.size
            end += -(-file.size // _PAGE) * _PAGE
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._map is None or end > self._size:
            self.close()
            if self._is_shared:
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
                    copied.view(header.shape).copy_(tensors[name].detach(), non_blocking=True)
        if on_gpu:
            synchronize()
        return places

    def pieces(self, places: Places) -> dict[str, list[memoryview]]:
        """The bytes of each file, for `write_files`."""
        assert self._map is not None
        return {name: [memoryview(self._map)[start:stop]] for name, (start, stop) in places.items()}

    def close(self) -> None:
        """Give the memory back, once nothing uses it."""
        if self._unpin is not None:
            self._unpin()  # while it is still mapped
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._size, self._map, self._unpin = -1, 0, None, None


def write_in_process(folder: Path, places: Places, checksum: str, memory: int, timeout: float) -> dict[str, Written]:
    """Write files into a folder as `write_files` does, from the file that the descriptor `memory` names.

    The system ends the process together with the thread that calls this. Raises RuntimeError where it has failed or
    died, TimeoutError where it is not done after `timeout` seconds.
    """
    command = [sys.executable, "-P", __file__, str(os.getpid()), str(memory)]
    job = json.dumps([str(folder), places, checksum])
    try:
        done = subprocess.run(command, pass_fds=[memory], input=job, stdout=subprocess.PIPE, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the process that writes checkpoints gave no answer for {timeout:.0f} s; the next save "
                           "starts another") from None
    if done.returncode:
        raise RuntimeError(f"the process that writes checkpoints has died (exit status {done.returncode}); the next "
                           "save starts another")
    outcome = json.loads(done.stdout)
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return {name: Written(*written) for name, written in outcome.items()}


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    folder, places, checksum = json.load(sys.stdin)
    outcome: str | dict[str, Written]
    try:
        shared = int(sys.argv[2])
        memory = memoryview(mmap.mmap(shared, os.fstat(shared).st_size))
        content = {name: [memory[start:stop]] for name, (start, stop) in places.items()}
        outcome = write_files(Path(folder), content, checksum)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    json.dump(outcome, sys.stdout)
