"""bf16 compute with fp32 accumulation on a real model: how far gradients are from a float64 accumulation.

The reference runs the same bf16 forward and backward, micro-batch by micro-batch, and accumulates in float64
(`grad_dtype`): the products that make weight gradients are float64 too. What autograd makes in bf16 (norms, the
embedding) is the same in all of them before it is added.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dualpipe import DualPipeV
from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.nn import cross_entropy_loss
from dualpipe.parallel import DTypePolicy, resolve_dtypes, shard
from ranks import run_ranks

CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
)
MICRO_BATCHES, REPLICAS = 16, 2


def whole_model() -> nn.Module:
    (model,) = build_stages(CONFIG, 1)
    model.init_weights(0)
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (2 * MICRO_BATCHES * REPLICAS, 17), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def accumulated(dtype: torch.dtype, compute: torch.dtype) -> dict[str, Tensor]:
    """Gradients of the unpipelined model, accumulated over all micro-batches in `dtype`, as their mean."""
    model = whole_model().to(compute)
    for param in model.parameters():
        param.grad_dtype = dtype
    for tokens, targets in zip(*(rows.split(2) for rows in batch())):
        (cross_entropy_loss(model(tokens), targets)).backward()
    return {name: p.grad.double() / (MICRO_BATCHES * REPLICAS) for name, p in model.named_parameters()}


def pipelined(rank: int, pp: int, compute: torch.dtype) -> dict[str, np.ndarray]:
    """The same, of this rank's stages under DualPipeV and FSDP2; accumulated and reduced in at least float32."""
    mesh = init_device_mesh("cpu", (pp, REPLICAS), mesh_dim_names=("pp", "dp"))
    replica, stage_rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    wide = torch.promote_types(compute, torch.float32)
    state = whole_model().state_dict()
    stages = build_stages(CONFIG, 2 * pp, only=(stage_rank, 2 * pp - 1 - stage_rank))
    nn.ModuleList(stages).to(wide)
    plan = resolve_dtypes(stages, DTypePolicy(compute, wide, compute))
    for stage in stages:
        stage.load_state_dict({name: state[name] for name in stage.state_dict()})
        shard(stage, mesh["dp"], plan)
    seen = set()

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        seen.update(p.grad.dtype for stage in stages for p in stage.parameters() if p.grad is not None)
        return cross_entropy_loss(logits, targets) / MICRO_BATCHES

    tokens, targets = (rows.tensor_split(REPLICAS)[replica] for rows in batch())
    DualPipeV(stages, process_group=mesh["pp"].get_group()).step(
        tokens, num_chunks=MICRO_BATCHES, criterion=criterion, labels=(targets,)
    )
    assert seen <= {wide}
    for stage in stages:
        for param in stage.parameters():
            assert isinstance(param, DTensor) and param.dtype == param.grad.dtype == wide
    return {n: p.grad.full_tensor().double().numpy() for stage in stages for n, p in stage.named_parameters()}


def joined(results: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(grad) for result in results for name, grad in result.items()}


def error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """||g - ref|| / ||ref|| over all parameters together."""
    difference = sum((gradients[name].double() - expected[name]).square().sum() for name in expected)
    return float((difference / sum(g.square().sum() for g in expected.values())).sqrt())


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bf16_compute_with_fp32_accumulation(pp, record_property):
    expected = accumulated(torch.float64, torch.bfloat16)
    in_bf16 = error(accumulated(torch.bfloat16, torch.bfloat16), expected)
    ours = joined(run_ranks(pipelined, pp * REPLICAS, pp, torch.bfloat16))
    assert ours.keys() == expected.keys()
    in_fp32 = error(ours, expected)
    record_property("relative error, fp32 accumulation", in_fp32)
    record_property("relative error, bf16 accumulation", in_bf16)
    print(f"relative error: {in_fp32:.2e} accumulated in fp32 by the pipeline, {in_bf16:.2e} in bf16")
    # Each of 32 additions, and the sums inside the products, round to 2^-24.
    assert in_fp32 < 32 * 2**-24
    assert in_fp32 < in_bf16 / 1000


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 1])
def test_float64_throughout(pp):
    expected = accumulated(torch.float64, torch.float64)
    assert error(joined(run_ranks(pipelined, pp * REPLICAS, pp, torch.float64)), expected) < 1e-10


def test_the_reference_is_of_the_same_computation():
    """Losses do not depend on what gradients are accumulated in."""
    models = [whole_model().bfloat16(), copy.deepcopy(whole_model()).bfloat16()]
    for param in models[1].parameters():
        param.grad_dtype = torch.float64
    tokens, targets = batch()
    a, b = (cross_entropy_loss(model(tokens[:2]), targets[:2]) for model in models)
    assert torch.equal(a, b)
