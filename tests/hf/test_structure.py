"""Models whose layers pass on more than hidden states are refused before loading; others run as stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dualpipe.hf import load_stages
from dualpipe.hf.structure import LayerCall, check_parameter_owners, uses_state
from dualpipe.parallel.mesh import build_mesh
from hf_families import config_of
from hf_sweep import outcome_of, sweep_config
from ranks import run_ranks

REFUSED = {
    "glm_moe_dsa": "passes 'prev_topk_indices' to a GlmMoeDsaDecoderLayer, which the layer before it returns",
    "deepseek_v4": r"parameters outside of embedding, layers, norm and head.*: model\.hc_head\.hc_fn",
    "gemma3n_text": r"parameters outside of .*: model\.embed_tokens_per_layer\.weight.* and 6 more",
    "zaya": r"parameters outside of .*: model\.input_hidden_states_scale",
    "nanochat": "calls its norm 2 times",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_before_anything_is_loaded(model_type, tmp_path):
    """The folder has no weights: the model is refused before weights are read."""
    sweep_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSED[model_type]):
        load_stages(tmp_path, 2, (0, 1))


def refused(rank, folder):
    mesh = build_mesh(2, 1, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match=REFUSED["glm_moe_dsa"]):
        load_stages(folder, 4, (rank, 3 - rank), mesh=mesh)


def test_all_ranks_refuse_alike(tmp_path):
    sweep_config("glm_moe_dsa").save_pretrained(tmp_path)
    run_ranks(refused, 2, tmp_path)


@pytest.mark.parametrize("model_type", ["bamba", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_layers_that_return_tuples_run_by_stages_also_by_those_without_layers(model_type):
    assert outcome_of(model_type) == "equal"


def test_a_model_with_more_hidden_layers_than_layers_runs_by_stages():
    """LongCat counts a layer twice, for its two attentions."""
    assert outcome_of("longcat_flash") == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [
    "afmoe", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v32", "exaone_moe", "gemma3_text", "granitemoehybrid",
    "inkling_text", "kimi_linear", "minimax", "olmo_hybrid", "phimoe", "solar_open"])
def test_other_models_run_by_stages(model_type):
    assert outcome_of(model_type) == "equal"


class SharingLayer(nn.Module):
    """Layer that stores keys and values for later layers in a dictionary, or reads them from it."""

    def __init__(self, *, reads, writes):
        super().__init__()
        self.reads = reads
        self.writes = writes

    def forward(self, x, shared):
        if self.writes:
            shared["keys"] = x
        return x + shared["keys"] if self.reads else x


@pytest.mark.parametrize("reads, writes", [(False, False), (True, False), (False, True)])
def test_a_dictionary_that_layers_share_values_in_is_noticed(reads, writes):
    shared: dict[str, torch.Tensor] = {}
    call = LayerCall(torch.ones(1, 2, 4), (shared,), {})
    assert uses_state(SharingLayer(reads=reads, writes=writes), call, shared) is (reads or writes)


def test_gemma4_without_shared_keys_and_per_layer_embeddings_runs_by_stages():
    """All layers get a dictionary for keys and values, but none uses it."""
    assert outcome_of("gemma4_text") == "equal"


def test_parameters_that_layers_share_are_named():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama"))
    model.model.layers[2].mlp = model.model.layers[1].mlp
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.gate_proj\.weight \(also in layers\.1\).*only a head may"):
        check_parameter_owners(model)


def test_a_tied_head_is_no_other_parameter():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama", tie_word_embeddings=True))
        check_parameter_owners(model)
        model.model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"has parameters outside of .* train separately: model\.scale; expected none"):
        check_parameter_owners(model)
