"""The linear layers of experts: each expert's own for its rows, with or without the activation that follows.

Weights are stacked. Rows come in two ways: sorted by expert, (M, H), with where those of each end; or as tokens,
(T, H), with `SortedTokens`, which says where the K rows of each go. Tokens are read where they are, so that no sorted
copy of K times their size is written, read and kept for the backward; there, the gradients of a token's rows are summed
in a fixed order. Weight gradients are deferred as those of `dualpipe.nn.Linear`.

Dimension letters: T tokens, K experts per token, M rows (T * K at most), E experts (groups), H in_features, N
out_features, I intermediate (N is 2I where gate and up follow).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_swiglu, grouped_gemm_wgrad
from dualpipe.kernels.routing import SortedTokens, combine_tokens
from dualpipe.kernels.swiglu import swiglu_backward, swiglu_form
from dualpipe.nn.deferral import accumulation_dtype, local, weight_grads


class GroupedLinear(nn.Module):
    """y[m] = W[e] x[m] (+ b[e]) for every row m of expert e: `num_groups` times `nn.Linear` on consecutive rows.

    `weight` is (E, N, H), `bias` (E, N). The backward computes the input gradient at once and defers the others while
    the running `WeightGradStore` does. An expert without rows gets a zero gradient. A second derivative is refused.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says
    quantizable = True
    form: tuple[bool, float, float] | None = None  # of the SwiGLU behind the product, as the kernels take it

    def __init__(
        self, num_groups: int, in_features: int, out_features: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        shape = (num_groups, out_features)
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert as `nn.Linear` does it: uniform within 1/sqrt(in_features)."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def forward(self, x: Tensor, rows: Tensor | SortedTokens) -> Tensor:
        """(M, H) and the experts' running ends (E,) int32, or (T, H) and where the tokens go -> (M, N). Rows past the
        last end are undefined. Raises `ValueError` for operands that do not fit, and under torch.func."""
        return self._forward(x, rows, None)

    def _forward(self, x: Tensor, rows: Tensor | SortedTokens, scale: Tensor | None) -> Tensor:
        if torch._C._are_functorch_transforms_active():
            raise ValueError("torch.func does not go through GroupedLinear, whose kernels have a backward for autograd "
                             "alone; use torch.autograd.grad, or experts that are nn.Linear")
        dtype = None
        if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
        return _Grouped.apply(x, self.weight, self.bias, rows, dtype, self.form, scale)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.in_features}, {self.out_features}, bias={self.bias is not None}"


class GroupedSwiGLU(GroupedLinear):
    """The first linear layer of each expert with the activation that follows: `GroupedLinear`, then `swiglu`.

    `weight` is (E, 2I, H), `bias` (E, 2I): gate and up, as halves or, `clamped` (gpt-oss), in turn. The backward
    recomputes from their product, which is all that is kept besides the operands.
    """

    def __init__(
        self, num_groups: int, in_features: int, intermediate: int, bias: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        *, clamped: bool = False, alpha: float = 1.702, limit: float = 7.0,
    ) -> None:
        super().__init__(num_groups, in_features, 2 * intermediate, bias, device, dtype)
        self.form = swiglu_form(clamped, alpha, limit)

    def forward(self, x: Tensor, rows: Tensor | SortedTokens, scale: Tensor | None = None) -> Tensor:
        """As `GroupedLinear` -> (M, I); `scale` (M,) is multiplied in, such as the sorted rows' routing weights."""
        return self._forward(x, rows, scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, clamped={self.form is not None and self.form[0]}"


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | SortedTokens,
        dtype: torch.dtype | None, form: tuple[bool, float, float] | None, scale: Tensor | None,
    ) -> Tensor:
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves: saved tensors may come back as copies
        ctx.tokens, ctx.ends, ctx.gather = None, rows, None
        if not isinstance(rows, Tensor):
            ctx.tokens, ctx.ends, ctx.gather = rows, rows.offs, rows.gather
            choices = rows.inverse.shape[0]
            ctx.top_k = max(1, choices // max(1, x.shape[0]))
            if x.shape[0] * ctx.top_k != choices:
                raise ValueError(f"x must have one row for each token, and the {choices} sorted rows be a multiple of "
                                 f"them; got {x.shape[0]}")
        weight, bias = local(weight), None if bias is None else local(bias)  # this rank's experts
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.form, gate_up = form, None
        if form is None:
            y = grouped_gemm(x, weight, ctx.ends, bias=bias, gather=ctx.gather)
        else:
            clamped, alpha, limit = form
            y, gate_up = grouped_gemm_swiglu(x, weight, ctx.ends, bias=bias, gather=ctx.gather, weight=scale,
                                             clamped=clamped, alpha=alpha, limit=limit)
        need_x, need_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None, gate_up, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, used_weight, gate_up, scale = ctx.saved_tensors
        dx = d_scale = None
        if ctx.form is not None:
            dy, d_scale = swiglu_backward(dy, gate_up, scale, *ctx.form)
        if ctx.needs_input_grad[0]:
            dx = grouped_gemm_dgrad(dy, used_weight, ctx.ends)  # (M, H)
            if ctx.tokens is not None:  # (T, H), the sum of a token's rows
                dx = combine_tokens(dx, None, ctx.tokens, top_k=ctx.top_k)
        weight_grad = partial(_grouped_weight_grad, ends=ctx.ends, gather=ctx.gather)
        dw, db = weight_grads(ctx, dy, x, weight_grad, partial(grouped_bias_grad, ends=ctx.ends), in_place=True)
        return dx, dw, db, None, None, None, d_scale


def _grouped_weight_grad(
    weight: Tensor, dy: Tensor, x: Tensor, out: Tensor | None = None, *, ends: Tensor, gather: Tensor | None
) -> Tensor:
    """The gradient of this rank's experts (E, N, H), in the dtype of the accumulator; added to `out` if it is given."""
    dw = out
    if dw is None:
        dw = torch.empty_like(local(weight.detach()), dtype=accumulation_dtype(weight, weight.dtype))
    grouped_gemm_wgrad(dy, x, ends, out=dw, accumulate=out is not None, gather=gather)
    return dw


def grouped_bias_grad(bias: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Sum of each expert's rows of `dy` (M, N) -> (E, N), without reading sizes back; half precision sums in fp32."""
    dtype, bounds = accumulation_dtype(bias, dy.dtype), torch.cat([ends.new_zeros(1), ends]).long()
    wide = dy.to(torch.promote_types(torch.promote_types(dy.dtype, dtype), torch.float32))
    return torch.segment_reduce(wide, "sum", offsets=bounds, axis=0, unsafe=True).to(dtype)
