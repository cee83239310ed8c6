"""Stand-ins for NCCL on one GPU, for bench_overlap.py: for its communication time, or for its multiprocessors.

An NCCL kernel has a block of 640 threads with 96 registers each and 82 KB of dynamic shared memory on every
multiprocessor that it holds (NVIDIA/nccl#689). `Blocks` launches the requested number of such blocks. The kernel is
written in PTX, because Triton supports neither 640 threads nor unused shared memory. The driver compiles it at load
time; without a GPU, `ptxas` from Triton's wheel does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

THREADS, REGISTERS, SHARED = 640, 96, 82 * 1024
_KEPT = 86  # values that a thread keeps while it waits; the compiler needs the rest of its registers
LIMIT_US = 2_000_000  # timeout of the blocks, so that a host that waits for the whole device does not hang


def held_ptx() -> str:
    """Return the PTX of the kernel `hold(words, limit_us)`.

    Each thread reads words from 1 on, waits until word 0 is not 0, and writes their sum. The reads are volatile, so
    the compiler does not move them behind the wait, and their values stay in registers.
    """
    kept = range(1, _KEPT + 1)
    return "\n".join([
        ".version 7.0", ".target sm_80", ".address_size 64",
        ".visible .entry hold(.param .u64 words, .param .u32 limit_us)", f".maxntid {THREADS}, 1, 1", "{",
        f".reg .pred %p; .reg .b32 %flag, %limit_us, %v<{_KEPT + 1}>; .reg .b64 %words, %start, %now, %limit;",
        "ld.param.u64 %words, [words];", "ld.param.u32 %limit_us, [limit_us];", "mul.wide.u32 %limit, %limit_us, 1000;",
        "mov.u64 %start, %globaltimer;",
        *(f"ld.volatile.global.u32 %v{i}, [%words+{4 * i}];" for i in kept),
        "wait:", "nanosleep.u32 500;", "ld.volatile.global.u32 %flag, [%words];", "setp.ne.u32 %p, %flag, 0;",
        "@%p bra done;", "mov.u64 %now, %globaltimer;", "sub.u64 %now, %now, %start;", "setp.lt.u64 %p, %now, %limit;",
        "@%p bra wait;", "done:",
        *(f"add.u32 %v{i}, %v{i}, %v{i - 1};" for i in kept[1:]),
        f"st.volatile.global.u32 [%words+{4 * (_KEPT + 1)}], %v{_KEPT};", "ret;", "}", "",
    ])


class Blocks:
    """Blocks that occupy multiprocessors as NCCL's kernels do while they wait for a peer."""

    def __init__(self, device: torch.device) -> None:
        from torch.cuda._utils import _cuda_load_module  # torch has no public way to launch a kernel given as PTX

        self._words = torch.zeros(_KEPT + 2, dtype=torch.int32, device=device)  # first: it creates the device's context
        self._kernel = _cuda_load_module(held_ptx(), ["hold"])["hold"]
        self._kernel.set_shared_memory_config(SHARED)
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def held(self, count: int, limit_us: int = LIMIT_US) -> Iterator[None]:
        """Hold `count` blocks from before the work launched in the body to after it; the body waits for its end.

        Raises RuntimeError if the blocks gave up earlier.
        """
        if not count:
            yield
            return
        self._words.zero_()
        torch.cuda.synchronize()  # all blocks start at once on a device that is idle
        arguments = [self._words, limit_us]
        self._kernel((count, 1, 1), (THREADS, 1, 1), arguments, shared_mem=SHARED, stream=self._stream)
        gone = self._stream.record_event()
        try:
            yield
            if gone.query():
                raise RuntimeError(f"{count} blocks gave up after {limit_us / 1e6:.3g} s, before the work beside them "
                                   "ended: it takes longer, or something waited for the whole device")
        finally:
            self._words[0].fill_(1)
            gone.synchronize()


def copies_to_host(device: torch.device) -> Callable[[float], None]:
    """Return a function that keeps a copy engine, and almost nothing else, busy for N seconds of the current stream."""
    source = torch.empty(2**25, dtype=torch.uint8, device=device)
    target = torch.empty(2**25, dtype=torch.uint8, pin_memory=True)

    def copy(size: int) -> None:
        while size > 0:
            target[:size].copy_(source[:size], non_blocking=True)
            size -= len(source)

    each = 2**28
    rate = each / stream_seconds(lambda: copy(each))
    return lambda seconds: copy(int(seconds * rate))


def waiting_kernel(device: torch.device) -> Callable[[float], None]:
    """Return a function that keeps one multiprocessor busy for N seconds of the current stream."""
    cycles = 10**7
    rate = cycles / stream_seconds(lambda: torch.cuda._sleep(cycles))
    return lambda seconds: torch.cuda._sleep(int(seconds * rate))


def stream_seconds(work: Callable[[], None]) -> float:
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


STAND_INS = {"copy": copies_to_host, "kernel": waiting_kernel}
