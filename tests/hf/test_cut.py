"""Causal LMs cut to the layers of a stage, and stages that cost about the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from dualpipe.hf.cut import base_of, config_of_stage, cut_model, drop_ends, is_tied, stage_layers, top_k_of
from hf_families import config_of, tiny_model


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "gpt_oss"])
def test_all_stages_have_together_what_the_model_has_under_the_same_names(family):
    expected = set(tiny_model(family).state_dict())
    names: list[str] = []
    for number, layers in enumerate([range(1), range(1, 3), range(3, 4)]):
        model = tiny_model(family)
        cut_model(model, layers, is_first=number == 0, is_last=number == 2)
        names += model.state_dict()
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize("is_first", [True, False])
def test_both_ends_of_a_tied_model_keep_both_weights_until_one_is_loaded(is_first):
    model = tiny_model("qwen3_moe", tie_word_embeddings=True)
    cut_model(model, range(3, 4), is_first=is_first, is_last=not is_first)
    assert base_of(model).embed_tokens is not None and model.lm_head is not None and model.all_tied_weights_keys
    drop_ends(model, is_first=is_first, is_last=not is_first)
    assert (base_of(model).embed_tokens is None, model.lm_head is None) == (not is_first, is_first)


def test_lists_of_the_configuration_are_those_of_the_stages_layers():
    config = config_of("qwen3_next")
    own = config_of_stage(config, range(1, 3), 4)
    assert own.layer_types == ["full_attention", "linear_attention"] and own.num_hidden_layers == 2
    assert len(config.layer_types) == config.num_hidden_layers == 4, "the model's own is as it was"
    without_layers = config_of_stage(config, range(4, 4), 4)
    assert without_layers.layer_types == ["full_attention"] and without_layers.num_hidden_layers == 1


def test_stages_cost_about_the_same():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("qwen3_moe", num_hidden_layers=12, layer_types=None))
        large_head = AutoModelForCausalLM.from_config(config_of("qwen3_moe", num_hidden_layers=12, vocab_size=4096))
    assert [len(layers) for layers in stage_layers(model, 4)] in ([3, 3, 3, 3], [3, 3, 4, 2])
    counts = [len(layers) for layers in stage_layers(large_head, 4)]
    assert sum(counts) == 12 and counts[-1] == 0, "the head costs more than all layers"
    assert [len(layers) for layers in stage_layers(model, 4, (1, 5, 5, 1))] == [1, 5, 5, 1]


def test_a_layer_costs_as_many_experts_as_a_token_goes_to():
    with torch.device("meta"):
        few = AutoModelForCausalLM.from_config(config_of("glm4_moe", num_hidden_layers=8, intermediate_size=4096))
    assert len(stage_layers(few, 2)[0]) == 1, "the dense layer in front costs more than seven with experts"


def test_numbers_that_do_not_fit_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama"))
    with pytest.raises(ValueError, match="cannot cut 4 layers into 8 stages"):
        stage_layers(model, 8)
    with pytest.raises(ValueError, match="layers_per_stage must be 2 numbers that add up to 4"):
        stage_layers(model, 2, (1, 1))


def test_a_model_without_the_usual_parts_is_refused_with_what_it_lacks():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=16, n_head=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no embed_tokens, layers, norm in 'transformer'"):
        cut_model(model, range(2), is_first=True, is_last=True)


@pytest.mark.parametrize("config, expected", [
    (SimpleNamespace(), False),
    (SimpleNamespace(tie_word_embeddings=True), True),
    (config_of("llama", tie_word_embeddings=False), False),
])
def test_a_head_is_tied_where_transformers_ties_it(config, expected):
    assert is_tied(config) is expected


@pytest.mark.parametrize("fields, expected", [
    ({}, 1), ({"num_experts_per_tok": None, "top_k_experts": 4}, 4), ({"top_k_experts": None}, 1)])
def test_experts_per_token_of_a_configuration(fields, expected):
    """A configuration may have the field of its family, without a number where the model is dense."""
    config = SimpleNamespace(**fields)
    config.get_text_config = lambda: config
    assert top_k_of(config) == expected
