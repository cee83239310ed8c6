"""CUDA streams, events, memory, random numbers and peak speed: every call of torch.cuda outside kernels and benchmarks.

Work on one stream runs in order; events order the work of different streams. On the CPU, which has one order of work,
streams and events are None, and waiting for None does nothing.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Stream = torch.cuda.Stream
Event = torch.cuda.Event

_SNAPSHOT_ENTRIES = 200_000  # latest allocations and frees in a memory snapshot; a step makes tens of thousands
_FLIGHT_RECORDER_ENTRIES = 100  # latest entries of torch's flight recorder that `flight_recorder` returns
_MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

# 10^12 operations per second of dense bf16 GEMMs, by NVIDIA's data sheets (half of their values "with sparsity").
# The first entry whose words are all in the device's name counts.
_PEAK_TFLOPS = {
    ("GB300",): 2500, ("GB200",): 2500, ("B300",): 2250, ("B200",): 2250,
    ("GH200",): 989, ("H200", "NVL"): 835, ("H200",): 989, ("H20",): 148,
    ("H100", "PCIe"): 756, ("H100", "NVL"): 835, ("H100",): 989, ("H800", "PCIe"): 756, ("H800",): 989,
    ("A100",): 312, ("A800",): 312, ("L40S",): 362, ("A10",): 125, ("L4",): 121,
}


def count() -> int:
    """Return the number of CUDA devices that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current() -> torch.device:
    """Return the current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def select(device: torch.device) -> None:
    """Make a CUDA device the current one; do nothing for the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


# -- streams and events


def stream(device: torch.device) -> Stream | None:
    """Return the current stream of a device; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def new_stream(device: torch.device) -> Stream | None:
    """Return a new side stream, whose kernels start before those of the compute stream; None on the CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def record(device: torch.device, *, timed: bool = False) -> Event | None:
    """Record an event on the current stream and return it; None on the CPU. timed: for `Event.elapsed_time`."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(device)
    return stream.record_event(torch.cuda.Event(enable_timing=True)) if timed else stream.record_event()


def wait(event: Event | None, device: torch.device) -> None:
    """Make the current stream of `device` wait for an event. The host does not wait."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


@contextmanager
def use_stream(stream: Stream | None, after: Event | None, *reads: Tensor) -> Iterator[None]:
    """Run the work inside of a `with` on `stream`, after the event `after` if there is one.

    If `stream` is None, as on the CPU, the work runs on the current stream. reads: tensors of other streams that the
    work reads; they are written before `after`.
    """
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        wait(after, stream.device)  # orders: the writes of the tensors, then their readers on `stream`
        record_stream(*reads)
        yield


def record_stream(*tensors: Tensor) -> None:
    """Keep the memory of tensors of another stream from being reused before the current stream has used it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def to_host(tensor: Tensor, *, timed: bool = False) -> tuple[Tensor, Event | None]:
    """Start copying a tensor into pinned host memory; return the copy, and the event to wait for before it is read.

    A CPU tensor is returned as it is, with None. timed: see `record`.
    """
    if not tensor.is_cuda:
        return tensor, None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy, record(tensor.device, timed=timed)


def synchronize(device: torch.device | None = None) -> None:
    """Make the host wait for all work of a CUDA device (default: the current one)."""
    torch.cuda.synchronize(device)


def min_seconds(run: Callable[[], object], device: torch.device, *, num_calls: int) -> float:
    """Return the shortest time of `num_calls` calls in seconds, each measured until the device has finished.

    One more call comes first. It is not timed, because it may compile and load kernels.
    """
    times = []
    for _ in range(1 + num_calls):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


# -- memory


def memory_in_use(device: torch.device) -> int:
    """Return the bytes of tensors on a CUDA device; on the CPU the resident bytes of the process.

    Where /proc is missing, the peak of the resident bytes.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of tensors on a CUDA device."""
    return torch.cuda.max_memory_allocated(device)


def record_memory() -> None:
    """Start recording allocations and frees on the current CUDA device."""
    torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)


def dump_memory(path: Path) -> None:
    """Write the recorded allocations to a file for pytorch.org/memory_viz, and stop recording."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def pin(memory: Tensor) -> Callable[[], None]:
    """Page-lock host memory, so that devices copy into it directly; return a function that unlocks it."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    address = memory.data_ptr()
    return lambda: runtime.cudaHostUnregister(address)


# -- reproducible numbers


class RandomState(NamedTuple):
    """State of torch's random number generators: of the CPU, and of a CUDA device if one is used."""

    cpu: Tensor
    cuda: Tensor | None

    @staticmethod
    def capture(device: torch.device | None = None) -> RandomState:
        """Return the current state.

        device: a CUDA device, or the CPU for its state alone; None: the current CUDA device, if one has been used.
        """
        uses_cuda = torch.cuda.is_initialized() if device is None else device.type == "cuda"
        cuda = torch.cuda.get_rng_state(device or "cuda") if uses_cuda else None
        return RandomState(torch.get_rng_state(), cuda)

    def restore(self, device: torch.device | None = None) -> None:
        """Set the generators to this state; that of a CUDA device if there is one. device: see `capture`."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda, device or "cuda")


@contextmanager
def deterministic(is_enabled: bool = True) -> Iterator[None]:
    """Make operators give the same bits in every run, inside of a `with`; a no-op if not `is_enabled`.

    torch raises RuntimeError for an operator that cannot. Warnings (`warn_only`) would not do: with them torch leaves
    the backward of flash attention as it is, whose atomic additions come in any order.

    Enter it before CUDA and NCCL are used, as their libraries read the environment once. torch refuses cuBLAS's GEMMs
    without a fixed workspace. NCCL must not add in the switch (NVLS), where the order of a sum is not documented.
    Variables that the user has set are not changed. Those that are set here stay set after the `with`.
    """
    if not is_enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)


# -- devices and their environment


def model_name(device: torch.device) -> str:
    """Return the model of a CUDA device, such as "NVIDIA H200"; "" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def peak_tflops(model: str) -> float | None:
    """Return 10^12 operations per second of dense bf16 GEMMs on a GPU; None for an unknown one and for a MIG slice.

    model: the device's name, such as "NVIDIA H100 80GB HBM3".
    """
    model_words = set(model.replace("-", " ").split())
    if "MIG" in model_words:
        return None
    for peak_words, peak in _PEAK_TFLOPS.items():
        if model_words.issuperset(peak_words):
            return float(peak)
    return None


def properties(index: int) -> torch.cuda._CudaDeviceProperties:
    """Return torch's properties of a CUDA device: name, uuid, total_memory, major, minor and others."""
    return torch.cuda.get_device_properties(index)


def can_access_peer(index: int, peer: int) -> bool:
    """Return True if a device can access the memory of another one."""
    return torch.cuda.can_device_access_peer(index, peer)


def set_environment() -> None:
    """Set the variables that CUDA and torch's allocator read once, when they start. Values of the user stay.

    A rank has some 20 streams. CUDA has 8 hardware queues by default, and of two streams that share a queue one waits
    for the other, so the number is raised to 32.

    Loading a kernel at its first launch, or freeing memory, waits for all work on the device. That work may be a
    message whose sender waits for this rank: a deadlock. Therefore torch's kernels are loaded at the start (Triton's
    are not), and the allocator's memory grows in place.
    """
    os.environ.setdefault(_MAX_CONNECTIONS, "32")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torch's watchdog cleans up after an aborted communicator but does not end the process: the rank raises an error.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that torch's flight recorder keeps


def single_queue_problem() -> str | None:
    """Return the text of a warning if all streams share one hardware queue; None otherwise."""
    if os.environ.get(_MAX_CONNECTIONS) != "1":
        return None
    return (f"{_MAX_CONNECTIONS}=1: all streams share one queue, so that nothing overlaps, and a receive can hold up "
            "the work that its sender waits for; set it to 32")


def flight_recorder() -> list[dict[str, Any]]:
    """Return the latest collectives and messages in torch's flight recorder; none if it is off.

    The keys are `group`, `number` (the sequence number in the group), `name`, `sizes` of the inputs, `state` and `p2p`.
    """
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # in builds with NCCL; in builds with gloo
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries += json.loads(dump(True, False)).get("entries", ())
    return [
        {"group": " ".join(entry["process_group"]), "number": entry["collective_seq_id"],
         "name": entry["profiling_name"], "sizes": str(entry["input_sizes"]), "state": entry["state"],
         "p2p": entry["is_p2p"]}
        for entry in entries[-_FLIGHT_RECORDER_ENTRIES:]
    ]


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL library that torch was built with."""
    return torch.cuda.nccl.version()


def annotation(device: torch.device) -> Callable[[str], AbstractContextManager] | None:
    """Return the function that names a range of work in a profile of a CUDA device; None on the CPU."""
    return torch.cuda.nvtx.range if device.type == "cuda" else None
