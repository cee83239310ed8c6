"""Documents packed into rows: their position ids and document ids."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_positions(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Compute position ids (B, S) of documents packed end to end into B rows of S tokens.

    The positions of a document go on counting in the next row. Example: [0, 3, 8], rows of 4: 0 1 2 0 | 1 2 3 4.

    cu_seqlens: (N + 1,), the start of every document and the end of the last one, in tokens over all rows: the first
    is 0, the last B * S.

    Raises:
        ValueError: `cu_seqlens` does not rise from 0 to B * S.
    """
    tokens = torch.arange(batch * length, device=cu_seqlens.device)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or (cu_seqlens.diff() < 0).any() or (
        cu_seqlens[0] != 0 or cu_seqlens[-1] != batch * length):
        raise ValueError(f"cu_seqlens is {cu_seqlens.tolist()}, but it must rise from 0 to the number of tokens, "
                         f"{batch * length}: pass the start of every document, and the end of the last one")
    documents = torch.searchsorted(cu_seqlens.to(tokens.dtype), tokens, right=True) - 1
    return (tokens - cu_seqlens[documents]).view(batch, length)


def document_ids(positions_BS: Tensor) -> Tensor:
    """Number the documents of every row: the document of each token (B, S).

    A document starts at every position id that does not follow its predecessor. Example: positions 0 1 2 0 1 are
    documents 0 0 0 1 1.
    """
    return (positions_BS.diff(dim=1, prepend=positions_BS[:, :1] - 1) != 1).cumsum(1)


document_numbers = document_ids  # old name
