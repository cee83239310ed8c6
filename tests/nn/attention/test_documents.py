"""Documents packed into rows: position ids and numbers."""

import pytest
import torch

from dualpipe.nn.attention import document_ids, packed_positions


@pytest.mark.parametrize(
    ("positions", "numbers"),
    [
        ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1]),
        ([0, 0, 0], [0, 1, 2]),
        ([5, 6, 7, 3, 9], [0, 0, 0, 1, 2]),  # the rest of a document that began in another row
        ([4], [0]),
    ],
)
def test_documents_start_where_positions_do_not_go_on(positions, numbers):
    assert document_ids(torch.tensor([positions])).tolist() == [numbers]


def test_packed_positions_of_documents_end_to_end():
    """Documents of 3, 0, 4 and 1 tokens in two rows; the third goes on in the second row."""
    positions = packed_positions(torch.tensor([0, 3, 3, 7, 8]), 2, 4)
    assert positions.tolist() == [[0, 1, 2, 0], [1, 2, 3, 0]]
    assert document_ids(positions).tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]
    assert packed_positions(torch.tensor([0, 8], dtype=torch.int32), 2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for wrong in ([0, 3], [1, 8], [0, 5, 4, 8], [8]):
        with pytest.raises(ValueError, match="8"):
            packed_positions(torch.tensor(wrong), 2, 4)
