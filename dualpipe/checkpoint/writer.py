"""A rank's files in host memory, as they will be on the disk: what is written while training goes on.

Another process may do that, without holding the rank's interpreter. It talks to its rank alone, so it needs no process
group, and no port that another job might have. It dies with its rank: what would be written afterwards, nobody could
commit. Each save starts one: this file run as a script, which imports no torch, and so takes 0.1 s and 20 MB.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from dualpipe.runtime.errors import die_with
from dualpipe.runtime.files import Written, reporting, write_files

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe.checkpoint.tensors import NewFile

_PAGE = 2**16  # bytes; a file begins at a multiple, so any dtype is aligned in it, and the next header may be longer


class HostMemory:
    """Holds the files of one save, the last that was made: one copy of what the rank writes, never two.

    is_shared: with another process, as an anonymous file, given away by its descriptor; no limit on /dev/shm applies.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared, self._descriptor = is_shared, -1
        self._map: mmap.mmap | None = None
        self._places: dict[str, tuple[int, int]] = {}  # where the bytes of each file begin and end
        self._unpin: Callable[[], None] | None = None

    def fill(self, files: Sequence[NewFile], tensors: Mapping[str, Tensor]) -> None:
        """Make these files over what was here; done when it returns, so that the tensors may change."""
        import torch

        from dualpipe.runtime.device import pin, synchronize

        self._places, end = {}, 0
        for file in files:
            self._places[file.name] = end, end + file.size
            end += -(-file.size // _PAGE) * _PAGE
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._map is None or end > len(self._map):
            self.close()
            if self._is_shared:
                self._descriptor = os.memfd_create("checkpoint")
                os.ftruncate(self._descriptor, end)
            self._map = mmap.mmap(self._descriptor, end)  # of this process alone with -1
            if on_gpu:  # which then copies into it directly
                self._unpin = pin(torch.frombuffer(self._map, dtype=torch.uint8))
        for file in files:
            start, _ = self._places[file.name]
            self._map[start : start + len(file.head)] = file.head
            for name, header in file.tensors.items():
                if count := prod(header.shape):
                    copied = torch.frombuffer(self._map, dtype=header.dtype, count=count, offset=start + header.start)
                    copied.view(header.shape).copy_(tensors[name].detach(), non_blocking=True)
        if on_gpu:
            synchronize()

    def pieces(self) -> dict[str, list[memoryview]]:
        """The bytes of each file, for `write_files`."""
        assert self._map is not None, "fill makes the files"
        return {name: [memoryview(self._map)[start:stop]] for name, (start, stop) in self._places.items()}

    def write_in_process(
        self, folder: Path, checksum: str, timeout: float, wrote: Callable[[int], None] = lambda size: None
    ) -> dict[str, Written]:
        """Have another process write the files into a folder, as `write_files` does; the memory must be shared.

        The system ends that process together with the thread that calls this. wrote: called with the bytes that were
        written since the last call; what it raises ends the process.

        Raises RuntimeError where that has failed or died, TimeoutError where nothing is heard of it for `timeout`
        seconds.
        """
        command = [sys.executable, "-P", __file__, str(os.getpid()), str(self._descriptor)]
        with subprocess.Popen(command, pass_fds=[self._descriptor], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as process:
            try:
                assert process.stdin is not None and process.stdout is not None, "they are pipes"
                with suppress(BrokenPipeError), process.stdin as to:  # its exit status tells
                    to.write(json.dumps([str(folder), self._places, checksum]).encode())
                said, end = b"", process.stdout.fileno()
                while select.select([end], [], [], timeout)[0]:
                    if not (heard := os.read(end, 2**16)):
                        break
                    *sizes, said = (said + heard).split(b"\n")
                    for size in sizes:
                        wrote(int(size))
                else:
                    raise TimeoutError(f"the process that writes checkpoints gave no answer for {timeout:.0f} s; the "
                                       "next save starts another")
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise RuntimeError(f"the process that writes checkpoints has died (exit status {process.returncode}); the "
                               "next save starts another")
        outcome = json.loads(said)
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return {name: Written(*written) for name, written in outcome.items()}

    def close(self) -> None:
        """Give the memory back, once nothing uses it."""
        if self._unpin is not None:
            self._unpin()  # while it is still mapped
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._map, self._unpin = -1, None, None


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    folder, places, checksum = json.load(sys.stdin)
    outcome: str | dict[str, Written]
    try:
        descriptor = int(sys.argv[2])
        memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        content = {name: reporting([memory[start:stop]], partial(print, flush=True))
                   for name, (start, stop) in places.items()}
        outcome = write_files(Path(folder), content, checksum)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    json.dump(outcome, sys.stdout)
