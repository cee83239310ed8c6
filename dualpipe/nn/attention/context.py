"""Context of the attention layers of a stage for one micro-batch: rotary tables, documents and masks.

A token sees itself and the tokens before it in its document, at most `window` tokens including itself. Documents follow
each other in a row; a document starts at every position id that is not its predecessor plus one.

Dimension letters: B batch, S sequence, H hidden, D head dimension, T keys of a part of the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualpipe.nn.attention.rope import Rotary
from dualpipe.nn.attention.sequence_split import WHOLE, Ranges, SequenceSplit, slice_sequence

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Context:
    """Rotary tables and masks that all attention layers of a stage share for one micro-batch.

    Args:
        rotary: angles of a head.
        x_BSH: the tokens of this rank; only their shape, dtype and device matter.
        positions_BS: position ids of all tokens of the sequence, also if ranks share it; None: 0, 1, 2, ... Required
            with a `split` of several ranks.
        split: the tokens of this rank, if ranks share the sequence.

    Raises:
        ValueError: the positions are missing, or do not match the tokens.
    """

    def __init__(
        self, rotary: Rotary, x_BSH: Tensor, positions_BS: Tensor | None = None, split: SequenceSplit = WHOLE
    ) -> None:
        batch, local_length = x_BSH.shape[:2]
        self.batch = batch
        self.length = local_length
        self.split = split
        self.device = x_BSH.device
        if split.size > 1:
            if positions_BS is None:
                raise ValueError(f"got no positions, but {split.size} ranks share a sequence; pass the positions of "
                                 "all its tokens (B, S) on each of these ranks")
            self.length = positions_BS.shape[-1]
            expected_length = split.counts(self.length)[split.rank]
            if local_length != expected_length:
                raise ValueError(f"got {local_length} tokens, expected {expected_length}, the share of rank "
                                 f"{split.rank} of {split.size} in the {self.length} tokens of the positions; split "
                                 "the tokens by SequenceSplit")
        if positions_BS is not None and positions_BS.shape != (batch, self.length):
            raise ValueError(f"positions have the shape {tuple(positions_BS.shape)}, expected {(batch, self.length)}: "
                             "one for each token")
        self.documents_BS = None if positions_BS is None else document_ids(positions_BS)
        positions = torch.arange(local_length, device=x_BSH.device) if positions_BS is None else positions_BS
        if split.size > 1:
            positions = slice_sequence(positions, split.chunks(self.length))
        cos, sin = rotary.tables(positions, torch.promote_types(x_BSH.dtype, torch.float32))
        if positions_BS is not None:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, S, D): the same for all heads
        self._tables = {cos.dtype: (cos, sin)}
        self._visible: dict[Any, Tensor] = {}  # by (window, queries, keys), like `_blocks`
        self._blocks: dict[Any, BlockMask] = {}

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (S, D) or (B, 1, S, D), in `dtype` or float32, whichever is wider."""
        dtype = torch.promote_types(dtype, torch.float32)
        if dtype not in self._tables:
            cos, sin = next(iter(self._tables.values()))
            self._tables[dtype] = cos.to(dtype), sin.to(dtype)
        return self._tables[dtype]

    def visible(self, window: int | None = None, queries: Ranges = (), keys: Ranges = ()) -> Tensor:
        """Return the mask that is True if a query sees a key: bool (S, S), or (B, S, S) with documents.

        queries, keys: parts of the sequence; empty: the whole sequence.
        """
        if (window, queries, keys) not in self._visible:
            key_T = self._token_indices(keys)
            query_S1 = self._token_indices(queries).unsqueeze(1)
            visible = key_T <= query_S1
            if window is not None:
                visible = visible & (key_T > query_S1 - window)
            if self.documents_BS is not None:
                key_documents = slice_sequence(self.documents_BS, keys).unsqueeze(1)
                query_documents = slice_sequence(self.documents_BS, queries).unsqueeze(2)
                visible = visible & (key_documents == query_documents)
            self._visible[window, queries, keys] = visible
        return self._visible[window, queries, keys]

    def blocks(self, window: int | None = None, queries: Ranges = (), keys: Ranges = ()) -> BlockMask:
        """Return the mask of `visible` for FlexAttention: the blocks of keys that each block of queries sees."""
        if (window, queries, keys) not in self._blocks:
            from dualpipe.nn.attention import flex  # not at the top: it imports the compiler, 0.5 s of every start

            indices = (self._token_indices(queries), self._token_indices(keys)) if queries or keys else None
            block_mask = flex.make_blocks(self.length, window, self.documents_BS, self.device, indices)
            self._blocks[window, queries, keys] = block_mask
        return self._blocks[window, queries, keys]

    def _token_indices(self, parts: Ranges) -> Tensor:
        """Return the indices of the tokens of some parts of the sequence; without parts, of all tokens."""
        indices = [torch.arange(*part, device=self.device) for part in parts or ((0, self.length),)]
        return torch.cat(indices) if len(indices) > 1 else indices[0]


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
