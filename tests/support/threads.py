"""Several ranks as threads of one process, so that one GPU shows how streams, events and memory of many behave.

    def on_rank(rank: Rank) -> ...:
        Pipeline(stages, process_group=rank.group("pp", (0, 1)), ...)          # beside it
        ExpertParallel(num_experts, rank.all_to_all("ep", (0, 2)))

    run_threads(on_rank, 4, device="cuda")

It stands behind two interfaces: the pipeline's `P2PGroups` with their `Link`s, and `AllToAll`. A send and its
receive meet in a mailbox, in order, and the later one starts the copy.

On CUDA every rank has its own current stream. A copy runs on a stream of the receiver, after events of both sides, as
NCCL does it; `wait` makes the current stream wait. On CPU the copy happens when one side waits, and not before, so
that a rank finds nothing it has not waited for. Receive buffers are filled with ones (NaN, -1) before, so that a
missing wait shows. Nothing is kept beyond the copy: that is up to the caller.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualpipe.pipeline.p2p import Link, P2PGroups
from dualpipe.runtime.ranks.rank_sync import RankSync

CYCLES_PER_SECOND = 1.5e9  # of torch.cuda._sleep, roughly


@dataclass(frozen=True)
class Delays:
    """Delays of single streams in seconds: of all ranks, or of one.

    links, all_to_all: each copy of a message, each of an all-to-all. beside: the stream that gives rows to the
    all-to-all, before each of them. compute: the computing of each module given to `slow_down`.
    """

    links: float = 0.0
    all_to_all: float = 0.0
    beside: float = 0.0
    compute: float = 0.0
    rank: int | None = None

    def of(self, stream: str, rank: int) -> float:
        return getattr(self, stream) if self.rank in (None, rank) else 0.0


class Side(NamedTuple):
    """One side of a transfer: the tensor, and the event before which it must not be touched."""

    tensor: Tensor
    ready: torch.cuda.Event | None

    @staticmethod
    def of(tensor: Tensor) -> Side:
        assert tensor.is_contiguous(), "only contiguous tensors are sent"
        return Side(tensor, torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None)


class Transfer:
    """A copy from one rank to another, as a `Work` of both."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what
        self.sides: dict[str, Side] = {}
        self._copied: torch.cuda.Event | None = None
        self._due = 0.0  # on CPU: the earliest time of the copy

    def meet(self, delay: float, stream: torch.cuda.Stream | None) -> None:
        """Start the transfer: both sides are there. Called with the world's lock."""
        sent, received = self.sides["send"].tensor, self.sides["receive"].tensor
        if (sent.nbytes, sent.device) != (received.nbytes, received.device):
            raise ValueError(f"{self._what}: {sent.nbytes} bytes are sent and {received.nbytes} received")
        self._due = time.monotonic() + delay
        if stream is not None:
            with torch.cuda.stream(stream):
                for side in self.sides.values():
                    stream.wait_event(side.ready)  # orders: earlier work of either side, then the copy
                pause(delay)
                _bytes(received).copy_(_bytes(sent))
                self._copied = stream.record_event()
            self.sides.clear()  # the callers keep their tensors until they have waited

    def wait(self) -> bool:
        self._world.until(lambda: self._copied is not None or len(self.sides) != 1, self._what)
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)  # orders: the copy, then what follows here
            return True
        time.sleep(max(0.0, self._due - time.monotonic()))
        with self._world.changed:
            if self.sides:
                _bytes(self.sides["receive"].tensor).copy_(_bytes(self.sides["send"].tensor))
                self.sides.clear()
        return True


class Works:
    """Several transfers as one `Work`."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def wait(self) -> bool:
        for transfer in self._transfers:
            transfer.wait()
        return True


class World:
    """State that the threads share. After a failure nothing waits any more."""

    def __init__(self, size: int, device: torch.device, delays: Delays, timeout: float) -> None:
        self.size, self.device, self.delays, self._timeout = size, device, delays, timeout
        self.changed = threading.Condition()
        self.store = dist.HashStore()
        self._open: defaultdict[tuple, deque[Transfer]] = defaultdict(deque)  # transfers with one side missing
        self._streams: dict[tuple, torch.cuda.Stream] = {}
        self._failure: str | None = None

    def post(self, kind: str, key: tuple[str, int, int], side: Side, role: str) -> Transfer:
        """Send or receive between two ranks, in order; `key` is (name, source, destination)."""
        with self.changed:
            waiting = self._open[key]
            if not waiting or role in waiting[0].sides:
                waiting.append(Transfer(self, f"{key[0]} from rank {key[1]} to {key[2]}"))
                waiting[-1].sides[role] = side
                return waiting[-1]
            transfer = waiting.popleft()
            transfer.sides[role] = side
            transfer.meet(self.delays.of(kind, key[2]), self._stream(kind, key) if side.tensor.is_cuda else None)
            self.changed.notify_all()
            return transfer

    def _stream(self, kind: str, key: tuple[str, int, int]) -> torch.cuda.Stream:
        """Return the receiver's stream: one for each link, one for all-to-alls from all ranks."""
        name = key if kind == "links" else (key[0], key[2])
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device)
        return self._streams[name]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for other threads; RuntimeError if one has failed or does not come."""
        with self.changed:
            if not self.changed.wait_for(lambda: condition() or self._failure is not None, self._timeout):
                raise RuntimeError(f"{what}: the other side did not come within {self._timeout} s")
            if not condition():
                raise RuntimeError(f"{what}: {self._failure}")

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self._failure = self._failure or f"rank {rank} failed: {type(error).__name__}: {error}"
            self.changed.notify_all()


class Rank(NamedTuple):
    """One of the threads."""

    world: World
    number: int

    @property
    def device(self) -> torch.device:
        return self.world.device

    def group(self, name: str, members: Sequence[int]) -> Group:
        """Return a process group for `Pipeline`: the ranks `members`, this one among them."""
        return Group(self, name, tuple(members))

    def all_to_all(self, name: str, members: Sequence[int]) -> ThreadAllToAll:
        """Return an all-to-all between the ranks `members`, for `ExpertParallel`."""
        return ThreadAllToAll(self, name, tuple(members))

    def slow_down(self, module: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> None:
        """Delay the computing of every module of a kind, forward and backward, by `Delays.compute`."""
        seconds = self.world.delays.of("compute", self.number)

        def late(_: nn.Module, __: Any, outputs: Tensor | tuple[Tensor, ...]) -> None:
            first = outputs[0] if isinstance(outputs, tuple) else outputs
            pause(seconds, self.device)
            if first.requires_grad:
                first.register_hook(lambda _: pause(seconds, self.device))

        for part in module.modules() if seconds else ():
            if isinstance(part, kind):
                part.register_forward_hook(late)


class Group(P2PGroups):
    """Connections that `Pipeline` takes in place of a process group: ranks that are threads."""

    def __init__(self, rank: Rank, name: str, members: tuple[int, ...]) -> None:
        self.of, self._name, self._members = rank, name, members

    def size(self) -> int:
        return len(self._members)

    def rank(self) -> int:
        return self._members.index(self.of.number)

    def ranks(self, replicas: Iterable[dist.ProcessGroup]) -> RankSync:
        return RankSync(self._between("record"), replicas=replicas)

    def store(self) -> dist.Store:
        return self.of.world.store

    def groups(self) -> list[ThreadGroup]:
        return [self._between("record")]

    def resolve_device(self, device: torch.device | None) -> torch.device:
        assert device is None or device.type == self.of.device.type, device
        return device or self.of.device

    def connect(self, placement: Any, device: torch.device) -> None:
        """Links need no preparation."""

    def link(self, stream: tuple[int, int, str], *, by_host: bool = False) -> Link:
        src, dst, kind = stream
        return Link(self._between(kind), dst if src == self.rank() else src)

    def header_link(self, peer: int) -> Link:
        return Link(self._between("header"), peer)

    def _between(self, what: str) -> ThreadGroup:
        return ThreadGroup(self.of, f"{self._name}: {what}", self._members)


class ThreadGroup(NamedTuple):
    """The part of a torch.distributed.ProcessGroup that links and `RankSync` use."""

    of: Rank
    name: str
    members: tuple[int, ...]

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.members.index(self.of.number)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        key = self.name, self.of.number, self.members[peer]
        return self.of.world.post("links", key, Side.of(tensors[0]), "send")

    def abort(self) -> None:
        """End all waits, as closed connections do."""
        self.of.world.fail(self.of.number, RuntimeError("Connection closed by peer"))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Transfer:
        _spoil(tensors[0])
        key = self.name, self.members[peer], self.of.number
        return self.of.world.post("links", key, Side.of(tensors[0]), "receive")


class ThreadAllToAll:
    """Stand-in for `dualpipe.parallel.all_to_all.AllToAll`."""

    group = None

    def __init__(self, rank: Rank, name: str, members: tuple[int, ...]) -> None:
        self._of, self._name, self._members = rank, name, members
        self.rank, self.size, self.device = members.index(rank.number), len(members), rank.device

    def start(
        self, received: Tensor, sent: Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
    ) -> Works:
        world, own = self._of.world, self._of.number
        pause(world.delays.of("beside", own), self.device)
        _spoil(received)
        transfers = []
        parts = zip(self._members, sent.split(list(sent_rows)), received.split(list(received_rows)), strict=True)
        for peer, out, into in parts:
            transfers.append(world.post("all_to_all", (self._name, own, peer), Side.of(out), "send"))
            transfers.append(world.post("all_to_all", (self._name, peer, own), Side.of(into), "receive"))
        return Works(transfers)


def pause(seconds: float, device: torch.device | None = None) -> None:
    """Keep the current stream busy, or on CPU the thread; without `device` the stream."""
    if seconds and (device is None or device.type == "cuda"):
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
    elif seconds:
        time.sleep(seconds)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _spoil(tensor: Tensor) -> None:
    _bytes(tensor).fill_(255)


def run_threads(
    fn: Callable[..., Any], size: int, *args: Any, device: str | torch.device = "cpu", delays: Delays | None = None,
    timeout: float = 30,
) -> list[Any]:
    """Call `fn(rank, *args)` in `size` threads; return their results by rank, or raise the first error.

    timeout: seconds that a rank waits for another. Threads share random numbers and all other state of the process.
    """
    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    world = World(size, device, delays or Delays(), timeout)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        try:
            with _own_stream(world.device):
                results[rank] = fn(Rank(world, rank), *args)
        except BaseException as error:
            errors.append((rank, error))
            world.fail(rank, error)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return results


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        yield
    if stream is not None:
        stream.synchronize()  # the results are read on another one
