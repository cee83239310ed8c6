"""torch.distributed over gloo in the order of NCCL, for tensors of a pretend device; ranks are processes.

    with pretend_cuda(strict=False) as device, pretend_nccl(device):
        mesh = build_mesh(2, 1, 2, torch.device("cuda", 0))

An operation runs on a stream of its process group, after what the current stream was given before; one that blocks (not
async_op) on the current stream itself. `Work.wait` makes the current stream wait, not the host; until then the work
keeps its tensors alive, as ProcessGroupNCCL does. Backends are said to be gloo for the CPU and NCCL for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from pretend_cuda import Event, PretendCuda, Stream

# Of the methods of a process group, those that torch has: which arguments are written, which are read.
OPERATIONS = {
    "send": ((), (0,)), "recv": ((0,), ()), "allreduce": ((0,), (0,)), "broadcast": ((0,), (0,)), "reduce": ((0,), (0,)),
    "allgather": ((0,), (1,)), "reduce_scatter": ((0,), (1,)), "alltoall": ((0,), (1,)),
    "all_gather_single": ((0,), (1,)), "reduce_scatter_single": ((0,), (1,)), "all_to_all_single": ((0,), (1,)),
    "_allgather_base": ((0,), (1,)), "_reduce_scatter_base": ((0,), (1,)), "alltoall_base": ((0,), (1,)),
}  # the last three until torch 2.12


class Work(torch._C._distributed_c10d.Work):  # FSDP2 asks for the type
    def __init__(self, device: PretendCuda, inner: dist.Work, done: Event, tensors: list[Tensor]) -> None:
        super().__init__()
        self._device, self._inner, self._done, self._tensors = device, inner, done, tensors

    def wait(self, timeout: Any = None) -> bool:
        if self._tensors:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._inner.wait()  # gloo's; for the values
            self._tensors = []
        self._device.current_stream().wait_event(self._done)
        return True


@contextmanager
def pretend_nccl(device: PretendCuda) -> Iterator[None]:
    """Have process groups carry tensors of `device` as NCCL would."""
    streams: dict[ProcessGroup, Stream] = {}
    works: list[Work] = []  # a work that nobody waits for keeps its tensors

    def ordered(name: str, real: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def call(group: ProcessGroup, *args: Any) -> dist.Work:
            written, read = ([t for i in places for t in tree_leaves(args[i])] for places in OPERATIONS[name])
            if not any(map(device.holds, (*written, *read))):
                return real(group, *args)
            stream = device.current_stream()
            if getattr(args[-1], "asyncOp", True):
                stream = streams.setdefault(group, Stream()) if group not in streams else streams[group]
                stream.wait_stream(device.current_stream())
            device.launch(name, read, written, stream.line)
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                inner = real(group, *args)
            works.append(Work(device, inner, stream.record_event(), [*written, *read]))
            return works[-1]

        return call

    def new_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return real_new_group(*args, backend="gloo" if backend == "nccl" else backend, **options)

    real_new_group = dist.new_group
    with ExitStack() as stack:
        for name in OPERATIONS:
            if (real := getattr(ProcessGroup, name, None)) is not None:
                stack.enter_context(mock.patch.object(ProcessGroup, name, ordered(name, real)))
        stack.enter_context(mock.patch.object(dist, "new_group", new_group))
        stack.enter_context(mock.patch.object(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl"))
        yield
