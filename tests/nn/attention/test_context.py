"""What the attention layers of a stage share: who sees whom, and what is refused."""

import pytest
import torch

from dualpipe.nn.attention import Context, Rotary


@pytest.mark.parametrize("shape", [(3, 10), (2, 11), (11,), (3, 11, 1)], ids=str)
def test_positions_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"positions must be \(3, 11\), as the tokens are; got \("):
        Context(Rotary(16, 1e4), torch.empty(3, 11, 8), torch.zeros(shape, dtype=torch.long))
