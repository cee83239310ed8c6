"""A model of waits on devices: by hosts, streams and multiprocessors, and by kernels of NCCL, which wait for peers.

    traces = [Trace("rank 0"), Trace("rank 1")]    # to be filled with the steps of each rank's host, in order
    assert run(traces).stuck == []                 # else the waits that remain once nothing can move any more

Each rank has one host, which takes its steps in order, and streams, each of which runs in order the work that the host
gave to it. A step of a host is one of

    Launch      give a kernel to a stream. The first one of its name is loaded before, and the host waits for all work
                given to its device: torch's kernels with CUDA_MODULE_LOADING=LAZY, Triton's in any case
    After       make a stream wait for the work that other streams have been given until then: an event
    HostWaits   wait for streams: for an event, for a stream, or for the device, as `cudaFree` does
    Meet        start a message between hosts (gloo), or wait until its other side has been started too

A kernel starts when its stream has come to it and CTAs are free. A computing kernel needs one CTA, as it runs in waves,
and ends. A kernel of NCCL needs all of its CTAs, and keeps them until all members of its communicator have started
their kernel of the same number; then these end. A communicator's kernels run one after the other. Streams may share
hardware queues (`connections`). A queue holds at most `depth` entries that have not begun; then its host waits. Only
the head of a queue can begin. Nothing has a duration: if the NCCL kernels that can wait at once all fit the device,
the outcome does not depend on which came first.

Two ranks that receive ahead on the link from the other one, compute, and send:

    rank 0: receive 1 -> 0 | mm | send 0 -> 1          rank 1: receive 0 -> 1 | mm | send 1 -> 0

If mm is loaded, both end. If not, each host waits, before it launches mm, for its receive, whose send the other host
has not launched: stuck. If receives come after the sends, mm is loaded while nothing waits. With 4 CTAs in all, which
the receive takes, mm never starts; with 5 it does, but the send does not.

A send waits for its receive, as a send larger than NCCL's buffers (4 MiB a channel) does. A smaller one need not: then
less waits, so a program without deadlocks here has none there. The model has no kernel of NCCL that has started some
CTAs and finds no room for others.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from dualpipe.runtime import nccl

MULTIPROCESSORS = 132  # of an H100. A CTA of NCCL (640 threads, 82 KB) has one for itself beside a large GEMM
LINK, COLLECTIVE = nccl.LINK.ctas, nccl.EXPERTS.ctas  # of NCCL's kernels of a link, and of others at most
Events = Mapping[Hashable, int]  # by stream: how many of the entries that it was given


class Launch(NamedTuple):
    stream: Hashable
    name: str
    communicator: Hashable = None
    size: int = 0  # of the communicator

    @property
    def ctas(self) -> int:
        return 1 if self.communicator is None else LINK if self.name in ("send", "recv") else COLLECTIVE


class After(NamedTuple):
    stream: Hashable
    events: Events


class HostWaits(NamedTuple):
    events: Events


class Meet(NamedTuple):
    message: Hashable
    role: str  # "send" or "recv"
    number: int  # of those of its role
    waits: bool


class Trace:
    """The steps of one rank's host."""

    def __init__(self, name: str) -> None:
        self.name, self.steps = name, list[Any]()
        self.ends = list[int]()  # for each step of training, the number of host steps before its end
        self._given, self._meets, self._paused = Counter[Hashable](), Counter[Hashable](), False

    def launch(self, stream: Hashable, name: str, communicator: Hashable = None, size: int = 0) -> None:
        self.add(Launch(stream, name, communicator, size))

    def after(self, stream: Hashable, events: Events) -> None:
        self.add(After(stream, events))

    def event(self, stream: Hashable) -> Events:
        """Return the event after all work given to the stream."""
        return {stream: self._given[stream]}

    def everything(self) -> Events:
        """Return the events after all work given to the device."""
        return dict(self._given)

    def communicate(self, name: str, communicator: Hashable, size: int, *, current: Hashable) -> Events:
        """Launch a kernel on a communicator's stream after all of the current stream's work, as ProcessGroupNCCL does.

        Returns the events of what comes after it.
        """
        self.after(communicator, self.event(current))
        self.launch(communicator, name, communicator, size)
        return self.event(communicator)

    def host_waits(self, events: Events) -> None:
        self.add(HostWaits(events))

    def meet(self, message: Hashable, role: str) -> Meet:
        """Start a message between hosts; return the argument of `wait_for`."""
        meet = Meet(message, role, self._meets[message, role], waits=False)
        self._meets[message, role] += not self._paused
        self.add(meet)
        return meet

    def wait_for(self, meet: Meet) -> None:
        self.add(meet._replace(waits=True))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the recording of steps; the caller records the block in another way."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def add(self, step: Launch | After | HostWaits | Meet) -> None:
        if not self._paused:
            self.steps.append(step)
            if isinstance(step, Launch | After):
                self._given[step.stream] += 1


class Outcome(NamedTuple):
    stuck: list[str]  # who waits for what in the end, or mismatches; empty if all ended
    most_ctas: int  # largest number that NCCL kernels held at once on one device


def run(
    traces: Sequence[Trace], *, loading: int | None = None, multiprocessors: int = MULTIPROCESSORS,
    connections: int = 128, depth: int = 1024,
) -> Outcome:
    """Run all hosts and streams as far as they can go.

    loading: number of training steps in which every kernel is loaded when it is launched; afterwards none is. By
    default the first kernel of each name is loaded.
    """
    world = _World()
    ranks = [_Rank(trace, world, loading, multiprocessors, connections, depth) for trace in traces]
    while any(rank.advance() for rank in ranks) and not world.faults:
        pass
    waiting = [line for rank in ranks for line in rank.waiting()]
    return Outcome(world.faults or waiting, multiprocessors - min(rank.least_free for rank in ranks))


class _World:
    """State that ranks share: started kernels, messages and faults."""

    def __init__(self) -> None:
        self.started: defaultdict[tuple, dict[_Rank, Launch]] = defaultdict(dict)  # by communicator and number
        self.meets = Counter[tuple]()
        self.faults: list[str] = []


class _Rank:
    def __init__(
        self, trace: Trace, world: _World, loading: int | None, multiprocessors: int, connections: int, depth: int
    ) -> None:
        self.name, self._steps, self._world, self._at = trace.name, trace.steps, world, 0
        self._by_name, self._loads_until = loading is None, trace.ends[loading - 1] if loading else 0
        self._depth, self._queues = depth, [deque[tuple[Any, int]]() for _ in range(connections)]
        self._queue_of: dict[Hashable, deque] = {}  # by stream
        self._given, self._done = Counter[Hashable](), Counter[Hashable]()  # entries by stream
        self._launched, self._ended = Counter[Hashable](), Counter[Hashable]()  # kernels by communicator
        self._running: dict[Hashable, tuple[Launch, int]] = {}  # of NCCL, by stream
        self._loaded = set[str]()
        self._free = self.least_free = multiprocessors

    def advance(self) -> bool:
        """Advance the host and the queues; return True if anything moved."""
        before = self._at, self._done.total(), len(self._running)
        while self._at < len(self._steps) and self._host(self._steps[self._at]):
            self._at += 1
        for queue in self._queues:
            while queue and queue[0][0].stream not in self._running and self._stream(queue, *queue[0]):
                pass
        return before != (self._at, self._done.total(), len(self._running))

    def _host(self, step: Any) -> bool:
        """Take a step of the host if possible; return True if it was taken."""
        if isinstance(step, HostWaits):
            return self._reached(step.events)
        if isinstance(step, Meet):
            other_side = "send" if step.role == "recv" else "recv"
            self._world.meets[step.message, step.role] += not step.waits
            return not step.waits or self._world.meets[step.message, other_side] > step.number
        communicator = getattr(step, "communicator", None)
        if isinstance(step, Launch) and communicator is None:
            is_loaded = step.name in self._loaded if self._by_name else self._at >= self._loads_until
            if not is_loaded and not self._reached(self._given):
                return False
            self._loaded.add(step.name)
        queue = self._queue_of.setdefault(step.stream, self._queues[len(self._queue_of) % len(self._queues)])
        if len(queue) >= self._depth:
            return False
        queue.append((step, self._launched[communicator]))
        self._launched[communicator] += 1
        self._given[step.stream] += 1
        return True

    def _stream(self, queue: deque, entry: Launch | After, number: int) -> bool:
        """Begin the next entry of a queue if possible; return True if it has begun."""
        if isinstance(entry, After):
            if not self._reached(entry.events):
                return False
        elif self._free < entry.ctas or (entry.communicator is not None and self._ended[entry.communicator] < number):
            return False
        queue.popleft()
        if isinstance(entry, Launch) and entry.communicator is not None:
            self._start(entry, number)
        else:
            self._done[entry.stream] += 1
        return True

    def _start(self, kernel: Launch, number: int) -> None:
        """Start a kernel of NCCL. The last rank to start its number ends it on all ranks."""
        self._running[kernel.stream] = kernel, number
        self._free -= kernel.ctas
        self.least_free = min(self.least_free, self._free)
        started = self._world.started[kernel.communicator, number]
        started[self] = kernel
        names = {other.name for other in started.values()}
        both = {"send", "recv"}
        if (len(names) > 1 and names != both) or (len(started) > 1 and names < both):
            each = ", ".join(f"{rank.name} {other.name}" for rank, other in started.items())
            self._world.faults.append(f"number {number} of {kernel.communicator}: {each}")
        elif len(started) == kernel.size:
            for rank, other in started.items():
                del rank._running[other.stream]
                rank._free += other.ctas
                rank._done[other.stream] += 1
                rank._ended[other.communicator] += 1

    def _reached(self, events: Events) -> bool:
        return all(self._done[stream] >= count for stream, count in events.items())

    def waiting(self) -> Iterator[str]:
        """Yield each wait: the waiting host, kernel or queue, and its cause."""
        if self._at < len(self._steps):
            yield f"{self.name}: the host, at step {self._at} of {len(self._steps)}: {self._steps[self._at]}"
        for kernel, number in self._running.values():
            there = ", ".join(rank.name for rank in self._world.started[kernel.communicator, number])
            yield f"{self.name}: {kernel.name}, number {number} of {kernel.communicator}, where only {there} is"
        for queue in self._queues:
            if queue and queue[0][0].stream not in self._running:
                yield f"{self.name}: with {self._free} CTAs free: {queue[0][0]}"
