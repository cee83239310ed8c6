"""Checkpoints in FP8 and MXFP4, dequantized for transformers' models as for our own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dualpipe.checkpoint import load_hf
from dualpipe.hf import load_stages
from hub import save_fp8, save_mxfp4, stages_on_meta


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
def test_logits_are_those_of_our_own_model(save, tmp_path):
    save(tmp_path)
    (own,), mesh, plan = stages_on_meta(tmp_path, stages_per_rank=1)
    own.to_empty(device="cpu")
    load_hf([own], tmp_path, mesh, plan)
    stages = load_stages(tmp_path, 2, (0, 1), dtype=torch.float32)
    tokens = torch.arange(10).view(1, 10)
    with torch.no_grad():
        expected = own(tokens)
        found = stages[1](stages[0](tokens))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_scales_that_are_missing_are_named(tmp_path):
    save_mxfp4(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, file, metadata={"format": "pt"})
    load_stages(tmp_path, 2, (0,), layers_per_stage=(1, 1))  # without this layer
    with pytest.raises(ValueError, match="down_proj_scales is missing"):
        load_stages(tmp_path, 2, (1,), layers_per_stage=(1, 1))


def test_another_way_of_quantizing_is_refused(tmp_path):
    save_mxfp4(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quant_method 'gptq' is not supported"):
        load_stages(tmp_path, 1, (0,))
