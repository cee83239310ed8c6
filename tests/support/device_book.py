"""The book of a pretend CUDA device: the order of all accesses to memory, by vector clocks. See pretend_cuda.py."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import count, islice
from pathlib import Path
from traceback import walk_stack
from types import CodeType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from device_waits import Events, Trace

CUDA = torch.device("cuda", 0)
ROOT, SUPPORT = (f"{Path(__file__).parents[up]}/" for up in (2, 0))
PASSED_BY = (SUPPORT, f"{ROOT}.", f"{ROOT}dualpipe/runtime/device.py")  # events there are attributed to the callers
Clock = Counter[int]  # accesses by timeline; the union of two clocks comes after both
RESIZE = torch.UntypedStorage.resize_
_numbers = count()
_devices: list[Book] = []  # the last one is pretended at the moment


def the_device() -> Book:
    return _devices[-1]


class Timeline:
    """torch.cuda.Stream, or a thread of the host. clock: the accesses that its next access comes after."""

    def __init__(self, device: Any = None, priority: int = 0, kind: str = "stream") -> None:
        self.number, self.clock, self.device = next(_numbers), Clock(), CUDA
        self.name = f"{kind} {self.number}"
        self.stream_id, self.device_index, self.device_type = self.number, 0, 1  # which FSDP2 of torch 2.15 asks for
        the_device().lines.append(self)

    def is_capturing(self) -> bool:
        """Return False: nothing is captured into a graph."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        the_device().order(self, event.clock)
        the_device().of_thread.trace.after(self.number, event.after)

    def wait_stream(self, stream: Timeline) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        the_device().host_waits("Stream.synchronize", self.clock, the_device().of_thread.trace.event(self.number))


class Event:
    """torch.cuda.Event. Nothing waits for an event that was never recorded, as in torch."""

    after: Events = {}  # noqa: RUF012 (replaced, never changed)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock, self._time = Clock(), 0.0

    def record(self, stream: Timeline | None = None) -> None:
        stream = stream or the_device().current_stream()
        self.after = the_device().of_thread.trace.event(stream.number)
        the_device().order(stream, Clock())
        self.clock, self._time = stream.clock.copy(), time.perf_counter()

    def synchronize(self) -> None:
        the_device().host_waits("Event.synchronize", self.clock, self.after)

    def query(self) -> bool:
        """Return True if this thread of the host has waited for the event, or for a later one."""
        known = the_device().of_thread.host.clock
        return all(known[line] >= number for line, number in self.clock.items())

    def elapsed_time(self, end: Event) -> float:
        return (end._time - self._time) * 1e3


class Access(NamedTuple):
    """An operator's access to the bytes from `low` to before `high`. lost: describes its memory, if that was freed."""

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

    def __init__(self, kind: str, line: Timeline, nbytes: int, made: str) -> None:
        self.kind, self.line, self.nbytes, self.made = kind, line, nbytes, made
        self.accesses: list[Access] = []
        self.recorded: set[int] = set()  # streams of `record_stream`


class OfThread(threading.local):
    """State of one thread of the host."""

    stream: Timeline | None = None
    watched = False  # whether its waits are counted
    transfer: tuple[str, bool] | None = None  # of `tensor.to` between the devices: where to, and non_blocking

    def __init__(self) -> None:
        self.host = Timeline(kind="host")
        self.trace = Trace(threading.current_thread().name)
        the_device().traces.append(self.trace)


class Book:
    """Streams, memory and faults of one device.

    strict: if True, memory given back too early is a fault even before it is used again.
    """

    def __init__(self, strict: bool) -> None:
        self.strict, self.launches, self.allocated, self.peak = strict, 0, 0, 0
        self.faults: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.lines: list[Timeline] = []
        self.traces: list[Trace] = []  # of the threads of the host
        self.pinned: dict[int, Block] = {}  # by address: memory of the host that was registered
        self._lock = threading.RLock()
        self._blocks: dict[int, Block] = {}  # by storage
        self._dead: deque[tuple[int, Block, Timeline]] = deque()  # storages that are gone, and the threads they went in
        # By stream and timeline: the last use of memory that was freed to that stream, unknown to it then.
        self._lost: defaultdict[int, dict[int, Access]] = defaultdict(dict)

    def report(self, waits: Mapping[str, int]) -> list[str]:
        """Return all faults, each with its count. `waits`: the expected waits of the host."""
        self._bury()
        wrong = [wait for wait in {*waits, *self.waits} if waits.get(wait, 0) != self.waits[wait]]
        found = [f"{fault} ({count} times)" for fault, count in self.faults.most_common()]
        return found + [f"sync: {wait}: {self.waits[wait]} times instead of {waits.get(wait, 0)}" for wait in wrong]

    def watched(self) -> AbstractContextManager:
        """Count this thread's waits inside the block."""
        return mock.patch.object(self.of_thread, "watched", True)

    # -- order

    @contextmanager
    def pretended(self) -> Iterator[None]:
        """Act as the device, with a default stream and a timeline for this thread."""
        _devices.append(self)
        self.default, self.of_thread = Timeline(), OfThread()
        try:
            yield
        finally:
            _devices.pop()

    def current_stream(self, device: Any = None) -> Timeline:
        return self.of_thread.stream or self.default

    def stream(self, stream: Timeline | None) -> AbstractContextManager:
        return mock.patch.object(self.of_thread, "stream", stream or self.current_stream())

    def order(self, line: Timeline, clock: Clock) -> None:
        """Order later work of this thread on `line` after `clock` and everything this thread has waited for."""
        self._bury()
        with self._lock:
            line.clock |= self.of_thread.host.clock | clock

    def host_waits(self, what: str, clock: Clock, after: Events | None = None) -> None:
        """Make the host wait for `clock`, which comes after `after`; by default after all of the current stream."""
        self._bury()
        trace = self.of_thread.trace
        trace.host_waits(trace.event(self.current_stream().number) if after is None else after)
        with self._lock:
            if self.of_thread.watched:
                self.waits[f"{what} in {where(1, '')}"] += 1
            self.of_thread.host.clock |= clock

    def synchronize(self, device: Any = None) -> None:
        """Make this thread wait for the device; all streams and threads learn of it."""
        clock = Clock({line.number: line.clock[line.number] for line in self.lines})
        self.host_waits("synchronize", clock, self.of_thread.trace.everything())
        for line in self.lines:
            line.clock |= self.of_thread.host.clock

    # -- memory

    def block(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor's memory; None for host memory that is not pinned."""
        self._bury()
        found = self._blocks.get(local(tensor).untyped_storage()._cdata)
        if found is None and self.pinned:
            address = tensor.data_ptr()
            found = next((b for start, b in self.pinned.items() if start <= address < start + b.nbytes), None)
        return found

    def kind(self, tensor: Tensor) -> str:
        block = self.block(tensor)
        return "host" if block is None else block.kind

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Mark a tensor's memory as "device", made on the current stream, or as "pinned"."""
        storage = local(tensor).untyped_storage()
        key, block = storage._cdata, Block(kind, self.current_stream(), 0, where())
        self._blocks[key] = block

        def died() -> None:
            if self in _devices:  # else nobody asks any more, and this thread may have no timeline
                self._dead.append((key, block, self.of_thread.host))

        weakref.finalize(storage, died).atexit = False
        if kind == "device":
            self._allocate(block, storage.nbytes())

    def pin(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = Block("pinned", self.of_thread.host, nbytes, where())
        return 0

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        """Resize a storage, as FSDP2 does to free gathered parameters and allocate them again."""
        block = self._blocks.get(storage._cdata)
        if block is not None and block.kind == "device":
            self._give_back(block, self.of_thread.host)
            block.line, block.made, block.recorded = self.current_stream(), where(), set()
            self._allocate(block, nbytes)
        return RESIZE(storage, nbytes)

    def _allocate(self, block: Block, nbytes: int) -> None:
        """Allocate without waiting.

        The allocator may return memory that was freed on this stream and is still in use, by others (lost) and by the
        stream itself.
        """
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
        """Free a block; accesses that neither its stream nor the thread has waited for may still use it."""
        self.allocated -= block.nbytes
        known = block.line.clock | host.clock
        what = f"{block.nbytes} bytes of {block.line.name}, made at {block.made}"
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
        """Record an access of `line` to a tensor, and check it against earlier accesses."""
        block, tensor = self.block(tensor), local(tensor)
        if block is None or tensor.numel() == 0:
            return
        low = tensor.data_ptr()
        high = low + tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride())))
        new, kept = Access(line, line.clock[line.number], write, low, high, what), []
        for old in block.accesses:
            ordered, only_read = old.before(line.clock), not (write or old.write)
            if not ordered and not only_read and old.low < high and low < old.high:
                fault = f"reuse: {new}, not after the {old} of what was given back, {old.lost}"
                self.faults[fault if old.lost else f"race: {new}, not after the {old}; made at {block.made}"] += 1
            implied = ordered and low <= old.low and old.high <= high and (write or (only_read and old.line is line))
            if not implied:
                kept.append(old)
        block.accesses = [*kept, new]

    def launch(
        self, name: str, reads: list[Tensor], writes: list[Tensor], line: Timeline | None = None,
        communicator: tuple[Hashable, int] | None = None,
    ) -> Clock:
        """Put an operator, or a kernel of NCCL on a communicator (key, number of ranks), on a timeline.

        The default timeline is the current stream. Returns the clock of what comes after it.
        """
        line = line or self.current_stream()
        if communicator is not None:
            self.of_thread.trace.launch(line.number, name, *communicator)
        elif line is not self.of_thread.host and (reads or writes):  # otherwise it is memory that is created
            self.of_thread.trace.launch(line.number, " ".join((name, *(str(t.dtype) for t in (*reads, *writes)))))
        with self._lock:
            self.order(line, Clock({line.number: line.clock[line.number] + 1}))
            self.launches += 1
            what = f"{name} at {where()}"
            for tensors, write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._access(tensor, write, line, what)
        return line.clock


@cache
def _label(code: CodeType) -> str:
    """Return the name of a function of the project or of its tests, "" for others."""
    ours = code.co_filename.startswith(ROOT) and not code.co_filename.startswith(PASSED_BY)
    name = code.co_qualname.removesuffix(".<locals>.<listcomp>")  # which is a function until Python 3.12
    return f"{code.co_filename.removeprefix(ROOT)}: {name}" if ours else ""


def where(most: int = 3, line: str = ", line {}") -> str:
    """Return the innermost functions that have a label."""
    frames = walk_stack(sys._getframe(1))
    return " < ".join(islice((label + line.format(at) for f, at in frames if (label := _label(f.f_code))), most))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the bytes of a quantized tensor."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "block_rows", tensor)
