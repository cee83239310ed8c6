"""Documents packed into rows: their position ids and numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_positions(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Position ids (B, S) of documents laid end to end in B rows of S tokens.

    cu_seqlens: where each document begins and the last one ends, counted over all rows (N + 1,): 0 at first, B * S at
    last. A document that goes on in the next row goes on counting. Example: [0, 3, 8], rows of 4: 0 1 2 0 | 1 2 3 4.
    Raises ValueError for anything else.
    """
    numbers = torch.arange(batch * length, device=cu_seqlens.device)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or (cu_seqlens.diff() < 0).any() or (
        cu_seqlens[0] != 0 or cu_seqlens[-1] != batch * length):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {batch * length}; "
                         f"got {cu_seqlens.tolist()}")
    first = torch.searchsorted(cu_seqlens.to(numbers.dtype), numbers, right=True) - 1
    return (numbers - cu_seqlens[first]).view(batch, length)


def document_numbers(positions_BS: Tensor) -> Tensor:
    """The number of each token's document in its row (B, S). Example: positions 0 1 2 0 1 are documents 0 0 0 1 1."""
    return (positions_BS.diff(dim=1, prepend=positions_BS[:, :1] - 1) != 1).cumsum(1)
