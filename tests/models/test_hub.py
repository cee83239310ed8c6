"""A config.json that matches no model is refused in one line, before anything is built."""

import json
import time

import pytest

from dualpipe.cli import main
from dualpipe.models import read_config
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


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"x": ' + "9" * 5000 + "}"])
def test_nested_json(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main(["hf", "check", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 1000 and str(tmp_path / "config.json") in said
