"""Linear layers whose weight gradient can be deferred, and is added to its accumulator in place.

The backward of y = x W^T + b computes dx = dy W at once, and dW = dy^T x and db = sum(dy) when the running
`WeightGradStore` says.

Dimension letters: M rows (all leading dimensions together), H in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.quantize import quantize_rows
from dualpipe.nn.deferral import accumulation_dtype, weight_grads
from dualpipe.nn.quantized_matmul import Products, input_grad, product, row_block, weight_grad_of_rows
from dualpipe.quantized import QuantizedTensor

_CHUNK = 2**24  # elements of a weight's gradient that are made at a time to be added to its accumulator: 64 MB of fp32


class Linear(nn.Linear):
    """`nn.Linear` that defers its weight and bias gradients while the running `WeightGradStore` does.

    Where nothing is deferred, gradients go through autograd as those of `nn.Linear`, and are bitwise the same. Those of
    a parameter with hooks (`register_hook`, `register_post_accumulate_grad_hook`) are not deferred, so that hooks run.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says
    products: Products = "auto"  # this and the next are for quantized weights: see `dualpipe.nn.quantized_matmul`
    fp8_weight_grad = False
    quantizable = True  # whether a plan's formats are for the weight

    def forward(self, x: Tensor, wide: torch.dtype | None = None) -> Tensor:
        """(..., H) -> (..., N). wide: compute and return in this dtype, whatever autocast says; x, which may be
        narrower, is kept for the backward as it came."""
        if torch.compiler.is_compiling():
            from dualpipe.nn.uncompiled import run_uncompiled  # not at the top: it brings the compiler

            # Its backward asks each time whether to defer. `Linear.forward`, not that of a subclass, which called this.
            return run_uncompiled(Linear.forward, self, x, wide)
        weight, bias, dtype = self.weight, self.bias, None
        # Parameters that come from others, by pruning or weight norm, or that torch.func replaces or batches.
        if not weight.is_leaf or (bias is not None and not bias.is_leaf) or torch._C._are_functorch_transforms_active():
            return _product(x, weight, bias, wide)
        if wide is None and not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)  # autocast leaves float64 alone
            x = x.to(dtype)
        if isinstance(weight, QuantizedTensor):
            x = x if wide is None else x.to(wide)
            return _Quantized.apply(x, weight, bias, row_block(self, x.dtype), self.fp8_weight_grad)
        return _Linear.apply(x, weight, bias, dtype, wide)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, wide: torch.dtype | None
    ) -> Tensor:
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves: saved tensors may come back as copies
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        need_x, need_weight, _, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return _product(x, weight, bias, wide)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:  # after a wide product, autograd casts it to the dtype of x
            dx = dy.matmul(weight if weight.dtype is dy.dtype else weight.to(dy.dtype))
        return dx, *weight_grads(ctx, dy, x, _weight_grad, bias_grad, in_place=True), None, None


class _Quantized(torch.autograd.Function):
    """The product with a quantized weight, in the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, block: int | None, fp8_weight_grad: bool
    ) -> Tensor:
        ctx.weight, ctx.bias, ctx.block = weight, bias, block
        x_MH, x_rows = flatten_rows(x), None
        ctx.ends = torch.full((1,), x_MH.shape[0], dtype=torch.int32, device=x.device)  # one expert's
        if block is not None:
            x_rows = quantize_rows(x_MH, block)
        bias_1N = None if bias is None else bias.to(x.dtype).unsqueeze(0)
        y_MN = product(x_rows or x_MH, weight, ctx.ends, bias_1N, None, x.dtype)
        need_weight = ctx.needs_input_grad[1]
        x_rows = x_rows if need_weight and fp8_weight_grad else None
        ctx.save_for_backward(x if need_weight and x_rows is None else None, *(x_rows or (None, None)))
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, *x_rows = ctx.saved_tensors
        dx = dy_rows = None
        if ctx.needs_input_grad[0]:
            dx, dy_rows = input_grad(flatten_rows(dy), ctx.weight, ctx.ends, ctx.block)
            dx = dx.view(*dy.shape[:-1], dx.shape[1])
        weight_grad: Callable[..., Tensor] = _weight_grad
        rows = dy.shape[:-1].numel()
        if x_rows[0] is not None:
            weight_grad = weight_grad_of_rows(weight_grad, flatten_rows(dy), dy_rows, QuantizedRows(*x_rows), ctx.block)
            dy = dy if ctx.needs_input_grad[2] else dy.new_empty(0)  # the bias's alone reads it: not kept otherwise
        return dx, *weight_grads(ctx, dy, x, weight_grad, bias_grad, in_place=True, rows=rows), None, None


class TransposedLinear(nn.Module):
    """`forward` of a module that computes y = x W + b, with `weight` (H, N) and `bias` (N,), such as GPT-2's `Conv1D`.

    For a class that derives from this one first, and then from the module's own.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) -> (..., N), with gradients that are deferred as those of `Linear`."""
        if torch.compiler.is_compiling():
            from dualpipe.nn.uncompiled import run_uncompiled  # not at the top: it brings the compiler

            return run_uncompiled(TransposedLinear.forward, self, x)
        weight, bias = self.weight, self.bias
        is_plain = weight.is_leaf and bias.is_leaf and not isinstance(weight, QuantizedTensor)
        if not is_plain or torch._C._are_functorch_transforms_active():
            return super().forward(x)
        dtype = None
        if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
        return _TransposedLinear.apply(x, weight, bias, dtype)


class _TransposedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None) -> Tensor:
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves: saved tensors may come back as copies
        if dtype is not None:
            weight, bias = weight.to(dtype), bias.to(dtype)
        need_x, need_weight, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return torch.addmm(bias, flatten_rows(x), weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = flatten_rows(dy).mm(weight.t()).view(*dy.shape[:-1], weight.shape[0])
        return dx, *weight_grads(ctx, dy, x, _transposed_weight_grad, bias_grad, in_place=True), None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype | None) -> Tensor:
    if wide is None:
        return F.linear(x, weight, bias)
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if kind != "meta" and torch.is_autocast_enabled(kind) else nullcontext():
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def _weight_grad(weight: Tensor, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """(N, H), not rounded to half precision where the accumulator is float32; added to `out` if given."""
    dy_NM, x_MH, dtype = flatten_rows(dy).t(), flatten_rows(x), accumulation_dtype(weight, dy.dtype)
    if (dy.is_cuda or dy.is_meta) and dtype is torch.float32 and dy.dtype in (torch.bfloat16, torch.float16):
        if out is None:
            return torch.mm(dy_NM, x_MH, out_dtype=dtype)
        return torch.addmm(out, dy_NM, x_MH, out_dtype=dtype, out=out)  # in the product's epilogue: no temporary
    if x.dtype is not dtype:  # asked first, because to() takes 0.4 us even where it changes nothing
        x_MH = x_MH.to(dtype)
    # mm and add_ instead of addmm_: bitwise what autograd accumulates over micro-batches, but for chunks.
    if out is None or out.numel() <= _CHUNK:
        dw = (dy_NM if dy.dtype is dtype else dy_NM.to(dtype)).mm(x_MH)
        return dw if out is None else out.add_(dw)
    rows = max(1, _CHUNK // x_MH.shape[1])
    for out_NH, part_NM in zip(out.split(rows), dy_NM.split(rows)):
        out_NH.add_(part_NM.to(dtype).mm(x_MH))
    return out


def _transposed_weight_grad(weight: Tensor, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """(H, N), as `_weight_grad`, with the operands in each other's place."""
    return _weight_grad(weight, x, dy, out)


def bias_grad(bias: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of a bias (N,), in the dtype of its accumulator."""
    return flatten_rows(dy).sum(0, dtype=accumulation_dtype(bias, dy.dtype))


def flatten_rows(x: Tensor) -> Tensor:
    """Flatten all leading dimensions into one: (..., H) -> (M, H)."""
    return x if x.dim() == 2 else torch.atleast_2d(x).flatten(0, -2)
