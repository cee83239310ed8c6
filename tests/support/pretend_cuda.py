"""A pretend CUDA device on CPU: a missing wait, memory given back too early and a wait of the host are faults on it.

    with pretend_cuda() as device:       # torch.cuda is the pretend one, in this thread and in those started here
        with device.watched():           # in here the host's waits for the device are counted, in device.waits
            pipe.step(...)
    assert device.report(waits={...}) == []

Every operator runs at once on CPU memory, so values are right whatever the order; what is checked is the order that was
asked for. A stream, and each thread of the host, is a timeline of numbered accesses with a vector clock: the last access
of each timeline that comes before its own next one. Events carry the clock of the stream that recorded them to those
that wait; and what a thread gives to a stream comes after all that the thread has waited for. Nothing else orders two
accesses. Those of each storage are kept, by bytes, as long as they matter: two that overlap, one of them a write, of
which neither is in the clock of the other, are a race.

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
    reuse   with strict=False instead of free, and only where something made since on the stream that the memory belongs
            to is accessed before the other stream is through (FSDP2 keeps sharded gradients on its reduce stream)
    sync    a wait of the host that the test does not list, or one that it lists and that there was not
    device  an operator with tensors of both devices

A tensor made on "cuda" has CPU memory, and its storage is marked. A TorchFunctionMode answers `.device` by the mark; a
TorchDispatchMode sees the operators, those of a backward too. A custom operator is one: what runs within is its own.
Not seen: deadlocks of streams, waits within CUDA's operators, that a backward runs on the streams of its forward, which
memory the allocator hands out again, time.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ROOT, SUPPORT = (f"{Path(__file__).parents[up]}/" for up in (2, 0))
PASSED_BY = (SUPPORT, f"{ROOT}.", f"{ROOT}dualpipe/device.py")  # what happens there is told of the callers
Clock = Counter[int]  # accesses by timeline; the union of two clocks is what comes after both

WAITING = {"nonzero", "_local_scalar_dense", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
           "bincount", "histc"}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
LIKE = ("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")  # read no values
RESIZE = torch.UntypedStorage.resize_
_devices: list[PretendCuda] = []  # the last one is pretended at the moment


def the_device() -> PretendCuda:
    return _devices[-1]


class Timeline:
    """torch.cuda.Stream, and a thread of the host. clock: what its next access comes after."""

    numbers = numbers()

    def __init__(self, device: Any = None, priority: int = 0, kind: str = "stream") -> None:
        self.number, self.clock, self.device = next(self.numbers), Clock(), CUDA
        self.name = f"{kind} {self.number}"
        the_device().lines.append(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        the_device().order(self, event.clock)

    def wait_stream(self, stream: Timeline) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        the_device().host_waits("Stream.synchronize", self.clock)


class Event:
    """torch.cuda.Event. One that was never recorded is waited for by nobody, as there."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock = Clock()

    def record(self, stream: Timeline | None = None) -> None:
        stream = stream or the_device().current_stream()
        the_device().order(stream, Clock())
        self.clock = stream.clock.copy()

    def synchronize(self) -> None:
        the_device().host_waits("Event.synchronize", self.clock)


class Access(NamedTuple):
    """By an operator, to the bytes from `low` to before `high`. lost: what memory it was, if that was given back."""

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
    """Memory of the device, which belongs to the stream `line`, or pinned memory of the host."""

    def __init__(self, kind: str, line: Timeline, nbytes: int, where: str) -> None:
        self.kind, self.line, self.nbytes, self.where = kind, line, nbytes, where
        self.accesses: list[Access] = []
        self.recorded: set[int] = set()  # streams of `record_stream`


class OfThread(threading.local):
    """What belongs to a thread of the host."""

    stream: Timeline | None = None
    watched = False  # whether its waits are counted
    transfer: tuple[str, bool] | None = None  # of `tensor.to` between the devices: where to, and non_blocking

    def __init__(self) -> None:
        self.host = Timeline(kind="host")


class PretendCuda:
    """The device's book. strict: whether memory given back too early is a fault before it is used again."""

    def __init__(self, strict: bool) -> None:
        self.strict, self.launches, self.allocated, self.peak = strict, 0, 0, 0
        self.faults: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.lines: list[Timeline] = []
        self.pinned: dict[int, Block] = {}  # by address: memory of the host that was registered
        self._lock = threading.RLock()
        self._blocks: dict[int, Block] = {}  # by storage
        self._dead: deque[tuple[int, Block, Timeline]] = deque()  # storages that are gone, and the thread they went in
        # By stream, and timeline: the last use of memory that was given back to that stream, and not known to it then.
        self._lost: defaultdict[int, dict[int, Access]] = defaultdict(dict)

    def report(self, waits: Mapping[str, int]) -> list[str]:
        """All faults, each with how often; `waits`: those of the host that there should be."""
        self._bury()
        wrong = [wait for wait in {*waits, *self.waits} if waits.get(wait, 0) != self.waits[wait]]
        found = [f"{fault} ({count} times)" for fault, count in self.faults.most_common()]
        return found + [f"sync: {wait}: {self.waits[wait]} times instead of {waits.get(wait, 0)}" for wait in wrong]

    def watched(self) -> AbstractContextManager:
        """Within it this thread's waits are counted."""
        return mock.patch.object(self.of_thread, "watched", True)

    # -- order

    def begin(self) -> None:
        """Make what needs the device to be the present one: the default stream, and this thread's timeline."""
        self.default = Timeline()
        self.of_thread = OfThread()

    def current_stream(self, device: Any = None) -> Timeline:
        return self.of_thread.stream or self.default

    def stream(self, stream: Timeline | None) -> AbstractContextManager:
        return mock.patch.object(self.of_thread, "stream", stream or self.current_stream())

    def order(self, line: Timeline, clock: Clock) -> None:
        """What this thread gives to `line` from now on comes after `clock` and all that the thread has waited for."""
        self._bury()
        with self._lock:
            line.clock |= self.of_thread.host.clock | clock

    def host_waits(self, what: str, clock: Clock) -> None:
        self._bury()
        with self._lock:
            if self.of_thread.watched:
                self.waits[f"{what} in {_where(1, '')}"] += 1
            self.of_thread.host.clock |= clock

    def synchronize(self, device: Any = None) -> None:
        """This thread waits, and will tell the others."""
        self.host_waits("synchronize", Clock({line.number: line.clock[line.number] for line in self.lines}))
        for line in self.lines:
            line.clock |= self.of_thread.host.clock

    # -- memory

    def block(self, tensor: Tensor) -> Block | None:
        """What is known of a tensor's memory; None on the host, if it is not pinned."""
        self._bury()
        found = self._blocks.get(_local(tensor).untyped_storage()._cdata)
        if found is None and self.pinned:
            address = tensor.data_ptr()
            found = next((b for start, b in self.pinned.items() if start <= address < start + b.nbytes), None)
        return found

    def kind(self, tensor: Tensor) -> str:
        block = self.block(tensor)
        return "host" if block is None else block.kind

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Have its memory be "device", made on the current stream, or "pinned"."""
        storage = _local(tensor).untyped_storage()
        key, block = storage._cdata, Block(kind, self.current_stream(), 0, _where())
        self._blocks[key] = block
        weakref.finalize(storage, lambda: self._dead.append((key, block, self.of_thread.host))).atexit = False
        if kind == "device":
            self._allocate(block, storage.nbytes())

    def pin(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = Block("pinned", self.of_thread.host, nbytes, _where())
        return 0

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        """As FSDP2 gives the memory of gathered parameters back and takes other."""
        block = self._blocks.get(storage._cdata)
        if block is not None and block.kind == "device":
            self._give_back(block, self.of_thread.host)
            block.line, block.where, block.recorded = self.current_stream(), _where(), set()
            self._allocate(block, nbytes)
        return RESIZE(storage, nbytes)

    def _allocate(self, block: Block, nbytes: int) -> None:
        """The allocator waits for nobody: it may be memory that was given back on this stream and is still in use, by
        others (lost), and by the stream itself."""
        line, block.nbytes = block.line, nbytes
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        lost = [old for old in self._lost[line.number].values() if not old.before(line.clock)]
        own = Access(line, line.clock[line.number], True, 0, sys.maxsize, "anything", f"memory of {line.name}")
        block.accesses = [own, *lost]

    def _bury(self) -> None:
        with self._lock:
            while self._dead:
                key, block, host = self._dead.popleft()
                if self._blocks.get(key) is block:
                    del self._blocks[key]
                if block.kind == "device":
                    self._give_back(block, host)

    def _give_back(self, block: Block, host: Timeline) -> None:
        """What the block's stream and the thread have not waited for may still use it."""
        self.allocated -= block.nbytes
        known = block.line.clock | host.clock
        what = f"{block.nbytes} bytes of {block.line.name}, made at {block.where}"
        for old in block.accesses:
            if old.line.number in (block.line.number, *block.recorded) or old.before(known):
                continue
            if self.strict and not old.lost:
                self.faults[f"free: {what}, given back before the {old}"] += 1
                continue
            lost, number = self._lost[block.line.number], old.line.number
            if number not in lost or lost[number].time < old.time:
                lost[number] = old._replace(write=True, low=0, high=sys.maxsize, lost=old.lost or what)

    def _access(self, tensor: Tensor, write: bool, line: Timeline, what: str) -> None:
        """Note what `line` does with a tensor, and hold it against what was noted before."""
        block, tensor = self.block(tensor), _local(tensor)
        if block is None or tensor.numel() == 0:
            return
        low = tensor.data_ptr()
        high = low + tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride())))
        new, kept = Access(line, line.clock[line.number], write, low, high, what), []
        for old in block.accesses:
            ordered, only_read = old.before(line.clock), not (write or old.write)
            if not ordered and not only_read and old.low < high and low < old.high:
                fault = f"reuse: {new}, not after the {old} of what was given back, {old.lost}"
                self.faults[fault if old.lost else f"race: {new}, not after the {old}; made at {block.where}"] += 1
            implied = ordered and low <= old.low and old.high <= high and (write or (only_read and old.line is line))
            if not implied:
                kept.append(old)
        block.accesses = [*kept, new]

    # -- operators

    def launch(self, name: str, reads: list[Tensor], writes: list[Tensor], line: Timeline | None = None) -> Clock:
        """Give an operator to a timeline, by default the current stream; returns what comes after it."""
        line = line or self.current_stream()
        with self._lock:
            self.order(line, Clock({line.number: line.clock[line.number] + 1}))
            self.launches += 1
            what = f"{name} at {_where()}"
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._access(tensor, write, line, what)
        return line.clock

    def ran(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Book an operator that has run."""
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name in ("_unsafe_view", "set_", "resize_"):
            return
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
            self.faults[f"device: {name} with tensors of both devices at {_where()}"] += 1
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
def _label(code: CodeType) -> str:
    """The name of a function of the project or of its tests."""
    ours = code.co_filename.startswith(ROOT) and not code.co_filename.startswith(PASSED_BY)
    return f"{code.co_filename.removeprefix(ROOT)}: {code.co_qualname}" if ours else ""


def _where(count: int = 3, line: str = ", line {}") -> str:
    """The innermost functions that have a label."""
    frames = walk_stack(sys._getframe(1))
    return " < ".join(islice((label + line.format(at) for f, at in frames if (label := _label(f.f_code))), count))


def _local(tensor: Tensor) -> Tensor:
    """Of a DTensor, this rank's part."""
    return getattr(tensor, "_local_tensor", tensor)


@cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Names of an operator's arguments, and whether it writes to them."""
    return [(a.name, bool(a.alias_info and a.alias_info.is_write)) for a in func._schema.arguments]


class _Operators(TorchDispatchMode):
    """Books the operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
_LIBRARY.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")  # which only CUDA has


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
        get_device_name=lambda *_: properties.name, set_sync_debug_mode=lambda mode: setattr(device.of_thread, "watched", mode == "error"),
    )
    yield from ((torch.cuda, name, function) for name, function in functions.items())
    yield torch.cuda.nvtx, "range", lambda *_: nullcontext()
    yield Tensor, "record_stream", lambda tensor, stream: device.block(tensor).recorded.add(stream.number)
    yield torch.UntypedStorage, "resize_", lambda storage, nbytes: device.resize(storage, nbytes)
    yield threading.Thread, "start", start_thread


@contextmanager
def pretend_cuda(strict: bool = True) -> Iterator[PretendCuda]:
    """Have torch.cuda be a pretend device; see the top of this file."""
    device = PretendCuda(strict)
    with ExitStack() as stack:
        for owner, name, value in _replacements(device):
            stack.enter_context(mock.patch.object(owner, name, value))
        _devices.append(device)
        stack.callback(_devices.pop)
        device.begin()
        stack.enter_context(_Operators())
        stack.enter_context(_Functions())
        yield device
