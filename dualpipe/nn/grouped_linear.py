"""The linear layers of experts: each expert's own for its rows, with or without the activation that follows.

Weights are stacked. Rows come in two ways: sorted by expert, (M, H), with where those of each end; or as tokens,
(T, H), with `SortedTokens`, which says where the K rows of each go. Tokens are read where they are, so that no sorted
copy of K times their size is written, read and kept for the backward; there, the gradients of a token's rows are summed
in a fixed order. Weight gradients are deferred as those of `dualpipe.nn.Linear`. What products with quantized weights
are in is said in `products`.

Dimension letters: T tokens, K experts per token, M rows (T * K at most), E experts (groups), H in_features, N
out_features, I intermediate (N is 2I where gate and up follow).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_swiglu, grouped_gemm_wgrad
from dualpipe.kernels.quantize import quantize_rows, swiglu_quantize
from dualpipe.kernels.routing import SortedTokens, combine_tokens
from dualpipe.kernels.swiglu import clamped_swiglu, swiglu, swiglu_backward, swiglu_form
from dualpipe.nn.deferral import accumulation_dtype, local, weight_grads
from dualpipe.nn.quantized_matmul import Products, input_grad, product, row_block, weight_grad_of_rows
from dualpipe.quantized import QuantizedTensor


class GroupedLinear(nn.Module):
    """y[m] = W[e] x[m] (+ b[e]) for every row m of expert e: `num_groups` times `nn.Linear` on consecutive rows.

    `weight` is (E, N, H), `bias` (E, N). The backward computes the input gradient at once and defers the others while
    the running `WeightGradStore` does. An expert without rows gets a zero gradient. A second derivative is refused.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says
    form: tuple[bool, float, float] | None = None  # of the SwiGLU behind the product, as the kernels take it
    quantizable = True  # see `dualpipe.quantized.quantize_model.quantizable`
    products: Products = "auto"  # this and the next are for quantized weights: see `dualpipe.nn.quantized_matmul`
    fp8_weight_grad = False

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

    def forward(
        self, x: Tensor, rows: Tensor | SortedTokens, *, quantized: QuantizedRows | None = None
    ) -> Tensor:
        """(M, H) and the experts' running ends (E,) int32, or (T, H) and where the tokens go -> (M, N). Rows past the
        last end are undefined. quantized: the rows of `x` in blocks of this layer's `row_block`, if they are at hand.
        Raises `ValueError` for operands that do not fit, and under torch.func."""
        return self._forward(x, rows, None, quantized, None)[0]

    def _forward(
        self, x: Tensor, rows: Tensor | SortedTokens, scale: Tensor | None, quantized: QuantizedRows | None,
        then: nn.Module | None,
    ) -> tuple[Tensor, QuantizedRows | None]:
        """The result, and its rows as `then` takes them; None where it takes no quantized ones."""
        if torch.compiler.is_compiling():
            from dualpipe.nn.uncompiled import run_uncompiled  # not at the top: it brings the compiler

            result = run_uncompiled(GroupedLinear._forward, self, x, rows, scale, quantized, then)
            return cast(tuple[Tensor, QuantizedRows | None], result)
        if torch._C._are_functorch_transforms_active():
            raise ValueError("torch.func does not go through GroupedLinear, whose kernels have a backward for autograd "
                             "alone; use torch.autograd.grad, or experts that are nn.Linear")
        x, dtype = _autocast(x)
        blocks = row_block(self, x.dtype), None if then is None else row_block(then, x.dtype)
        y, *y_rows = _Grouped.apply(x, self.weight, self.bias, rows, dtype, self.form, scale, *blocks, quantized,
                                    self.fp8_weight_grad, False)
        return y, QuantizedRows(*y_rows) if y_rows else None

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

    def forward(
        self, x: Tensor, rows: Tensor | SortedTokens, scale: Tensor | None = None, *,
        quantized: QuantizedRows | None = None, then: nn.Module | None = None,
    ) -> Any:
        """As `GroupedLinear` -> (M, I); `scale` (M,) is multiplied in, such as the sorted rows' routing weights. then:
        the layer that takes the result; with it come the rows as that takes them, None where it quantizes none."""
        y, y_rows = self._forward(x, rows, scale, quantized, then)
        return y if then is None else (y, y_rows)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, clamped={self.form is not None and self.form[0]}"


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | SortedTokens, *, is_transposed: bool = False,
    form: tuple[bool, float, float] | None = None, scale: Tensor | None = None,
) -> Tensor:
    """`GroupedLinear`, or with `form` `GroupedSwiGLU`, of parameters that a module of another class owns.

    weight: (E, N, H), or (E, H, N) where `is_transposed`; bias: (E, N); rows, and scale (M,) for a `form`: see
    `GroupedLinear.forward` and `GroupedSwiGLU.forward`; form: see `dualpipe.kernels.swiglu.swiglu_form`. Weight
    gradients have the layout of the parameters, and are deferred while the running `WeightGradStore` does.
    Returns (M, N), or (M, N / 2) with a `form`. Raises ValueError for operands that do not fit.
    """
    if torch.compiler.is_compiling():
        from dualpipe.nn.uncompiled import run_uncompiled  # not at the top: it brings the compiler

        run = partial(grouped_linear, is_transposed=is_transposed, form=form, scale=scale)
        return cast(Tensor, run_uncompiled(run, x, weight, bias, rows))
    x, dtype = _autocast(x)
    y, *_ = _Grouped.apply(x, weight, bias, rows, dtype, form, scale, None, None, None, False, is_transposed)
    return y


def _autocast(x: Tensor) -> tuple[Tensor, torch.dtype | None]:
    """Return rows in autocast's dtype, and that dtype; as they are, and None, without autocast and in float64."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type) or x.dtype is torch.float64:
        return x, None
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), dtype


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | SortedTokens,
        dtype: torch.dtype | None, form: tuple[bool, float, float] | None, scale: Tensor | None, block: int | None,
        next_block: int | None, x_rows: QuantizedRows | None, fp8_weight_grad: bool, is_transposed: bool,
    ) -> tuple[Tensor, ...]:
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves: saved tensors may come back as copies
        ctx.tokens, ctx.ends, ctx.gather = None, rows, None
        if not isinstance(rows, Tensor):
            ctx.tokens, ctx.ends, ctx.gather = rows, rows.offs, rows.gather
            choices = rows.inverse.shape[0]
            ctx.top_k = max(1, choices // max(1, x.shape[0]))
            if x.shape[0] * ctx.top_k != choices:
                raise ValueError(f"x must have one row for each token, and the {choices} sorted rows be a multiple of "
                                 f"them; got {x.shape[0]}")
        ctx.is_transposed = is_transposed
        weight, bias = local(weight), None if bias is None else local(bias)  # this rank's experts
        if is_transposed:
            weight = weight.transpose(1, 2)
        if dtype is not None:
            weight = weight if isinstance(weight, QuantizedTensor) else weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.form, ctx.block, gate_up, y_rows = form, block, None, None
        x_rows = None if block is None else x_rows or quantize_rows(x, block)
        if isinstance(weight, QuantizedTensor):
            y = product(x_rows or x, weight, ctx.ends, bias, ctx.gather, x.dtype)
            if form is not None:
                gate_up, (y, y_rows) = y, _activated(y, scale, *form, next_block)
        elif form is None:
            y = grouped_gemm(x, weight, ctx.ends, bias=bias, gather=ctx.gather)
        else:
            clamped, alpha, limit = form
            y, gate_up = grouped_gemm_swiglu(x, weight, ctx.ends, bias=bias, gather=ctx.gather, weight=scale,
                                             clamped=clamped, alpha=alpha, limit=limit)
        if next_block is not None:
            y_rows = y_rows or quantize_rows(y, next_block)
            ctx.mark_non_differentiable(*y_rows)
        need_x, need_weight, *_ = ctx.needs_input_grad
        x_rows = x_rows if need_weight and fp8_weight_grad else None
        ctx.save_for_backward(
            x if need_weight and x_rows is None else None,
            weight if need_x and not isinstance(weight, QuantizedTensor) else None,  # the parameter itself is kept
            gate_up, scale, *(x_rows or (None, None)),
        )
        return y, *(y_rows or ())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, used_weight, gate_up, scale, *x_rows = ctx.saved_tensors
        dx = d_scale = dy_rows = None
        if ctx.form is not None:
            dy, d_scale = swiglu_backward(dy, gate_up, scale, *ctx.form)
        if ctx.needs_input_grad[0]:
            if used_weight is not None:
                dx = grouped_gemm_dgrad(dy, used_weight, ctx.ends)  # (M, H)
            else:
                dx, dy_rows = input_grad(dy, local(ctx.weight), ctx.ends, ctx.block)
            if ctx.tokens is not None:  # (T, H), the sum of a token's rows
                dx = combine_tokens(dx, None, ctx.tokens, top_k=ctx.top_k)
        weight_grad: Callable[..., Tensor] = partial(
            _grouped_weight_grad, ends=ctx.ends, gather=ctx.gather, is_transposed=ctx.is_transposed)
        num_rows = dy.shape[0]
        if x_rows[0] is not None:
            weight_grad = weight_grad_of_rows(weight_grad, dy, dy_rows, QuantizedRows(*x_rows), ctx.block)
            dy = dy if ctx.needs_input_grad[2] else dy.new_empty(0)  # the bias's alone reads it: not kept otherwise
        of_bias = partial(grouped_bias_grad, ends=ctx.ends)
        dw, db = weight_grads(ctx, dy, x, weight_grad, of_bias, in_place=True, rows=num_rows)
        return dx, dw, db, None, None, None, d_scale, None, None, None, None, None


def _activated(
    gate_up: Tensor, scale: Tensor | None, clamped: bool, alpha: float, limit: float, block: int | None
) -> tuple[Tensor, QuantizedRows | None]:
    """The activation (M, I) of (M, 2I), and its quantized rows where `block` is given."""
    if block is not None:
        return swiglu_quantize(gate_up, scale, block=block, clamped=clamped, alpha=alpha, limit=limit)
    return clamped_swiglu(gate_up, scale, alpha, limit) if clamped else swiglu(gate_up, scale), None


def _grouped_weight_grad(
    weight: Tensor, dy: Tensor, x: Tensor, out: Tensor | None = None, *, ends: Tensor, gather: Tensor | None,
    is_transposed: bool,
) -> Tensor:
    """Return the gradient of this rank's experts, in the layout of `weight` and the dtype of its accumulator; added to
    `out` if that is given."""
    dw = out
    if dw is None:
        dw = dy.new_empty(local(weight.detach()).shape, dtype=accumulation_dtype(weight, weight.dtype))
    dw_ENH = dw.transpose(1, 2) if is_transposed else dw
    grouped_gemm_wgrad(dy, x, ends, out=dw_ENH, accumulate=out is not None, gather=gather)
    return dw


def grouped_bias_grad(bias: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Sum of each expert's rows of `dy` (M, N) -> (E, N), without reading sizes back; half precision sums in fp32."""
    dtype, bounds = accumulation_dtype(bias, dy.dtype), torch.cat([ends.new_zeros(1), ends]).long()
    wide = dy.to(torch.promote_types(torch.promote_types(dy.dtype, dtype), torch.float32))
    return torch.segment_reduce(wide, "sum", offsets=bounds, axis=0, unsafe=True).to(dtype)
