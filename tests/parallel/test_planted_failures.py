"""A rank that fails before a communication or in the midst of it: nobody waits, and the next step is right.

Every place is tried at which a communication is made or goes on, or something is given to its stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dualpipe import Pipeline
from dualpipe.models.decoder import Experts, SparseMLP
from dualpipe.nn.deferral import local
from dualpipe.nn.routing.router import Router
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.nn.segments import Communicate, Compute
from dualpipe.parallel.all_to_all import CommStream, GroupAllToAll, PendingRows
from dualpipe.parallel.context.sequence_rows import SequenceRanks, SequenceRows
from dualpipe.parallel.experts import dispatcher as expert
from dualpipe.parallel.experts.dispatcher import ExpertParallel, shard_experts
from dualpipe.parallel.experts.shared_loads import share_loads
from dualpipe.pipeline import PipelineError
from dualpipe.runtime import device
from ranks import run_ranks
from threads import Rank, run_threads

HIDDEN, EXPERTS, TOP_K, CHUNKS = 8, 4, 2, 2
GROUP_TIMEOUT = 30.0  # a step takes a hundredth of a second
# What fails, and where it is defined. `_unpacked` reads the numbers of rows, between their message and the rows.
PLACES = {"beside": CommStream, "start": CommStream, "__init__": PendingRows, "_unpacked": expert}


class Planted(Exception):
    """What is raised on purpose."""


class Failing:
    """Have a method fail at its n-th call, once."""

    def __init__(self, method: Callable, error: type[Exception] = Planted) -> None:
        self._method, self._error = method, error
        self.calls = 0
        self.at = -1  # from 0; no call

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls - 1 == self.at:
            raise self._error(f"call {self.at}")
        return self._method(*args, **kwargs)


class TokenWise(nn.Module):
    """Two layers of experts; the gate's choices may be counted over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            SparseMLP(Router(HIDDEN, EXPERTS, TOP_K, score="softmax"), Experts(EXPERTS, HIDDEN, 8)) for _ in range(2)
        )
        for parameter in self.double().parameters():
            nn.init.normal_(parameter)

    def segments(self):
        found = []
        for mlp in self.mlps:
            found += [Compute(lambda x: x * 1, "x", "normed"), *mlp.segments(lambda part: False),
                      Compute(torch.add, ("x", "y"), "x")]
        return found


class Rows(nn.Module):
    """Two exchanges of rows between two ranks that share sequences of 6 tokens."""

    def __init__(self, ranks: SequenceRanks) -> None:
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64))
        self.layers = nn.ModuleList(nn.Identity() for _ in range(2))

    def segments(self):
        other = 1 - self.ranks.split.rank
        each = [3 * (rank == other) for rank in range(2)]
        context = SimpleNamespace(batch=2, length=6)
        found = [Compute(lambda x: (x.flatten(0, 1) @ self.weight, context), "x", ("rows", "context"))]
        for layer in self.layers:
            exchange = SequenceRows(self.ranks, layer, HIDDEN, lambda length: (each, each))
            found += [Communicate(exchange, ("rows", "context"), "rows", of_attention=True),
                      Compute(lambda rows: rows @ self.weight, "rows", "rows")]
        return [*found, Compute(lambda rows: rows.view(2, 3, HIDDEN), "rows", "x")]


def make_stage(kind: str, mesh: DeviceMesh) -> nn.Module:
    """A stage whose communications are those of experts, of experts whose loads are shared, or of a sequence."""
    if kind == "sequence":
        return Rows(SequenceRanks(mesh))
    stage = TokenWise()
    for mlp in stage.mlps:
        mlp.dispatcher = ExpertParallel(EXPERTS, mesh).dispatcher()
        shard_experts(mlp, mesh)
    if kind == "loads":
        share_loads([stage], GroupAllToAll(mesh), 1)
    return stage


def planted_steps(rank: int, kind: str, method: str) -> tuple[list[str], list[float], list[bool]]:
    """Steps in which one of `PLACES` fails on rank 1 at its first call, its second, ...: what each says and its
    seconds, and whether a step behind it has the gradients of the step before all."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))["pp"].get_group()
    stage = make_stage(kind, mesh)
    routers = RouterSet([stage], level="microbatch", num_chunks=CHUNKS, balance=0.5 if kind == "loads" else 0.0, z=0.0)
    pipe = Pipeline([stage], process_group=alone)
    x = torch.randn(2 * CHUNKS, 3, HIDDEN, dtype=torch.float64)

    def step() -> list[torch.Tensor]:
        pipe.zero_grad()
        with routers.step():
            pipe.step(x, num_chunks=CHUNKS, criterion=lambda y: y.square().mean())
        return [local(parameter.grad) for parameter in stage.parameters()]

    expected = step()
    failing = Failing(getattr(PLACES[method], method))
    said: list[str] = []
    seconds: list[float] = []
    right: list[bool] = []
    with mock.patch.object(PLACES[method], method, lambda *args, **kwargs: failing(*args, **kwargs)):
        step()
        for place in range(failing.calls):
            failing.calls = 0
            failing.at = place if rank == 1 else -1
            began = time.monotonic()
            try:
                step()
            except PipelineError as error:
                said.append(str(error))
            seconds.append(time.monotonic() - began)
            failing.at = -1
            right.append(all(map(torch.equal, step(), expected)))
    return said, seconds, right


def left_over(rank: int) -> tuple[str, int, int]:
    """A step in which the backend fails on all ranks between a dispatch and its combine: what is said, and how many
    dispatches without an answer there are then and after a step behind it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    stage = make_stage("experts", mesh)
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))["pp"].get_group()
    pipe = Pipeline([stage], process_group=alone)
    failing = Failing(CommStream.wait, RuntimeError)
    said, left = "", []
    with mock.patch.object(CommStream, "wait", lambda *args: failing(*args)):
        for failing.at in (1, -1):  # the first is that of the numbers of rows
            try:
                pipe.step(torch.ones(4, 3, HIDDEN).double(), num_chunks=CHUNKS, criterion=lambda y: y.square().mean())
            except PipelineError as error:
                said = str(error)
            left.append(sum(len(mlp.dispatcher.combine._under_way) for mlp in stage.mlps))
    return said, *left


def test_a_step_that_broke_leaves_no_dispatch_for_the_next_one():
    for said, *left in run_ranks(left_over, 2):
        assert "RuntimeError: call 1" in said and left == [0, 0]


def uncopied(rank: Rank) -> tuple[BaseException | None, int]:
    """A dispatch on a device, where rank 1 cannot copy the numbers of rows to the host: the failure, and how many rows
    come."""
    threading.current_thread().name = f"rank {rank.number}"
    dispatcher = ExpertParallel(EXPERTS, rank.all_to_all("ep", range(2))).dispatcher()
    x = torch.ones(3, HIDDEN, device=rank.device)
    choices = torch.tensor([[0, 2]] * 3).to(rank.device)  # an expert of each rank
    pending = dispatcher.dispatch.forward(dispatcher.plan(x, torch.ones(3, TOP_K, device=rank.device), choices))
    pending.advance()
    _, (sizes, *_) = pending.wait()
    return pending.take_failure(), sum(sizes.received)


def test_numbers_of_rows_that_cannot_be_copied_are_not_sent_twice(any_cuda, monkeypatch):
    def to_host(tensor, **options):
        if threading.current_thread().name == "rank 1":
            raise Planted
        return copy(tensor, **options)

    copy = device.to_host
    monkeypatch.setattr(device, "to_host", to_host)
    (failure, rows), (failure_1, rows_1) = run_threads(uncopied, 2, device="cuda")
    assert failure is None and isinstance(failure_1, Planted)
    assert rows == rows_1 == 6


FAST = [("experts", "_unpacked"), ("loads", "beside"), ("sequence", "__init__"), ("sequence", "beside")]
SLOW = [(kind, method) for kind in ("experts", "loads", "sequence") for method in PLACES
        if (kind, method) not in (*FAST, ("sequence", "_unpacked"))]


@pytest.mark.parametrize("kind, method", [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_failure_around_a_communication_leaves_nobody_waiting_and_the_next_step_is_right(kind, method):
    for said, seconds, right in run_ranks(planted_steps, 2, kind, method, group_timeout=GROUP_TIMEOUT):
        assert len(said) == len(seconds) > 5 and all(right)
        assert all("rank 1: 0" in text and "Planted: call" in text and "rank 0" not in text for text in said)
        assert max(seconds) < GROUP_TIMEOUT / 2
