"""A pretend CUDA device on CPU: a missing wait, memory given back too early and a wait of the host are faults on it.

    with pretend_cuda() as device:       # torch.cuda is the pretend one, in this thread and in those started here
        with device.watched():           # in here the host's waits for the device are counted, in device.waits
            pipe.step(...)
    assert device.report(waits={...}) == []

Every operator runs at once on CPU memory, so values are right whatever the order; what is checked is the order that is
asked for. A stream, or a thread of the host, is a timeline of numbered accesses with a vector clock: the last one of
each timeline that comes before its own next one. Events carry the clock of the stream that recorded them to those that
wait; and what a thread gives to a stream comes after all that the thread has waited for. Nothing else orders two
accesses. Those of each storage are kept, by bytes, as long as they matter: two that overlap, one of them a write, of
which neither is in the clock of the other, are a race. All this is in device_book.py; here is what feeds it.

    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")   # main 1 writes 16 bytes              clock of main: {main: 1}
    with torch.cuda.stream(side):
        y = x + 1                       # side 1 reads them: a race, for the  clock of side: {side: 1} has no main 1
        side.wait_stream(main)          #                                     clock of side: {side: 1, main: 1}
        z = x + 1                       # side 2 reads them, after main 1     clock of side: {side: 2, main: 1}
    del x                               # free: the clock of main, whose memory it is, has no side 2

Faults, by their first word:

    race    two accesses, one of them a write, without an order: of two streams, or of a stream and the host
    free    memory given back that another stream may still use, without `record_stream`
    reuse   memory used on one stream while another may still use what was in it before: that of its own stream, which
            has to be waited for as of when the memory was made; with strict=False that of a third one, instead of free
            (FSDP2 keeps sharded gradients on its reduce stream)
    sync    a wait of the host that the test does not list, or one that it lists and that there was not
    device  an operator with tensors of both devices

A tensor made on "cuda" has CPU memory, and its storage is marked. A TorchFunctionMode answers `.device` by the mark; a
TorchDispatchMode sees the operators, those of a backward too. A custom operator is one: what runs within is its own.
Not seen: deadlocks of streams, waits within CUDA's operators, that a backward runs on the streams of its forward, which
memory the allocator hands out again, time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from device_book import CUDA, Book, Event, Timeline, the_device, where
from dualpipe.quantized import QuantizedTensor

WAITING = {"nonzero", "_local_scalar_dense", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
           "bincount", "histc"}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
LIKE = ("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")  # read no values
CPU = torch.device("cpu")


class PretendCuda(Book):
    """The device, as operators and functions of torch are told to it."""

    def ran(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Book an operator that has run."""
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in ("_unsafe_view", "set_", "resize_", "fsdp::record_grad_output_stream"):
            return  # the last one does nothing on CUDA
        operands: tuple[list[Tensor], list[Tensor]] = [], []
        for position, (argument, is_written) in enumerate(_arguments(func)):
            value = args[position] if position < len(args) else kwargs.get(argument)
            operands[is_written].extend(v for v in (value if isinstance(value, (list, tuple)) else (value,))
                                        if isinstance(v, Tensor))
        reads, writes = operands
        if name == "_to_copy" and self.of_thread.transfer is not None:
            kind, non_blocking = self.of_thread.transfer
            if kind == "device" or non_blocking:
                self.mark(out, "device" if kind == "device" else "pinned")
            return self._copied(out, reads[0], non_blocking)
        kinds = {self.kind(tensor) for tensor in (*reads, *writes)}
        if "device" not in kinds:
            if "pinned" in kinds:
                self.launch(name, reads, writes, self.of_thread.host)
        elif name == "copy_" and len(kinds) > 1:
            self._copied(writes[0], reads[0], bool(kwargs.get("non_blocking", args[2:] and args[2])))
        else:
            self._computed(name, [] if name.startswith(LIKE) else reads, writes, kwargs, out)

    def _computed(self, name: str, reads: list[Tensor], writes: list[Tensor], kwargs: dict, out: Any) -> None:
        """On the device."""
        waits = name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        on_host = [t for t in (*reads, *writes) if t.dim() and t.numel() and self.kind(t) == "host"]
        if name in INDEXING:
            waits = bool(on_host) or any(t.dtype in (torch.bool, torch.uint8) for t in reads[1:])
        elif on_host:
            self.faults[f"device: {name} with tensors of both devices at {where()}"] += 1
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and self.block(t) is None]
        for tensor in made:
            self.mark(tensor, "device")
        after = self.launch(name, reads, [*writes, *(() if name in UNWRITTEN else made)])
        if waits:
            self.host_waits(name, after)

    def _copied(self, into: Tensor, of: Tensor, non_blocking: bool) -> None:
        """Between the device and the host, which waits if it is to, or if its memory is not pinned."""
        after = self.launch("copy", [of], [into])
        if not non_blocking or "host" in (self.kind(into), self.kind(of)):
            self.host_waits("pageable copy" if non_blocking else "copy", after)

    def read_by_host(self, tensor: Tensor, name: str) -> None:
        if self.kind(tensor) == "device":
            self.host_waits(name, self.launch(name, [tensor], []))
        elif self.kind(tensor) == "pinned":
            self.launch(name, [tensor], [], self.of_thread.host)


@cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Names of an operator's arguments, and whether it writes to them."""
    return [(a.name, bool(a.alias_info and a.alias_info.is_write)) for a in func._schema.arguments]


class _Operators(TorchDispatchMode):
    """Books the operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, QuantizedTensor) for kind in types):
            return NotImplemented  # it works on its bytes, by operators that come here, also those made of others
        with self:
            if (out := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return out
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            the_device().ran(func, args, kwargs or {}, out)
        return out


class _Functions(TorchFunctionMode):
    """Answers where tensors are, and makes them where they are wanted."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name, device = dict(kwargs or {}), getattr(func, "__name__", ""), the_device()
        if name == "__get__" and getattr(func.__self__, "__name__", "") in ("device", "is_cuda", "is_cpu"):
            on_device = device.kind(args[0]) == "device"
            if func.__self__.__name__ == "device":
                return CUDA if on_device else func(*args)
            return on_device == (func.__self__.__name__ == "is_cuda")
        if name in ("to", "cuda", "cpu") and isinstance(args[0], Tensor):
            return self._to(args[0], *(args[1:] if name == "to" else (CUDA if name == "cuda" else CPU,)), **kwargs)
        if name in ("tolist", "numpy", "__array__"):
            if name != "tolist" and device.kind(args[0]) == "device":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            device.read_by_host(args[0], name)
        if name == "is_pinned":
            return device.kind(args[0]) == "pinned"
        place, wanted = kwargs.get("device"), "host"
        if place is not None and torch.device(place).type == "cuda":
            kwargs["device"], wanted = CPU, "device"
        if kwargs.pop("pin_memory", False) or name == "pin_memory":
            wanted, func = "pinned", Tensor.clone if name == "pin_memory" else func
        out = func(*args, **kwargs)
        if wanted != "host":
            self._made(name, out, wanted)
        return out

    def _made(self, name: str, out: Any, kind: str) -> None:
        device = the_device()
        with torch._C.DisableTorchFunction():
            for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor) and device.block(t) is None):
                device.mark(tensor, kind)
                if kind == "device" and name not in UNWRITTEN:
                    after = device.launch(name, [], [tensor])
                    if name in ("tensor", "as_tensor"):
                        device.host_waits("values from the host", after)

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, own = the_device(), the_device().kind(tensor)
        if args and isinstance(args[0], Tensor):
            args = (CUDA if device.kind(args[0]) == "device" else args[0].device, args[0].dtype, *args[1:])
        place, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        crosses = place is not None and place.type != "meta" and (place.type == "cuda") != (own == "device")
        if place is None or place.type == "cuda":
            place = tensor.device
        transfer = ("host" if own == "device" else "device", non_blocking) if crosses else None
        with mock.patch.object(device.of_thread, "transfer", transfer):
            return Tensor.to(tensor, place, dtype or tensor.dtype, copy=copy or crosses)


_LIBRARY = torch.library.Library("aten", "IMPL")
# Which only CUDA has.
_LIBRARY.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")
_LIBRARY.impl("addmm.dtype_out", lambda into, a, b, dtype, *, out: torch.addmm(into, a.to(dtype), b.to(dtype), out=out),
              "CPU")


def _replacements(device: PretendCuda) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, what stands for it)"""
    start = threading.Thread.start

    def start_thread(thread: threading.Thread) -> None:
        run, known = thread.run, device.of_thread.host.clock.copy()

        def run_on_device() -> None:
            with _Operators(), _Functions():
                device.of_thread.host.clock |= known
                run()

        thread.run = run_on_device
        start(thread)

    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="pretend", total_memory=2**36)
    runtime = SimpleNamespace(cudaHostRegister=device.pin, cudaHostUnregister=device.pinned.pop)
    functions = dict(
        Stream=Timeline, Event=Event, stream=device.stream, synchronize=device.synchronize, cudart=lambda: runtime,
        current_stream=device.current_stream, default_stream=lambda *_: device.default, check_error=lambda _: None,
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        set_device=lambda _: None, device_of=lambda _: nullcontext(), _sleep=lambda _: None, empty_cache=lambda: None,
        memory_allocated=lambda *_: device.allocated, max_memory_allocated=lambda *_: device.peak,
        reset_peak_memory_stats=lambda *_: setattr(device, "peak", device.allocated),
        get_rng_state=lambda *_: torch.get_rng_state(), set_rng_state=lambda state, *_: torch.set_rng_state(state),
        get_device_properties=lambda *_: properties, get_device_capability=lambda *_: (9, 0),
        get_device_name=lambda *_: properties.name, is_current_stream_capturing=lambda: False,
        set_sync_debug_mode=lambda mode: setattr(device.of_thread, "watched", mode == "error"),
    )
    yield from ((torch.cuda, name, function) for name, function in functions.items())
    yield torch.accelerator, "current_stream", device.current_stream  # which optimizers of torch 2.15 ask
    yield torch.cuda.nvtx, "range", lambda *_: nullcontext()
    yield Tensor, "record_stream", lambda tensor, stream: device.block(tensor).recorded.add(stream.number)
    yield torch.UntypedStorage, "resize_", lambda storage, nbytes: device.resize(storage, nbytes)
    yield threading.Thread, "start", start_thread


@contextmanager
def pretend_cuda(strict: bool = True) -> Iterator[PretendCuda]:
    """Have torch.cuda be a pretend device; see the top of this file."""
    device = PretendCuda(strict)
    _device_constructors()  # torch keeps which functions make tensors: its own, not those that replace them here
    with ExitStack() as stack:
        for owner, name, value in _replacements(device):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(device.pretended())
        stack.enter_context(_Operators())
        stack.enter_context(_Functions())
        yield device
