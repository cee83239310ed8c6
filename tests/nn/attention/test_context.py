"""The attention context that the layers of a stage share: its masks, and the inputs it refuses."""

import pytest
import torch

from dualpipe.nn.attention import Context, Rotary, SequenceSplit
from dualpipe.nn.attention.sequence_split import WHOLE


@pytest.mark.parametrize("shape", [(3, 10), (2, 11), (11,), (3, 11, 1)], ids=str)
def test_positions_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"expected \(3, 11\)"):
        Context(Rotary(16, 1e4), torch.empty(3, 11, 8), torch.zeros(shape, dtype=torch.long))


def context(length=5, positions=None, dtype=torch.float32, split=WHOLE, here=None):
    positions = None if positions is None else torch.tensor(positions)
    rows = 1 if positions is None else len(positions)
    return Context(Rotary(4, 1e4), torch.empty(rows, here or length, 8, dtype=dtype), positions, split)


def seen(context, *options):
    """Return which keys each query sees, as text."""
    rows = context.visible(*options)
    return ["".join("x" if sees else "." for sees in row) for row in rows.flatten(0, -2).tolist()]


def test_a_token_sees_itself_and_what_came_before_it():
    assert seen(context(3)) == ["x..", "xx.", "xxx"]
    assert seen(context(4), 2) == ["x...", "xx..", ".xx.", "..xx"]


def test_documents_do_not_see_each_other():
    packed = context(5, [[0, 1, 0, 1, 2]])
    assert seen(packed) == ["x....", "xx...", "..x..", "..xx.", "..xxx"]
    assert seen(packed, 2) == ["x....", "xx...", "..x..", "..xx.", "...xx"]


def test_parts_of_a_sequence_see_what_they_would_in_the_whole():
    packed = context(6, [[0, 1, 2, 3, 0, 1]])
    queries, keys = ((0, 2), (4, 6)), ((1, 5),)
    whole = packed.visible(3)[0]
    rows = [row for start, stop in queries for row in range(start, stop)]
    assert torch.equal(packed.visible(3, queries, keys)[0], whole[rows, 1:5])
    assert packed.visible(3, queries, keys) is packed.visible(3, queries, keys), "made once"


def test_tables_are_in_the_dtype_of_the_tokens_or_wider():
    plain, packed = context(5), context(5, [[0, 1, 2, 0, 1]])
    assert plain.tables(torch.bfloat16)[0].dtype is torch.float32
    assert plain.tables(torch.float64)[0].dtype is torch.float64
    assert plain.tables(torch.float32)[0] is plain.tables(torch.bfloat16)[0]
    for whole, of_documents in zip(plain.tables(torch.float32), packed.tables(torch.float32)):
        assert torch.equal(of_documents[0, 0], whole[[0, 1, 2, 0, 1]])


def test_ranks_that_share_a_sequence_have_the_tables_of_their_tokens():
    whole = context(8, [list(range(8))])
    shared = context(8, [list(range(8))], split=SequenceSplit(1, 2), here=4)
    own = SequenceSplit(1, 2).token_indices(8)
    assert (shared.length, shared.batch) == (8, 1)
    for mine, all_of_it in zip(shared.tables(torch.float32), whole.tables(torch.float32)):
        assert torch.equal(mine, all_of_it[:, :, own])
