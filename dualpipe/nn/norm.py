"""RMS norm (Zhang and Sennrich, arXiv:1910.07467), fused with the residual's addition; its weight gradient is deferred.

Dimension letters: P parts of a weight's gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.kernels.norm import rms_norm, rms_norm_backward, rms_norm_reference
from dualpipe.nn.deferral import accumulation_dtype, weight_grads


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in `promote_types(dtype, float32)` and
    rounded to the dtype of `x` before the weight is applied, as in transformers' Qwen3. The weight's gradient is
    deferred while the running `WeightGradStore` does."""

    makes_accumulators = True  # of the dtype that `grad_dtype` says

    def __init__(
        self, size: int, eps: float = 1e-6, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None, *, keep: bool = False) -> Any:
        """(..., size) -> the norm of x + residual, in the common dtype of x, residual and weight; keep: and the sum,
        whose gradient is then added in the norm's backward. Differentiable once."""
        weight = self.weight
        if torch.compiler.is_compiling() or not weight.is_leaf or torch._C._are_functorch_transforms_active():
            y, total, _ = rms_norm_reference(x, weight, self.eps, residual)
            return (y, total) if keep else y
        y, total = _Norm.apply(x, weight, None, residual, self.eps)
        return (y, total) if keep else y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: None, residual: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, total, scale = rms_norm(x, weight, eps, residual)
        ctx.weight, ctx.bias, ctx.added = weight, None, residual is not None
        ctx.set_materialize_grads(False)  # a gradient of zeros is not worth a launch
        ctx.save_for_backward(total, scale, weight)
        return y, total.view_as(total) if residual is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return d_sum, None, None, d_sum if ctx.added else None, None
        dx, parts = rms_norm_backward(dy, d_sum, *ctx.saved_tensors)
        of_weight = partial(norm_weight_grad, parts=parts)
        dw, _ = weight_grads(ctx, parts, None, of_weight, of_weight)
        return dx, dw, None, dx if ctx.added else None, None


def norm_weight_grad(weight: Tensor, *_: Any, parts: Tensor) -> Tensor:
    """Sum of the parts (P, size) that a norm's backward left of its weight's gradient."""
    return parts.sum(0, dtype=accumulation_dtype(weight, weight.dtype))
