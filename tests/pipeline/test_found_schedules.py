"""Runs of schedules found by search: their gradients, and the time of a step with timed work and communication."""

from __future__ import annotations

import contextlib
import io
import os
import time
from statistics import median
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dualpipe import DualPipeV, WeightGradStore
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.pipeline import engine
from dualpipe.schedule import Costs, build, simulate, validate
from dualpipe.schedule.builders import overlap_costs
from dualpipe.schedule.by_name import search_with_progress
from ranks import run_ranks
from toys import gradient_error, make_stages, reference, relative_error

UNIT = 0.08  # seconds of a forward
COMPUTE, SEND = 0.65 / 3, 0.35 / 2  # of each of a layer's three segments, and of its two communications


def costs() -> Costs:
    """Return the costs: forward and input gradient of 0.65 computing and 0.35 communication, weight gradients of 0.65.

    A pair takes the longest of all its computing, all its communication, and either action alone. The engine takes that
    for these layers, to the last digit, where only their waits take time.
    """
    return overlap_costs(0.35)


def found(num_ranks: int, num_microbatches: int, cache: object, effort: int):
    os.environ["XDG_CACHE_HOME"] = str(cache)
    return build("auto", num_ranks, num_microbatches, costs=costs(), effort=effort)


def errors(rank, world, schedule):
    """Return the largest error of this rank's training step against the unpipelined model."""
    stages, expected = make_stages(2 * world), make_stages(2 * world)
    own, num_chunks = (rank, 2 * world - 1 - rank), schedule.num_microbatches
    x, y = (torch.randn(2 * num_chunks, 8, dtype=torch.float64, device="cpu") for _ in range(2))
    pipe = DualPipeV(tuple(stages[s] for s in own), schedule=schedule)
    loss, _ = pipe.step(*([x] if rank == 0 else []), num_chunks=num_chunks, criterion=None if rank else F.mse_loss,
                        labels=() if rank else (y,))
    losses, _ = reference(expected, x, y, num_chunks)
    return max([gradient_error(stages[s], expected[s]) for s in own] + ([] if rank else [relative_error(loss, losses)]))


@pytest.mark.parametrize("world", [1, 3])
def test_gradients_are_those_of_the_model(world, tmp_path):
    schedule = found(world, 7, tmp_path, 1_000_000)
    kinds = {tuple(sorted(action.kind for action in step)) for steps in schedule.ranks for step in steps}
    assert len({pair for pair in kinds if len(pair) == 2} - {("B", "F")}) > 0, "it has other pairs than DualPipeV"
    validate(schedule)
    assert max(run_ranks(errors, world, world, schedule)) < 1e-10


def searched_by(rank, world, fails, cache):
    """Return the order that the ranks run, or the error where rank 0 `fails`; the number of searches; printed text."""
    searches, said = [], io.StringIO()

    def find(*args):
        searches.append(args)
        if fails:
            raise MemoryError("planted")
        return search_with_progress(*args, effort=20_000)

    stages = make_stages(2 * world)
    pipe = DualPipeV((stages[rank], stages[2 * world - 1 - rank]), schedule="auto")
    x = torch.ones(6, 8, dtype=torch.float64)
    no_earlier_search = mock.patch.dict(os.environ, XDG_CACHE_HOME=cache)
    with no_earlier_search, mock.patch.object(engine, "search_with_progress", find), contextlib.redirect_stderr(said):
        try:
            for _ in range(2):
                pipe.step(x, num_chunks=3, criterion=nn.functional.mse_loss, labels=(x,))
        except RuntimeError as error:
            return str(error), len(searches), said.getvalue()
    return pipe._programs.schedule(3), len(searches), said.getvalue()


@pytest.mark.parametrize("fails", [False, True])
def test_a_pipeline_searches_on_one_rank_for_all(fails, tmp_path):
    (first, searches, said), (second, others, nothing) = run_ranks(searched_by, 2, 2, fails, str(tmp_path))
    assert first == second and (searches, others) == (1, 0)
    assert ("searching for a schedule of 2 ranks and 3 micro-batches: " in said) != fails and nothing == ""
    if fails:
        assert first == "rank 0: MemoryError: planted"
    else:
        assert first.name == "auto" and first.num_microbatches == 3


class Asleep(torch.autograd.Function):
    """Sleeps as long in the forward as for the input gradient and for the weight gradient."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(COMPUTE * UNIT)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(COMPUTE * UNIT)
        WeightGradStore.current().put(lambda: time.sleep(COMPUTE * UNIT))
        return grad.clone()


class Wire:
    """A communication that takes its time after earlier ones on this rank's network."""

    group = None

    def __init__(self, free_at, payload=None) -> None:
        self._free_at, self._payload = free_at, payload  # when the network is free, in a list that all of a rank share
        self._due = free_at[0]

    def forward(self, inputs):
        self._free_at[0] = max(self._free_at[0], time.perf_counter()) + SEND * UNIT
        return Wire(self._free_at, inputs)

    def backward(self, context, gradients):
        return self.forward(gradients)

    def advance(self):
        pass

    def wait(self):
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return self._payload, None


class Layer(nn.Module):
    """Three pieces of computing with two communications between them."""

    def __init__(self, free_at) -> None:
        super().__init__()
        self._free_at = free_at
        self.weight = nn.Parameter(torch.ones(1, device="cpu"))

    def segments(self):
        wire = Wire(self._free_at)
        return [
            Compute(lambda x: Asleep.apply(x * self.weight), "x", "rows"), Communicate(wire, "rows", "rows"),
            Compute(Asleep.apply, "rows", "rows"), Communicate(wire, "rows", "rows"),
            Compute(Asleep.apply, "rows", "x"),
        ]

    def forward(self, x):
        raise AssertionError("it is run by its segments")


def step_times(rank, world, schedules, rounds):
    """Return the seconds of a step of each schedule, one after the other, `rounds` times."""
    num_chunks = schedules[0].num_microbatches
    free_at = [0.0]
    pipes = [DualPipeV((Layer(free_at), Layer(free_at)), schedule=schedule) for schedule in schedules]
    x = torch.ones(num_chunks, 1, device="cpu")
    taken = []
    for _ in range(rounds):
        for pipe in pipes:
            dist.barrier()
            start = time.perf_counter()
            pipe.step(*([] if rank else [x]), num_chunks=num_chunks, criterion=None if rank else F.mse_loss,
                      labels=() if rank else (x,))
            dist.barrier()
            taken.append(time.perf_counter() - start)
    return [taken[i :: len(pipes)] for i in range(len(pipes))]


@pytest.mark.long
@pytest.mark.slow
def test_a_measured_step_is_shorter_than_dualpipevs(tmp_path):
    """Four ranks sleep, so that the order and overlap of the engine are measured. The first round is not counted."""
    auto, theirs = found(4, 8, tmp_path, 20_000_000), build("dualpipev", 4, 8)
    times = run_ranks(step_times, 4, 4, (auto, theirs), 5, timeout=200, fresh=True)[0]
    ours, other = (median(taken[1:]) for taken in times)
    expected = simulate(auto, costs()).makespan / simulate(theirs, costs()).makespan
    print(f"measured {ours:.3f} s and {other:.3f} s: {ours / other:.3f}, simulated {expected:.3f}")
    assert expected < 0.94 and ours / other < 0.96
