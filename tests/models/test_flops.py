"""Sizes and costs of models, against transformers' modules and torch's own counter of floating-point operations."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from dualpipe.models import build_stages, config_from_dict, read_config
from dualpipe.models.flops import flops_per_token, layer_flops, meta_layer, parameter_counts
from dualpipe.models.stages import stage_layers

QWEN3 = {
    "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": True,
}
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
}
DEEPSEEK_V3 = {
    **DEEPSEEK_V2, "model_type": "deepseek_v3", "q_lora_rank": 20, "n_group": 4, "topk_group": 2,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
}
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6,
    "num_experts_per_tok": 2, "sliding_window": 8,
}
FAMILIES = {hub["model_type"]: hub for hub in (QWEN3, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS)}


def hf_model(hub):
    config = AutoConfig.for_model(**hub)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("hub", FAMILIES.values(), ids=FAMILIES)
def test_parameters_are_those_of_transformers(hub):
    counts, model = parameter_counts(config_from_dict(hub)), hf_model(hub)
    assert counts.total == model.num_parameters()
    (stage,) = build_stages(config_from_dict(hub), 1)
    assert counts.total == sum(param.numel() for param in stage.parameters())


def test_active_parameters_are_those_that_a_token_meets():
    counts = parameter_counts(config_from_dict(QWEN3))
    an_expert = 3 * 32 * 24
    assert counts.total - counts.active == 2 * (6 - 2) * an_expert
    assert counts.embedding == 61 * 32


@pytest.mark.parametrize("hub", FAMILIES.values(), ids=FAMILIES)
def test_flops_are_those_that_torch_counts(hub):
    batch, length = 4, 32
    model = hf_model(hub)
    tokens = torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens).logits
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    expected = flops_per_token(config_from_dict(hub), length)
    assert expected.forward * batch * length == pytest.approx(forward, rel=0.01)
    assert expected.backward * batch * length == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert expected.total == expected.forward + expected.backward


def test_causal_attention_counts_what_a_token_sees():
    config = config_from_dict(GPT_OSS)
    sliding, full = (layer_flops(config, index, 32) - layer_flops(config, index, 32, causal=True) for index in range(2))
    each = 2 * 4 * (16 + 16)  # a query with one key and one value, in all heads
    assert full == each * (32 - sum(range(1, 33)) / 32)
    assert sliding == each * (32 - (sum(range(1, 9)) + 24 * 8) / 32)


def test_layers_for_multi_token_prediction_count_and_push_others_out_of_the_last_stage():
    config = read_config(Path(__file__).parents[2] / "examples" / "models" / "deepseek-v3")
    trained = config.with_mtp()
    layer = sum(p.numel() for p in meta_layer(config, 60).parameters())
    own = 2 * 7168**2 + 3 * 7168  # the projection of two hidden sizes to one, and three norms
    assert parameter_counts(trained).total - parameter_counts(config).total == layer + own
    assert [len(stage_layers(each, 16)[-1]) for each in (config, trained)] == [2, 1]
    assert [len(stage_layers(trained, 32)[stage]) for stage in (-2, -1)] == [1, 0]  # a stage of its own
