"""Initial values depend on seed and name alone: equal in blocks and at once, in any dtype, and in any shard."""

import hashlib

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dualpipe.nn import init
from dualpipe.nn.init import local_part, seeded_normal_
from ranks import run_ranks


def drawn(shape, *, std=0.5, seed=3, name="w", dtype=torch.float32):
    tensor = torch.empty(shape, dtype=dtype)
    seeded_normal_(tensor, std=std, seed=seed, name=name)
    return tensor


def test_values_are_those_of_a_generator_seeded_by_the_digest_of_seed_and_name():
    digest = hashlib.sha256(b"3/layers.0.w").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    expected = torch.empty(40, 7).normal_(0, 0.5, generator=generator)
    assert torch.equal(drawn((40, 7), name="layers.0.w"), expected)


def test_seed_and_name_make_values_that_differ():
    values = [drawn((32, 32)), drawn((32, 32), seed=4), drawn((32, 32), name="v")]
    assert not any(torch.equal(a, b) for a in values for b in values if a is not b)
    assert all(value.std().item() == pytest.approx(0.5, rel=0.1) for value in values)


@pytest.mark.parametrize("shape", [(1000, 3), (37, 16), (17, 1), (5, 2, 9), (3,), (64,)], ids=str)
@pytest.mark.parametrize("block", [1, 16, 100])
def test_blocks_have_the_values_of_one_draw(shape, block, monkeypatch):
    whole = drawn(shape)
    monkeypatch.setattr(init, "_BLOCK", block)
    assert torch.equal(drawn(shape), whole)


def test_other_dtypes_have_the_values_of_float32_rounded_or_widened():
    whole = drawn((20, 6))
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(drawn((20, 6), dtype=dtype), whole.to(dtype))


@pytest.mark.parametrize("shape", [(), (0, 4), (4, 0), (1,)], ids=str)
def test_scalars_and_empty_tensors(shape):
    assert drawn(shape).isfinite().all()


def test_a_plain_tensor_is_all_of_itself():
    weight = nn.Parameter(torch.zeros(4, 3))
    local, part = local_part(weight)
    assert part == (slice(0, 4), slice(0, 3)) and not local.requires_grad
    local.fill_(1)
    assert (weight == 1).all(), "its memory is shared"


def shards(rank, shape, dim):
    """Return the slices of this rank's shard, and whether it has the whole's values there."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)])
    seeded_normal_(weight, std=0.5, seed=3, name="w")
    local, part = local_part(weight)
    return [(piece.start, piece.stop) for piece in part], torch.equal(local, drawn(shape)[part])


@pytest.mark.parametrize(("shape", "dim", "places"), [
    ((4, 3), 0, [[(0, 2), (0, 3)], [(2, 4), (0, 3)]]),
    ((4, 3), 1, [[(0, 4), (0, 2)], [(0, 4), (2, 3)]]),
    ((33, 16), 0, [[(0, 17), (0, 16)], [(17, 33), (0, 16)]]),
], ids=str)
def test_a_shard_has_its_part_of_the_whole(shape, dim, places):
    assert run_ranks(shards, 2, shape, dim) == [(place, True) for place in places]
