"""One linear layer for each expert, as stacked weights, whose weight gradient can be deferred like that of `Linear`.

Dimension letters: M rows, sorted by expert; E experts (groups); H in_features; N out_features.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.kernels import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from dualpipe.nn.accumulate import add_grad
from dualpipe.pipeline.weight_grad_store import WeightGradStore


class GroupedLinear(nn.Module):
    """y[m] = W[e] x[m] (+ b[e]) for every row m of expert e: `num_groups` times `nn.Linear` on consecutive rows.

    `weight` is (E, N, H), `bias` (E, N). The backward computes the input gradient at once and defers the others while
    the running `WeightGradStore` does. An expert without rows gets a zero gradient. A second derivative is refused.
    """

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

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """`x` (M, H) sorted by expert, `offs` (E,) int32 running ends -> (M, N). Rows past `offs[-1]` are undefined."""
        dtype = None
        if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
        return _GroupedLinear.apply(x, self.weight, self.bias, offs, dtype)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.in_features}, {self.out_features}, bias={self.bias is not None}"


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.weight, ctx.bias = weight, bias
        if dtype is not None:
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        need_x, need_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None, offs)
        return grouped_gemm(x, weight, offs, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offs = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        dx = grouped_gemm_dgrad(dy, weight, offs) if need_x else None
        weight, bias = ctx.weight if need_weight else None, ctx.bias if need_bias else None
        store = WeightGradStore.current()
        if (need_weight or need_bias) and store.deferring:
            store.put(partial(_add_grads, weight, bias, dy, None if x is None else x.detach(), offs))
            return dx, None, None, None, None
        dw = _weight_grad(weight, dy, x, offs) if need_weight else None
        db = _bias_grad(dy, offs) if need_bias else None
        return dx, dw, db, None, None


def _add_grads(weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor | None, offs: Tensor) -> None:
    if weight is not None and weight.grad is None:
        weight.grad = _weight_grad(weight, dy, x, offs)
    elif weight is not None:
        grouped_gemm_wgrad(dy, x, offs, out=weight.grad, accumulate=True)
    if bias is not None:
        add_grad(bias, _bias_grad(dy, offs))


def _weight_grad(weight: Tensor, dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    dw = torch.empty_like(weight, dtype=weight.grad_dtype or weight.dtype, requires_grad=False)  # (E, N, H)
    grouped_gemm_wgrad(dy, x, offs, out=dw, accumulate=False)
    return dw


def _bias_grad(dy: Tensor, offs: Tensor) -> Tensor:
    """Sum of each expert's rows of `dy` (M, N) -> (E, N), without reading sizes back; half precision sums in fp32."""
    bounds = torch.cat([offs.new_zeros(1), offs]).long()
    wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
    return torch.segment_reduce(wide, "sum", offsets=bounds, axis=0, unsafe=True).to(dy.dtype)
