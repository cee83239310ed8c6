"""Embedding with a deferrable gradient that is added to its accumulator row by row.

Dimension letters: H embedding_dim, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe.nn.accumulators import accumulation_dtype
from dualpipe.nn.deferral import needs_plain_autograd, return_or_defer
from dualpipe.nn.deferred_grad import Gemm
from dualpipe.nn.linear import flatten_rows


class Embedding(nn.Embedding):
    """`nn.Embedding` with a gradient that is deferred like that of `Linear` and added to float32 accumulators by row.

    Without this, torch allocates a gradient of the whole table for each micro-batch: 0.6 GB in bfloat16 for 151936
    tokens of 2048 elements, and 1.2 GB if it is cast before the addition.
    """

    makes_accumulators = True  # creates `.grad` in `grad_dtype` itself: the FSDP2 driver need not allocate zeros

    def __init__(
        self, num_embeddings: int, embedding_dim: int, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the rows of `tokens`: (...) int32 or int64 -> (..., H)."""
        if torch.compiler.is_compiling() or needs_plain_autograd(self.weight):
            return F.embedding(tokens, self.weight)
        return _Embedding.apply(tokens, self.weight, None)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: None) -> Tensor:
        ctx.weight = weight
        ctx.bias = bias
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        (tokens,) = ctx.saved_tensors
        return None, *return_or_defer(ctx, _Operands(dy, tokens), _EMBEDDING)


class _Operands(NamedTuple):
    """Gradient of the rows (..., H), and the tokens (...)."""

    dy: Tensor
    tokens: Tensor


def _embedding_grad(weight: Tensor, operands: Sequence[_Operands], out: Tensor | None) -> Tensor:
    """Return the gradient of the table (V, H): the rows of `dy` summed by token, in a fixed order; added to `out`."""
    ((dy, tokens),) = operands
    dtype = accumulation_dtype(weight, dy.dtype) if out is None else out.dtype
    if dtype.itemsize < 4:  # torch sums in float32 and rounds once
        dw = torch.ops.aten.embedding_dense_backward(dy, tokens, weight.shape[0], -1, False)
        return dw if out is None else out.add_(dw)
    if out is None:
        out = dy.new_zeros(weight.shape, dtype=dtype)
    tokens = tokens.flatten()
    rows = flatten_rows(dy).to(dtype)
    if dy.is_cuda:  # index_put_ sorts the tokens, index_add_ uses atomics
        return out.index_put_((tokens,), rows, accumulate=True)
    # Sum by token first: bitwise equal to the accumulation of autograd.
    unique_tokens, sum_indices = tokens.unique(return_inverse=True)
    sums = rows.new_zeros(len(unique_tokens), rows.shape[1]).index_add_(0, sum_indices, rows)
    return out.index_add_(0, unique_tokens, sums)


_EMBEDDING = Gemm(_embedding_grad)
