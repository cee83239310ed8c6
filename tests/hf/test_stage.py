"""Stages of transformers' causal LMs, one after the other in one process: what the whole model computes."""

from __future__ import annotations

import copy

import pytest
import torch

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


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_stages_one_after_the_other_are_the_model(family):
    whole = tiny_model(family, tie_word_embeddings=False)
    tokens, labels = batch_of(0, rows=2)
    loss_fn(whole(tokens, use_cache=False).logits, labels).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    whole.zero_grad()
    stages = stages_of(whole)
    x = tokens
    for stage in stages:
        x = stage(x)
    loss_fn(x, labels).backward()
    found = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    assert found.keys() == expected.keys()
    errors = {name: error_of(found[name], expected[name]) for name in expected}
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
    stage.use_expert_parallelism({8: ExpertParallel(8)})
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
