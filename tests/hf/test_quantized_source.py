"""Checkpoints in FP8 and MXFP4, dequantized for transformers' models as for our own."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from dualpipe.checkpoint import load_hf
from dualpipe.checkpoint.hub.files import Reader
from dualpipe.hf import load_stages, quantized_source
from dualpipe.hf.build import READS_SHARDS
from dualpipe.parallel.experts.dispatcher import stacked_parameters
from dualpipe.parallel.mesh import build_mesh
from hub import save_fp8, save_mxfp4, stages_on_meta
from ranks import run_ranks


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


def experts_of_rank(rank, folder):
    """Experts of a stage whose rank reads half of them, and the bytes of the experts' tensors that it has read."""
    sizes: list[int] = []

    class CountingReader(Reader):
        def __call__(self, name, box):
            part = super().__call__(name, box)
            sizes.append(part.nbytes if ".experts." in name else 0)
            return part

    mesh = build_mesh(1, 1, 2, torch.device("cpu"))
    with mock.patch.object(quantized_source, "Reader", CountingReader):
        (stage,) = load_stages(folder, 1, (0,), mesh=mesh, dtype=torch.float32)
    experts = {
        f"{path}.{name}": parameter.full_tensor().detach()
        for path, module in stage.named_modules() for name, parameter in stacked_parameters(module).items()}
    return experts, sum(sizes)


@pytest.mark.skipif(not READS_SHARDS, reason="this version of transformers reads all experts")
@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
def test_a_rank_reads_its_own_experts_alone(save, tmp_path):
    save(tmp_path)
    (whole,) = load_stages(tmp_path, 1, (0,), dtype=torch.float32)
    expected = whole.state_dict()
    total = sum(tensor.nbytes for file in tmp_path.glob("*.safetensors")
                for name, tensor in load_file(file).items() if ".experts." in name)
    results = run_ranks(experts_of_rank, 2, tmp_path)
    for experts, num_bytes in results:
        assert num_bytes == total // 2
        assert experts and all(torch.equal(tensor, expected[name]) for name, tensor in experts.items())


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
