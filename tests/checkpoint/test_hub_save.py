"""Who writes what, as a pure function."""

import pytest
import torch

from dualpipe.checkpoint.hub_save import Piece, writers
from dualpipe.checkpoint.tensors import Box
from dualpipe.models import Qwen3MoeConfig

BF16, F32 = torch.bfloat16, torch.float32
CONFIG = Qwen3MoeConfig(
    vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=4,
    num_experts=4, num_experts_per_tok=1, moe_intermediate_size=6,
)


def piece(start, stop, name="embed_tokens.weight", dtype=F32):
    return Piece(name, (8, 4), dtype, Box((start, 0), (stop - start, 4)))


def test_the_first_of_the_ranks_that_hold_the_same_writes_it():
    held = [[piece(0, 4)], [piece(4, 8)], [piece(0, 4)], [piece(4, 8)]]
    assert writers(CONFIG, held) == {piece(0, 4): 0, piece(4, 8): 1}


def test_pieces_that_do_not_make_up_a_tensor():
    with pytest.raises(ValueError, match=r"embed_tokens.weight: the ranks hold 16 of 32 elements; pass the mesh"):
        writers(CONFIG, [[piece(0, 4)], [piece(0, 4)]])
    with pytest.raises(ValueError, match="hold 40 of 32"):
        writers(CONFIG, [[piece(0, 5)], [piece(3, 8)]])
    with pytest.raises(ValueError, match=r"torch.bfloat16 on one rank, .* torch.float32 on another"):
        writers(CONFIG, [[piece(0, 4)], [piece(4, 8, dtype=BF16)]])
