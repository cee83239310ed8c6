"""Causal attention over documents: which positions a token sees, and what it makes of them.

    context = Context(rotary, x_BSH, positions_BS)     once for a micro-batch and stage
    attend(q_BASD, k_BGSD, v_BGSV, context, scale=D**-0.5, window=None, sinks_A=None)

A token sees itself and what came before it in its document, at most `window` positions with itself. Documents in a row
follow each other; one starts wherever the position ids do not go on by one.

On CPU, and in float64, attention is computed as it is written down, in at least float32 where it matters. On CUDA a
fused kernel does not write the (S, S) scores: torch's own where only the future is hidden (but in float32 that writes
them where heads share keys), and FlexAttention for all else, which skips blocks that a window or a document hides.

Dimension letters: B batch, S sequence, H hidden, A query heads, G key/value heads (a divisor of A), R = A / G, D head
dimension of queries and keys, V of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dualpipe.nn.rotary import Rotary

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Context:
    """What all attention layers of a stage have in common for one micro-batch: rotary tables and who sees whom."""

    def __init__(self, rotary: Rotary, x_BSH: Tensor, positions_BS: Tensor | None = None) -> None:
        batch, length = x_BSH.shape[:2]
        if positions_BS is not None and positions_BS.shape != (batch, length):
            raise ValueError(f"positions must be {(batch, length)}, as the tokens are; got {tuple(positions_BS.shape)}")
        self.length, self.device = length, x_BSH.device
        self.documents_BS = None if positions_BS is None else document_numbers(positions_BS)
        positions = torch.arange(length, device=x_BSH.device) if positions_BS is None else positions_BS
        cos, sin = rotary.tables(positions, torch.promote_types(x_BSH.dtype, torch.float32))
        if positions_BS is not None:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, S, D): the same for all heads
        self._tables = {cos.dtype: (cos, sin)}
        self._visible: dict[int | None, Tensor] = {}  # by window, as the next
        self._blocks: dict[int | None, BlockMask] = {}

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (S, D) or (B, 1, S, D)."""
        if dtype not in self._tables:
            cos, sin = next(iter(self._tables.values()))
            self._tables[dtype] = cos.to(dtype), sin.to(dtype)
        return self._tables[dtype]

    def visible(self, window: int | None = None) -> Tensor:
        """Which keys a query sees: bool (S, S), or (B, S, S) where there are documents."""
        if window not in self._visible:
            key_S = torch.arange(self.length, device=self.device)
            query_S1 = key_S.unsqueeze(1)
            seen = key_S <= query_S1
            if window is not None:
                seen = seen & (key_S > query_S1 - window)
            if self.documents_BS is not None:
                seen = seen & (self.documents_BS.unsqueeze(1) == self.documents_BS.unsqueeze(2))
            self._visible[window] = seen
        return self._visible[window]

    def blocks(self, window: int | None = None) -> BlockMask:
        """The same for FlexAttention: which blocks of keys a block of queries sees, in full or in part."""
        if window not in self._blocks:
            from dualpipe.nn import compiled

            self._blocks[window] = compiled.make_blocks(self.length, window, self.documents_BS, self.device)
        return self._blocks[window]


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


def attend(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, context: Context, *, scale: float, window: int | None = None,
    sinks_A: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over what a query sees -> (B, A, S, V), in the dtype of v.

    sinks_A: a logit for each head that takes its share of the softmax and has no value (gpt-oss).
    """
    causal = context.documents_BS is None and (window is None or window >= context.length)
    plain = causal and sinks_A is None
    if not _has_kernel(q_BASD, v_BGSV, plain):
        return attention_reference(q_BASD, k_BGSD, v_BGSV, context, scale=scale, window=window, sinks_A=sinks_A)
    q_BASD, k_BGSD = q_BASD.to(v_BGSV.dtype), k_BGSD.to(v_BGSV.dtype)  # which a norm kept in float32 may have widened
    if plain:
        grouped = q_BASD.shape[1] != k_BGSD.shape[1]  # fewer of torch's kernels do it
        return F.scaled_dot_product_attention(q_BASD, k_BGSD, v_BGSV, is_causal=True, enable_gqa=grouped, scale=scale)
    from dualpipe.nn import compiled  # not at the top: it brings the compiler, half a second of every start

    return compiled.compiled(compiled.attention_flex)(q_BASD, k_BGSD, v_BGSV, context.blocks(window), scale, sinks_A)


def _has_kernel(q: Tensor, v: Tensor, plain: bool) -> bool:
    """FlexAttention multiplies tiles of at least 16 dimensions, and nothing fused has float64."""
    wide_enough = plain or min(q.shape[-1], v.shape[-1]) >= 16
    return q.device.type == "cuda" and v.dtype is not torch.float64 and wide_enough


def attention_reference(
    q_BASD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, context: Context, *, scale: float, window: int | None = None,
    sinks_A: Tensor | None = None,
) -> Tensor:
    """`attend` as it is written down: scores of the dtype of q, the softmax in at least float32."""
    q_BGRSD = rearrange(q_BASD, "B (G R) S D -> B G R S D", G=k_BGSD.shape[1])
    scores = q_BGRSD @ k_BGSD.unsqueeze(2).mT * scale  # (B, G, R, S, S)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    seen = context.visible(window)
    wide = wide.masked_fill(~(seen if seen.dim() == 2 else seen[:, None, None]), -torch.inf)
    if sinks_A is not None:
        sinks = rearrange(sinks_A.to(wide.dtype), "(G R) -> 1 G R 1 1", G=k_BGSD.shape[1])
        wide = torch.cat((wide, sinks.expand(*wide.shape[:-1], 1)), -1)
    probs = wide.softmax(-1)[..., : seen.shape[-1]].to(v_BGSV.dtype)
    return rearrange(probs @ v_BGSV.unsqueeze(2), "B G R S V -> B (G R) S V")
