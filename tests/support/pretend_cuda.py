"""A pretend CUDA device on CPU: a missing wait, memory given back too early and a wait of the host are faults on it.

    with pretend_cuda() as device:       # torch.cuda is the pretend one, in this thread and in those started here
        with device.watched():           # within it, the host's waits for the device are counted in device.waits
            pipe.step(...)
    assert device.report(waits={...}) == []

Every operator runs at once on CPU memory, so values are right whatever the order; what is checked is the order that the
program asked for. A stream, and each thread of the host, is a timeline of numbered accesses and has a vector clock: the
last number of each other timeline that comes before its own next one. Events carry clocks; recording one, waiting for
one, and launching (after what the launching thread knows) are all that orders. Of each storage the accesses are kept,
by bytes, as long as they matter: two that overlap, one of them a write, of which neither knows the other, are a race.

    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")       # main 1 writes x[0:16]; main knows {main: 1}
    with torch.cuda.stream(side):
        y = x + 1                           # side 1 reads x[0:16]; side knows {side: 1}, nothing of main: a race
        side.wait_stream(main)              # side knows {side: 1, main: 1}
        z = x + 1                           # side 2 reads x[0:16], after main 1
    del x                                   # main may hand this memory out again; it knows nothing of side 2: free

Faults, by their first word:

    race    two accesses, one of them a write, without an order: of two streams, or of a stream and the host
    free    memory given back that another stream may still use, without `record_stream`
    reuse   with strict=False instead of free, and only where something made since on the stream that the memory belongs
            to is accessed before the other stream is through (FSDP2 keeps sharded gradients on its reduce stream)
    sync    a wait of the host that the test does not list, or one that it lists and that was not found
    device  an operator with tensors of both devices

A tensor made on "cuda" has CPU memory, and its storage is marked. A TorchFunctionMode answers `.device` by the mark; a
TorchDispatchMode sees the operators, those of a backward too. A custom operator is one: what runs within is its own.
Not seen: deadlocks of streams, waits within CUDA's operators, autograd's choice of a forward's stream for the backward,
the allocator's real reuse, time.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import reduce
from operator import or_
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ROOT, SUPPORT = (str(Path(__file__).parents[up]) + "/" for up in (2, 0))
THIN = f"{ROOT}dualpipe/device.py"  # what happens there is told of its callers
Clock = Counter[int]  # accesses by timeline; the union of two is what comes after both

WAITING = {"nonzero", "_local_scalar_dense", "masked_select", "_unique", "_unique2", "unique_dim", "bincount", "equal",
           "unique_consecutive", "is_nonzero", "histc"}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
UNTOUCHED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
SHAPE_ONLY = ("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
VIEWS = {"detach", "alias", "lift_fresh", "_unsafe_view", "set_", "resize_"}
GETTERS = {torch._C.TensorBase.__dict__[name]: name for name in ("device", "is_cuda", "is_cpu")}


class Timeline:
    """A stream, or a thread of the host. clock: what its next access comes after."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name, self.clock = number, name, Clock()


class Access(NamedTuple):
    """Of bytes low to high of a storage. lost: of memory that was given back since, what that was."""

    line: Timeline
    time: int
    write: bool
    low: int
    high: int
    what: str
    lost: str = ""

    def before(self, clock: Clock) -> bool:
        return clock[self.line.number] >= self.time

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} by {self.what} on {self.line.name}"


class Block:
    """The memory of a storage on the device, or pinned memory of the host. line: the stream it belongs to."""

    def __init__(self, kind: str, line: Timeline, nbytes: int, where: str) -> None:
        self.kind, self.line, self.nbytes, self.where = kind, line, nbytes, where
        self.accesses: list[Access] = []
        self.recorded: set[int] = set()  # streams of `record_stream`
        self.reference: Any = None


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.line = the_device().timeline("stream")
        self.device, self.device_index, self.priority, self.stream_id = CUDA, 0, priority, self.line.number
        the_device().streams.append(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        the_device().order(self.line, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        the_device().host_waits("Stream.synchronize", self.line.clock)

    def query(self) -> bool:
        return True


class Event:
    """torch.cuda.Event. Waiting for one that was never recorded is no wait, as there."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or the_device().current_stream()
        the_device().order(stream.line)
        self.clock = stream.line.clock.copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or the_device().current_stream()).wait_event(self)

    def synchronize(self) -> None:
        the_device().host_waits("Event.synchronize", self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class OfThread(threading.local):
    """What belongs to a thread of the host."""

    host: Timeline | None = None
    stream: Stream | None = None
    watched = False
    transfer: tuple[str, bool] | None = None  # of `tensor.to` to the other side: where to, and non_blocking
    elsewhere = False  # whether a function makes its result on the host, whatever its arguments are on


class PretendCuda:
    """The device's book. strict: whether memory given back too early is a fault before it is used again."""

    def __init__(self, strict: bool) -> None:
        self.strict, self.launches, self.allocated, self.peak = strict, 0, 0, 0
        self.faults: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.streams: list[Stream] = []
        self.of_thread = OfThread()
        self.lock = threading.RLock()
        self._lines: list[Timeline] = []
        self._blocks: dict[int, Block] = {}  # by storage
        self._pinned: dict[int, Block] = {}  # by address: memory of the host that was registered with the device
        self._dead: deque[tuple[int, Block, Timeline]] = deque()  # storages that are gone, and who let go of them
        self._lost: dict[int, dict[int, Access]] = {}  # by stream, what may still use its memory, by timeline
        self._labels: dict[CodeType, str | None] = {}

    def report(self, waits: Mapping[str, int]) -> list[str]:
        """All faults, each with how often; `waits`: those of the host that there should be."""
        self._bury()
        wrong = {wait for wait in {*waits, *self.waits} if waits.get(wait, 0) != self.waits[wait]}
        found = [f"{fault} ({count} times)" for fault, count in self.faults.most_common()]
        return found + [f"sync: {wait}: {self.waits[wait]} times instead of {waits.get(wait, 0)}" for wait in wrong]

    @contextmanager
    def watched(self, watch: bool = True) -> Iterator[None]:
        """Count the host's waits of this thread, or do not."""
        before, self.of_thread.watched = self.of_thread.watched, watch
        try:
            yield
        finally:
            self.of_thread.watched = before

    # -- order

    def timeline(self, name: str) -> Timeline:
        with self.lock:
            self._lines.append(Timeline(len(self._lines), f"{name} {len(self._lines)}"))
            return self._lines[-1]

    def host(self) -> Timeline:
        if self.of_thread.host is None:
            self.of_thread.host = self.timeline("host")
        return self.of_thread.host

    def current_stream(self, device: Any = None) -> Stream:
        return self.of_thread.stream or self.streams[0]

    def set_stream(self, stream: Stream) -> None:
        self.of_thread.stream = stream

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current_stream()
        self.of_thread.stream = stream or before
        try:
            yield
        finally:
            self.of_thread.stream = before

    def order(self, line: Timeline, clock: Clock | None = None) -> None:
        """What this thread gives to `line` from now on comes after `clock`, and after what the thread knows."""
        with self.lock:
            line.clock |= self.host().clock | (clock or Clock())

    def host_waits(self, what: str, clock: Clock) -> None:
        with self.lock:
            if self.of_thread.watched:
                self.waits[f"{what} in {self._where(1, number=False)}"] += 1
            self.host().clock |= clock

    def synchronize(self, device: Any = None) -> None:
        self.host_waits("synchronize", reduce(or_, (stream.line.clock for stream in self.streams)))

    def fault(self, kind: str, text: str) -> None:
        self.faults[f"{kind}: {text}"] += 1

    def _where(self, count: int = 3, number: bool = True) -> str:
        """The innermost functions of the project, or of its tests where it has none."""
        frame, found = sys._getframe(2), []
        while frame is not None and len(found) < count:
            code = frame.f_code
            if code not in self._labels:
                ours = code.co_filename.startswith(ROOT) and not code.co_filename.startswith((SUPPORT, THIN, ROOT + "."))
                self._labels[code] = f"{code.co_filename[len(ROOT):]}: {code.co_qualname}" if ours else None
            if (label := self._labels[code]) is not None:
                found.append(f"{label}, line {frame.f_lineno}" if number else label)
            frame = frame.f_back
        return " < ".join(found)

    # -- memory

    def block(self, tensor: Tensor) -> Block | None:
        """That of a marked tensor."""
        self._bury()
        found = self._blocks.get(_local(tensor).untyped_storage()._cdata)
        if found is None and self._pinned:
            address = tensor.data_ptr()
            found = next((b for start, b in self._pinned.items() if start <= address < start + b.nbytes), None)
        return found

    def holds(self, tensor: Tensor) -> bool:
        block = self.block(tensor)
        return block is not None and block.kind == "device"

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Have it on the device, made on the current stream, or in pinned memory."""
        storage = _local(tensor).untyped_storage()
        block = Block(kind, self.current_stream().line, 0, self._where())
        key = storage._cdata
        self._blocks[key] = block
        block.reference = weakref.ref(storage, lambda _: self._dead.append((key, block, self.host())))
        if kind == "device":
            self._allocate(block, storage.nbytes())

    def pin(self, address: int, nbytes: int, flags: int) -> int:
        self._pinned[address] = Block("pinned", self.host(), nbytes, self._where())
        return 0

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Before `storage.resize_(nbytes)`, by which FSDP2 gives memory back and takes other."""
        with self.lock:
            block = self._blocks.get(storage._cdata)
            if block is not None and block.kind == "device":
                self._give_back(block, self.host())
                block.line, block.where, block.recorded = self.current_stream().line, self._where(), set()
                self._allocate(block, nbytes)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        block = self.block(tensor)
        assert block is not None, "record_stream is for tensors on the device"
        block.recorded.add(stream.line.number)

    def _allocate(self, block: Block, nbytes: int) -> None:
        """The allocator waits for nobody: it may be the memory of what was given back on this stream."""
        block.nbytes = nbytes
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        lost = self._lost.get(block.line.number, {})
        for number in [number for number, old in lost.items() if old.before(block.line.clock)]:
            del lost[number]
        block.accesses = list(lost.values())

    def _bury(self) -> None:
        while self._dead:
            with self.lock:
                if self._dead:
                    key, block, host = self._dead.popleft()
                    if self._blocks.get(key) is block:
                        del self._blocks[key]
                    if block.kind == "device":
                        self._give_back(block, host)

    def _give_back(self, block: Block, host: Timeline) -> None:
        """Another stream that may still use it is found by what the block's stream and the giving thread know."""
        self.allocated -= block.nbytes
        known = block.line.clock | host.clock
        lost = self._lost.setdefault(block.line.number, {})
        what = f"{block.nbytes} bytes of {block.line.name}, made at {block.where}"
        for old in block.accesses:
            number = old.line.number
            if number in (block.line.number, *block.recorded) or old.before(known):
                continue
            if self.strict and not old.lost:
                self.fault("free", f"{what}, given back before a {old}")
            elif number not in lost or lost[number].time < old.time:
                lost[number] = old._replace(write=True, low=0, high=sys.maxsize, lost=old.lost or what)

    def access(self, tensor: Tensor, write: bool, line: Timeline, what: str) -> None:
        """Note what `line` does with a tensor, and hold it against what was noted before."""
        tensor = _local(tensor)
        block = self.block(tensor)
        if block is None or tensor.numel() == 0:
            return
        low = tensor.data_ptr()
        high = low + tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride())))
        new, kept = Access(line, line.clock[line.number], write, low, high, what), []
        for old in block.accesses:
            ordered = old.before(line.clock)
            if not ordered and old.low < high and low < old.high and (write or old.write):
                if old.lost:
                    self.fault("reuse", f"{new}, not after the {old} of what was given back, {old.lost}")
                else:
                    self.fault("race", f"{new}, not after the {old}; made at {block.where}")
            implied = ordered and low <= old.low and old.high <= high and (write or (not old.write and old.line is line))
            if not implied:
                kept.append(old)
        block.accesses = [*kept, new]

    # -- operators

    def launch(self, name: str, reads: list[Tensor], writes: list[Tensor], line: Timeline | None = None) -> Timeline:
        """Give an operator to a stream, or to the host where that is the line."""
        line = line or self.current_stream().line
        with self.lock:
            self.order(line)
            line.clock[line.number] += 1
            what = f"{name} at {self._where()}"
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self.access(tensor, write, line, what)
        self.launches += 1
        return line

    def ran(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Book an operator that has run."""
        name = func._schema.name.split("::")[1]
        if func.is_view or name in VIEWS:
            return
        reads, writes = _arguments(func, args, kwargs)
        blocks = [self.block(tensor) for tensor in (*reads, *writes)]
        kinds = {"host" if block is None else block.kind for block in blocks}
        transfer, outs = self.of_thread.transfer, [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if name == "_to_copy" and transfer is not None:
            self.mark_and_copy(outs[0], reads[0], *transfer)
        elif name == "copy_" and "device" in kinds and len(kinds) > 1:
            self.copied(writes[0], reads[0], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        elif "device" in kinds:
            self._ran_on_device(name, args, kwargs, reads, writes, outs)
        elif "pinned" in kinds:
            self.launch(name, reads, writes, self.host())

    def _ran_on_device(self, name: str, args: tuple, kwargs: dict, reads: list[Tensor], writes: list[Tensor],
                       outs: list[Tensor]) -> None:
        waits = name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        if name.startswith(SHAPE_ONLY):
            if self.of_thread.elsewhere:
                return
            reads = []
        elif any(t.dim() and t.numel() and self.block(t) is None for t in (*reads, *writes)):
            if name in INDEXING:
                waits = True
            else:
                self.fault("device", f"{name} with tensors of both devices at {self._where()}")
        if name in INDEXING:
            waits |= any(t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]) if isinstance(t, Tensor))
        made = [tensor for tensor in outs if self.block(tensor) is None]
        for tensor in made:
            self.mark(tensor, "device")
        line = self.launch(name, reads, [*writes, *(() if name in UNTOUCHED else made)])
        if waits:
            self.host_waits(name, line.clock)

    def mark_and_copy(self, into: Tensor, of: Tensor, kind: str, non_blocking: bool) -> None:
        """`of.to(...)` has made `into` on the other side."""
        if kind == "device" or non_blocking:
            self.mark(into, "device" if kind == "device" else "pinned")
        self.copied(into, of, non_blocking)

    def copied(self, into: Tensor, of: Tensor, non_blocking: bool) -> None:
        """Between the device and the host, which waits where its memory is pageable."""
        line = self.launch("copy", [of], [into])
        if not non_blocking or not (self.block(into) and self.block(of)):
            self.host_waits("pageable copy" if non_blocking else "copy", line.clock)

    def read_by_host(self, tensor: Tensor, name: str) -> None:
        block = self.block(tensor)
        if block is not None and block.kind == "device":
            self.host_waits(name, self.launch(name, [tensor], []).clock)
        elif block is not None:
            self.launch(name, [tensor], [], self.host())


def _local(tensor: Tensor) -> Tensor:
    """Of a DTensor, its own part."""
    return getattr(tensor, "_local_tensor", tensor)


_schemas: dict[Any, list[tuple[str, bool]]] = {}


def _arguments(func: Any, args: tuple, kwargs: dict) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads, and those that it writes."""
    if func not in _schemas:
        _schemas[func] = [(a.name, bool(a.alias_info and a.alias_info.is_write)) for a in func._schema.arguments]
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for position, (name, write) in enumerate(_schemas[func]):
        value = args[position] if position < len(args) else kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        found[write].extend(t for t in values if isinstance(t, Tensor))
    return found


class _Operators(TorchDispatchMode):
    def __init__(self, device: PretendCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            self._device.ran(func, args, kwargs or {}, out)
        return out


class _Functions(TorchFunctionMode):
    """What torch's functions say and do about devices."""

    def __init__(self, device: PretendCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name, device = dict(kwargs or {}), getattr(func, "__name__", ""), self._device
        if name == "__get__":
            if (getter := GETTERS.get(func.__self__)) is None:
                return func(*args)
            on_device = device.holds(args[0])
            return {"device": CUDA if on_device else func(*args), "is_cuda": on_device, "is_cpu": not on_device}[getter]
        if name in ("to", "cuda", "cpu") and args and isinstance(args[0], Tensor):
            return self._to(name, *args, **kwargs)
        if name in ("tolist", "numpy", "__array__"):
            if name != "tolist" and device.holds(args[0]):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            device.read_by_host(args[0], name)
        if name == "is_pinned":
            return getattr(device.block(args[0]), "kind", None) == "pinned"
        return self._make(func, name, args, kwargs)

    def _make(self, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function that may make tensors, where `device` and `pin_memory` say."""
        device, wanted = self._device, kwargs.get("device")
        kind = None if wanted is None else "device" if torch.device(wanted).type == "cuda" else "host"
        if kind == "device":
            kwargs["device"] = CPU
        if kwargs.pop("pin_memory", False) or name == "pin_memory":
            kind, func = "pinned", Tensor.clone if name == "pin_memory" else func
        device.of_thread.elsewhere = kind in ("host", "pinned")
        out = func(*args, **kwargs)
        device.of_thread.elsewhere = False
        if kind in ("device", "pinned"):
            with torch._C.DisableTorchFunction():
                for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor) and device.block(t) is None):
                    device.mark(tensor, kind)
                    if kind == "device" and name not in UNTOUCHED:
                        line = device.launch(name, [], [tensor])
                        if name in ("tensor", "as_tensor"):
                            device.host_waits("values from the host", line.clock)
        return out

    def _to(self, name: str, tensor: Tensor, *args: Any, copy: bool = False, memory_format: Any = None,
            **kwargs: Any) -> Tensor:
        device = self._device
        own = "device" if device.holds(tensor) else "host"
        target, dtype, non_blocking = CUDA if name == "cuda" else CPU, None, kwargs.get("non_blocking", False)
        if name == "to":
            if args and isinstance(args[0], Tensor):
                args = (CUDA if device.holds(args[0]) else CPU, args[0].dtype, *args[1:])
            target, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        options = {} if memory_format is None else {"memory_format": memory_format}
        if target is not None and target.type == "meta":
            return Tensor.to(tensor, target, dtype or tensor.dtype, **options)
        kind = own if target is None else "device" if target.type == "cuda" else "host"
        if kind == own:
            return Tensor.to(tensor, dtype or tensor.dtype, copy=copy, **options)
        device.of_thread.transfer = kind, non_blocking
        try:
            return Tensor.to(tensor, dtype or tensor.dtype, copy=True, **options)
        finally:
            device.of_thread.transfer = None


_devices: list[PretendCuda] = []  # the one that is pretended at the moment
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")  # which only CUDA has


def the_device() -> PretendCuda:
    return _devices[-1]


def _replaced(device: PretendCuda) -> dict[str, Any]:
    """What stands for the functions and types of torch.cuda."""
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="pretend", total_memory=2**36)
    runtime = SimpleNamespace(cudaHostRegister=device.pin, cudaHostUnregister=device._pinned.pop)
    return dict(
        Stream=Stream, Event=Event, stream=device.stream, set_stream=device.set_stream, synchronize=device.synchronize,
        current_stream=device.current_stream, default_stream=lambda *_: device.streams[0],
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        set_device=lambda _: None, device_of=lambda _: nullcontext(), _sleep=lambda _: None, empty_cache=lambda: None,
        memory_allocated=lambda *_: device.allocated, max_memory_allocated=lambda *_: device.peak,
        reset_peak_memory_stats=lambda *_: setattr(device, "peak", device.allocated),
        get_rng_state=lambda *_: torch.get_rng_state(), set_rng_state=lambda state, *_: torch.set_rng_state(state),
        get_device_properties=lambda *_: properties, get_device_capability=lambda *_: (9, 0),
        get_device_name=lambda *_: properties.name, cudart=lambda: runtime, check_error=lambda _: None,
        set_sync_debug_mode=lambda _: None,
    )


@contextmanager
def pretend_cuda(strict: bool = True) -> Iterator[PretendCuda]:
    """Have torch.cuda be a pretend device with its book in what this yields; see the top of this file."""
    device = PretendCuda(strict)
    start, submit, resize = threading.Thread.start, ThreadPoolExecutor.submit, torch.UntypedStorage.resize_

    def handed_over(work: Callable) -> Callable:
        """What another thread is to do, knowing what this one knows by now."""
        known = device.host().clock.copy()

        def run(*args: Any, **kwargs: Any) -> Any:
            device.host().clock |= known
            return work(*args, **kwargs)

        return run

    def start_thread(thread: threading.Thread) -> None:
        work = handed_over(thread.run)

        def run() -> None:
            with _Operators(device), _Functions(device):
                work()

        thread.run = run
        start(thread)

    def submit_work(executor: ThreadPoolExecutor, work: Callable, *args: Any, **kwargs: Any) -> Future:
        return submit(executor, handed_over(work), *args, **kwargs)

    def resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        device.resize(storage, size)
        return resize(storage, size)

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        device.record_stream(tensor, stream)

    with ExitStack() as stack:
        for name, value in _replaced(device).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.cuda.nvtx, "range", lambda *_: nullcontext()))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", record_stream))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize_storage))
        stack.enter_context(mock.patch.object(threading.Thread, "start", start_thread))
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", submit_work))
        _devices.append(device)
        stack.callback(_devices.pop)
        Stream()  # the default one
        stack.enter_context(_Operators(device))
        stack.enter_context(_Functions(device))
        yield device
