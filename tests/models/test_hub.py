"""Keys of a config.json: rope keys count as in transformers, some have no effect, others are refused in one line."""

import copy
import json
import time

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig

from dualpipe.cli import main
from dualpipe.models import config_from_dict, read_config
from hub import FAMILIES, TINY

CONFIGS = {name: sizes | {"model_type": name} for name, sizes in FAMILIES.items()} | {
    "qwen3_moe": TINY | {"model_type": "qwen3_moe"}
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
ABSURD = [
    *({key: 10**9} for key in ("num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads")),
    {"num_hidden_layers": 10**400}, {"rms_norm_eps": 10**400},
    *({"rms_norm_eps": value} for value in (float("inf"), float("-inf"), float("nan"), -1e-6)),
    *({"rope_theta": value} for value in (float("inf"), float("nan"), 10**400)),
    {"rope_parameters": YARN | {"rope_theta": 1.0}},
    *({"rope_parameters": YARN | {key: value}} for value in (float("inf"), float("nan"), -2.0, 10**400, "1")
      for key in (*YARN, "beta_fast", "attention_factor", "mscale") if key != "rope_type"),
    {"initializer_range": float("nan")}, {"unknown": [[[[[[[1] * 100] * 100] * 9]]]]},
]
EXPERTS = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}


@pytest.mark.parametrize("family", CONFIGS)
def test_absurd_values(family, tmp_path):
    path = tmp_path / "config.json"
    start = time.process_time()
    for absurd in (*ABSURD, {EXPERTS.get(family, "n_routed_experts"): 10**9}):
        path.write_text(json.dumps(CONFIGS[family] | absurd))
        with pytest.raises(ValueError) as caught:
            read_config(path)
        ((key, value),) = absurd.items()
        said = str(caught.value)
        assert (key.removeprefix("local_") in said or key == "num_local_experts" or isinstance(value, dict)), absurd
        assert "\n" not in said and len(said) < 1000, absurd
    assert time.process_time() - start < 30


def test_other_numbers_are_still_taken(tmp_path):
    path = tmp_path / "config.json"
    for changes in ({"rope_theta": 10_000_000}, {"rms_norm_eps": 1e-12}, {"vocab_size": 2**20 + 1},
                    {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0.0, "rope_theta": 10**7}}):
        path.write_text(json.dumps(CONFIGS["qwen3_moe"] | changes))
        read_config(path)


STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
ROPE_KEYS = {
    "scaling beside parameters": {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "theta beside both": {"rope_scaling": STRETCHED, "rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    "three thetas": {"rope_scaling": YARN, "rope_theta": 3.0, "rope_parameters": {"rope_theta": 2.0}},
    "theta beside parameters": {"rope_theta": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 2.0}},
    "older form": {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}},
    "two types": {"rope_scaling": STRETCHED | {"type": "linear"}, "rope_theta": 7.0},
    "default over yarn": {"rope_scaling": {"rope_type": "default", "rope_theta": 4.0}, "rope_parameters": YARN},
    "empty scaling": {"rope_scaling": {}, "rope_parameters": YARN},
    "null scaling": {"rope_scaling": None, "rope_parameters": YARN},
    "empty parameters": {"rope_parameters": {}},
    "null truncate": {"rope_scaling": STRETCHED | {"truncate": None}},
    "no truncate": {"rope_parameters": YARN | {"truncate": False}},
    "none": {},
}


@pytest.mark.parametrize("keys", ROPE_KEYS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_rope_keys_count_as_in_transformers(family, keys):
    unrelated = {key: value for key, value in CONFIGS[family].items() if not key.startswith("rope_")}
    hub = unrelated | {"max_position_embeddings": 64} | ROPE_KEYS[keys]
    config = config_from_dict(hub)
    expected = CONFIG_MAPPING[family].from_dict(copy.deepcopy(hub)).rope_parameters
    assert config.rope_theta == expected["rope_theta"]
    assert (config.yarn is not None) == (expected["rope_type"] == "yarn")
    if config.yarn is not None:
        assert config.yarn.factor == expected["factor"]
        assert config.yarn.original_max_position_embeddings == expected["original_max_position_embeddings"]
        assert config.yarn.truncate == bool(expected.get("truncate", True)), "null counts as false"


def test_rope_theta_that_rope_scaling_drops_is_refused():
    keys = {"rope_scaling": STRETCHED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(ValueError, match=r"rope_theta would be 10000.0 instead of 1000000.0; put"):
        config_from_dict(CONFIGS["qwen3_moe"] | keys)


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_of_tools_are_ignored(family):
    left = dict.fromkeys(GenerationConfig._get_default_generation_params(), 1) | {
        "unsloth_version": "2026.1", "_attn_implementation_autoset": True, "output_router_logits": True,
        "torch_dtype": "bfloat16", "tokenizer_class": "Qwen2Tokenizer", "pad_token_id": [3],
    }
    assert config_from_dict(CONFIGS[family] | left) == config_from_dict(CONFIGS[family])
    with pytest.raises(ValueError, match=r"router_jitter_noise=0.1 \(unknown\)"):
        config_from_dict(CONFIGS[family] | left | {"router_jitter_noise": 0.1})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"x": ' + "9" * 5000 + "}"])
def test_nested_json(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main(["hf", "check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 1000 and str(tmp_path / "config.json") in said
