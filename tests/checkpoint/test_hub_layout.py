"""How files are laid out and who writes what, as pure functions."""

import pytest
import torch
from safetensors import safe_open

from dualpipe.checkpoint.hub_layout import NewTensor, Piece, lay_out, runs, writers
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
    assert runs(shape, part) == expected
    flat = torch.arange(torch.Size(shape).numel())
    wanted = flat.view(shape)[part].flatten()
    length = wanted.numel() // len(expected)
    assert torch.equal(torch.cat([flat[start : start + length] for start in expected]), wanted)


def test_files_are_filled_in_turn(tmp_path):
    """a (40 bytes) and b (6) are one file, c alone is too large for any, d begins the next."""
    tensors = [NewTensor("a", (10,), F32), NewTensor("b", (3,), BF16), NewTensor("c", (100,), F32),
               NewTensor("d", (1,), BF16), NewTensor("e", (2,), F32)]
    files = lay_out(tensors, 50)
    assert [(file.name, list(file.starts)) for file in files] == [
        ("model-00001-of-00003.safetensors", ["a", "b"]), ("model-00002-of-00003.safetensors", ["c"]),
        ("model-00003-of-00003.safetensors", ["e", "d"]),  # wide ones first, so that they are aligned
    ]
    for file in files:
        path = tmp_path / file.name
        path.write_bytes(file.head + bytes(file.size - len(file.head)))
        with safe_open(path, framework="pt") as opened:
            assert set(opened.keys()) == set(file.starts)
            assert opened.metadata() == {"format": "pt"}
        assert all(start % 4 == 0 for name, start in file.starts.items() if name != "d")


def test_one_file_has_no_number():
    assert [file.name for file in lay_out([NewTensor("a", (10,), F32)], 50)] == ["model.safetensors"]


def piece(start, stop, name="embed_tokens.weight", dtype=F32):
    return Piece(name, (8, 4), dtype, ((start, stop), (0, 4)))


def test_the_first_of_the_ranks_that_hold_the_same_writes_it():
    held = [[piece(0, 4)], [piece(4, 8)], [piece(0, 4)], [piece(4, 8)]]
    assert writers(CONFIG, held) == [[piece(0, 4)], [piece(4, 8)], [], []]


def test_pieces_that_do_not_make_up_a_tensor():
    with pytest.raises(ValueError, match=r"embed_tokens.weight: the ranks hold 16 of 32 elements; pass the mesh"):
        writers(CONFIG, [[piece(0, 4)], [piece(0, 4)]])
    with pytest.raises(ValueError, match="hold 40 of 32"):
        writers(CONFIG, [[piece(0, 5)], [piece(3, 8)]])
    with pytest.raises(ValueError, match=r"torch.bfloat16 on one rank, .* torch.float32 on another"):
        writers(CONFIG, [[piece(0, 4)], [piece(4, 8, dtype=BF16)]])
