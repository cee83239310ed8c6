"""All that the library asks of CUDA devices: streams, events, memory, random numbers.

Nothing else calls torch.cuda, kernels and benchmarks apart. Work that is given to a stream runs in order; what another
stream makes or reads is ordered by events. On the CPU, which has one order of work, there are neither: streams and
events are None, and to wait for None is nothing.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Stream = torch.cuda.Stream
Event = torch.cuda.Event

_ALLOCATIONS = 200_000  # of a memory snapshot: the last ones, of which a step has some ten thousands
_FLIGHT = 100  # entries of torch's flight recorder that are shown
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def count() -> int:
    """The CUDA devices that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current() -> torch.device:
    """The CUDA device on which this process works."""
    return torch.device("cuda", torch.cuda.current_device())


def select(device: torch.device) -> None:
    """Work on this device from now on, where it is a CUDA device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def new_stream(device: torch.device) -> Stream | None:
    """A stream beside the computing one, whose kernels start before those that wait there; None on the CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def record(device: torch.device, *, timed: bool = False) -> Event | None:
    """An event after all that the current stream has been given; None on the CPU. timed: its `elapsed_time` works."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return stream.record_event(torch.cuda.Event(enable_timing=True)) if timed else stream.record_event()


def wait(event: Event | None, device: torch.device) -> None:
    """Have the current stream of `device`, not the host, wait for an event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


@contextmanager
def beside(stream: Stream | None, after: Event | None, *reads: Tensor) -> Iterator[None]:
    """Give to `stream` what reads the tensors `reads`, which exist after `after`."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        wait(after, stream.device)  # orders: the making of the tensors, then what reads them here
        keep(*reads)
        yield


def keep(*tensors: Tensor) -> None:
    """Have the memory of these, made on another stream, not given away before the current stream has used it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def to_host(tensor: Tensor, *, timed: bool = False) -> tuple[Tensor, Event | None]:
    """Begin to copy a tensor to the host, into pinned memory: the copy, and the event to wait for before it is read,
    `timed` as in `record`. A tensor of the CPU is given back as it is, with None."""
    if not tensor.is_cuda:
        return tensor, None
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copied.copy_(tensor, non_blocking=True)
    return copied, record(tensor.device, timed=timed)


def synchronize(device: torch.device | None = None) -> None:
    """Have the host wait for all that a CUDA device has been given."""
    torch.cuda.synchronize(device)


def stream(device: torch.device) -> Stream | None:
    """The current stream, to which work is given; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def memory_in_use(device: torch.device) -> int:
    """Bytes of tensors on a CUDA device; on the CPU what the process has resident (its peak where /proc is missing)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def record_memory() -> None:
    """Record from now on what allocates and frees the current CUDA device's memory."""
    torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)


def dump_memory(path: Path) -> None:
    """Write what was recorded as a file for pytorch.org/memory_viz, and end recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def peak_memory(device: torch.device) -> int:
    """Bytes of tensors that were held on a CUDA device at once, at most."""
    return torch.cuda.max_memory_allocated(device)


def pin(memory: Tensor) -> Callable[[], None]:
    """Have devices copy into host memory directly, until what is returned is called."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    address = memory.data_ptr()
    return lambda: runtime.cudaHostUnregister(address)


class RandomState(NamedTuple):
    """States of torch's generators: that of the CPU, and of a CUDA device where one is used."""

    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def capture(device: torch.device | None = None) -> RandomState:
        """Return the states now. device: a CUDA device, or the CPU for its state alone; None: the current CUDA device,
        if one has been used."""
        uses_cuda = torch.cuda.is_initialized() if device is None else device.type == "cuda"
        return RandomState(torch.get_rng_state(), torch.cuda.get_rng_state(device or "cuda") if uses_cuda else None)

    def restore(self, device: torch.device | None = None) -> None:
        """Continue from these states; from that of a CUDA device where there is one."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda, device or "cuda")


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """Have operators give the same bits each time, where `wanted`; one of torch's that cannot raises RuntimeError.

    Warnings would not do: with them torch leaves the backward of flash attention as it is, whose atomic additions come
    in any order. To be entered before CUDA and NCCL are used, as their libraries read the environment once: torch
    refuses cuBLAS's products without a fixed workspace; and NCCL is not to add in the switch (NVLS), where the order of
    a sum is not said. What is set there already stays, and what is set here too.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def model_name(device: torch.device) -> str:
    """Such as "NVIDIA H200"; "" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def properties(index: int) -> torch.cuda._CudaDeviceProperties:
    """Name, uuid, total_memory, major and minor of a CUDA device, as torch has them."""
    return torch.cuda.get_device_properties(index)


def reaches(first: int, second: int) -> bool:
    """Return True if a device can read another one's memory."""
    return torch.cuda.can_device_access_peer(first, second)


def set_environment() -> None:
    """Set what CUDA and torch's allocator read once, when they start, unless the user has.

    Hardware queues: a rank has some 20 streams, and of two that share a queue (8 by default) one waits for the other.
    torch's kernels are loaded at the start (Triton's are not), and memory grows in place: to load one at its first
    launch, or to free memory, waits for all that the device does, also for a message whose sender waits for this rank.
    """
    os.environ.setdefault(_CONNECTIONS, "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Of torch's watchdog: to clean up after a communicator that was aborted, not to end the process, whose ranks raise.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that torch's flight recorder keeps


def flight_recorder() -> list[dict[str, Any]]:
    """The last collectives and messages that torch's flight recorder has seen here, none where it is off: `group`,
    `number` in it, `name`, `sizes` of the inputs, `state`."""
    from torch._C import _distributed_c10d as c10d

    found: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # the former in builds with NCCL, the latter gloo's
        if (dump := getattr(c10d, name, None)) is not None:
            found += json.loads(dump(True, False)).get("entries", ())
    return [
        {"group": " ".join(each["process_group"]), "number": each["collective_seq_id"], "name": each["profiling_name"],
         "sizes": str(each["input_sizes"]), "state": each["state"], "p2p": each["is_p2p"]}
        for each in found[-_FLIGHT:]
    ]


def one_queue() -> str | None:
    """Return the problem where all streams share one hardware queue; None where they do not."""
    if os.environ.get(_CONNECTIONS) != "1":
        return None
    return (f"{_CONNECTIONS}=1: all streams share one queue, so that nothing overlaps, and a message that is waited "
            "for can hold up the work that it waits for; set it to 32")


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL library that torch was built with."""
    return torch.cuda.nccl.version()


def annotation(device: torch.device) -> Callable[[str], AbstractContextManager] | None:
    """Return the function that names a range of work in a profile of a CUDA device; None on the CPU."""
    return torch.cuda.nvtx.range if device.type == "cuda" else None
