"""bf16 compute with fp32 accumulation on a real model: how far gradients are from a float64 accumulation.

The reference runs the same bf16 forward and backward, micro-batch by micro-batch, and accumulates in float64
(`grad_dtype`): the products that make weight gradients are float64 too. What autograd makes in bf16 (norms, the
embedding) is the same in all of them before it is added.
"""

from __future__ import annotations

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


def accumulated(dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of the unpipelined model in bf16, accumulated over all micro-batches in `dtype`, as their mean."""
    model = whole_model().bfloat16()
    for param in model.parameters():
        param.grad_dtype = dtype
    for tokens, targets in zip(*(rows.split(2) for rows in batch())):
        (cross_entropy_loss(model(tokens), targets)).backward()
    return {name: p.grad.double() / (MICRO_BATCHES * REPLICAS) for name, p in model.named_parameters()}


def pipelined(rank: int, pp: int) -> dict[str, np.ndarray]:
    """The same, of this rank's stages under DualPipeV and FSDP2; accumulated and reduced in float32."""
    mesh = init_device_mesh("cpu", (pp, REPLICAS), mesh_dim_names=("pp", "dp"))
    replica, stage_rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    state = whole_model().state_dict()
    stages = build_stages(CONFIG, 2 * pp, only=(stage_rank, 2 * pp - 1 - stage_rank))
    plan = resolve_dtypes(stages, DTypePolicy(torch.bfloat16, torch.float32, torch.bfloat16))
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
    assert seen <= {torch.float32}
    for stage in stages:
        for param in stage.parameters():
            assert isinstance(param, DTensor) and param.dtype is param.grad.dtype is torch.float32
    return {n: p.grad.full_tensor().double().numpy() for stage in stages for n, p in stage.named_parameters()}


def joined(results: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(grad) for result in results for name, grad in result.items()}


def error(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """||g - ref|| / ||ref|| over all parameters together."""
    difference = sum((gradients[name].double() - expected[name]).square().sum() for name in expected)
    return float((difference / sum(g.square().sum() for g in expected.values())).sqrt())


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bf16_compute_with_fp32_accumulation(pp):
    expected = accumulated(torch.float64)
    in_bf16 = error(accumulated(torch.bfloat16), expected)
    ours = joined(run_ranks(pipelined, pp * REPLICAS, pp))
    assert ours.keys() == expected.keys()
    in_fp32 = error(ours, expected)
    # Each of 32 additions, and the sums inside the products, round to 2^-24.
    assert in_fp32 < 32 * 2**-24
    assert in_fp32 < in_bf16 / 1000
