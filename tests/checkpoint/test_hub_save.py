"""Which files there are and who writes what, as pure functions."""

import pytest
import torch
from safetensors import safe_open

from dualpipe.checkpoint.hub_save import Piece, writers
from dualpipe.checkpoint.tensors import Box, lay_out
from dualpipe.models import Qwen3MoeConfig

BF16, F32 = torch.bfloat16, torch.float32
CONFIG = Qwen3MoeConfig(
    vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=4,
    num_experts=4, num_experts_per_tok=1, moe_intermediate_size=6,
)


@pytest.mark.parametrize("shape, at, expected", [
    ((4, 5), ((1, 3), (0, 5)), [5]),
    ((3, 5), ((0, 3), (1, 3)), [1, 6, 11]),
    ((2, 3, 4), ((0, 2), (1, 2), (0, 4)), [4, 16]),
    ((2, 3, 4), ((1, 2), (0, 3), (2, 4)), [14, 18, 22]),
    ((2, 3), ((0, 2), (0, 3)), [0]),
    ((), (), [0]),
])
def test_runs(shape, at, expected):
    part = tuple(slice(*bounds) for bounds in at)
    assert Box.at(part).runs(shape) == expected
    flat = torch.arange(torch.Size(shape).numel())
    wanted = flat.view(shape)[part].flatten()
    length = wanted.numel() // len(expected)
    assert torch.equal(torch.cat([flat[start : start + length] for start in expected]), wanted)


def test_files_are_filled_in_turn(tmp_path):
    """a (40 bytes) and b (6) are one file, c alone is too large for any, d begins the next."""
    tensors = {"a": (F32, (10,)), "b": (BF16, (3,)), "c": (F32, (100,)), "d": (BF16, (1,)), "e": (F32, (2,))}
    files = lay_out(tensors, 50, "{}-of-{}".format, {})
    assert [(file.name, list(file.tensors)) for file in files] == [
        ("0-of-3", ["a", "b"]), ("1-of-3", ["c"]), ("2-of-3", ["e", "d"]),  # wide ones first, so that they are aligned
    ]
    for file in files:
        path = tmp_path / file.name
        path.write_bytes(file.head + bytes(file.size - len(file.head)))
        with safe_open(path, framework="pt") as opened:
            assert set(opened.keys()) == set(file.tensors)
            assert opened.metadata() == {"format": "pt"}
        assert all(tensor.start % 4 == 0 for name, tensor in file.tensors.items() if name != "d")


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
