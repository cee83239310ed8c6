"""Stages whose gradients would differ between data-parallel ranks raise on every rank, by name."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dualpipe import DualPipeV, Pipeline
from ranks import run_ranks
from refusals import refusal
from toys import Stage


def in_part(mesh, **options) -> Stage:
    stage = Stage(**options)
    fully_shard(stage.up, mesh=mesh)
    fully_shard(stage.down, mesh=mesh)
    return stage


def with_parameter(mesh, placements=None, ignored=False) -> nn.Module:
    """Build a sharded stage with one more parameter: a DTensor with `placements`, or one that FSDP2 ignores."""
    stage = in_part(mesh)
    stage.norm.requires_grad_(False)
    stage.extra = nn.Parameter(torch.ones(4))
    if placements is not None:
        stage.extra = nn.Parameter(distribute_tensor(torch.ones(4), mesh, placements))
    if ignored:
        fully_shard(stage, mesh=mesh, ignored_params={stage.extra})
    return stage


def experts(mesh) -> nn.Module:
    """Build a stage whose parameters are all sharded over the ranks of a mesh."""
    stage = Stage()
    for layer in ("norm", "up", "down"):
        sharded = nn.Module()  # a linear layer would be tensor parallel
        for name, p in getattr(stage, layer).named_parameters():
            setattr(sharded, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        setattr(stage, layer, sharded)
    return stage


def given_to_replicate(mesh) -> nn.Module:
    stage = Stage()
    replicate_with_fsdp.replicate(stage, mesh=mesh)
    return stage


def constructions(rank: int) -> dict[str, str]:
    """Return the error of each construction, on two pipelines of two ranks.

    Only the second rank of each pipeline is wrong where the other has `Stage()`.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("rest", "one"))["one"]
    dp, group = mesh["dp"], mesh["pp"].get_group()
    wrong = mesh["pp"].get_local_rank() == 1

    def build_pair(first: nn.Module, second: nn.Module) -> str:
        return refusal(lambda: DualPipeV([first, second], process_group=group))

    def build(stage: nn.Module, **options) -> str:
        return refusal(lambda: Pipeline([stage], process_group=group, **options))

    inside = nn.Sequential(Stage(), DistributedDataParallel(Stage(), process_group=dp.get_group()))
    first_fsdp = FullyShardedDataParallel(Stage(), process_group=dp.get_group(), device_id=torch.device("cpu"))
    return {
        "ddp": build(DistributedDataParallel(Stage(), process_group=dp.get_group()) if wrong else Stage()),
        "ddp inside": build(inside if wrong else Stage()),
        "fsdp1": build(first_fsdp if wrong else Stage()),
        "in part": build(in_part(dp) if wrong else fully_shard(Stage(), mesh=dp)),
        "in part, by pattern": build(in_part(dp), unreduced=("n*",)),
        "in part, by module": build(in_part(dp), unreduced="norm"),
        "in part, not all": build(in_part(dp), unreduced=["norm.bias", "nothing"]),
        "frozen": build(with_parameter(dp, [Shard(0)])),
        "replicated": build(with_parameter(dp, [Replicate()])),
        "ignored": build(with_parameter(dp, ignored=True)),
        "another rank's": build(Stage() if wrong else fully_shard(Stage(), mesh=dp)),
        "another rank's, named": build(Stage() if wrong else fully_shard(Stage(), mesh=dp), unreduced="*"),
        "another stage": build_pair(fully_shard(Stage(), mesh=dp), Stage()),
        "nothing to reduce": build_pair(fully_shard(Stage(), mesh=alone), Stage()),
        "apart on fewer ranks": build_pair(fully_shard(Stage(), mesh=dp), experts(alone)),
        "apart on all": build_pair(fully_shard(Stage(), mesh=dp), experts(dp)),
        "in part, on one rank": build(in_part(alone)),
        "replicate": build(given_to_replicate(dp)),
        "no sharding": build(Stage()),
    }


def test_gradients_that_nobody_reduces():
    expected = {
        "ddp": "rank WRONG: module 0 of this rank is a DistributedDataParallel, which does not reduce",
        "ddp inside": "rank WRONG: module 0 of this rank has a DistributedDataParallel, 1, which does not reduce",
        "fsdp1": "rank WRONG: module 0 of this rank is a FullyShardedDataParallel, which does not reduce",
        "in part": "rank WRONG: module 0 of this rank is sharded in part, but not norm.weight, norm.bias; their",
        "in part, not all": "sharded in part, but not norm.weight; their gradients would",
        "replicated": "sharded in part, but not extra;",
        "ignored": "sharded in part, but not extra;",
        "another rank's": "some stages are sharded, but not the one with norm.weight, norm.bias, up.weight; their",
        "apart on fewer ranks": "some stages are sharded, but not the one with norm.weight, norm.bias, up.weight",
        "another stage": "some stages are sharded, but not the one with norm.weight, norm.bias, up.weight",
    }
    for rank, found in enumerate(run_ranks(constructions, 4, group_timeout=20, fresh=True)):
        assert "was given to torch's replicate, which a pipeline cannot drive; use" in found.pop("replicate")
        assert {name for name, text in found.items() if text} == set(expected)
        for name, text in expected.items():
            text = text.replace("WRONG", str(2 + rank % 2))  # numbered among all ranks, not in its pipeline
            assert text in found[name] and "\n" not in found[name], found[name]
            assert "dualpipe.parallel.shard or torch's fully_shard" in found[name]
            assert ("name them in unreduced" in found[name]) != ("does not reduce" in found[name])
