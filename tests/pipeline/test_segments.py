"""Stages made of segments have the gradients of the plain module, with any overlap."""

from __future__ import annotations

import copy
import itertools
import weakref
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe import Pipeline
from dualpipe.nn import defer_weight_grads
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.pipeline import PipelineError
from dualpipe.pipeline.compiled_stage import backward_order, compile_segments
from dualpipe.pipeline.microbatch_state import MicrobatchState
from dualpipe.pipeline.overlap import walk
from dualpipe.pipeline.stage_runner import StageRunner
from ranks import run_ranks
from toys import Rolled, Stage, gradient_error, num_stages, reference, relative_error, stages_of_rank

WIDTH = 8
ALL = ("before", "between", "after")  # recomputed parts of Layered: a message that arrives is not kept, but sent again


class Layered(nn.Module):
    """(B, width) -> (B, width): `layers` times a linear, a communication, a linear, a residual; with dropout."""

    layers, recompute, p = 2, (), 0.0

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.log = []
        self.a = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(3))
        self.b = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(3))

    def before(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        self.log.append(f"before {i}")
        return x, F.dropout(torch.tanh(self.a[i](x)), self.p)

    def after(self, i: int, residual: Tensor, rows: Tensor) -> Tensor:
        self.log.append(f"after {i}")
        return residual + self.b[i](rows)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.layers):
            residual, rows = self.before(i, x)
            x = self.after(i, residual, rows.roll(1, 0))
        return x

    def segments(self) -> list:
        found = []
        for i in range(self.layers):
            found += [
                Compute(lambda x, i=i: self.before(i, x), "x", ("residual", "rows"), "before" in self.recompute),
                Communicate(Rolled(self.log), "rows", "rows", "between" in self.recompute),
                Compute(lambda r, x, i=i: self.after(i, r, x), ("residual", "rows"), "x", "after" in self.recompute),
            ]
        return found


def unequal(count: int) -> list[Layered]:
    torch.manual_seed(0)
    stages = [defer_weight_grads(Layered()) for _ in range(count)]
    for i, stage in enumerate(stages):
        stage.layers = 1 + i % 3
    return stages


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(3 * microbatches, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))


def parity(rank: int, name: str, pp: int, microbatches: int, recompute: tuple, overlap: bool) -> tuple[float, float]:
    expected = unequal(num_stages(name, pp))
    mine = [copy.deepcopy(expected[i]) for i in stages_of_rank(name, pp, rank)]
    for stage in mine:
        stage.recompute = recompute
    pipe = Pipeline(mine, schedule=name, overlap=overlap)
    x, y = batch(microbatches)
    losses, _ = reference(expected, x, y, microbatches)
    loss, _ = pipe.step(x, num_chunks=microbatches, criterion=F.mse_loss, labels=(y,))
    numbers = stages_of_rank(name, pp, rank)
    worst = max(gradient_error(stage, expected[i]) for stage, i in zip(mine, numbers))
    return worst, 0.0 if loss is None else relative_error(loss, losses)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("recompute", [(), ("before", "after"), ALL], ids=str)
@pytest.mark.parametrize("name, pp, microbatches", [
    ("dualpipev", 1, 3), ("dualpipev", 2, 7), ("zbv", 2, 5), ("1f1b", 2, 3), ("interleaved_1f1b", 2, 4),
])
def test_gradients_and_losses(name, pp, microbatches, recompute, overlap):
    for gradients, losses in run_ranks(parity, pp, name, pp, microbatches, recompute, overlap):
        assert gradients < 1e-10 and losses < 1e-12


# -- the order of a walk


def begun(x: Tensor) -> MicrobatchState:
    """Return the state at the start of a forward in segments."""
    state = MicrobatchState()
    state.begin({"x": x})
    return state


class Named(list):
    """One side's entries in a log shared by both sides."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def append(self, entry):
        self.log.append(f"{self.name} {entry}")


def test_a_walk_computes_on_one_side_while_the_other_communicates():
    """Two forwards of two layers overlap in a fixed order.

    Each communication is started, then the other side computes. The first communication is advanced before the other
    side's starts, and only then is it waited for.
    """
    log, tasks = [], []
    for name in "ab":
        side = Layered()
        side.log = Named(name, log)
        stage = StageRunner(compile_segments(side.segments(), ("x",)), WeightGradStore())
        tasks.append(stage.forward(begun(torch.ones(2, WIDTH, dtype=torch.float64))))
    walk(tasks)
    assert log == [
        "a before 0", "a forward",
        "b before 0", "a advance", "b forward",
        "a wait", "a after 0", "a before 1", "b advance", "a forward",  # no communication between two segments
        "b wait", "b after 0", "b before 1", "a advance", "b forward",
        "a wait", "a after 1",
        "b advance", "b wait", "b after 1",
    ]


def noted(log, name):
    """Return a function that computes its inputs' sum and logs `name`, also in the backward."""
    def run(*inputs):
        total = sum(inputs) * 2
        log.append(name)
        if total.requires_grad:
            total.register_hook(lambda _: log.append(f"{name} back"))
        return total
    return run


@pytest.mark.parametrize("recompute", [False, True])
def test_a_communication_is_waited_for_when_something_reads_what_it_brings(recompute):
    """A communication is waited for only when a segment reads its result.

    It runs alone, there and back. Two neighbours are not joined if only the later one reads the result. The input of a
    recomputed communication is kept where the segment before it is not recomputed.
    """
    log = []
    segments = [
        Compute(noted(log, "first"), "x", "rows"),
        Compute(noted(log, "other"), "x", "other"),
        Communicate(Rolled(log), "rows", "there", recompute),
        Compute(noted(log, "meanwhile"), "other", "other", recompute),
        Compute(noted(log, "reads"), ("there", "other"), "x", recompute),
    ]
    stage, x = StageRunner(compile_segments(segments, ("x",)), WeightGradStore()), torch.randn(3, 2, requires_grad=True)
    state = MicrobatchState()
    state.begin({"x": x}, ("x",))
    walk([stage.forward(state)])
    expected = 4 * x.roll(1, 0) + 8 * x
    assert torch.equal(state.carry["x"], expected)
    there = ["forward", "meanwhile", "advance", "wait", "reads"]
    assert log == ["first", "other", *there]
    log.clear()
    state.gradients = {"x": torch.ones(3, 2)}
    walk([stage.backward(state, "B", "B")])
    assert torch.equal(state.input_gradients()[0], torch.full((3, 2), 12.0))
    back = ["reads back", "backward", "meanwhile back", "advance", "wait", "other back", "first back"]
    assert log == (["recompute", *there[1:]] if recompute else []) + back


def test_worked_example_of_the_order_of_backwards():
    """Order the backwards of a ring of three ranks, and of a name that is written twice.

    The gradients of the name's first value must not come before those of its second.
    """
    ring = [Communicate(None, "kv0", "kv1"), Compute(None, ("q", "kv0"), "y"), Communicate(None, "kv1", "kv2"),
            Compute(None, ("q", "kv1", "y"), "y"), Compute(None, ("q", "kv2", "y"), "y")]
    assert backward_order(ring) == [4, 2, 3, 0, 1]
    again = [Communicate(None, "rows", "there"), Compute(None, "x", "rows"), Compute(None, ("there", "rows"), "x")]
    assert backward_order(again) == [2, 1, 0]


def test_gradients_travel_while_what_does_not_read_them_is_computed():
    log = []
    segments = [
        Compute(noted(log, "first"), "x", "rows"),
        Communicate(Rolled(log), "rows", "there"),
        Compute(noted(log, "between"), "x", "other"),
        Communicate(Rolled(log), "there", "there"),
        Compute(noted(log, "last"), ("there", "other"), "x"),
    ]
    stage, x = StageRunner(compile_segments(segments, ("x",)), WeightGradStore()), torch.randn(3, 2, requires_grad=True)
    state = MicrobatchState()
    state.begin({"x": x}, ("x",))
    walk([stage.forward(state)])
    log.clear()
    state.gradients = {"x": torch.ones(3, 2)}
    walk([stage.backward(state, "B", "B")])
    assert torch.equal(state.input_gradients()[0], torch.full((3, 2), 8.0))
    assert log == ["last back", "backward", "advance", "wait", "backward", "between back", "advance", "wait",
                   "first back"]


def test_what_cannot_be_advanced_is_an_error_of_its_own_action():
    """The first side's first communication cannot send its rows, when it is the other side's turn to start one."""
    log, turns, tasks = [], [], []
    failing = Rolled.Pending((), [])
    failing.advance = Mock(side_effect=ValueError("rows of different sizes"))
    failing.wait = Mock()
    for name in "ab":
        side = Layered()
        side.log = Named(name, log)
        segments = side.segments()
        if name == "a":
            segments[1].communication.forward = lambda inputs: failing
        stage = StageRunner(compile_segments(segments, ("x",)), WeightGradStore())
        tasks.append(stage.forward(begun(torch.ones(2, WIDTH, dtype=torch.float64))))
    with pytest.raises(ValueError, match="rows of different sizes"):
        walk(tasks, turns.append)
    assert turns == [0, 0, 1, 0], "the turn that raises is that of the side whose rows cannot be sent"
    failing.wait.assert_not_called()
    assert log == ["a before 0", "b before 0"]


class Clock:
    """Simulated time, which passes only where a side computes or waits; other work on the machine takes none."""

    now = 0.0


class Slow:
    """A communication that ends `seconds` after its start, in parallel with the computing of this rank."""

    group = None

    def __init__(self, seconds):
        self.seconds = seconds

    class Pending:
        def __init__(self, value, ready):
            self.value, self.ready = value, ready

        def advance(self):
            pass

        def wait(self):
            Clock.now = max(Clock.now, self.ready)
            return self.value

    def forward(self, inputs):
        return self.Pending((inputs, None), Clock.now + self.seconds)

    def backward(self, context, gradients):
        return self.Pending((gradients, None), Clock.now + self.seconds)

    def recompute(self, context, inputs):
        return self.forward(inputs)


def busy(seconds):
    Clock.now += seconds


class Burn(torch.autograd.Function):
    """Takes time in the forward, and again in the backward for the input and, deferred, for the weights."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        busy(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        busy(ctx.seconds)
        WeightGradStore.current().put(lambda: busy(ctx.seconds))
        return dy, None


UNIT, LAYERS = 1.0, 6


def slow_stage(communication: float) -> list:
    def compute(x):
        return Burn.apply(x, UNIT)

    first = [Compute(compute, "x", "x")]
    return first + [Communicate(Slow(communication), "x", "x"), Compute(compute, "x", "x")] * LAYERS


def timed(kinds: str, communication: float) -> float:
    """Return the time of a step with actions of these kinds, in units; each communication takes `communication`."""
    store = WeightGradStore()
    stage = StageRunner(compile_segments(slow_stage(communication), ("x",)), store)
    jobs = []
    for i, kind in enumerate(kinds):
        state = begun(torch.ones(1, requires_grad=True))
        if kind == "F":
            jobs.append(stage.forward(state))
            continue
        walk([stage.forward(state)])
        state.gradients = {"x": torch.ones(1)}
        backward = stage.backward(state, "I" if kind == "W" else kind, i)
        if kind == "W":
            with store.activate():
                walk([backward])
            backward = stage.compute_deferred(i, turns=LAYERS)
        jobs.append(backward)
    with store.activate():
        start = Clock.now
        walk(jobs)
        return Clock.now - start


@pytest.mark.parametrize("kinds, computes, communications", [
    ("FB", 3, 2), ("FI", 2, 2), ("FF", 2, 2), ("II", 2, 2), ("BB", 4, 2), ("FW", 2, 1), ("IW", 2, 1), ("B", 2, 1),
])
def test_a_pair_takes_the_longer_of_computing_and_communicating(kinds, computes, communications):
    """Compute segments take one unit; a communication takes as long as the computing available to hide it."""
    compute = computes * (LAYERS + 1) * UNIT
    communication = compute / (communications * LAYERS)
    alone = compute + communications * LAYERS * communication
    found = timed(kinds, min(communication, UNIT))
    longer = max(compute, communications * LAYERS * min(communication, UNIT))
    # One unit at either end has nothing on the other side to overlap with.
    assert longer <= found <= longer + 2 * UNIT < alone, f"{found}; {longer} if all is hidden, {alone} if nothing is"


def test_a_pair_of_equal_computing_and_communication():
    """Forward and input gradients: as much communication as computing, hidden except at the ends."""
    computing, communicating = 2 * (LAYERS + 1) * UNIT, 2 * LAYERS * UNIT
    assert timed("FI", UNIT) == max(computing, communicating)
    assert timed("F", UNIT) == (2 * LAYERS + 1) * UNIT, "alone, nothing hides it"


# -- the same results, bit for bit


def training(rank: int, overlap: bool, recompute: tuple, p: float) -> list:
    mine = [copy.deepcopy(unequal(4)[i]) for i in stages_of_rank("dualpipev", 2, rank)]
    for stage in mine:
        stage.recompute, stage.p = recompute, p
    pipe = Pipeline(mine, schedule="dualpipev", overlap=overlap)
    torch.manual_seed(rank)
    x, y = batch(6)
    losses = []
    for _ in range(4):
        loss, _ = pipe.step(x, num_chunks=6, criterion=F.mse_loss, labels=(y,))
        losses.append(None if loss is None else loss.tolist())
        with torch.no_grad():
            for param in pipe.parameters():
                if param.grad is not None:  # the gradient of a layer that the stage has
                    param -= 0.1 * param.grad
        pipe.zero_grad()
    return losses


@pytest.mark.parametrize("overlap, recompute", [
    (False, ()), (True, ("before",)), (False, ALL),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, ("before", "after")), (True, ALL))),
])
def test_losses_are_the_same_bits_with_and_without_overlap_and_recomputation(overlap, recompute):
    plain = run_ranks(training, 2, True, (), 0.0)
    assert run_ranks(training, 2, overlap, recompute, 0.0) == plain


def test_recomputation_draws_the_same_random_numbers():
    """Dropout draws the same numbers, also after a recomputed segment: it draws as if nothing had been recomputed."""
    plain, *again = (run_ranks(training, 2, False, recompute, 0.5) for recompute in ((), ("before",), ALL))
    assert again == [plain, plain]


def counts(rank: int, recompute: tuple, frozen: int = 0) -> list[str]:
    """Return what a stage of two layers does in three micro-batches. frozen: its first layers that are not trained."""
    stage = unequal(1)[0]
    stage.layers, stage.recompute = 2, recompute
    later = copy.deepcopy(stage)
    for layer in (*stage.a[:frozen], *stage.b[:frozen]):
        layer.requires_grad_(False)
    pipe = Pipeline([stage, later], schedule="zbv")
    x, y = batch(3)
    pipe.step(x, num_chunks=3, criterion=F.mse_loss, labels=(y,))
    return stage.log


def test_a_marked_segment_is_computed_again_once_and_others_are_not():
    log = run_ranks(counts, 1, ("before",))[0]
    assert log.count("before 0") == log.count("before 1") == 2 * 3
    assert log.count("after 0") == log.count("after 1") == 3
    assert log.count("forward") == log.count("backward") == 2 * 3


def test_communications_before_all_that_is_trained_have_no_backward():
    """Without recomputation, which shows what needs a gradient only in the backward."""
    for frozen, backwards in ((0, 2), (1, 1), (2, 0)):
        log = run_ranks(counts, 1, (), frozen)[0]
        assert log.count("forward") == 2 * 3 and log.count("backward") == backwards * 3


def test_what_is_not_kept_is_sent_again_once():
    log = run_ranks(counts, 1, ALL)[0]
    assert {log.count(f"{part} {i}") for part in ("before", "after") for i in range(2)} == {2 * 3}
    assert log.count("forward") == log.count("recompute") == log.count("backward") == 2 * 3


class Rereading(Layered):
    """Passes one tensor to two compute segments, with a communication before each."""

    def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a[0](x)
        return h, 2 * h

    def read(self, i: int, h: Tensor, rows: Tensor) -> Tensor:
        return torch.tanh(self.b[i](h * rows))

    def forward(self, x: Tensor) -> Tensor:
        h, rows = self.first(x)
        return self.read(1, h, self.read(0, h, rows.roll(1, 0)).roll(1, 0))

    def segments(self) -> list:
        marked = bool(self.recompute)
        found = [Compute(self.first, "x", ("h", "rows"), marked)]
        for i, written in enumerate(("rows", "x")):
            found += [Communicate(Rolled(self.log), "rows", "rows", marked),
                      Compute(partial(self.read, i), ("h", "rows"), written, marked)]
        return found


def rereading(rank: int, recompute: tuple) -> float:
    torch.manual_seed(0)
    expected, (x, y) = defer_weight_grads(Rereading()), batch(2)
    stage = copy.deepcopy(expected)
    stage.recompute = recompute
    reference([expected], x, y, 2)
    Pipeline([stage], schedule="1f1b").step(x, num_chunks=2, criterion=F.mse_loss, labels=(y,))
    return gradient_error(stage, expected)


def test_what_several_segments_that_are_run_again_together_read_counts_once_for_each():
    for recompute in ((), ALL):
        assert run_ranks(rereading, 1, recompute)[0] < 1e-12


# -- what is kept


def what_was_sent(rank: int) -> list[bool]:
    """Return, per communication, whether the sent rows are still alive when the received ones are read."""
    stage, sent, alive = unequal(1)[0], [], []
    stage.layers, stage.recompute = 2, ALL

    class Watched(Rolled):
        def forward(self, inputs):
            sent.append(weakref.ref(inputs[0].untyped_storage()))
            return super().forward(inputs)

    def after(residual, rows):
        alive.append(sent[-1]() is not None)
        return residual + rows

    segments = stage.segments()
    segments[0::3] = [Compute(lambda x, a=a: (x, a(x)), "x", ("residual", "rows"), True) for a in stage.a[:2]]
    segments[1::3] = [Communicate(Watched([]), "rows", "rows", True)] * 2
    segments[2::3] = [Compute(after, ("residual", "rows"), "x", True)] * 2
    store = WeightGradStore()
    segmented = StageRunner(compile_segments(segments, ("x",)), store)
    state = begun(torch.randn(5, WIDTH, dtype=torch.float64).requires_grad_())
    walk([segmented.forward(state)])
    state.gradients = {"x": torch.ones_like(state.carry.pop("x"))}
    with store.activate(), torch.autograd.set_multithreading_enabled(False):
        walk([segmented.backward(state, "B", 0)])
    return alive


def test_what_is_sent_is_freed_before_what_arrives_is_read_also_when_it_is_sent_again():
    assert run_ranks(what_was_sent, 1) == [[False] * 2 * 2]


def test_what_a_segment_read_is_freed_before_the_one_before_it_is_run_again():
    read, alive = [], []

    def first(x):
        alive.append([ref() is not None for ref in read])
        return 2 * x

    def second(rows):
        read.append(weakref.ref(rows.untyped_storage()))
        return 3 * rows

    segments = [Compute(first, "x", "rows", recompute=True), Compute(second, "rows", "x")]
    segmented = StageRunner(compile_segments(segments, ("x",)), WeightGradStore())
    state = begun(torch.ones(5, requires_grad=True))
    walk([segmented.forward(state)])
    state.gradients = {"x": torch.ones_like(state.carry.pop("x"))}
    walk([segmented.backward(state, "B", 0)])
    assert alive == [[], [False]]


def saved(rank: int) -> list[tuple[int, int]]:
    """Return how many tensors autograd saves and the records hold after three layers' forward, by recomputation."""
    found = []
    for recompute in ((), ("before", "after"), ALL):
        stage, count = unequal(1)[0], []
        stage.layers, stage.recompute = 3, recompute
        segmented = StageRunner(compile_segments(stage.segments(), ("x",)), WeightGradStore())
        state = begun(torch.randn(5, WIDTH, dtype=torch.float64).requires_grad_())
        with torch.autograd.graph.saved_tensors_hooks(lambda t, count=count: count.append(t.shape) or t, lambda t: t):
            walk([segmented.forward(state)])
        assert set(state.carry) == {"x"}, "everything else has been read for the last time"
        found.append((len(count), sum(len(record.saved_inputs) for record in state.records)))
    return found


def test_recomputation_keeps_the_inputs_of_segments_only():
    (plain, no_inputs), (again, inputs), (sent_again, first_inputs) = run_ranks(saved, 1)[0]
    assert plain > 0 and no_inputs == 0
    # For three layers: x, and the output of each communication together with the residual.
    assert again == 0 and inputs == 1 + 3 * 2
    assert sent_again == 0 and first_inputs == 1


# -- failures


class Failing(Layered):
    fail = ""

    def before(self, i, x):
        if self.fail == "forward":
            raise RuntimeError("out of luck")
        residual, rows = super().before(i, x)
        if self.fail == "backward":
            rows.register_hook(lambda grad: 1 / 0)
        return residual, rows


def failing(rank: int) -> list[str]:
    x, y = batch(5)
    messages = []
    for where, failing_rank, local in itertools.product(("forward", "backward"), range(2), range(2)):
        mine = [Failing() for _ in range(2)]
        pipe = Pipeline(mine, process_group=dist.new_group([0, 1]), schedule="dualpipev")
        mine[local].fail = where if rank == failing_rank else ""
        with pytest.raises(PipelineError) as raised:
            pipe.step(x, num_chunks=5, criterion=F.mse_loss, labels=(y,))
        messages.append(str(raised.value))
    return messages


def test_a_segment_that_fails_is_named_by_its_rank_and_stage():
    first, second = run_ranks(failing, 2)
    assert first == second
    stages = [0, 3, 1, 2] * 2  # of rank 0 and rank 1, of which each fails in its two stages
    for i, (message, stage) in enumerate(zip(first, stages)):
        assert message.startswith(f"rank {i // 2 % 2}: {stage}") and ("out of luck" if i < 4 else "division") in message


# -- names


class Listed(nn.Module):
    """A stage of given segments, and a forward equivalent to them."""

    def __init__(self, segments, forward=None):
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.segments, self.run = (lambda: segments(self)), forward

    def forward(self, *x):
        return self.run(self, *x)


def through(rows):
    return Communicate(Rolled([]), rows, rows)


TWO = {
    "rewritten": [
        Listed(lambda s: [Compute(lambda x: (s.a(x), s.b(x)), "x", ("x0", "x1")), through("x0"),
                          Compute(lambda a, b: (a, b), ("x0", "x1"), ("x1", "x0"))],
               lambda s, x: (s.b(x), s.a(x).roll(1, 0))),
        Listed(lambda s: [Compute(lambda x: x * 1, "x0", "d"), through("d"),
                          Compute(lambda d, x1: (s.a(d), 3 * s.b(x1)), ("d", "x1"), ("x1", "x0"))],
               lambda s, x0, x1: (3 * s.b(x1), s.a((x0 * 1).roll(1, 0)))),
        Listed(lambda s: [Compute(lambda x: s.a(x), "x0", "d"), through("d"), Compute(torch.mul, ("d", "d"), "e"),
                          through("e"), Compute(lambda e, x1: e + s.b(x1), ("e", "x1"), "x")],
               lambda s, x0, x1: (s.a(x0).roll(1, 0) ** 2).roll(1, 0) + s.b(x1)),
    ],
}


def several_tensors(rank: int) -> float:
    torch.manual_seed(0)
    stages = TWO["rewritten"]
    expected = copy.deepcopy(stages)
    x, y = batch(3)
    pipe = Pipeline(stages, schedule="interleaved_1f1b")
    loss, _ = pipe.step(x, num_chunks=3, criterion=F.mse_loss, labels=(y,))
    losses = []
    for xs, ys in zip(x.chunk(3), y.chunk(3)):
        out = (xs,)
        for stage in expected:
            out = stage(*out)
            out = out if isinstance(out, tuple) else (out,)
        losses.append(F.mse_loss(*out, ys))
        losses[-1].backward()
    errors = [gradient_error(a, b) for a, b in zip(stages, expected)]
    return max(*errors, relative_error(loss, torch.stack(losses).detach()))


def test_outputs_go_by_number_and_a_tensor_read_twice_has_both_gradients():
    assert run_ranks(several_tensors, 1)[0] < 1e-10


# -- autocast


class Watch(torch.autograd.Function):
    """Logs in which direction autocast is on."""

    @staticmethod
    def forward(ctx, x, seen):
        seen.append(("forward", torch.is_autocast_enabled("cpu")))
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.seen.append(("backward", torch.is_autocast_enabled("cpu")))
        return dy, None


@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_around_a_step_is_for_the_forwards_alone(recompute):
    stage, seen = Stage(dtype=torch.float32), []
    stage.segments = lambda: [
        Compute(lambda x: Watch.apply(stage.up(x), seen), "x", "rows", recompute=recompute),
        Communicate(Slow(0.0), "rows", "rows", recompute=recompute),
        Compute(lambda rows: Watch.apply(stage.down(rows), seen), "rows", "x", recompute=recompute),
    ]
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        Pipeline([stage], schedule="1f1b").step(x, num_chunks=2, criterion=F.mse_loss, labels=x)
    assert set(seen) == {("forward", True), ("backward", False)}
    assert len(seen) == 2 * 2 * (3 if recompute else 2)


def test_what_a_communication_brings_and_nothing_reads_is_no_output():
    class Sending(Stage):
        def segments(self):
            return [Communicate(Rolled([]), "x", "x1"), Compute(super().forward, "x", "x")]

    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    found = []
    for kind in (Stage, Sending):
        torch.manual_seed(1)
        pipe = Pipeline([defer_weight_grads(kind()) for _ in range(2)], schedule="dualpipev")
        loss, outputs = pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=(x,), return_outputs=True)
        found.append([loss, outputs, *(param.grad for param in pipe.parameters())])
    assert all(map(torch.equal, *found))
