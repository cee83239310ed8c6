"""The split of a sequence over ranks."""

import pytest
import torch

from dualpipe.nn.attention import SequenceSplit


def test_worked_example_of_a_split():
    assert [SequenceSplit(rank, 2).token_indices(9).tolist() for rank in range(2)] == [[0, 1, 2, 7, 8], [3, 4, 5, 6]]
    assert SequenceSplit(1, 2).counts(9) == (5, 4)
    assert SequenceSplit().token_indices(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(8, 20))
def test_every_token_is_one_rank_s_and_ranks_attend_about_as_much(size, length):
    own = [SequenceSplit(rank, size).token_indices(length) for rank in range(size)]
    assert torch.cat(own).sort().values.tolist() == list(range(length))
    assert all(mine.dtype is torch.int64 and (mine.diff() > 0).all() for mine in own)
    assert SequenceSplit(0, size).counts(length) == tuple(map(len, own))
    seen = [int((mine + 1).sum()) for mine in own]  # a token sees itself and all before it
    assert max(seen) - min(seen) <= 2 * length


def test_a_sequence_shorter_than_its_chunks_is_refused():
    with pytest.raises(ValueError, match=r"5 tokens .*at least 6"):
        SequenceSplit(0, 3).token_indices(5)
