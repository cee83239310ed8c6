"""GEMMs of layers with quantized weights: their precision, and the bytes that they read.

    forward           y = x W^T    FP8: quantized rows of x, times the stored bytes of W
    input gradient    dx = dy W    FP8 too if the blocks of W are square: its transpose then has the same scales
    weight gradient   dW = dy^T x  from dy and x in their own dtype, or optionally from their dequantized rows

A GEMM that is not in FP8 takes rows in their own dtype. It dequantizes the weight while loading it, and rounds every
element once to the dtype of the rows. DeepSeek-V3 (arXiv:2412.19437, section 3.3) has all three GEMMs in FP8. The input
gradient of mxfp8 could be in FP8, by quantizing W a second time along the other dimension; for Gaussian values its
error would be 3.8% of its norm, measured in float64, instead of 2.7%.

A layer's attribute `gemm_precision` chooses the precision: "auto" is FP8 if the weight's format supports FP8 GEMMs and
rows are in half precision, and "weight-only" otherwise; "fp8" and "weight-only" can also be requested.

With `fp8_weight_grad` the layer saves x, and a deferred weight gradient keeps dy, as quantized rows with one byte per
element instead of two. The GEMM of the weight gradient then runs on their dequantized values in half precision.

No function here quantizes a weight. The transpose of a weight is cached until its bytes change, so that all
micro-batches of a step share it. A dense weight is treated as one expert.

Dimension letters: M rows, E experts, K in_features, N out_features.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualpipe.kernels.formats import Format, QuantizedRows
from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.kernels.grouped_gemm_quantized import grouped_gemm_dequantize, grouped_gemm_fp8
from dualpipe.kernels.quantize import dequantize_rows, quantize_rows
from dualpipe.quantized import QuantizedTensor

GemmPrecision = Literal["auto", "fp8", "weight-only"]


class HasGemmPrecision:
    """Base class of layers that choose the precision of their GEMMs with a quantized weight."""

    gemm_precision: GemmPrecision = "auto"


def row_block(layer: Any, dtype: torch.dtype) -> int | None:
    """Return the number of elements of a row that share a scale if `layer` quantizes rows of `dtype`, else None.

    Raises:
        ValueError: `layer.gemm_precision` is unknown, or the format of the layer's weight does not support it.
    """
    weight = getattr(layer, "weight", None)
    if isinstance(weight, DTensor):
        with torch.no_grad():  # 6 us instead of 23: the result need not be differentiable
            weight = weight.to_local()
    if not isinstance(weight, QuantizedTensor):
        return None
    format = weight.format  # `format.computes`: it has FP8 GEMMs
    precision = layer.gemm_precision
    if precision not in get_args(GemmPrecision):
        choices = ", ".join(map(repr, get_args(GemmPrecision)))
        raise ValueError(f"gemm_precision is {precision!r}, expected one of {choices}")
    if precision == "fp8" and not format.computes:
        raise ValueError(f"gemm_precision is 'fp8', but the format {format} of the weight has no FP8 GEMM; leave "
                         "gemm_precision at 'auto', or choose another format")
    is_fp8 = precision == "fp8" or (precision == "auto" and format.computes and dtype in HALF)
    return format.block[1] if is_fp8 else None


def forward_gemm(
    x: Tensor | QuantizedRows, weight: QuantizedTensor, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute y = x W^T: (M, K) -> (M, N) in `dtype`, in FP8 if `x` is quantized.

    `offs`, `bias` and `gather` are those of `dualpipe.kernels.grouped_gemm.grouped_gemm`.
    """
    data, format, shape = _operands(weight)
    if isinstance(x, QuantizedRows):
        return grouped_gemm_fp8(x, data, format, shape, offs, out_dtype=dtype, bias=bias, gather=gather)
    return grouped_gemm_dequantize(x, data, format, shape, offs, bias=bias, gather=gather)


def input_grad(
    dy: Tensor, weight: Tensor, offs: Tensor, block: int | None
) -> tuple[Tensor, QuantizedRows | None]:
    """Compute dx = dy W: (M, N) -> (M, K), and the quantized rows of `dy` if the GEMM is in FP8, else None.

    block: the result of `row_block` in the forward.
    """
    assert isinstance(weight, QuantizedTensor), "the weight was quantized in the forward"
    data, format, shape = _operands(weight)
    if block is None or block != format.block[0]:  # not in FP8, or blocks that are not square
        return grouped_gemm_dequantize(dy, data, format, shape, offs, transposed=True), None
    num_experts, out_features, in_features = shape
    dy_rows = quantize_rows(dy, block)
    transposed_data = weight.transposed_rows()
    transposed_shape = (num_experts, in_features, out_features)
    dx = grouped_gemm_fp8(dy_rows, transposed_data, format, transposed_shape, offs, out_dtype=dy.dtype)
    return dx, dy_rows


class RowsForWeightGrad(NamedTuple):
    """Operands of a weight gradient as quantized rows, to be dequantized to `dtype`."""

    dy: QuantizedRows
    x: QuantizedRows
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """Return the number of rows of `dy`."""
        return self.dy.elements.shape[0]

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Return dy and x."""
        return dequantize_rows(self.dy, self.dtype), dequantize_rows(self.x, self.dtype)


def quantize_for_weight_grad(
    dy: Tensor, dy_rows: QuantizedRows | None, x_rows: QuantizedRows, block: int
) -> RowsForWeightGrad:
    """Return the operands of a weight gradient as quantized rows. dy_rows: those of `dy`; None: quantize `dy` now."""
    return RowsForWeightGrad(dy_rows or quantize_rows(dy, block), x_rows, dy.dtype)


def _operands(weight: QuantizedTensor) -> tuple[Tensor, Format, tuple[int, int, int]]:
    """Return the block rows, the format and the shape (E, N, K) of a weight."""
    *experts, out_features, in_features = weight.matrix_shape
    num_experts = experts[0] if experts else 1
    return weight.block_rows, weight.format, (num_experts, out_features, in_features)
