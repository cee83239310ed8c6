"""Memory that stages made of segments keep, counted in bytes: of each tensor, and at the peak of a pair."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from dualpipe.nn import Linear
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.parallel.all_to_all import CommStream, PendingRows
from dualpipe.pipeline.compiled_stage import compile_segments
from dualpipe.pipeline.microbatch_state import MicrobatchState
from dualpipe.pipeline.overlap import Task, walk
from dualpipe.pipeline.stage_runner import StageRunner
from tensor_bytes import AliveBytes
from threads import Rank, run_threads

ROWS, WIDTH, LAYERS = 256, 64, 3
SEGMENT = ROWS * WIDTH * 4  # bytes of the largest output of a segment that goes to another: float32 (ROWS, WIDTH)


class Exchange:
    """Sends all rows to one rank, which is this one, through the same buffers as between ranks."""

    group = None

    class Pending(PendingRows):
        on_wait: Callable[[], None] | None = None

        def wait(self):
            if self.on_wait is not None:
                self.on_wait()
            return super().wait()

    def __init__(self, stream: CommStream, on_wait: Callable[[], None]) -> None:
        self._stream, self._on_wait = stream, on_wait

    def forward(self, inputs):
        (rows,), pending = inputs, self.Pending(self._stream)
        return pending.send(rows, [len(rows)], [len(rows)])

    def backward(self, context, gradients):
        pending = self.forward(gradients)
        pending.on_wait = self._on_wait
        return pending


class Watched(nn.Module):
    """Layers of two linears with a communication before and after the second, and a residual."""

    def __init__(self, stream: CommStream) -> None:
        super().__init__()
        self.first = nn.ModuleList(Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.second = nn.ModuleList(Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.read: list[weakref.ref] = []  # storages of what came out of a communication, as they were read
        self.alive: list[list[bool]] = []  # whether each is there when the backward waits for a communication
        self.exchange = Exchange(stream, lambda: self.alive.append([ref() is not None for ref in self.read]))

    def received(self, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        self.read.append(weakref.ref(tensors[-1].untyped_storage()))
        return compute(*tensors)

    def segments(self) -> list:
        found = []
        for first, second in zip(self.first, self.second):
            found += [
                Compute(lambda x, first=first: torch.tanh(first(x)), "x", "rows"),
                Communicate(self.exchange, "rows", "rows"),
                Compute(partial(self.received, lambda rows, second=second: torch.tanh(second(rows))), "rows", "rows"),
                Communicate(self.exchange, "rows", "rows"),
                Compute(partial(self.received, torch.add), ("x", "rows"), "x"),
            ]
        return found


class Stage:
    """Runs actions of one stage, as the engine does."""

    def __init__(self, rank: Rank) -> None:
        torch.manual_seed(0)
        self.module = Watched(CommStream(rank.all_to_all("self", [rank.number]))).to(rank.device)
        self._store, self._device, self._count = WeightGradStore(), rank.device, 0
        self._runner = StageRunner(compile_segments(self.module.segments(), ("x",)), self._store)
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._store.activate(), torch.autograd.set_multithreading_enabled(False):
            yield

    def new(self) -> MicrobatchState:
        state = MicrobatchState()
        state.begin({"x": torch.ones(ROWS, WIDTH, device=self._device, requires_grad=True)})
        return state

    def forward(self, state: MicrobatchState) -> Task:
        return self._runner.forward(state)

    def backward(self, kind: str, state: MicrobatchState) -> Task:
        self._count += 1
        state.gradients = {"x": torch.ones_like(state.carry.pop("x"))}
        return self._runner.backward(state, kind, self._count)

    def tasks(self, kinds: str) -> list[tuple[MicrobatchState, Task]]:
        """Return actions ready to run, with the micro-batches they work on."""
        made = []
        for kind in kinds:
            state = self.new()
            if kind != "F":
                walk([self.forward(state)])
            if kind == "W":
                walk([self.backward("I", state)])
                weights = self._runner.compute_deferred(self._count, turns=2 * LAYERS)
                made.append((state, weights))
            else:
                made.append((state, self.forward(state) if kind == "F" else self.backward(kind, state)))
        return made


# -- counting


def peak(rank: Rank, stage: Stage, kinds: str) -> int:
    """Return the peak bytes of running the actions in turn, beyond those allocated before."""
    made = stage.tasks(kinds)
    tasks = [task for _, task in made]
    if rank.device.type == "cpu":
        with AliveBytes() as counted:
            walk(tasks)
        return counted.peak
    torch.cuda.synchronize()  # no freed memory still waits for a stream
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    walk(tasks)
    return torch.cuda.max_memory_allocated() - before


def peaks(rank: Rank) -> dict[str, int]:
    stage, found = Stage(rank), {}
    with stage.running():
        for kinds in ("F", "B", "I", "F", "B", "I", "W", *PAIRS):  # the first round warms up
            found[kinds] = peak(rank, stage, kinds)
    return found


PAIRS = ("FB", "FI", "FF", "BB", "II", "FW", "IW")


def test_a_pair_holds_what_both_hold_and_one_segment_more(device):
    (found,) = run_threads(peaks, 1, device=device)
    assert found["F"] >= LAYERS * 4 * SEGMENT, "each layer keeps what went into and came out of two communications"
    for pair in PAIRS:
        assert found[pair] <= found[pair[0]] + found[pair[1]] + SEGMENT, (pair, found)


def lifetimes(rank: Rank) -> list[list[bool]]:
    stage = Stage(rank)
    with stage.running():
        state = stage.new()
        walk([stage.forward(state)])
        walk([stage.backward("B", state)])
    return stage.module.alive


def test_a_boundary_tensor_goes_when_its_backward_is_done(device):
    """A boundary tensor is freed when its backward is done.

    When the backward waits for a communication, the segment before it has computed its gradients, also those of its
    weights: its input is gone.
    """
    (alive,) = run_threads(lifetimes, 1, device=device)
    count = 2 * LAYERS
    assert alive == [[i < count - done for i in range(count)] for done in range(1, count + 1)]


def read_without_gradients(rank: Rank) -> list[list[bool]]:
    stage, alive = Stage(rank), []
    module = stage.module
    start = module.exchange.forward

    def forward(inputs):
        alive.append([ref() is not None for ref in module.read])
        return start(inputs)

    module.exchange.forward = forward
    with torch.no_grad():
        walk([stage.forward(stage.new())])
    return alive


def test_without_a_backward_it_goes_when_it_has_been_read(device):
    (alive,) = run_threads(read_without_gradients, 1, device=device)
    assert alive == [[False] * i for i in range(2 * LAYERS)]


def forwards_beside_backwards(rank: Rank) -> list[int]:
    """Return the bytes alive after each of several consecutive pairs."""
    stage, found = Stage(rank), []
    with stage.running(), AliveBytes() as counted:
        state = stage.new()
        walk([stage.forward(state)])
        for _ in range(4):
            following = stage.new()
            walk([stage.forward(following), stage.backward("B", state)])
            state = following
            found.append(counted.now)
    return found


def test_nothing_piles_up_over_pairs():
    (found,) = run_threads(forwards_beside_backwards, 1)
    assert len(set(found)) == 1, found
