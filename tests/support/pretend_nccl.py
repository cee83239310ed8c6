"""torch.distributed over gloo in the order of NCCL, for tensors of a pretend device; ranks are processes.

    with pretend_cuda(strict=False) as device, pretend_nccl(device):
        mesh = build_mesh(2, 1, 2, torch.device("cuda", 0))

An operation runs on a stream of its process group, after the work that the current stream was given before. One that
blocks (not async_op) runs on the current stream itself. `Work.wait` makes the current stream wait, not the host; until
then the work keeps its tensors, as ProcessGroupNCCL does. Backends report gloo for the CPU and NCCL for the device.
The context manager yields the options that each group was created with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from device_book import Event, Timeline
from device_waits import Meet, Trace
from pretend_cuda import PretendCuda

OPERATIONS = (  # outputs first, then inputs, if they are other tensors
    "send", "recv", "allreduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single",
    "all_to_all_single", "_allgather_base", "_reduce_scatter_base", "alltoall_base",  # the last three until torch 2.12
)


class HostWork(torch._C._distributed_c10d.Work):
    """The work of a message between hosts."""

    def __init__(self, trace: Trace, inner: dist.Work, meet: Meet) -> None:
        super().__init__()
        self._trace, self._inner, self._meet = trace, inner, meet

    def wait(self, timeout: Any = None) -> bool:
        if timeout is not None:  # the message may never come: the other rank need not meet it
            return self._inner.wait(timeout)
        self._trace.wait_for(self._meet)
        return self._inner.wait()


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


class Options:
    """Stand-in for ProcessGroupNCCL.Options. max_ctas: 0 if it was not set."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)
        self.config = SimpleNamespace(max_ctas=0)


@contextmanager
def pretend_nccl(device: PretendCuda) -> Iterator[dict[ProcessGroup, Options]]:
    """Carry tensors of `device` in process groups as NCCL would."""
    made: dict[ProcessGroup, Options] = {}
    streams: defaultdict[ProcessGroup, Timeline] = defaultdict(Timeline)
    works: list[Work] = []  # a work that nothing waits for keeps its tensors

    def ordered(name: str, real: Callable[..., dist.Work], group: ProcessGroup, *args: Any) -> dist.Work:
        first, second = ([t for t in tree_leaves(arg) if isinstance(t, Tensor)] for arg in args[:2])
        name_of_group = *dist.get_process_group_ranks(group), group.group_name
        if all(device.kind(tensor) != "device" for tensor in first + second):
            inner = real(group, *args)
            if name not in ("send", "recv"):
                return inner
            _, peer, tag = args
            ends = (group.rank(), peer) if name == "send" else (peer, group.rank())
            trace = device.of_thread.trace
            return HostWork(trace, inner, trace.meet((name_of_group, *ends, tag), name))
        stream = current = device.current_stream()
        if getattr(args[-1], "asyncOp", True):
            stream = streams[group]
            stream.wait_stream(current)
        communicator = name_of_group, group.size()
        device.launch(name, second or first, [] if name == "send" else first, stream, communicator)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            inner = real(group, *args)
        works.append(Work(device, inner, stream.record_event(), first + second))
        return works[-1]

    def new_group(*args: Any, backend: str | None = None, pg_options: Any = None, **options: Any) -> Any:
        group = real_new_group(*args, backend="gloo" if backend == "nccl" else backend, **options)
        if pg_options is not None:
            assert not any(pg_options is other for other in made.values()), "torch writes into a group's options"
            made[group] = pg_options
        return group

    real_new_group = dist.new_group
    with ExitStack() as stack:
        for name in OPERATIONS:
            if (real := getattr(ProcessGroup, name, None)) is not None:
                method = partial(ordered, name, real)
                stack.enter_context(mock.patch.object(ProcessGroup, name, lambda *args, call=method: call(*args)))
        stack.enter_context(mock.patch.object(dist, "new_group", new_group))
        nccl = SimpleNamespace(Options=Options)
        stack.enter_context(mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True))
        stack.enter_context(mock.patch.object(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl"))
        yield made
