"""Causal attention over documents: which positions a token sees, and what it makes of them.

    context = Context(rotary, x_BSH, positions_BS)     once for a micro-batch and stage
    attend(q_BASD, k_BGSD, v_BGSV, context, scale=D**-0.5, window=None, sinks_A=None)

A token sees itself and what came before it in its document, at most `window` positions with itself. Documents in a row
follow each other; one starts wherever the position ids do not go on by one.

On CPU attention is computed as it is written down, in at least float32 where it matters.

Dimension letters: B batch, S sequence, H hidden, A query heads, G key/value heads (a divisor of A), R = A / G, D head
dimension of queries and keys, V of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualpipe.nn.rotary import Rotary


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
        self._visible: dict[int | None, Tensor] = {}

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (S, D) or (B, 1, S, D)."""
        if dtype not in self._tables:
            cos, sin = next(iter(self._tables.values()))
            self._tables[dtype] = cos.to(dtype), sin.to(dtype)
        return self._tables[dtype]

    def visible(self, window: int | None = None) -> Tensor:
        """Which keys a query sees: bool (S, S), or (B, S, S) where there are documents."""
        if window not in self._visible:
            query_S1 = torch.arange(self.length, device=self.device).unsqueeze(1)
            key_S = query_S1.squeeze(1)
            seen = key_S <= query_S1
            if window is not None:
                seen = seen & (key_S > query_S1 - window)
            if self.documents_BS is not None:
                seen = seen & (self.documents_BS.unsqueeze(1) == self.documents_BS.unsqueeze(2))
            self._visible[window] = seen
        return self._visible[window]


def document_numbers(positions_BS: Tensor) -> Tensor:
    """The number of each token's document in its row (B, S). Example: positions 0 1 2 0 1 are documents 0 0 0 1 1."""
    return (positions_BS.diff(dim=1, prepend=positions_BS[:, :1] - 1) != 1).cumsum(1)


def attend(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    context: Context,
    *,
    scale: float,
    window: int | None = None,
    sinks_A: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v over what a query sees -> (B, A, S, V), in the dtype of v.

    sinks_A: a logit for each head that takes its share of the softmax and has no value (gpt-oss).
    """
    return attention_reference(q_BASD, k_BGSD, v_BGSV, context, scale=scale, window=window, sinks_A=sinks_A)


def attention_reference(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSV: Tensor,
    context: Context,
    *,
    scale: float,
    window: int | None = None,
    sinks_A: Tensor | None = None,
) -> Tensor:
    """`attend` as it is written down: scores of the dtype of q, the softmax in at least float32."""
    q_BGRSD = q_BASD.unflatten(1, (k_BGSD.shape[1], -1))
    scores = q_BGRSD @ k_BGSD.unsqueeze(2).mT * scale  # (B, G, R, S, S)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    seen = context.visible(window)
    wide = wide.masked_fill(~(seen if seen.dim() == 2 else seen[:, None, None]), -torch.inf)
    if sinks_A is not None:
        sinks = sinks_A.to(wide.dtype).view(1, *q_BGRSD.shape[1:3], 1, 1)
        wide = torch.cat((wide, sinks.expand(*wide.shape[:-1], 1)), -1)
    probs = wide.softmax(-1)[..., : seen.shape[-1]].to(v_BGSV.dtype)
    return (probs @ v_BGSV.unsqueeze(2)).flatten(1, 2)
