"""Sequences that several ranks share against one process that has them whole: gradients, bytes, memory, failures."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dualpipe import Pipeline
from dualpipe.models import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn.attention import packed_positions
from dualpipe.nn.segments import Communicate
from dualpipe.parallel.context import ContextParallel, row_width
from threads import Rank, run_threads
from toys import relative_error

ROWS, MICRO_BATCHES = 4, 2
COMMON = {"vocab_size": 31, "hidden_size": 16, "initializer_range": 0.3}
QWEN = Qwen3MoeConfig(
    **COMMON, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=4, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True, mlp_only_layers=(1,), intermediate_size=12,
)
DEEPSEEK = DeepseekV3Config(
    **COMMON, num_hidden_layers=2, num_attention_heads=4, q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=4,
    qk_rope_head_dim=4, v_head_dim=5, intermediate_size=12, moe_intermediate_size=8, n_routed_experts=4,
    n_shared_experts=1, num_experts_per_tok=2, n_group=None, topk_group=None, first_k_dense_replace=1,
)
GPT_OSS = GptOssConfig(
    **COMMON, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=4, num_experts=4,
    num_experts_per_tok=2, intermediate_size=8, sliding_window=3, layer_types=("full_attention", "sliding_attention"),
)
FAMILIES = {"qwen3_moe": QWEN, "deepseek": DEEPSEEK, "gpt_oss": GPT_OSS}
# Documents that cross the cuts between ranks, and one of a single token.
STARTS = {11: [0, 4, 5, 11, 19, 22, 31], 16: [0, 7, 8, 22, 32, 50], 19: [0, 2, 30, 57], 6: [0, 1, 9, 12]}


def batch(length: int, packed: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions (ROWS, length)."""
    generator = torch.Generator().manual_seed(length)
    tokens, labels = torch.randint(31, (2, ROWS, length), generator=generator)
    starts = STARTS[length] if packed else list(range(0, ROWS * length, length))
    return tokens, labels, packed_positions(torch.tensor([*starts, ROWS * length]), ROWS, length)


def criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float() if logits.dtype is torch.bfloat16
                                             else logits.flatten(0, 1), labels.flatten(), reduction="sum")


def make(config, count: int, dtype: torch.dtype):
    stages = build_stages(config, count)
    for stage in stages:
        stage.init_weights(0)
        for name, parameter in stage.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        stage.to(dtype)
    return stages


def step(pipe: Pipeline, own: torch.Tensor, length: int, packed: bool = True):
    tokens, labels, positions = batch(length, packed)
    pipe.step(tokens[:, own], num_chunks=MICRO_BATCHES, criterion=criterion, labels=(labels[:, own].contiguous(),),
              side={"positions": positions})


def whole_gradients(config, length: int, dtype: torch.dtype = torch.float64, packed: bool = True):
    (stage,) = make(config, 1, dtype)
    tokens, labels, positions = batch(length, packed)
    criterion(stage(tokens, positions), labels).backward()
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def shared(rank: Rank, config, cp: int, method: str, length: int, recompute, dtype, packed, schedule="1f1b"):
    """Gradients of a rank's tokens, and what it has sent."""
    (stage,) = make(config, 1, dtype)
    context = ContextParallel(rank.all_to_all("cp", range(cp)), method=method)
    stage.use_context_parallelism(context)
    stage.recompute = Recompute(recompute)
    pipe = Pipeline([stage], process_group=rank.group(f"pp of {rank.number}", (rank.number,)), schedule=schedule)
    step(pipe, context.split.own(length), length, packed)
    return {name: parameter.grad for name, parameter in stage.named_parameters()}, context.sent_bytes


def worst(found, expected) -> dict[str, float]:
    """The error of the sum over all ranks, by parameter."""
    return {name: relative_error(sum(grads[name] for grads in found), grad) for name, grad in expected.items()}


def compare(config, cp: int, method: str, length: int, recompute=(), dtype=torch.float64, packed=True, limit=1e-10):
    found = run_threads(shared, cp, config, cp, method, length, recompute, dtype, packed)
    errors = worst([grads for grads, _ in found], whole_gradients(config, length, torch.float64, packed))
    assert max(errors.values()) < limit, errors


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_sequence(family, method, cp):
    compare(FAMILIES[family], cp, method, 19)
