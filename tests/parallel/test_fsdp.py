"""FSDP2 under the pipeline: the gradients of the unpipelined model, one fp32 buffer each, and no rank left waiting."""

from __future__ import annotations

import copy
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from toys import Stage, make_stages, num_stages, reference, relative_error, stages_of_rank

from dualpipe import DualPipeV, Pipeline
from dualpipe.pipeline import PipelineError

WIDTH = 8


def full(grad: Tensor | None) -> Tensor | None:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def shard_whole(stage: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    return fully_shard(stage, mesh=mesh, **options)


def shard_children(stage: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    """Units without one around them; the norm stays unsharded."""
    fully_shard(stage.up, mesh=mesh, **options)
    fully_shard(stage.down, mesh=mesh, **options)
    return stage


def shard_nested(stage: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    fully_shard(stage.up, mesh=mesh, **options)
    return fully_shard(stage, mesh=mesh, **options)


SHARD = {"whole": shard_whole, "children": shard_children, "nested": shard_nested}


def gradient_errors(stages: list[nn.Module], numbers: tuple[int, ...], expected: list[nn.Module]) -> float:
    return max(
        relative_error(full(p.grad), q.grad)
        for stage, number in zip(stages, numbers)
        for p, q in zip(stage.parameters(), expected[number].parameters(), strict=True)
    )


def batch(microbatches: int, replicas: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2 * microbatches * replicas, WIDTH)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


def parity(rank: int, pp: int, name: str, shard: str, microbatches: int) -> float:
    """The worst gradient of three steps against the mean over the global batch of the unpipelined model."""
    mesh = init_device_mesh("cpu", (pp, torch.distributed.get_world_size() // pp), mesh_dim_names=("pp", "dp"))
    replicas, replica, stage_rank = mesh["dp"].size(), mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    expected = make_stages(num_stages(name, pp))
    numbers = stages_of_rank(name, pp, stage_rank)
    stages = [SHARD[shard](copy.deepcopy(expected[i]), mesh["dp"]) for i in numbers]
    pipe = Pipeline(stages, process_group=mesh["pp"].get_group(), schedule=name)
    x, y = batch(microbatches, replicas)
    mine = slice(replica * 2 * microbatches, (replica + 1) * 2 * microbatches)
    worst = 0.0
    for step in range(3):
        reference(expected, x, y, microbatches * replicas, criterion=lambda a, b: F.mse_loss(a, b) / replicas)
        pipe.step(x[mine], num_chunks=microbatches, criterion=F.mse_loss, labels=(y[mine],))
        if shard == "children":
            for stage in stages:
                for p in stage.norm.parameters():
                    torch.distributed.all_reduce(p.grad, group=mesh["dp"].get_group())
                    p.grad /= replicas
        worst = max(worst, gradient_errors(stages, numbers, expected))
        for model in (*expected, pipe):
            model.zero_grad()
        x = x + step
    return worst


@pytest.mark.parametrize("shard", SHARD)
@pytest.mark.parametrize("pp, world, name, microbatches", [(2, 4, "dualpipev", 5), (1, 2, "dualpipev", 1)])
def test_gradients_are_the_mean_over_the_global_batch(pp, world, name, microbatches, shard):
    assert max(run_ranks(parity, world, pp, name, shard, microbatches)) < 1e-10
