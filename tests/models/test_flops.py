"""Sizes and costs of models, against transformers' modules and torch's own counter of floating-point operations."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from dualpipe.models import build_stages, config_from_dict, read_config
from dualpipe.models.flops import flops_per_token, layer_flops, meta_layer, parameter_counts
from dualpipe.models.stages import stage_layers
from tiny_models import TINY

FAMILIES = {family: hub | {"model_type": family} for family, hub in TINY.items()}
FAMILIES["qwen3_moe"] |= {"mlp_only_layers": [1]}
FAMILIES["deepseek_v2"] |= {"q_lora_rank": None}


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
    counts = parameter_counts(config_from_dict(FAMILIES["qwen3_moe"]))
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
    config = config_from_dict(FAMILIES["gpt_oss"])
    sliding, full = (layer_flops(config, index, 32) - layer_flops(config, index, 32, causal=True) for index in range(2))
    each = 2 * 4 * (16 + 16)  # a query with one key and one value, in all heads
    assert full == each * (32 - sum(range(1, 33)) / 32)
    assert sliding == each * (32 - (sum(range(1, 5)) + 28 * 4) / 32)


def test_layers_for_multi_token_prediction_count_and_push_others_out_of_the_last_stage():
    config = read_config(Path(__file__).parents[2] / "examples" / "models" / "deepseek-v3")
    trained = config.with_mtp()
    layer = sum(p.numel() for p in meta_layer(config, 60).parameters())
    own = 2 * 7168**2 + 3 * 7168  # the projection of two hidden sizes to one, and three norms
    assert parameter_counts(trained).total - parameter_counts(config).total == layer + own
    assert [len(stage_layers(each, 16)[-1]) for each in (config, trained)] == [2, 1]
    assert [len(stage_layers(trained, 32)[stage]) for stage in (-2, -1)] == [1, 0]  # a stage of its own
