"""Stages of transformers' causal LMs, one after the other in one process: what the whole model computes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from dualpipe.hf.cut import cut_model
from dualpipe.hf.experts import NAME
from dualpipe.hf.model import TransformersModel
from dualpipe.hf.stage import CausalLMStage
from dualpipe.models.stages import Recompute
from dualpipe.parallel.experts.dispatcher import ExpertParallel
from hf_families import FAMILIES, OTHERS, VOCAB, batch_of, config_of, error_of, loss_fn, tiny_model

CUTS = [range(0), range(1), range(1, 3), range(3, 4)]


def stages_of(whole):
    stages = []
    for number, layers in enumerate(CUTS):
        model = copy.deepcopy(whole)
        cut_model(model, layers, is_first=number == 0, is_last=number == len(CUTS) - 1)
        stages.append(CausalLMStage(model, is_first=number == 0, is_last=number == len(CUTS) - 1))
    return stages


def gradient_errors(whole, stages):
    """Train the whole model and its stages, one after the other, on a batch; return the errors of gradients by name."""
    tokens, labels = batch_of(0, rows=2)
    loss_fn(whole(tokens, use_cache=False).logits, labels).backward()
    x = tokens
    for stage in stages:
        x = stage(x)
    loss_fn(x, labels).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    found = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    assert found.keys() == expected.keys()
    return {name: error_of(found[name], grad) for name, grad in expected.items()}


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_stages_one_after_the_other_are_the_model(family):
    whole = tiny_model(family, tie_word_embeddings=False)
    errors = gradient_errors(whole, stages_of(whole))
    assert max(errors.values()) < 1e-12, errors


def test_documents_in_a_row_are_told_apart_by_their_positions():
    whole = tiny_model("qwen3_moe")
    tokens = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    x = tokens
    for stage in stages_of(whole):
        x = stage(x, position_ids=positions)
    assert torch.allclose(x, whole(tokens, position_ids=positions, use_cache=False).logits, rtol=1e-10)
    alone = whole(tokens[:, 5:], use_cache=False).logits
    assert torch.allclose(x[:, 5:], alone, rtol=1e-8), "the second document does not see the first"


class Adapter(nn.Module):
    """Low-rank adapter in the place of a linear layer, which it keeps frozen, as PEFT puts it there."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        down = torch.randn(2, base_layer.in_features, dtype=torch.float64, generator=generator)
        up = torch.randn(base_layer.out_features, 2, dtype=torch.float64, generator=generator)
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.T @ self.up.T


def new_module(kind, *shape):
    torch.manual_seed(1)
    return kind(*shape, dtype=torch.float64)


def adapt_attention(model):
    for name, module in list(model.named_modules()):
        if name.endswith("self_attn"):
            module.q_proj = Adapter(module.q_proj)


def adapt_head(model):
    if model.lm_head is not None:
        model.lm_head = Adapter(model.lm_head)


def replace_head(model):
    if model.lm_head is not None:
        model.lm_head = new_module(partial(nn.Linear, bias=False), 32, VOCAB)


def set_output_embeddings(model):
    if model.lm_head is not None:
        getattr(model, "causal_lm", model).set_output_embeddings(new_module(partial(nn.Linear, bias=False), 32, VOCAB))


def set_input_embeddings(model):
    if model.model.embed_tokens is not None:
        getattr(model, "causal_lm", model).set_input_embeddings(new_module(nn.Embedding, VOCAB, 32))


def replace_norm(model):
    if getattr(model, "is_last", True):
        model.model.norm = new_module(nn.LayerNorm, 32)


def replace_layer(model):
    """Replace the last layer of the model by the one before it, which is in another stage."""
    if getattr(model, "is_last", True):
        model.model.layers[-1] = copy.deepcopy(tiny_model("olmoe", tie_word_embeddings=False).model.layers[2])


def add_parameter(model):
    if model.lm_head is not None:
        model.lm_head.bias = nn.Parameter(torch.linspace(0, 1, VOCAB, dtype=torch.float64))


@pytest.mark.parametrize("change", [
    adapt_attention, adapt_head, replace_head, set_output_embeddings, set_input_embeddings, replace_norm,
    replace_layer, add_parameter,
])
def test_a_module_that_is_replaced_later_runs_and_trains(change):
    whole = tiny_model("olmoe", tie_word_embeddings=False)
    stages = stages_of(whole)
    for model in (whole, *stages):
        change(model)
    x = tokens = batch_of(0, rows=2)[0]
    for stage in copy.deepcopy(stages):
        x = stage(x)
    assert error_of(x, whole(tokens, use_cache=False).logits) < 1e-12, "copies of stages show and run the same"
    errors = gradient_errors(whole, stages)
    assert max(errors.values()) < 1e-12, errors


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    whole = tiny_model("qwen3_moe", tie_word_embeddings=False)
    stages = stages_of(whole)
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj", "lm_head"])
    for model in (whole, *stages):
        peft.inject_adapter_in_model(config, model).double()
    adapters = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    found = {name: p for stage in stages for name, p in stage.named_parameters() if p.requires_grad}
    assert found.keys() == adapters.keys() and "lm_head.lora_A.default.weight" in found
    torch.manual_seed(0)
    for name, parameter in adapters.items():
        parameter.data.normal_()
        found[name].data.copy_(parameter)
    errors = gradient_errors(whole, stages)
    assert max(errors.values()) < 1e-12 and all(p.grad is not None for p in adapters.values())


def test_layers_are_replaced_and_neither_added_nor_removed():
    (_, _, stage, _) = stages_of(tiny_model("olmoe"))
    layers = stage.layers
    with pytest.raises(ValueError, match="layers of a stage have their numbers"):
        layers.append(nn.Identity())
    with pytest.raises(ValueError, match="layers of a stage have their numbers"):
        del layers[0]
    key = stage.segments_key()
    layers[0] = copy.deepcopy(layers[1])
    assert [name for name, _ in layers.named_children()] == ["1", "2"]
    assert stage.segments_key() != key, "a pipeline takes the segments of the new layer"


def test_names_are_those_of_the_model_and_modes_are_set_everywhere():
    whole = tiny_model("qwen3_moe")
    stages = stages_of(whole)
    assert sorted(name for stage in stages for name in stage.state_dict()) == sorted(whole.state_dict())
    stages[1].eval()
    assert not any(module.training for module in stages[1].modules()) and not stages[1].causal_lm.training


def test_segments_are_offered_where_tokens_travel():
    whole = tiny_model("qwen3_moe")
    whole.set_experts_implementation(NAME)
    stage = stages_of(whole)[2]
    key = stage.segments_key()
    stage.use_expert_parallelism(ExpertParallel(8))
    assert stage.segments_key() != key
    tokens, _ = batch_of(0, rows=2)
    hidden = torch.randn(*tokens.shape, 32, dtype=torch.float64)
    carry = {"x": hidden, "position_ids": None}
    for segment in stage.segments():  # nothing is sent from a rank that has all experts: no layer is cut
        values = segment.fn(*(carry[name] for name in segment.reads))
        carry.update(zip(segment.writes, values if len(segment.writes) > 1 else (values,)))
    assert torch.allclose(carry["x"], stage(hidden), rtol=1e-12)


def test_tied_parameters_are_named_at_both_ends_alone():
    whole = tiny_model("qwen3_moe", tie_word_embeddings=True)
    first, *middle, last = stages_of(whole)
    assert first.tied_parameters() == [first.base.embed_tokens.weight]
    assert last.tied_parameters() == [last.causal_lm.lm_head.weight]
    assert not any(stage.tied_parameters() for stage in middle)


def test_layers_of_which_segments_are_computed_again():
    model = TransformersModel.from_dict(config_of("llama").to_dict())
    (stage,) = model.meta_stages()
    assert not any(segment.recompute for segment in stage.segments())
    before = stage.segments_key()
    stage.recompute = Recompute(["layer:1-2"])
    assert [segment.reads for segment in stage.segments() if segment.recompute] == [
        ("x", "arguments1"), ("x", "arguments2")]
    assert stage.segments_key() != before
    stage.recompute = Recompute()
