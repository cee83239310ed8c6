"""A rank that fails when a pipeline is built is heard of by all, its replicas too, and is named."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dualpipe import Communicate, Compute, Pipeline, PipelineError
from dualpipe.runtime.recorder import Recorder
from ranks import run_ranks
from toys import Handed


class Shared(nn.Linear):
    """Communicates over a group, as experts of two pipelines do."""

    def __init__(self, group) -> None:
        super().__init__(4, 4)
        self.communication = Handed()
        self.communication.group = group

    def segments(self) -> list:
        rows = Compute(super().forward, "x", "y")
        return [rows, Communicate(self.communication, "y", "y"), Compute(lambda y: y * 1, "y", "x")]


def wrong_on_one(rank: int) -> tuple[str, float]:
    """Two pipelines of one rank each; the second names a schedule that there is not."""
    both = dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    began = time.monotonic()
    with pytest.raises(ValueError) as raised:
        Pipeline([Shared(both)], process_group=alone, schedule="nonsense" if rank else "1f1b")
    return str(raised.value), time.monotonic() - began


def test_replicas_hear_of_a_rank_that_cannot_build_its_pipeline():
    for text, seconds in run_ranks(wrong_on_one, 2, group_timeout=60):
        assert "nonsense" in text and seconds < 20, text


def named(rank: int) -> str:
    """The error where rank 1 fails in a loop whose recorder nobody has told the rank."""
    with Recorder().activate():
        pipe = Pipeline([nn.Linear(4, 4)], process_group=dist.new_group([0, 1]))
        if rank == 1:
            pipe.module[0].weight.data = torch.ones(4, 3)
        with pytest.raises(PipelineError) as raised:
            pipe.step(torch.ones(2, 4), num_chunks=1, criterion=torch.sum)
        return str(raised.value)


def test_a_rank_is_named_also_where_nothing_but_the_pipeline_knows_it():
    first, second = run_ranks(named, 2)
    assert first == second and first.startswith("rank 1: 1F0 (forward of stage 1, micro-batch 0)")


def partly_sharded(rank: int) -> str:
    """A stage of which FSDP2 has one layer, and of another the bias alone is trained."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(stage[0], mesh=mesh["dp"])
    stage[1].weight.requires_grad_(False)
    with pytest.raises(ValueError) as raised:
        Pipeline([stage], process_group=mesh["pp"].get_group(), schedule="1f1b")
    Pipeline([stage], process_group=mesh["pp"].get_group(), schedule="1f1b", unreduced="1.bias")
    return str(raised.value)


def test_a_trained_parameter_beside_a_frozen_one_that_nothing_reduces_is_named():
    for text in run_ranks(partly_sharded, 2):
        assert "1.bias" in text and "1.weight" not in text
