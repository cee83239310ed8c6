"""Products of layers with quantized weights: what they are computed in, and from which bytes.

    forward           y = x W^T    FP8: the rows of x quantized, times the bytes of W as they are stored
    input gradient    dx = dy W    FP8 too where W can be transposed without other scales, that is, in square blocks
    weight gradient   dW = dy^T x  of dy and x as they were, or by choice of what their quantized rows stand for

Where a product is not in FP8, rows stay as they are, and the weight is dequantized on its way into the product, each
number rounded once to the dtype of the rows. DeepSeek-V3 (arXiv:2412.19437, section 3.3) has all three in FP8. mxfp8's
input gradient could be, by quantizing once more along the other dimension; of Gaussians it is then 3.8% of its norm off
in float64, instead of 2.7%.

A layer has `products`: "auto" is FP8 for formats that compute where rows are in half precision, and "weight-only"
elsewhere; both can be asked for. With `fp8_weight_grad` it keeps rows of one byte a number for the weight gradient, not
two, and the deferred ones' gradients likewise; the product itself is then of the same numbers in half precision.

Nothing of a weight is quantized here, and it is transposed once, for all micro-batches that use the same bytes. A dense
weight counts as that of one expert.

Dimension letters: M rows, E experts, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualpipe.kernels.formats import Format, QuantizedRows
from dualpipe.kernels.grouped_gemm import HALF
from dualpipe.kernels.grouped_gemm_quantized import grouped_gemm_dequantize, grouped_gemm_fp8
from dualpipe.kernels.quantize import dequantize_rows, quantize_rows
from dualpipe.quantized import QuantizedTensor

Products = Literal["auto", "fp8", "weight-only"]


def row_block(layer: Any, dtype: torch.dtype) -> int | None:
    """How many numbers of a row share a scale where `layer` quantizes rows of `dtype` for its product; None where it
    takes them as they are. Raises ValueError for `products` that there are not, or that its weight's format has not."""
    weight = getattr(layer, "weight", None)
    if isinstance(weight, DTensor):
        with torch.no_grad():  # 6 us instead of 23: it need not be differentiable
            weight = weight.to_local()
    if not isinstance(weight, QuantizedTensor):
        return None
    format, products = weight.format, layer.products
    if products not in get_args(Products):
        raise ValueError(f"products must be one of {', '.join(map(repr, get_args(Products)))}; got {products!r}")
    if products == "fp8" and not format.computes:
        raise ValueError(f"a weight in {format} has no products in FP8; leave products at 'auto', or choose another "
                         "format")
    fp8 = products == "fp8" or (products == "auto" and format.computes and dtype in HALF)
    return format.block[1] if fp8 else None


def product(
    x: Tensor | QuantizedRows, weight: QuantizedTensor, ends: Tensor, bias: Tensor | None, gather: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(M, K) -> (M, N) in `dtype`, in FP8 where rows are quantized; the rest as for `grouped_gemm`."""
    data, format, shape = _operands(weight)
    if isinstance(x, QuantizedRows):
        return grouped_gemm_fp8(x, data, format, shape, ends, out_dtype=dtype, bias=bias, gather=gather)
    return grouped_gemm_dequantize(x, data, format, shape, ends, bias=bias, gather=gather)


def input_grad(
    dy: Tensor, weight: Tensor, ends: Tensor, block: int | None
) -> tuple[Tensor, QuantizedRows | None]:
    """(M, N) -> (M, K), and the rows of `dy` if they were quantized for it. block: the `row_block` of the forward."""
    assert isinstance(weight, QuantizedTensor), "it was in the forward"
    data, format, (experts, rows, columns) = _operands(weight)
    if block is None or block != format.block[0]:
        return grouped_gemm_dequantize(dy, data, format, (experts, rows, columns), ends, transposed=True), None
    quantized, turned = quantize_rows(dy, block), weight.transposed_rows()
    return grouped_gemm_fp8(quantized, turned, format, (experts, columns, rows), ends, out_dtype=dy.dtype), quantized


def weight_grad_of_rows(
    weight_grad: Callable[..., Tensor], dy: Tensor, dy_rows: QuantizedRows | None, x_rows: QuantizedRows, block: int
) -> Callable[..., Tensor]:
    """`weight_grad(weight, dy, x, out=None)` of what quantized rows stand for, whatever it is then given for them."""
    return partial(_of_rows, weight_grad, dy_rows or quantize_rows(dy, block), x_rows, dy.dtype)


def _of_rows(
    weight_grad: Callable[..., Tensor], dy: QuantizedRows, x: QuantizedRows, dtype: torch.dtype, weight: Tensor,
    _: Any, __: Any, out: Tensor | None = None,
) -> Tensor:
    return weight_grad(weight, dequantize_rows(dy, dtype), dequantize_rows(x, dtype), out)


def _operands(weight: QuantizedTensor) -> tuple[Tensor, Format, tuple[int, int, int]]:
    """Block rows, format and shape (E, N, K)."""
    *experts, rows, columns = weight.matrix_shape
    return weight.block_rows, weight.format, (experts[0] if experts else 1, rows, columns)
