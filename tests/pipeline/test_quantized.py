"""Pipelines of stages with quantized weights against one rank with the dequantized ones; ranks are threads."""

from __future__ import annotations

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import dualpipe.nn.quantized_matmul as quantized_matmul
from dualpipe.models import build_stages
from dualpipe.models.deepseek import DeepseekV3Config
from dualpipe.models.gpt_oss import GptOssConfig
from dualpipe.nn import cross_entropy_loss
from dualpipe.quantized import FORMATS, QuantizedTensor, quantize_weights
from thread_steps import Problem, reference, run, same_bits, share_experts, worst

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


def problem(family: str, format: str, dtype: torch.dtype, ep: int) -> Problem:
    """Return four stages with quantized weights, and their batches."""
    stages = build_stages(CONFIGS[family], 4)
    for stage in stages:
        stage.to(dtype).init_weights(seed=0)
        quantize_weights(stage, format)
    rows = torch.randint(61, (ep, ROWS * MICRO_BATCHES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batches = [(each[:, :-1], each[:, 1:].contiguous()) for each in rows]
    return Problem(stages, batches, MICRO_BATCHES, cross_entropy_loss, partial(share_experts, num_experts=8))


def plain(stage: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the stage with its weights dequantized."""
    stage = copy.deepcopy(stage)
    for module in stage.modules():
        if isinstance(module._parameters.get("weight"), QuantizedTensor):
            module.weight = nn.Parameter(module.weight.dequantize().to(dtype))
    return stage


@pytest.mark.parametrize("family, format", [
    ("gpt-oss", "nvfp4"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("DeepSeek", "fp8_block"), ("gpt-oss", "mxfp8"), ("DeepSeek", "mxfp4"))),
])
def test_weight_only_is_exact(family, format):
    it = problem(family, format, torch.float64, 2)
    dequantized = it._replace(stages=[plain(stage, torch.float64) for stage in it.stages])
    assert worst(run(it, 2, 2), reference(dequantized)) < 1e-10


@pytest.mark.parametrize("family, format", [
    ("DeepSeek", "fp8_block"), pytest.param("gpt-oss", "mxfp8", marks=pytest.mark.slow),
])
def test_in_fp8_a_pipeline_has_the_losses_of_one_rank(family, format):
    it = problem(family, format, torch.bfloat16, 1)
    with mock.patch.object(quantized_matmul, "grouped_gemm_fp8", wraps=quantized_matmul.grouped_gemm_fp8) as fp8:
        found = run(it, 2, 1)
    assert fp8.called
    expected = reference(it)
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
    it = problem(family, format, torch.bfloat16, 2)
    for stage in it.stages:
        for module in stage.modules():
            module.fp8_weight_grad = True
    found = run(it, 2, 2)
    before_dispatch = partial(share_experts, num_experts=8, fp8_rows=FORMATS[format].block[1])
    for overlap, recompute in others:
        assert same_bits(found, run(it._replace(connect=before_dispatch), 2, 2, overlap, recompute))
