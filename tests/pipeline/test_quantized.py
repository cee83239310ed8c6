"""Pipelines of stages with quantized weights against one rank with the dequantized ones; ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dualpipe.nn.quantized_matmul as quantized_matmul
from dualpipe import Pipeline
from dualpipe.models import build_stages
from dualpipe.models.deepseek import DeepseekV3Config
from dualpipe.models.gpt_oss import GptOssConfig
from dualpipe.models.stages import Recompute
from dualpipe.nn import GroupedLinear, cross_entropy_loss
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from dualpipe.quantized import FORMATS, QuantizedTensor, quantize_weights
from threads import Rank, run_threads
from toys import relative_error, stages_of_rank

MICRO_BATCHES, ROWS, LENGTH = 5, 4, 8
SIZES = dict(vocab_size=61, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, initializer_range=0.3,
             num_experts_per_tok=3)
CONFIGS = {
    "gpt-oss": GptOssConfig(**SIZES, num_key_value_heads=1, head_dim=16, num_experts=8, intermediate_size=48,
                            layer_types=("sliding_attention", "full_attention") * 2, sliding_window=4),
    "DeepSeek": DeepseekV3Config(**SIZES, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
                                 v_head_dim=16, intermediate_size=96, moe_intermediate_size=48, n_routed_experts=8,
                                 n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1),
}


def made(family: str, format: str, dtype: torch.dtype, count: int) -> list[nn.Module]:
    """Build stages with quantized weights."""
    stages = build_stages(CONFIGS[family], count)
    for stage in stages:
        stage.to(dtype).init_weights(seed=0)
        quantize_weights(stage, format)
    return stages


def accumulating(stages: Sequence[nn.Module]) -> list[nn.Module]:
    """Return copies whose accumulators are in float32 or wider."""
    stages = copy.deepcopy(list(stages))
    for stage in stages:
        for param in stage.parameters():
            param.grad_dtype = torch.promote_types(param.dtype, torch.float32)
    return stages


def plain(stage: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the stage with its weights dequantized."""
    stage = copy.deepcopy(stage)
    for module in stage.modules():
        if isinstance(module._parameters.get("weight"), QuantizedTensor):
            module.weight = nn.Parameter(module.weight.dequantize().to(dtype))
    return stage


def batches(ep: int) -> Tensor:
    return torch.randint(61, (ep, ROWS * MICRO_BATCHES, LENGTH + 1), generator=torch.Generator().manual_seed(1))


class Result(NamedTuple):
    loss: Tensor | None
    gradients: dict[str, Tensor]  # by stage and name


def step(
    rank: Rank, stages: list[nn.Module], pp: int, ep: int, overlap: bool, recompute: Sequence[str], fp8_rows: int | None
) -> Result:
    """Run one step as rank (pipeline rank) * ep + (expert-parallel rank)."""
    mine, replica = divmod(rank.number, ep)
    all_to_all = rank.all_to_all(f"ep of {mine}", [mine * ep + e for e in range(ep)])
    numbers = stages_of_rank("dualpipev", pp, mine)
    stages = accumulating([stages[number] for number in numbers])
    for stage in stages:
        stage.recompute = Recompute(recompute)
        for layer in stage.modules():
            if isinstance(layer, GroupedLinear) and ep > 1:
                for name, param in layer.named_parameters(recurse=False):
                    part = nn.Parameter(param.detach().chunk(ep)[replica].clone())
                    part.grad_dtype = param.grad_dtype
                    setattr(layer, name, part)
        if ep > 1:
            stage.use_expert_parallelism(ExpertParallel(8, all_to_all, fp8_rows=fp8_rows))
    pipe = Pipeline(stages, process_group=rank.group(f"pp of {replica}", [p * ep + replica for p in range(pp)]),
                    schedule="dualpipev", overlap=overlap)
    x, y = batches(ep)[replica][:, :-1], batches(ep)[replica][:, 1:].contiguous()
    loss, _ = pipe.step(x, num_chunks=MICRO_BATCHES, criterion=cross_entropy_loss, labels=(y,))
    found = {f"{n}.{name}": p.grad for n, stage in zip(numbers, stages) for name, p in stage.named_parameters()}
    assert all(type(gradient) is Tensor for gradient in found.values())
    return Result(loss, found)


def run(
    stages: list[nn.Module], pp: int, ep: int, overlap: bool = True, recompute: Sequence[str] = (),
    fp8_rows: int | None = None,
) -> Result:
    """Return all ranks' losses, and gradients: experts joined, all others summed over the expert-parallel ranks."""
    results = run_threads(step, pp * ep, stages, pp, ep, overlap, recompute, fp8_rows)
    whole = {}
    for first in range(0, len(results), ep):
        for name in results[first].gradients:
            parts = [result.gradients[name] for result in results[first : first + ep]]
            whole[name] = torch.cat(parts) if ".experts." in name else torch.stack(parts).sum(0)
    return Result(torch.stack([result.loss for result in results[:ep]]), whole)


def reference(stages: list[nn.Module], ep: int) -> Result:
    losses = []
    for rows in batches(ep):
        for part in rows.tensor_split(MICRO_BATCHES):
            x = part[:, :-1]
            for stage in stages:
                x = stage(x)
            losses.append(cross_entropy_loss(x, part[:, 1:]))
            losses[-1].backward()
    found = {f"{n}.{name}": p.grad for n, stage in enumerate(stages) for name, p in stage.named_parameters()}
    return Result(torch.stack(losses).detach().view(ep, -1), found)


def worst(found: Result, expected: Result) -> float:
    assert found.gradients.keys() == expected.gradients.keys()
    errors = [relative_error(found.gradients[name], gradient) for name, gradient in expected.gradients.items()]
    return max(relative_error(found.loss, expected.loss), *errors)


@pytest.mark.parametrize("family, format", [
    ("gpt-oss", "nvfp4"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("DeepSeek", "fp8_block"), ("gpt-oss", "mxfp8"), ("DeepSeek", "mxfp4"))),
])
def test_weight_only_is_exact(family, format):
    stages = made(family, format, torch.float64, 4)
    assert worst(run(stages, 2, 2), reference([plain(stage, torch.float64) for stage in stages], 2)) < 1e-10


@pytest.mark.parametrize("family, format", [
    ("DeepSeek", "fp8_block"), pytest.param("gpt-oss", "mxfp8", marks=pytest.mark.slow),
])
def test_in_fp8_a_pipeline_has_the_losses_of_one_rank(family, format):
    stages = made(family, format, torch.bfloat16, 4)
    with mock.patch.object(quantized_matmul, "grouped_gemm_fp8", wraps=quantized_matmul.grouped_gemm_fp8) as fp8:
        found = run(stages, 2, 1)
    assert fp8.called
    expected = reference(accumulating(stages), 1)
    assert torch.equal(found.loss, expected.loss)
    assert worst(found, expected) < 1e-5  # micro-batches are added in another order


RECOMPUTED = ("layer", "dispatch")


@pytest.mark.slow
@pytest.mark.parametrize("family, format, others", [
    ("gpt-oss", "mxfp8", [(False, RECOMPUTED)]),
    *(pytest.param(*each, [(False, ()), (True, RECOMPUTED)], marks=pytest.mark.slow)
      for each in (("gpt-oss", "mxfp8"), ("DeepSeek", "fp8_block"))),
])
def test_in_fp8_neither_overlap_nor_recomputation_changes_a_bit(family, format, others):
    """Quantizing rows before their dispatch or in the layer that takes them changes no bit either."""
    stages = made(family, format, torch.bfloat16, 4)
    for stage in stages:
        for module in stage.modules():
            module.fp8_weight_grad = True
    found = run(stages, 2, 2)
    for overlap, recompute in others:
        other = run(stages, 2, 2, overlap, recompute, fp8_rows=FORMATS[format].block[1])
        assert torch.equal(other.loss, found.loss)
        assert all(torch.equal(other.gradients[name], grad) for name, grad in found.gradients.items())
