"""An embedding whose gradient is deferred, and added to its accumulator row by row.

Dimension letters: H embedding_dim, V words.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe.nn.deferral import accumulation_dtype, weight_grads
from dualpipe.nn.linear import bias_grad, flatten_rows


class Embedding(nn.Embedding):
    """`nn.Embedding` that defers its gradient as `Linear` does, and adds it to a float32 accumulator row by row.

    Otherwise torch makes a gradient of the whole table for each micro-batch: 0.6 GB in bfloat16 for 151936 words of
    2048 numbers, and 1.2 GB where it is cast to be added.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says

    def __init__(
        self, num_embeddings: int, embedding_dim: int, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) int32 or int64 -> (..., H)."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not self.weight.is_leaf:
            return F.embedding(tokens, self.weight)
        return _Embedding.apply(tokens, self.weight, None)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: None) -> Tensor:
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        (tokens,) = ctx.saved_tensors
        return None, *weight_grads(ctx, dy, tokens, _embedding_grad, bias_grad, in_place=True)


def _embedding_grad(weight: Tensor, dy: Tensor, tokens: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient of the table (V, H), each word's rows of `dy` summed in a fixed order; added to `out` if given."""
    dtype = accumulation_dtype(weight, dy.dtype) if out is None else out.dtype
    if dtype.itemsize < 4:  # torch sums in float32 and rounds once
        dw = torch.ops.aten.embedding_dense_backward(dy, tokens, weight.shape[0], -1, False)
        return dw if out is None else out.add_(dw)
    out = dy.new_zeros(weight.shape, dtype=dtype) if out is None else out
    tokens, rows = tokens.flatten(), flatten_rows(dy).to(dtype)
    if dy.is_cuda:  # it sorts, where index_add_ has atomics
        return out.index_put_((tokens,), rows, accumulate=True)
    words, at = tokens.unique(return_inverse=True)  # each word's sum first: bitwise what autograd accumulates
    return out.index_add_(0, words, rows.new_zeros(len(words), rows.shape[1]).index_add_(0, at, rows))
