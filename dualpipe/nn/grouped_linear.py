"""One linear layer for each expert, as stacked weights, whose weight gradient can be deferred like that of `Linear`.

Both modules take their rows in two ways: sorted by expert, (M, H), with where each expert's rows end; or as tokens,
(T, H), with `SortedTokens`, which says where the K rows of each go. Tokens are read where they are, so that no sorted
copy of K times their size is written, read and kept for the backward; there, the gradients of a token's rows are summed
in a fixed order.

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

from dualpipe.kernels import (
    SortedTokens,
    combine_tokens,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_swiglu,
    grouped_gemm_wgrad,
)
from dualpipe.kernels.swiglu import swiglu_backward, swiglu_form
from dualpipe.nn.accumulate import accumulates_apart, accumulation_dtype, add_grad, as_grad_of, has_hooks, local
from dualpipe.nn.deferral import WeightGradStore


class GroupedLinear(nn.Module):
    """y[m] = W[e] x[m] (+ b[e]) for every row m of expert e: `num_groups` times `nn.Linear` on consecutive rows.

    `weight` is (E, N, H), `bias` (E, N). The backward computes the input gradient at once and defers the others while
    the running `WeightGradStore` does. An expert without rows gets a zero gradient. A second derivative is refused.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        """(M, H) and the experts' running ends (E,) int32, or (T, H) and where the tokens go -> (M, N).

        Rows past the last end are undefined. Raises `ValueError` for operands that do not fit.
        """
        x, dtype = _autocast(x)
        return _GroupedLinear.apply(x, self.weight, self.bias, rows, dtype)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.in_features}, {self.out_features}, bias={self.bias is not None}"


class GroupedSwiGLU(GroupedLinear):
    """The first linear layer of each expert with the activation that follows: `GroupedLinear`, then `swiglu`.

    `weight` is (E, 2I, H), `bias` (E, 2I): gate and up, as halves or, `clamped` (gpt-oss), in turn. The backward
    recomputes from their product, which is all that is kept besides the operands.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        intermediate: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        clamped: bool = False,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> None:
        super().__init__(num_groups, in_features, 2 * intermediate, bias, device, dtype)
        self.form = swiglu_form(clamped, alpha, limit)

    def forward(self, x: Tensor, rows: Tensor | SortedTokens, scale: Tensor | None = None) -> Tensor:
        """As `GroupedLinear` -> (M, I); `scale` (M,) is multiplied in, such as the sorted rows' routing weights."""
        x, dtype = _autocast(x)
        return _GroupedSwiGLU.apply(x, self.weight, self.bias, rows, dtype, scale, self.form)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, clamped={self.form[0]}"


def _autocast(x: Tensor) -> tuple[Tensor, torch.dtype | None]:
    """`x` and the dtype that autocast wants the parameters in, if any; ValueError under torch.func."""
    if torch._C._are_functorch_transforms_active():
        raise ValueError("torch.func does not go through GroupedLinear, whose kernels have a backward for autograd "
                         "alone; use torch.autograd.grad, or experts that are nn.Linear")
    if not torch.is_autocast_enabled(x.device.type) or x.dtype is torch.float64:
        return x, None
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), dtype


def _cast(dtype: torch.dtype | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What the kernels take: this rank's experts, in `dtype` where one is given."""
    weight, bias = local(weight), None if bias is None else local(bias)
    if dtype is None:
        return weight, bias
    return weight.to(dtype), None if bias is None else bias.to(dtype)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | SortedTokens,
        dtype: torch.dtype | None,
    ) -> Tensor:
        used_weight, used_bias = _cast(dtype, weight, bias)
        y = grouped_gemm(x, used_weight, _ends(rows), bias=used_bias, gather=_gather(rows))
        _keep(ctx, weight, bias, rows, x, used_weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_grads(ctx, dy, *ctx.saved_tensors), None, None


class _GroupedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | SortedTokens,
        dtype: torch.dtype | None,
        scale: Tensor | None,
        form: tuple[bool, float, float],
    ) -> Tensor:
        used_weight, used_bias = _cast(dtype, weight, bias)
        clamped, alpha, limit = ctx.form = form
        h, gate_up = grouped_gemm_swiglu(
            x, used_weight, _ends(rows), bias=used_bias, gather=_gather(rows), weight=scale,
            clamped=clamped, alpha=alpha, limit=limit,
        )
        _keep(ctx, weight, bias, rows, x, used_weight, gate_up, scale)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate_up, scale = ctx.saved_tensors
        d_gate_up, d_scale = swiglu_backward(dh, gate_up, scale, *ctx.form)
        return *_grads(ctx, d_gate_up, x, weight), None, None, d_scale, None


def _keep(
    ctx: Any, weight: Tensor, bias: Tensor | None, rows: Tensor | SortedTokens, x: Tensor, used_weight: Tensor,
    *others: Tensor | None,
) -> None:
    """What `_grads` needs; the parameters themselves, because saved tensors may come back as copies."""
    need_x, need_weight, *_ = ctx.needs_input_grad
    ctx.weight, ctx.bias, ctx.rows = weight, bias, rows
    ctx.top_k = 0 if isinstance(rows, Tensor) else _top_k(x, rows)
    ctx.save_for_backward(x if need_weight else None, used_weight if need_x else None, *others)


def _grads(
    ctx: Any, dy: Tensor, x: Tensor | None, used_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias; None for what needs none, or what the store adds: later, or now and straight
    into an accumulator of another dtype."""
    need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
    dx = _input_grad(dy, used_weight, ctx.rows, ctx.top_k) if need_x else None
    weight, bias = ctx.weight if need_weight else None, ctx.bias if need_bias else None
    store = WeightGradStore.current()
    straight = store.active and (accumulates_apart(weight) or accumulates_apart(bias))
    if (need_weight or need_bias) and (store.deferring or straight) and not has_hooks(ctx.weight, ctx.bias):
        add = partial(_add_grads, weight, bias, dy, None if x is None else x.detach(), ctx.rows)
        store.put(add)
        return dx, None, None
    dw = as_grad_of(weight, _weight_grad(weight, dy, x, ctx.rows)) if need_weight else None
    return dx, dw, as_grad_of(bias, bias_grad(bias, dy, ctx.rows)) if need_bias else None


def _input_grad(dy: Tensor, weight: Tensor, rows: Tensor | SortedTokens, top_k: int) -> Tensor:
    """Of sorted rows (M, H), or of tokens (T, H): the sum of their rows'."""
    dx_MH = grouped_gemm_dgrad(dy, weight, _ends(rows))
    return dx_MH if isinstance(rows, Tensor) else combine_tokens(dx_MH, None, rows, top_k=top_k)


def _add_grads(
    weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor | None, rows: Tensor | SortedTokens
) -> None:
    if weight is not None and weight.grad is None:
        weight.grad = as_grad_of(weight, _weight_grad(weight, dy, x, rows))
    elif weight is not None:
        grouped_gemm_wgrad(dy, x, _ends(rows), out=local(weight.grad), accumulate=True, gather=_gather(rows))
    if bias is not None:
        add_grad(bias, bias_grad(bias, dy, rows))


def _weight_grad(weight: Tensor, dy: Tensor, x: Tensor, rows: Tensor | SortedTokens) -> Tensor:
    dtype = accumulation_dtype(weight, weight.dtype)
    dw = torch.empty_like(local(weight.detach()), dtype=dtype)  # (E, N, H)
    grouped_gemm_wgrad(dy, x, _ends(rows), out=dw, accumulate=False, gather=_gather(rows))
    return dw


def _ends(rows: Tensor | SortedTokens) -> Tensor:
    return rows if isinstance(rows, Tensor) else rows.offs


def _gather(rows: Tensor | SortedTokens) -> Tensor | None:
    return None if isinstance(rows, Tensor) else rows.gather


def _top_k(x: Tensor, tokens: SortedTokens) -> int:
    choices = tokens.inverse.shape[0]
    top_k = max(1, choices // max(1, x.shape[0]))
    if x.shape[0] * top_k != choices:
        raise ValueError(f"x must have one row for each token, and the {choices} sorted rows be a multiple of them; "
                         f"got {x.shape[0]}")
    return top_k


def bias_grad(bias: Tensor, dy: Tensor, rows: Tensor | SortedTokens) -> Tensor:
    """Sum of each expert's rows of `dy` (M, N) -> (E, N), without reading sizes back; half precision sums in fp32."""
    ends, dtype = _ends(rows), accumulation_dtype(bias, dy.dtype)
    bounds = torch.cat([ends.new_zeros(1), ends]).long()
    wide = dy.to(torch.promote_types(torch.promote_types(dy.dtype, dtype), torch.float32))
    return torch.segment_reduce(wide, "sum", offsets=bounds, axis=0, unsafe=True).to(dtype)
