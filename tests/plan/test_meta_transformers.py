"""Stages whose layers are on meta, with the code around them on the CPU."""

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dualpipe.hf.cut import cut_model
from dualpipe.hf.model import TransformersModel
from dualpipe.hf.stage import CausalLMStage
from dualpipe.nn.segments import run_segments
from dualpipe.plan.meta_transformers import build_meta_stage, layer_forms, split_on_meta
from hf_families import config_of, tiny_model


def meta_stage(family, **changes):
    """The last two layers, the norm and the head of a tiny model, in float32."""
    model = TransformersModel.from_dict(config_of(family, **changes).to_dict())
    return build_meta_stage(model, [2, 3], is_last=True, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", "granite", "gemma2", "gpt_oss"])
def test_layers_get_what_those_of_a_real_stage_get_and_logits_have_their_shape(family):
    stage = meta_stage(family)
    causal_lm = tiny_model(family, torch.float32)
    cut_model(causal_lm, range(2, 4), is_first=False, is_last=True)
    real = CausalLMStage(causal_lm, is_first=False, is_last=True, form=stage.form)
    x = torch.randn(2, 12, 32)
    positions = torch.arange(6).repeat(2).expand(2, 12)
    for position_ids in (None, positions):
        _, expected = real.layer_arguments(x, position_ids)
        _, arguments = stage.layer_arguments(x.to("meta"), position_ids)
        tensors = [[leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor)]
                   for each in (expected, arguments)]
        shapes = [[(tensor.shape, tensor.dtype) for tensor in found] for found in tensors]
        assert shapes[0] == shapes[1] and all(tensor.is_meta for tensor in tensors[1])
    logits = run_segments(stage.segments(), {"x": x.to("meta"), "position_ids": None})["x"]
    assert logits.is_meta and logits.shape == (2, 12, 64)


def test_layers_are_cut_at_their_experts():
    stage = meta_stage("deepseek_v3")
    split_on_meta(stage, torch.empty(2, 4, 32, device="meta"))
    assert list(stage.splits) == [2, 3] and all(split.num_recorded for split in stage.splits.values())


def test_forms_of_layers():
    forms = layer_forms(TransformersModel.from_dict(config_of("glm4_moe").to_dict()))
    assert forms[0] != forms[1] == forms[2] == forms[3]
