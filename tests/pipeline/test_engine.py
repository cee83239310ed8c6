"""Losses, outputs and gradients of the pipelined model equal those of the unpipelined one."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualpipe import Compute, DualPipeV, Pipeline, PipelineError
from dualpipe.nn import defer_weight_grads
from dualpipe.pipeline import p2p
from ranks import run_ranks
from schedules import SCHEDULES
from toys import (
    Hooked,
    Stage,
    gradient_error,
    make_stages,
    num_stages,
    reference,
    relative_error,
    stages_of_rank,
    use_own_groups,
)

# The pipeline adds micro-batches' gradients in its own order, so equality is to rounding of the sums.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def make_pipeline(name, stages, rank, world, **options):
    own = stages_of_rank(name, world, rank)
    modules = tuple(stages[s] for s in own)
    cls = DualPipeV if name in ("dualpipev", "zbv") else Pipeline
    return cls(modules, schedule=name, **options), own


def compare(rank, world, name, num_chunks, batch, dtype=torch.float64, dim=0):
    """Return the largest error of one training step on this rank."""
    total = num_stages(name, world)
    stages = make_stages(total, lambda: Stage(dtype=dtype))
    expected = make_stages(total, lambda: Stage(dtype=dtype))
    shape = (batch, 3, 8) if dim == 0 else (3, batch, 8)
    x, y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    pipe, own = make_pipeline(name, stages, rank, world, batch_dim=dim)
    loss, outputs = pipe.step(
        *([x] if 0 in own else []),
        num_chunks=num_chunks,
        criterion=F.mse_loss if total - 1 in own else None,
        labels=(y,) if total - 1 in own else (),
        return_outputs=True,
    )
    losses, joined = reference(expected, x, y, num_chunks, dim=dim)
    errors = [gradient_error(stages[s], expected[s]) for s in own]
    assert all(p.grad is None for s in range(total) if s not in own for p in stages[s].parameters())
    if total - 1 in own:
        assert loss.shape == (num_chunks,) and not loss.requires_grad and not outputs.requires_grad
        errors += [relative_error(loss, losses), relative_error(outputs, joined)]
    else:
        assert loss is None and outputs is None
    return max(errors)


def all_sizes(rank, world, names, dtype, numbers):
    """Return the largest error of every schedule with each of these numbers of micro-batches."""
    worst = {}
    for name in names:
        for num_chunks in numbers:
            worst[name, num_chunks] = compare(rank, world, name, num_chunks, 2 * num_chunks, dtype)
    return worst


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
def test_every_schedule_and_number_of_microbatches(world):
    numbers = [*range(1, 2 * world + 2), 3 * world]  # the steady state comes at 2 * world
    for worst in run_ranks(all_sizes, world, world, SCHEDULES, torch.float64, numbers):
        assert {k: v for k, v in worst.items() if v > TOLERANCE[torch.float64]} == {}


def with_fewest_sends(rank, world, num_chunks):
    """Return the largest errors where a rank waits for each send that the schedule allows it to wait for."""
    with mock.patch.object(p2p, "SENDS_IN_FLIGHT", 0):
        return all_sizes(rank, world, ("interleaved_1f1b", "interleaved_zb"), torch.float64, [num_chunks])


@pytest.mark.parametrize("world, num_chunks", [(2, 5), (3, 7), (4, 10), pytest.param(4, 11, marks=pytest.mark.slow)])
def test_schedules_with_several_messages_in_flight(world, num_chunks):
    for worst in run_ranks(with_fewest_sends, world, world, num_chunks):
        assert {k: v for k, v in worst.items() if v > TOLERANCE[torch.float64]} == {}


def splits(rank, world):
    cases = [("dualpipev", m, batch, dim) for m, batch in [(3, 7), (8, 8), (8, 15), (1, 1), (5, 9)] for dim in (0, 1)]
    return {case: compare(rank, world, *case[:3], dim=case[3]) for case in cases}


def test_uneven_batches_along_any_dimension():
    for worst in run_ranks(splits, 2, 2):
        assert {k: v for k, v in worst.items() if v > TOLERANCE[torch.float64]} == {}


def bitwise(rank, world, dtype):
    """Compare bits: one micro-batch has one order, and 1F1B and interleaved 1F1B add in micro-batch order."""
    worst = {(name, 1): compare(rank, world, name, 1, 4, dtype) for name in SCHEDULES}
    for name in ("1f1b", "interleaved_1f1b"):
        worst |= {(name, m): compare(rank, world, name, m, 2 * m, dtype) for m in (2, 5, 3 * world)}
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_bitwise_where_the_order_of_additions_is_the_same(world, dtype):
    for worst in run_ranks(bitwise, world, world, dtype):
        assert {k: v for k, v in worst.items() if v != 0.0} == {}


def many_steps(rank, world):
    """Accumulate gradients over steps of different sizes and shapes, with an evaluation in between."""
    stages, expected = make_stages(2 * world), make_stages(2 * world)
    pipe, own = make_pipeline("dualpipev", stages, rank, world)
    for shape, num_chunks in [((8, 3, 8), 4), ((6, 8), 6), ((9, 1, 5, 8), 4), ((8, 3, 8), 4)]:
        x, y = torch.randn(shape).double(), torch.randn(shape).double()
        first = rank == 0
        kwargs = dict(num_chunks=num_chunks, criterion=F.mse_loss, labels=(y,) if first else ())
        loss, _ = pipe.step(x if first else None, **kwargs)
        before = [p.grad.clone() for s in own for p in stages[s].parameters()]
        with torch.no_grad():
            evaluated, outputs = pipe.step(x if first else None, return_outputs=True, **kwargs)
        assert all(torch.equal(a, p.grad) for a, p in zip(before, [p for s in own for p in stages[s].parameters()]))
        losses, joined = reference(expected, x, y, num_chunks)
        if first:
            assert torch.equal(evaluated, losses) and torch.equal(loss, losses) and torch.equal(outputs, joined)
    return max(gradient_error(stages[s], expected[s]) for s in own)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_steps_of_different_sizes_and_shapes_accumulate(world):
    assert max(run_ranks(many_steps, world, world)) < TOLERANCE[torch.float64]


class Sum(Stage):
    """A first stage of two inputs."""

    def forward(self, x, z):
        return super().forward(x) + z


class SegmentedSum(Sum):
    """`Sum` in two segments that both read an input; the first is recomputed."""

    def segments(self):
        first = Compute(lambda x, z: Sum.forward(self, x, z), ("x0", "x1"), "y", recompute=True)
        return [first, Compute(lambda y, x: y * x, ("y", "x0"), "x")]

    def forward(self, x, z):
        return super().forward(x, z) * x


class HookedStage(Hooked, Stage):
    """A stage with DeepSeek's method."""

    def forward(self, x, z=None):
        y = super().forward(x)
        return y if z is None else y + z


class Distance(nn.Module):
    """A criterion with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, output, target):
        return (self.scale * output - target).square().sum()


def caller_graph(rank, world, name, num_chunks, first_stage, stage, dim, sync):
    """Return the largest error of a model whose inputs and labels come from one encoder of the caller."""
    total = num_stages(name, world)
    own = stages_of_rank(name, world, rank)
    is_first = 0 in own
    is_last = total - 1 in own
    torch.manual_seed(3)
    stages = [first_stage(), *(stage() for _ in range(total - 1))]
    encoder = Stage()
    criterion = Distance()
    x = nn.Parameter(torch.randn(5, 5, 8).double())
    plain = copy.deepcopy(nn.ModuleDict(dict(stages=nn.ModuleList(stages), encoder=encoder, criterion=criterion)))
    plain_x = copy.deepcopy(x)
    pipe, _ = make_pipeline(name, [defer_weight_grads(module) for module in stages], rank, world, batch_dim=dim)
    errors = []
    for _ in range(2):
        hidden = encoder(x)
        gradients = []
        hidden.register_hook(gradients.append)
        inputs = (2 * hidden, hidden) if is_first else ()
        labels = (3 * hidden,) if is_last else ()
        loss, _ = pipe.step(*inputs, num_chunks=num_chunks, criterion=criterion, labels=labels, sync=sync)
        assert len(gradients) == (is_first or is_last)
        hidden = plain.encoder(plain_x)
        at_first = hidden if is_first else hidden.detach()
        at_last = hidden if is_last else hidden.detach()
        y = plain.stages[0](2 * at_first, at_first)
        for plain_stage in plain.stages[1:]:
            y = plain_stage(y)
        plain_loss = plain.criterion(y, 3 * at_last)
        plain_loss.backward()
        if is_last:
            errors.append(relative_error(loss.sum(), plain_loss.detach()))
    errors += [gradient_error(stages[number], plain.stages[number]) for number in own]
    errors.append(relative_error(x.grad, plain_x.grad))
    errors.append(gradient_error(encoder, plain.encoder))
    if is_last:
        errors.append(gradient_error(criterion, plain.criterion))
    return max(errors)


def caller_graphs(rank, world, name):
    """Return the largest error of each case of `caller_graph`."""
    cases = [
        (1, Sum, Stage, 0, True),
        (4, Sum, Stage, 0, True),
        (3, Sum, Stage, 1, False),
        (4, SegmentedSum, Stage, 0, True),
        (5, HookedStage, HookedStage, 0, True),
    ]
    return [caller_graph(rank, world, name, *case) for case in cases]


@pytest.mark.parametrize("name, world", [("1f1b", 2), ("zbv", 1), ("dualpipev", 2)])
def test_one_backward_runs_into_the_graph_of_inputs_and_labels(name, world):
    for errors in run_ranks(caller_graphs, world, world, name):
        assert max(errors) < TOLERANCE[torch.float64], errors


def test_evaluation_and_a_failed_step_leave_the_callers_graph_whole():
    stages = make_stages(2)
    encoder = Stage()
    plain_stages, plain_encoder = copy.deepcopy((stages, encoder))
    x = torch.randn(4, 8).double()
    pipe = Pipeline(stages, schedule="zbv")
    calls = []

    def distance(output, target):
        calls.append(output)
        if len(calls) == 4:
            raise ZeroDivisionError("late")
        return F.mse_loss(output, target)

    hidden = encoder(x)
    with torch.no_grad():
        pipe.step(hidden, num_chunks=2, criterion=distance, labels=(hidden,))
    with pytest.raises(PipelineError, match="late"):
        pipe.step(hidden, num_chunks=2, criterion=distance, labels=(hidden,))
    assert all(parameter.grad is None for parameter in encoder.parameters())
    pipe.zero_grad()
    pipe.step(hidden, num_chunks=2, criterion=distance, labels=(hidden,))
    plain_hidden = plain_encoder(x)
    for part in plain_hidden.chunk(2):
        F.mse_loss(plain_stages[1](plain_stages[0](part)), part).backward(retain_graph=True)
    assert gradient_error(pipe.module, nn.ModuleList(plain_stages)) < TOLERANCE[torch.float64]
    assert gradient_error(encoder, plain_encoder) < TOLERANCE[torch.float64]


def test_gradients_are_set_to_zero_or_dropped():
    pipe = Pipeline(make_stages(2), schedule="zbv")
    x, y = torch.randn(2, 4, 8, dtype=torch.float64)
    pipe.step(x, num_chunks=2, criterion=F.mse_loss, labels=(y,))
    pipe.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in pipe.parameters())
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in pipe.parameters())


def spent_graph(rank, world):
    """Return the error of a step whose inputs come from a graph that has had its backward, on every rank."""
    hidden = Stage()(torch.randn(4, 8).double())
    hidden.sum().backward()
    stages = make_stages(4)
    pipe = DualPipeV((stages[rank], stages[3 - rank]))
    with pytest.raises(PipelineError) as caught:
        pipe.step(hidden, num_chunks=4, criterion=F.mse_loss, labels=(torch.zeros(4, 8).double(),))
    return str(caught.value)


def test_an_error_in_the_callers_graph_is_raised_on_every_rank():
    for text in run_ranks(spent_graph, 2, 2):
        assert "rank 0: in the backward of the graph from which the inputs or labels of the step come" in text


def mapped(rank, world):
    """Train with the last process as the first pipeline rank: pipeline rank = rank_mapping[group rank]."""
    mapping = list(reversed(range(world)))
    stages, expected = make_stages(2 * world), make_stages(2 * world)
    me = mapping[rank]
    pipe = DualPipeV((stages[me], stages[2 * world - 1 - me]), rank_mapping=mapping)
    x, y = torch.randn(6, 8).double(), torch.randn(6, 8).double()
    loss, _ = pipe.step(x if me == 0 else None, num_chunks=6, criterion=F.mse_loss, labels=(y,) if me == 0 else ())
    losses, _ = reference(expected, x, y, 6)
    assert (loss is not None) == (me == 0) and (loss is None or torch.equal(loss, losses))
    return max(gradient_error(stages[s], expected[s]) for s in (me, 2 * world - 1 - me))


def test_rank_mapping():
    assert max(run_ranks(mapped, 3, 3)) < TOLERANCE[torch.float64]


def two_pipelines(rank, world, own_groups):
    """Train three pipelines in one process: of ranks 0 and 1, of ranks 2 and 3, and of all four."""
    import torch.distributed as dist

    if own_groups:
        use_own_groups()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    error = 0.0
    x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    built = []
    for group, size, me in [(halves[rank // 2], 2, rank % 2), (None, 4, rank)]:
        stages, expected = make_stages(2 * size), make_stages(2 * size)
        pipe = DualPipeV((stages[me], stages[2 * size - 1 - me]), process_group=group)
        built.append((pipe, stages, expected, size, me))
    for _ in range(2):
        for pipe, stages, expected, size, me in built:
            pipe.step(x if me == 0 else None, num_chunks=4, criterion=F.mse_loss, labels=(y,) if me == 0 else ())
            reference(expected, x, y, 4)
            error = max(error, *(gradient_error(stages[s], expected[s]) for s in (me, 2 * size - 1 - me)))
    return error


@pytest.mark.parametrize("own_groups", [False, True])
def test_two_pipelines_in_one_process(own_groups):
    assert max(run_ranks(two_pipelines, 4, 4, own_groups)) < TOLERANCE[torch.float64]
