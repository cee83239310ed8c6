"""Model descriptions of transformers for the trainer, on the meta device."""

from __future__ import annotations

import pytest
import torch

from dualpipe.hf.model import TransformersModel
from hf_families import FAMILIES, OTHERS, config_of, error_of, tiny_model


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_its_stages_have_the_names_and_shapes_of_the_whole_model(family):
    model = TransformersModel.from_dict(config_of(family).to_dict())
    expected = {name: tensor.shape for name, tensor in tiny_model(family, torch.float32).state_dict().items()}
    for num_stages in (1, 4):
        stages = model.meta_stages(num_stages)
        found = {name: tensor.shape for stage in stages for name, tensor in stage.state_dict().items()}
        assert found == expected
        assert all(tensor.is_meta for stage in stages for tensor in stage.parameters())


def test_sizes():
    moe = TransformersModel.from_dict(config_of("ernie4_5_moe").to_dict())
    assert (moe.model_type, moe.vocab_size, moe.hidden_size, moe.num_hidden_layers) == ("ernie4_5_moe", 64, 32, 4)
    assert (moe.num_experts, moe.num_experts_per_tok, moe.positions, moe.name_prefix) == (8, 2, 64, "model.")
    dense = TransformersModel.from_dict(config_of("llama").to_dict())
    assert (dense.num_experts, dense.num_experts_per_tok, dense.is_tied) == (0, 1, False)
    assert TransformersModel.from_dict(dense.to_dict()) == dense != moe


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_documents_of_a_row_that_are_mixed(family):
    """Compare with the second document alone; its positions start at 0."""
    model = tiny_model(family)
    tokens = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        both = model(tokens, position_ids=positions, use_cache=False).logits[:, 5:]
        alone = model(tokens[:, 5:], position_ids=positions[:, 5:], use_cache=False).logits
    is_mixed = TransformersModel.from_dict(config_of(family).to_dict()).mixes_documents
    assert (error_of(both, alone) > 1e-6) is is_mixed


def test_operations_of_a_dense_model():
    """Count a layer's queries, keys, values and output, its MLP of three matrices, and scores; then the head."""
    model = TransformersModel.from_dict(config_of("llama").to_dict())
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    scores = 4 * (8 + 8) * 10
    assert model.flops_per_token(10) == 6 * (4 * (layer + scores) + 32 * 64)


def test_a_family_that_transformers_lacks_is_refused():
    with pytest.raises(ValueError, match="model_type 'nothing' is unknown to transformers"):
        TransformersModel.from_dict({"model_type": "nothing"})
    with pytest.raises(ValueError, match="has no embed_tokens, layers, norm"):
        TransformersModel.from_dict({"model_type": "gpt2"})
