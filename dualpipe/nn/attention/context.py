"""What all attention layers of a stage share for one micro-batch: rotary tables, documents, and who sees whom.

A token sees itself and what came before it in its document, at most `window` positions with itself. Documents in a row
follow each other; one starts wherever the position ids do not go on by one.

Dimension letters: B batch, S sequence, H hidden, D head dimension, T keys of a part of the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualpipe.nn.attention.documents import document_numbers
from dualpipe.nn.attention.rope import Rotary
from dualpipe.nn.attention.sequence_split import WHOLE, Ranges, SequenceSplit, cut

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Context:
    """What all attention layers of a stage have in common for one micro-batch: rotary tables and who sees whom."""

    def __init__(
        self, rotary: Rotary, x_BSH: Tensor, positions_BS: Tensor | None = None, split: SequenceSplit = WHOLE
    ) -> None:
        """x_BSH: the tokens here, of which the length alone counts. positions_BS: of all tokens of the sequence, also
        where ranks share it by `split`, which then need them; ValueError for others, or none."""
        batch, here = x_BSH.shape[:2]
        self.batch, self.length, self.split, self.device = batch, here, split, x_BSH.device
        if split.size > 1:
            if positions_BS is None:
                raise ValueError(f"positions must be given where {split.size} ranks share a sequence: those of all its "
                                 "tokens (B, S), on each of them")
            self.length = positions_BS.shape[-1]
            if (own := split.counts(self.length)[split.rank]) != here:
                raise ValueError(f"positions are given of {self.length} tokens, of which rank {split.rank} of "
                                 f"{split.size} has {own}; got {here} tokens: cut them by SequenceSplit")
        if positions_BS is not None and positions_BS.shape != (batch, self.length):
            raise ValueError(f"positions must be {(batch, self.length)}, as the tokens are; got "
                             f"{tuple(positions_BS.shape)}")
        self.documents_BS = None if positions_BS is None else document_numbers(positions_BS)
        positions = torch.arange(here, device=x_BSH.device) if positions_BS is None else positions_BS
        if split.size > 1:
            positions = cut(positions, split.chunks(self.length))
        cos, sin = rotary.tables(positions, torch.promote_types(x_BSH.dtype, torch.float32))
        if positions_BS is not None:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, S, D): the same for all heads
        self._tables = {cos.dtype: (cos, sin)}
        self._visible: dict[Any, Tensor] = {}  # by window and parts, as the next
        self._blocks: dict[Any, BlockMask] = {}

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (S, D) or (B, 1, S, D), in `dtype` or float32, whichever is wider."""
        dtype = torch.promote_types(dtype, torch.float32)
        if dtype not in self._tables:
            cos, sin = next(iter(self._tables.values()))
            self._tables[dtype] = cos.to(dtype), sin.to(dtype)
        return self._tables[dtype]

    def visible(self, window: int | None = None, queries: Ranges = (), keys: Ranges = ()) -> Tensor:
        """Which keys a query sees: bool (S, S), or (B, S, S) where there are documents. queries, keys: parts of the
        sequence that they are, instead of all of it."""
        if (window, queries, keys) not in self._visible:
            key_T, query_S1 = self._places(keys), self._places(queries).unsqueeze(1)
            seen = key_T <= query_S1
            if window is not None:
                seen = seen & (key_T > query_S1 - window)
            if (documents := self.documents_BS) is not None:
                seen = seen & (cut(documents, keys).unsqueeze(1) == cut(documents, queries).unsqueeze(2))
            self._visible[window, queries, keys] = seen
        return self._visible[window, queries, keys]

    def blocks(self, window: int | None = None, queries: Ranges = (), keys: Ranges = ()) -> BlockMask:
        """The same for FlexAttention: which blocks of keys a block of queries sees, in full or in part."""
        if (window, queries, keys) not in self._blocks:
            from dualpipe.nn.attention import flex  # not at the top: it brings the compiler, 0.5 s of every start

            places = (self._places(queries), self._places(keys)) if queries or keys else None
            made = flex.make_blocks(self.length, window, self.documents_BS, self.device, places)
            self._blocks[window, queries, keys] = made
        return self._blocks[window, queries, keys]

    def _places(self, parts: Ranges) -> Tensor:
        """The indices in the sequence of the tokens of some parts; of all, where none are named."""
        each = [torch.arange(*part, device=self.device) for part in parts or ((0, self.length),)]
        return torch.cat(each) if len(each) > 1 else each[0]
