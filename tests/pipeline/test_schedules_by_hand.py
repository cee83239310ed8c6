"""Schedules that nobody built by name: pairs of any kinds, any placement, and DeepSeek's own overlap hook."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dualpipe import DualPipeV, Pipeline
from dualpipe.schedule import Action, Schedule, ScheduleError, build, validate
from ranks import run_ranks
from schedules import SCHEDULES
from toys import Stage, gradient_error, make_stages, reference, relative_error


def merge_random_pairs(schedule: Schedule, seed: int) -> Schedule:
    """Merge neighbouring single steps into pairs, at random, wherever the result is still valid."""
    rng = random.Random(seed)
    ranks = [list(steps) for steps in schedule.ranks]
    for rank, steps in enumerate(ranks):
        i = 0
        while i + 1 < len(steps):
            if len(steps[i]) == len(steps[i + 1]) == 1 and rng.random() < 0.7:
                merged = [*steps[:i], (*steps[i], *steps[i + 1]), *steps[i + 2 :]]
                try:
                    candidate = replace(
                        schedule, name="by hand",
                        ranks=tuple(map(tuple, [*ranks[:rank], merged, *ranks[rank + 1 :]])),
                    )
                    validate(candidate)
                    steps[:] = merged
                except ScheduleError:
                    pass
            i += 1
    return replace(schedule, name="by hand", ranks=tuple(map(tuple, ranks)))


def kinds_of_pairs(schedule):
    return {"".join(sorted(a.kind for a in step)) for steps in schedule.ranks for step in steps if len(step) == 2}


def run_schedule(rank, schedule):
    stages, expected = make_stages(schedule.num_stages), make_stages(schedule.num_stages)
    own = schedule.rank_stages(rank)
    pipe = Pipeline([stages[s] for s in own], schedule=schedule)
    x, y = torch.randn(10, 8).double(), torch.randn(10, 8).double()
    last = schedule.num_stages - 1 in own
    loss, _ = pipe.step(
        x if 0 in own else None, num_chunks=schedule.num_microbatches, criterion=F.mse_loss if last else None,
        labels=(y,) if last else (),
    )
    losses, _ = reference(expected, x, y, schedule.num_microbatches)
    assert (loss is not None) == last and (loss is None or relative_error(loss, losses) < 1e-10)
    return max((gradient_error(stages[s], expected[s]) for s in own), default=0.0)


def run_schedules(rank, schedules):
    return max(run_schedule(rank, schedule) for schedule in schedules)


@pytest.mark.parametrize("world, seeds", [
    (1, range(4)), (3, range(2)), *(pytest.param(world, range(4), marks=pytest.mark.slow) for world in (2, 3)),
], ids=str)
def test_pairs_of_any_kinds(world, seeds):
    schedules = [
        merge_random_pairs(build(name, world, m), seed)
        for name in ("zbv", "interleaved_1f1b", "dualpipev")
        for m in (3, 7)
        for seed in seeds
    ]
    found = set().union(*map(kinds_of_pairs, schedules))
    assert {"FF", "FI", "FW", "IW"} <= found, found
    assert max(run_ranks(run_schedules, world, schedules)) < 1e-10


def sequential(placement, num_microbatches):
    """All forwards of a stage, then the next; backwards in reverse: valid for any placement."""
    num_stages = len(placement)
    ranks = [[] for _ in range(max(placement) + 1)]
    for m in range(num_microbatches):
        for s in range(num_stages):
            ranks[placement[s]].append((Action("F", s, m),))
        for s in reversed(range(num_stages)):
            ranks[placement[s]].append((Action("B", s, m),))
    return Schedule("sequential", len(ranks), num_stages, num_microbatches, tuple(map(tuple, ranks)))


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (1, 0), (0, 1, 0, 1, 0), (0, 2, 1, 1, 0, 2), (2, 2, 0, 1)])
def test_any_placement(placement):
    schedule = sequential(placement, 3)
    validate(schedule)
    assert max(run_ranks(run_schedule, schedule.num_ranks, schedule)) < 1e-10


class Hooked(Stage):
    """A module type with DeepSeek's hook."""

    pairs = 0

    @classmethod
    def overlapped_forward_backward(
        cls, module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1
    ):
        Hooked.pairs += 1
        outputs0 = module0(*inputs0)
        loss0 = criterion0(outputs0, *labels0) if criterion0 is not None else None
        if loss1 is not None:
            assert outputs1 == () and output_grads1 == ()
            loss1.backward()
        else:
            assert isinstance(outputs1, tuple) and isinstance(output_grads1, tuple)  # as run_backward needs them
            torch.autograd.Variable._execution_engine.run_backward(
                outputs1, output_grads1, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        return outputs0, loss0


def hooked(rank, world, name):
    chunks = 4 * world
    stages, expected = make_stages(2 * world, Hooked), make_stages(2 * world)
    pipe = DualPipeV((stages[rank], stages[2 * world - 1 - rank]), schedule=name)
    x, y = torch.randn(2 * chunks, 8).double(), torch.randn(2 * chunks, 8).double()
    loss, outputs = pipe.step(
        x if rank == 0 else None, num_chunks=chunks, criterion=F.mse_loss, labels=(y,) if rank == 0 else (),
        return_outputs=True,
    )
    losses, joined = reference(expected, x, y, chunks)
    if rank == 0:
        assert torch.equal(loss, losses) and torch.equal(outputs, joined)
    pairs = sum(len(step) == 2 for step in build(name, world, chunks).ranks[rank])
    return max(gradient_error(stages[s], expected[s]) for s in (rank, 2 * world - 1 - rank)), Hooked.pairs - pairs


@pytest.mark.parametrize("world", [1, 2, 3])
def test_overlapped_forward_backward_runs_every_pair(world):
    for error, missing in run_ranks(hooked, world, world, "dualpipev", fresh=True):
        assert error < 1e-10 and missing == 0


def against_torch(rank, world, name):
    """Our schedule as CSV, run by torch's own runtime, gives the same gradients."""
    import tempfile

    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    chunks = 3 * world
    schedule = build(name, world, chunks)
    total = schedule.num_stages
    stages, ours = make_stages(total, defer=False), make_stages(total)  # torch splits backwards its own way
    own = schedule.rank_stages(rank)
    x, y = torch.randn(2 * chunks, 8).double(), torch.randn(2 * chunks, 8).double()
    example = (torch.randn(2, 8, dtype=torch.float64, requires_grad=True),)
    wrapped = [
        PipelineStage(stages[s], s, total, torch.device("cpu"), input_args=example, output_args=example) for s in own
    ]
    runtime = _PipelineScheduleRuntime(wrapped, chunks, loss_fn=F.mse_loss, scale_grads=False)
    runtime.stage_index_to_group_rank = dict(enumerate(schedule.placement))
    for stage in wrapped:
        stage.stage_index_to_group_rank = runtime.stage_index_to_group_rank
        stage._get_init_p2p_neighbors_ops = list  # 2.11 would warm up by sending to itself, which gloo refuses
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(schedule.to_torch_csv())
        file.flush()
        runtime._load_csv(file.name, format="compute_only")
    first, last = 0 in own, total - 1 in own
    runtime.step(*((x,) if first else ()), **(dict(target=y) if last else {}))
    dist.barrier()
    pipe = Pipeline([ours[s] for s in own], schedule=schedule)
    pipe.step(x if first else None, num_chunks=chunks, criterion=F.mse_loss, labels=(y,) if last else ())
    return max(gradient_error(ours[s], stages[s]) for s in own)


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_runs_our_schedule_to_the_same_gradients(name):
    assert max(run_ranks(against_torch, 2, 2, name)) < 1e-10
