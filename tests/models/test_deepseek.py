"""Configurations and routers of DeepSeek-V2 and -V3."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from dualpipe.checkpoint.hub.load import model_shapes
from dualpipe.models import DeepseekV3Config, config_from_dict, read_config
from dualpipe.models.deepseek import LatentAttention
from models import whole
from tiny_models import TINY, tiny

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
REFERENCES = {"deepseek_v2": modeling_deepseek_v2, "deepseek_v3": modeling_deepseek_v3}


def test_correction_bias_changes_the_choice_and_not_the_weights():
    model = whole(tiny("deepseek_v3", n_group=1, topk_group=1, norm_topk_prob=False))
    gate = model.layers["1"].mlp.gate
    x_TH = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate.e_score_correction_bias[5] = 10.0
        weights_TK, experts_TK = gate(x_TH)
        chosen = experts_TK == 5
        assert chosen.any(dim=1).all()
        torch.testing.assert_close(weights_TK[chosen], 2.5 * (x_TH @ gate.weight[5]).sigmoid())


# -- config.json


@pytest.mark.parametrize("family", REFERENCES)
def test_null_is_not_the_same_as_left_out(family):
    nulls = {"q_lora_rank": None, "n_group": None, "topk_group": None, "num_key_value_heads": None}
    config = tiny(family, **nulls)
    assert config.q_lora_rank is config.n_group is None
    assert config.gate().n_group == config.gate().topk_group == 1
    least = {key: value for key, value in TINY[family].items() if key not in nulls and "dense" not in key}
    with pytest.raises(ValueError, match="lacks q_lora_rank"):
        type(config).from_dict(least)
    hub = CONFIG_MAPPING[family](**least)
    left_out = type(config).from_dict(least | {"q_lora_rank": 12})
    for key in ("n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor", "tie_word_embeddings"):
        assert getattr(left_out, key) == getattr(hub, key), key
    no_shared_experts = [whole(tiny(family, n_shared_experts=number)).state_dict() for number in (0, None)]
    assert no_shared_experts[0].keys() == no_shared_experts[1].keys()
    assert not any("shared_experts" in name for name in no_shared_experts[0])


# -- the published models


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3"])
def test_published_routers_and_scales_are_those_of_transformers(name):
    """One layer of transformers' own, narrowed to where its size does not matter, read from the same file."""
    hub = json.loads((EXAMPLES / name / "config.json").read_text())
    hub |= {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8}
    family = hub["model_type"]
    version = family.removeprefix("deepseek_")
    reference = REFERENCES[family]
    narrow = CONFIG_MAPPING[family](**{k: v for k, v in hub.items() if k != "quantization_config"})
    config = config_from_dict(hub)
    attention = getattr(reference, f"Deepseek{version.upper()}Attention")
    with torch.device("meta"):
        assert attention(narrow, 0).scaling == pytest.approx(LatentAttention(config).scale, rel=1e-12)
    rotary = getattr(reference, f"Deepseek{version.upper()}RotaryEmbedding")(narrow)
    positions = torch.tensor([[0, 1, 5000, 160_000]])
    cos, _ = config.rotary.tables(positions, torch.float32)
    expected = rotary(torch.zeros(1), positions)
    expected = expected.real if version == "v2" else expected[0][..., :32]
    torch.testing.assert_close(cos[..., :32], expected, rtol=0, atol=0.02)  # 160000 radians, of which 2^-24 is 0.01
    gate = getattr(reference, f"Deepseek{version.upper()}TopkRouter")(narrow)
    torch.nn.init.normal_(gate.weight, std=0.02)
    x_TH = torch.randn(64, config.hidden_size)
    router = config.gate()
    router.load_state_dict(gate.state_dict())
    _, weights_TK, experts_TK = gate(x_TH)
    own_weights_TK, own_experts_TK = router(x_TH)
    zeros_TE = torch.zeros(64, config.num_experts)
    expected = zeros_TE.scatter(1, experts_TK, weights_TK)
    torch.testing.assert_close(zeros_TE.scatter(1, own_experts_TK, own_weights_TK), expected)


def test_kimi_k2_is_read_as_it_was_published():
    """Kimi-K2-Instruct's config.json; a trillion parameters (arXiv:2507.20534, table 2)."""
    config = config_from_dict({
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                                                "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                                                "type": "yarn"},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
    })
    assert isinstance(config, DeepseekV3Config) and config.model_type == "kimi_k2" and not config.carried_layers
    assert config.rotary.yarn.factor == 32
    sizes = [prod(shape) for shape in model_shapes(config).values()]
    assert 1.02e12 < sum(sizes) < 1.04e12


def test_multi_token_prediction_is_ignored_on_the_hub():
    config = read_config(EXAMPLES / "deepseek-v3")
    assert config.ignored_on_hub("model.layers.61.embed_tokens.weight")
    assert config.ignored_on_hub("model.layers.61.mlp.experts.3.up_proj.weight")
    for name in ("model.layers.60.input_layernorm.weight", "model.layers.62.input_layernorm.weight", "lm_head.weight"):
        assert not config.ignored_on_hub(name)
    without = dataclasses.replace(config, num_nextn_predict_layers=0)
    assert not without.ignored_on_hub("model.layers.61.embed_tokens.weight")
    assert tiny("deepseek_v3", num_nextn_predict_layers=None, num_mtp_layers=2).num_nextn_predict_layers == 2
    lite = read_config(EXAMPLES / "deepseek-v2-lite")
    assert not lite.ignored_on_hub("model.layers.27.input_layernorm.weight")
