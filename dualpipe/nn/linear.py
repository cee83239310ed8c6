"""Linear layers with weight gradients that can be deferred and are added to their accumulators in place.

The backward of y = x W^T + b computes dx = dy W immediately; dW = dy^T x and db = sum(dy) run when the active
`WeightGradStore` decides.

Dimension letters: M rows (all leading dimensions together), H in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.quantize import quantize_rows
from dualpipe.nn.accumulators import accumulation_dtype
from dualpipe.nn.deferral import needs_plain_autograd, return_or_defer
from dualpipe.nn.deferred_grad import Gemm
from dualpipe.nn.quantized_matmul import (
    HasGemmPrecision,
    RowsForWeightGrad,
    forward_gemm,
    input_grad,
    quantize_for_weight_grad,
    row_block,
)
from dualpipe.quantized import QuantizedTensor

LARGEST_WEIGHT_GRAD = 2**24  # elements, 64 MB of float32: larger weight gradients are computed and added in chunks


class Linear(HasGemmPrecision, nn.Linear):
    """`nn.Linear` that defers its weight and bias gradients while the active `WeightGradStore` is deferring.

    Otherwise gradients go through autograd like those of `nn.Linear`, bitwise equal. Not deferred are gradients of
    parameters with hooks, so that the hooks run, of complex parameters, and inside of one compiled graph
    (`torch.compile(fullgraph=True)`, `torch.export`).

    Attributes:
        gemm_precision: precision of the GEMMs with a quantized weight; see `dualpipe.nn.quantized_matmul`.
        fp8_weight_grad: save quantized rows for the weight gradient of a quantized weight.
        quantizable: True if a dtype plan may quantize the weight.
    """

    makes_accumulators = True  # creates `.grad` in `grad_dtype` itself: the FSDP2 driver need not allocate zeros
    fp8_weight_grad = False
    quantizable = True

    def forward(self, x: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
        """Apply the layer: (..., H) -> (..., N).

        Args:
            x: rows; saved for the backward in their own dtype.
            compute_dtype: dtype of the GEMM and the result, regardless of autocast; None: that of the operands.
        """
        y = self._run(x, compute_dtype)
        adapter = self._modules.get("adapter")  # of `dualpipe.nn.lora`
        return y if adapter is None else adapter(x, y, compute_dtype)

    def _run(self, x: Tensor, compute_dtype: torch.dtype | None) -> Tensor:
        """Apply the layer without an adapter."""
        weight = self.weight
        bias = self.bias
        if torch.compiler.is_compiling():
            from dualpipe.nn import uncompiled  # not at the top: it imports the compiler

            if uncompiled.is_one_graph() and not isinstance(weight, QuantizedTensor):
                return _linear(x, weight, bias, compute_dtype)
            # Run eagerly: the backward checks in every call whether to defer.
            return uncompiled.run_uncompiled(Linear._run, self, x, compute_dtype)
        if needs_plain_autograd(weight, bias):
            return _linear(x, weight, bias, compute_dtype)
        autocast_dtype = None if compute_dtype is not None else autocast_dtype_of(x)
        if autocast_dtype is not None:
            x = x.to(autocast_dtype)
        if isinstance(weight, QuantizedTensor):
            if compute_dtype is not None:
                x = x.to(compute_dtype)
            return _Quantized.apply(x, weight, bias, row_block(self, x.dtype), self.fp8_weight_grad)
        return _Linear.apply(x, weight, bias, autocast_dtype, compute_dtype)


def autocast_dtype_of(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts `x` to; None without autocast, and for float64, which autocast skips."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type) or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, autocast_dtype: torch.dtype | None,
        compute_dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.weight = weight  # the parameters themselves: saved tensors may come back as copies
        ctx.bias = bias
        if autocast_dtype is not None:
            weight = weight.to(autocast_dtype)
            bias = None if bias is None else bias.to(autocast_dtype)
        need_x, need_weight, _, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return _linear(x, weight, bias, compute_dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:  # in the dtype of dy: autograd casts it to the dtype of x
            dx = dy.matmul(weight if weight.dtype is dy.dtype else weight.to(dy.dtype))
        return dx, *return_or_defer(ctx, LinearOperands(dy, x), LINEAR), None, None


class _Quantized(torch.autograd.Function):
    """Linear layer with a quantized weight; the result has the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, block: int | None, fp8_weight_grad: bool
    ) -> Tensor:
        ctx.weight = weight
        ctx.bias = bias
        ctx.block = block
        x_MH = flatten_rows(x)
        ctx.offs = torch.full((1,), x_MH.shape[0], dtype=torch.int32, device=x.device)  # a single expert
        quantized_x = None if block is None else quantize_rows(x_MH, block)
        bias_1N = None if bias is None else bias.to(x.dtype).unsqueeze(0)
        y_MN = forward_gemm(quantized_x or x_MH, weight, ctx.offs, bias_1N, None, x.dtype)
        need_weight = ctx.needs_input_grad[1]
        saved_quantized = quantized_x if need_weight and fp8_weight_grad else None
        saved_x = x if need_weight and saved_quantized is None else None
        ctx.save_for_backward(saved_x, *(saved_quantized or (None, None)))
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, *quantized_x = ctx.saved_tensors
        dx = None
        quantized_dy = None
        if ctx.needs_input_grad[0]:
            dx, quantized_dy = input_grad(flatten_rows(dy), ctx.weight, ctx.offs, ctx.block)
            dx = dx.view(*dy.shape[:-1], dx.shape[1])
        if quantized_x[0] is None:
            return dx, *return_or_defer(ctx, LinearOperands(dy, x), LINEAR), None, None
        rows = quantize_for_weight_grad(flatten_rows(dy), quantized_dy, QuantizedRows(*quantized_x), ctx.block)
        bias_dy = dy if ctx.needs_input_grad[2] else None
        return dx, *return_or_defer(ctx, _QuantizedOperands(rows, bias_dy), _QUANTIZED), None, None


class TransposedLinear(nn.Module):
    """Linear layer with a transposed weight, such as GPT-2's `Conv1D`: y = x W + b, `weight` (H, N), `bias` (N,).

    A mixin that provides `forward` only: among the bases of a class, put it before the class that owns the parameters.
    """

    makes_accumulators = True  # creates `.grad` in `grad_dtype` itself: the FSDP2 driver need not allocate zeros
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (..., H) -> (..., N). Gradients are deferred like those of `Linear`."""
        weight = self.weight
        bias = self.bias
        if torch.compiler.is_compiling():
            from dualpipe.nn import uncompiled  # not at the top: it imports the compiler

            if uncompiled.is_one_graph():
                return super().forward(x)
            return uncompiled.run_uncompiled(TransposedLinear.forward, self, x)
        if needs_plain_autograd(weight, bias) or isinstance(weight, QuantizedTensor):
            return super().forward(x)
        autocast_dtype = autocast_dtype_of(x)
        if autocast_dtype is not None:
            x = x.to(autocast_dtype)
        return _TransposedLinear.apply(x, weight, bias, autocast_dtype)


class _TransposedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, autocast_dtype: torch.dtype | None) -> Tensor:
        ctx.weight = weight  # the parameters themselves: saved tensors may come back as copies
        ctx.bias = bias
        if autocast_dtype is not None:
            weight = weight.to(autocast_dtype)
            bias = bias.to(autocast_dtype)
        need_x, need_weight, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return torch.addmm(bias, flatten_rows(x), weight).view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = flatten_rows(dy).mm(weight.t()).view(*dy.shape[:-1], weight.shape[0])
        return dx, *return_or_defer(ctx, LinearOperands(dy, x), _TRANSPOSED), None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, compute_dtype: torch.dtype | None) -> Tensor:
    """Return `F.linear` in `compute_dtype` without autocast; None: in the dtype of the operands."""
    if compute_dtype is None:
        return F.linear(x, weight, bias)
    device_type = x.device.type
    is_autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False) if is_autocast else nullcontext():
        return F.linear(x.to(compute_dtype), weight.to(compute_dtype), None if bias is None else bias.to(compute_dtype))


class LinearOperands(NamedTuple):
    """Gradient of the output (..., N), and input (..., H); None if only the bias needs a gradient."""

    dy: Tensor
    x: Tensor | None


def _linear_weight_grad(weight: Tensor, operands: Sequence[LinearOperands], out: Tensor | None) -> Tensor:
    """Compute dW (N, H), without rounding to half precision if the accumulator is float32; added to `out` if any."""
    ((dy, x),) = operands
    assert x is not None, "saved if the weight needs a gradient"
    return _outer_product(weight, dy, x, out)


def _transposed_weight_grad(weight: Tensor, operands: Sequence[LinearOperands], out: Tensor | None) -> Tensor:
    """Compute dW (H, N) = x^T dy: `_linear_weight_grad` with swapped operands."""
    ((dy, x),) = operands
    assert x is not None, "saved if the weight needs a gradient"
    return _outer_product(weight, x, dy, out)


def _outer_product(weight: Tensor, dy: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """Compute dy^T x in the dtype of the accumulator of `weight`; added to `out` if any."""
    dy_NM = flatten_rows(dy).t()
    x_MH = flatten_rows(x)
    dtype = accumulation_dtype(weight, dy.dtype)
    if (dy.is_cuda or dy.is_meta) and dtype is torch.float32 and dy.dtype in (torch.bfloat16, torch.float16):
        if out is None:
            return torch.mm(dy_NM, x_MH, out_dtype=dtype)
        return torch.addmm(out, dy_NM, x_MH, out_dtype=dtype, out=out)  # in the GEMM's epilogue: no temporary
    if x.dtype is not dtype:  # to() takes 0.4 us even if the dtype is the same
        x_MH = x_MH.to(dtype)
    # mm and add_ instead of addmm_: bitwise equal to autograd's accumulation over micro-batches, unless in chunks.
    if out is None or out.numel() <= LARGEST_WEIGHT_GRAD:
        dw = (dy_NM if dy.dtype is dtype else dy_NM.to(dtype)).mm(x_MH)
        return dw if out is None else out.add_(dw)
    rows_per_chunk = max(1, LARGEST_WEIGHT_GRAD // x_MH.shape[1])
    for out_chunk_NH, dy_chunk_NM in zip(out.split(rows_per_chunk), dy_NM.split(rows_per_chunk)):
        out_chunk_NH.add_(dy_chunk_NM.to(dtype).mm(x_MH))
    return out


def _bias_grad(bias: Tensor, operands: LinearOperands | _QuantizedOperands) -> Tensor:
    """Return the gradient of a bias (N,), in the dtype of its accumulator."""
    dy = operands.dy
    assert dy is not None, "kept if the bias needs a gradient"
    return flatten_rows(dy).sum(0, dtype=accumulation_dtype(bias, dy.dtype))


def _num_rows(operands: LinearOperands) -> int:
    """Return the number of rows of a micro-batch."""
    return operands.dy.shape[:-1].numel()


LINEAR = Gemm(_linear_weight_grad, _num_rows, _bias_grad)
_TRANSPOSED = Gemm(_transposed_weight_grad, _num_rows, _bias_grad)


class _QuantizedOperands(NamedTuple):
    """Rows of a `RowsForWeightGrad`, and the gradient of the output; None if the bias needs no gradient."""

    rows: RowsForWeightGrad
    dy: Tensor | None


def _quantized_weight_grad(weight: Tensor, operands: Sequence[_QuantizedOperands], out: Tensor | None) -> Tensor:
    """Compute dW (N, H) from dequantized rows; see `_linear_weight_grad`."""
    ((rows, _),) = operands
    return _outer_product(weight, *rows.dequantize(), out)


def _num_quantized_rows(operands: _QuantizedOperands) -> int:
    """Return the number of rows of a micro-batch."""
    return operands.rows.num_rows


_QUANTIZED = Gemm(_quantized_weight_grad, _num_quantized_rows, _bias_grad)


def flatten_rows(x: Tensor) -> Tensor:
    """Flatten all leading dimensions into one: (..., H) -> (M, H)."""
    return x if x.dim() == 2 else torch.atleast_2d(x).flatten(0, -2)
