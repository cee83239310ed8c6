"""Memory of micro-batches of transformers' models, counted without allocating it."""

import pytest
import torch
from transformers.models.olmoe.modeling_olmoe import OlmoeDecoderLayer

from dualpipe.hf.model import TransformersModel
from dualpipe.plan import counted_stages
from dualpipe.plan.activations import activation_bytes
from dualpipe.plan.counted_stages import layer_kinds, uncounted_layers
from hf_families import config_of

LAYERS = range(4)


def model_of(family, **changes):
    return TransformersModel.from_dict(config_of(family, **changes).to_dict())


@pytest.mark.parametrize("family, kinds", [
    ("llama", [0, 0, 0, 0]), ("deepseek_v3", [0, 1, 1, 1]), ("gpt_oss", [0, 1, 0, 1])])
def test_layers_of_one_kind_are_counted_once(family, kinds):
    found = layer_kinds(model_of(family), LAYERS, ["layer:0-1"])
    assert [kind.first for kind in found] == kinds
    assert [kind.recomputed for kind in found] == [("layer",), ("layer",), (), ()]


def test_kernels_of_gpus_keep_as_much_of_long_sequences_as_of_short_ones():
    model = model_of("llama")
    long, short = (activation_bytes(model, LAYERS, batch=512 // length, sequence_length=length).saved
                   for length in (256, 64))
    # Except for rotary tables, for which one row is enough.
    assert long == pytest.approx(short, rel=0.02)


def test_long_sequences_follow_from_shorter_ones(monkeypatch):
    model = model_of("llama", vocab_size=65)
    sizes = {"batch": 1, "sequence_length": 4096, "last": True}
    exact = activation_bytes(model, LAYERS, **sizes)
    monkeypatch.setattr(counted_stages, "_MAX_MASK_PAIRS", 0)
    assert activation_bytes(model, LAYERS, **sizes) == pytest.approx(exact, rel=0.01)


def test_masks_of_documents_are_counted():
    """A document mask takes memory as bool, and once more for each layer as values that its kernel adds to scores."""
    model = model_of("llama", vocab_size=66)
    sizes = {"batch": 2, "sequence_length": 64}
    plain, masked = (activation_bytes(model, LAYERS, **sizes, has_documents=documents).saved
                     for documents in (False, True))
    assert masked - plain >= 2 * 64 * 64 * len(LAYERS) * torch.bfloat16.itemsize


def test_recomputed_layers_keep_their_inputs_alone():
    model = model_of("olmoe")
    sizes = {"batch": 4, "sequence_length": 16, "ep": 2}
    kept, again = (activation_bytes(model, LAYERS, **sizes, recompute=rules) for rules in ((), ("layer",)))
    assert len(LAYERS) * 4 * 16 * 32 * 2 <= again.saved < kept.saved / 3
    assert again.deferred == kept.deferred


@pytest.mark.slow
@pytest.mark.parametrize("groups, bounded", [((8, 2), True), ((8, 8), False)], ids=str)
def test_the_groups_of_a_router_bound_the_rows_that_are_sent(groups, bounded):
    n_group, topk_group = groups
    plain, limited = (
        activation_bytes(
            model_of("deepseek_v3", n_routed_experts=16, num_experts_per_tok=4, n_group=number, topk_group=best),
            LAYERS, batch=4, sequence_length=16, ep=8).forward
        for number, best in ((1, 1), (n_group, topk_group)))
    assert (limited < plain) is bounded


def test_a_layer_that_looks_at_values_is_named_and_left_out(monkeypatch):
    model = model_of("olmoe", vocab_size=67)
    forward = OlmoeDecoderLayer.forward

    def looking(self, hidden_states, *args, **kwargs):
        assert hidden_states.sum().item() < 1e9
        return forward(self, hidden_states, *args, **kwargs)

    assert uncounted_layers(model) == []
    monkeypatch.setattr(OlmoeDecoderLayer, "forward", looking)
    other = model_of("olmoe", vocab_size=68)
    (line,) = uncounted_layers(other)
    assert line.startswith("not counted: activations of 4 of 4 layers, such as layer 0, a OlmoeDecoderLayer")
    taken = activation_bytes(other, LAYERS, batch=2, sequence_length=16)
    assert taken.saved <= 3 * 2 * 16 * 32 * 2, "hidden states and rotary tables"
