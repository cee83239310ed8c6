"""The files of a rank in host memory, in their final form, written to the disk while training continues.

A separate process can write them without holding the interpreter lock of the rank. It communicates with its rank only,
so it needs no process group and no port that another job might use. It ends with its rank: nobody could commit what it
would write afterwards. Each save starts one process: this file run as a script, which imports no torch, and so takes
0.1 s and 20 MB.
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
from typing import TYPE_CHECKING

from dualpipe.runtime.errors import die_with
from dualpipe.runtime.files import Written, report_writes
from dualpipe.runtime.storage import Location, as_location, write_files

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe.checkpoint.tensors import NewFile

# Files start at multiples of this many bytes, which aligns any dtype and leaves room for a longer header next time.
_FILE_ALIGNMENT = 2**16


class HostMemory:
    """Host memory for the files of the most recent save. Holds one copy of the data, never two.

    Args:
        is_shared: share the memory with another process, as an anonymous file that is passed by its descriptor. The
            size limit of /dev/shm does not apply.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self._spans: dict[str, tuple[int, int]] = {}  # start and end of each file, in bytes
        self._unpin: Callable[[], None] | None = None

    def fill(self, files: Sequence[NewFile], tensors: Mapping[str, Tensor]) -> None:
        """Replace the contents by these files. On return, all copies are done and the tensors may change.

        Args:
            files: from `lay_out`.
            tensors: values by name, on any device.
        """
        import torch

        from dualpipe.runtime.device import synchronize

        self._spans = {}
        end = 0
        for file in files:
            self._spans[file.name] = (end, end + file.size)
            end += -(-file.size // _FILE_ALIGNMENT) * _FILE_ALIGNMENT
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._map is None or end > len(self._map):
            self._allocate(end, pin_memory=on_gpu)
        assert self._map is not None, "memory is allocated"
        for file in files:
            start, _ = self._spans[file.name]
            self._map[start : start + len(file.head)] = file.head
            for name, header in file.tensors.items():
                count = prod(header.shape)
                if count:
                    target = torch.frombuffer(self._map, dtype=header.dtype, count=count, offset=start + header.start)
                    target.view(header.shape).copy_(tensors[name].detach(), non_blocking=True)
        if on_gpu:
            synchronize()

    def _allocate(self, size: int, *, pin_memory: bool) -> None:
        """Replace the memory by `size` bytes. The GPU copies to pinned memory directly."""
        self.close()
        if self._is_shared:
            self._descriptor = os.memfd_create("checkpoint")
            os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)  # descriptor -1: private to this process
        if pin_memory:
            import torch

            from dualpipe.runtime.device import pin

            self._unpin = pin(torch.frombuffer(self._map, dtype=torch.uint8))

    def pieces(self) -> dict[str, list[memoryview]]:
        """Return the bytes of each file, for `write_files`."""
        assert self._map is not None, "fill makes the files"
        return {name: [memoryview(self._map)[start:end]] for name, (start, end) in self._spans.items()}

    def write_in_process(
        self, folder: Location, checksum: str, timeout: float, report: Callable[[int], None] = lambda size: None
    ) -> dict[str, Written]:
        """Have another process write the files to a folder, like `write_files`. The memory must be shared.

        The system ends that process together with the thread that calls this method.

        Args:
            folder: receives the files.
            checksum: algorithm, one of `CHECKSUMS`, or "".
            timeout: seconds to wait for progress.
            report: called with the number of bytes written since the last call. If it raises, the process is killed.

        Raises:
            RuntimeError: the process failed or died.
            TimeoutError: it made no progress for `timeout` seconds.
        """
        command = [sys.executable, "-P", __file__, str(os.getpid()), str(self._descriptor)]
        with subprocess.Popen(command, pass_fds=[self._descriptor], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE) as process:
            try:
                assert process.stdin is not None, "it is a pipe"
                with suppress(BrokenPipeError), process.stdin as request:  # the exit status says why the pipe broke
                    request.write(json.dumps([str(folder), self._spans, checksum]).encode())
                answer = _read_answer(process, timeout, report)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise RuntimeError(f"the process that writes checkpoints has died (exit status {process.returncode}); the "
                               "next save starts another")
        outcome = json.loads(answer)
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        return {name: Written(*written) for name, written in outcome.items()}

    def close(self) -> None:
        """Release the memory. Nothing may use it any more."""
        if self._unpin is not None:
            self._unpin()  # while the memory is still mapped
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._map = None
        self._unpin = None


def _read_answer(process: subprocess.Popen[bytes], timeout: float, report: Callable[[int], None]) -> bytes:
    """Return the last line of the process's output. Each line before it is a number of bytes that were written."""
    assert process.stdout is not None, "it is a pipe"
    output = process.stdout.fileno()
    line = b""
    while select.select([output], [], [], timeout)[0]:
        received = os.read(output, 2**16)
        if not received:
            return line
        *sizes, line = (line + received).split(b"\n")
        for size in sizes:
            report(int(size))
    raise TimeoutError(f"the process that writes checkpoints gave no answer for {timeout:.0f} s; the next save starts "
                       "another")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    folder, spans, checksum = json.load(sys.stdin)
    outcome: str | dict[str, Written]
    try:
        descriptor = int(sys.argv[2])
        memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        report = partial(print, flush=True)
        pieces = {name: report_writes([memory[start:end]], report) for name, (start, end) in spans.items()}
        outcome = write_files(as_location(folder), pieces, checksum)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    json.dump(outcome, sys.stdout)
