"""Taking tokens to their experts and back without dropping any, the same way on every run.

Every token has K rows, one for each of its experts. Sorting by expert puts the rows of one expert next to each other;
going back, a token's rows are added in a fixed order. Both directions are gathers, never scatters with atomic adds, so
that results are bitwise reproducible, forward and backward.

Example with K = 2 and 3 experts: choices [[2, 0], [0, 1]] give rows 0 to 3 for experts 2, 0, 0, 1; sorted by expert
that is order = [1, 2, 3, 0], its inverse [3, 0, 1, 2], and offs = [2, 3, 4].

Dimension letters: T tokens, K experts per token, E experts, M = T * K rows, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SortedTokens(NamedTuple):
    """Where every row goes."""

    order: Tensor  # (M,) int64: sorted row m is row order[m] of (T, K)
    inverse: Tensor  # (M,) int64: row r of (T, K) is sorted row inverse[r]
    offs: Tensor  # (E,) int32: where each expert's sorted rows end


def sort_tokens(experts_TK: Tensor, num_experts: int) -> SortedTokens:
    """Stable order of the rows by expert; `experts_TK` (T, K) holds the chosen experts."""
    chosen_M = experts_TK.flatten()
    order = torch.argsort(chosen_M, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    ends = torch.searchsorted(chosen_M[order], torch.arange(num_experts, device=order.device), right=True)
    return SortedTokens(order, inverse, ends.to(torch.int32))


def dispatch_tokens(x_TH: Tensor, tokens: SortedTokens, top_k: int) -> Tensor:
    """Copy every token to its `top_k` sorted rows: (T, H) -> (M, H)."""
    return _Dispatch.apply(x_TH, tokens.order, tokens.inverse, top_k)


def combine_tokens(y_MH: Tensor, weights_TK: Tensor, tokens: SortedTokens) -> Tensor:
    """Weighted sum of a token's K sorted rows, in a fixed order: (M, H), (T, K) -> (T, H)."""
    y_TKH = _Permute.apply(y_MH, tokens.inverse, tokens.order).unflatten(0, weights_TK.shape)
    return (y_TKH * weights_TK.unsqueeze(-1)).sum(1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy.index_select(0, inverse).unflatten(0, (dy.shape[0] // ctx.top_k, ctx.top_k)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy.index_select(0, inverse), None, None
