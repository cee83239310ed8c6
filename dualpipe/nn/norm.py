"""RMS norm (Zhang and Sennrich, arXiv:1910.07467), fused with the addition of the residual.

The weight gradient can be deferred.

Dimension letters: P partial sums of a weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.kernels.norm import rms_norm, rms_norm_backward, rms_norm_reference
from dualpipe.nn.accumulators import accumulation_dtype
from dualpipe.nn.deferral import needs_plain_autograd, return_or_defer
from dualpipe.nn.deferred_grad import Gemm


class RMSNorm(nn.Module):
    """RMS norm: y = weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    Computes in `promote_types(dtype, float32)` and rounds to the dtype of `x` before it applies the weight, like
    transformers' Qwen3. Defers its weight gradient while the active `WeightGradStore` is deferring.
    """

    makes_accumulators = True  # creates `.grad` in `grad_dtype` itself: the FSDP2 driver need not allocate zeros

    def __init__(
        self, size: int, eps: float = 1e-6, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, return_sum: bool = False
    ) -> Any:
        """Normalize x + residual. Differentiable once.

        Args:
            x: (..., size).
            residual: same shape; None: nothing is added.
            return_sum: also return x + residual; the backward adds the gradient of this sum to those of x and residual.

        Returns the normalized values (..., size) in the common dtype of x, residual and weight; with `return_sum` a
        pair of them and the sum.
        """
        weight = self.weight
        if torch.compiler.is_compiling() or needs_plain_autograd(weight):
            y, total, _ = rms_norm_reference(x, weight, self.eps, residual)
        else:
            y, total = _Norm.apply(x, weight, None, residual, self.eps)
        return (y, total) if return_sum else y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: None, residual: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, total, scale = rms_norm(x, weight, eps, residual)
        ctx.weight = weight
        ctx.bias = None
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)  # a gradient of zeros is not worth a launch
        ctx.save_for_backward(total, scale, weight)
        return y, total.view_as(total) if residual is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return d_sum, None, None, d_sum if ctx.has_residual else None, None
        dx, partial_sums = rms_norm_backward(dy, d_sum, *ctx.saved_tensors)
        dw, _ = return_or_defer(ctx, PartialSums(partial_sums), SUM_OF_PARTS)
        return dx, dw, None, dx if ctx.has_residual else None, None


class PartialSums(NamedTuple):
    """Partial weight gradients (P, size) from the backward of a norm, or of two norms.

    bias: those of the second weight, which `return_or_defer` takes in the place of a bias.
    """

    weight: Tensor
    bias: Tensor | None = None


def _norm_weight_grad(weight: Tensor, operands: Sequence[PartialSums], out: Tensor | None) -> Tensor:
    """Sum the partial weight gradients -> (size,); added to `out` if any."""
    ((partial_sums, _),) = operands
    dw = partial_sums.sum(0, dtype=accumulation_dtype(weight, weight.dtype))
    return dw if out is None else out.add_(dw)


def _second_weight_grad(weight: Tensor, operands: PartialSums) -> Tensor:
    """Sum the partial gradients of the second weight -> (size,)."""
    assert operands.bias is not None, "a second weight has partial sums"
    return operands.bias.sum(0, dtype=accumulation_dtype(weight, weight.dtype))


SUM_OF_PARTS = Gemm(_norm_weight_grad, bias_grad=_second_weight_grad)
