"""Grouped products of rows with quantized weights, whose bytes are read as they are stored.

`grouped_gemm_fp8` multiplies e4m3 by e4m3 and promotes partial sums to float32 wherever a scale changes, every 128
numbers (fp8_block) or 32 (mxfp8). `grouped_gemm_dequantize` takes rows of any floating-point dtype and weights of any
format, and dequantizes tiles of them on their way to the product: the weights have no copy in bfloat16 in memory.
What rows, `offs`, `gather` and `bias` are is in grouped_gemm.py; a dense product is that of one expert.

Dimension letters: M rows, E experts, K in_features, N out_features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualpipe.kernels.common import operator
from dualpipe.kernels.formats import FORMATS, Format, QuantizedRows, dequantize_reference
from dualpipe.kernels.grouped_gemm import check_operands, grouped_gemm

# --- operators -------------------------------------------------------------------------------------------------------


def _new_rows(x: Tensor, gather: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x if gather is None else gather).shape[0], columns, dtype=dtype)


@operator(lambda elements, _, __, ___, n, ____, _____, ______, gather, dtype: _new_rows(elements, gather, n, dtype))
def _grouped_gemm_fp8(
    elements: Tensor, scales: Tensor, data: Tensor, format: str, n: int, k: int, offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:
    return _reference_fp8(QuantizedRows(elements, scales), data, FORMATS[format], n, k, offs, bias, gather, out_dtype)


@operator(lambda x, _, __, n, k, ___, ____, gather, dgrad: _new_rows(x, gather, k if dgrad else n, x.dtype))
def _grouped_gemm_dequantize(
    x: Tensor, data: Tensor, format: str, n: int, k: int, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    transposed: bool,
) -> Tensor:
    return _reference_dequantize(x, data, FORMATS[format], n, k, offs, bias, gather, transposed)


# --- public functions ------------------------------------------------------------------------------------------------


def grouped_gemm_fp8(
    rows: QuantizedRows, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, *,
    out_dtype: torch.dtype, bias: Tensor | None = None, gather: Tensor | None = None,
) -> Tensor:
    """y[m] = w[e] x[m] (+ bias[e]) for every row m of expert e, of quantized rows and quantized weights.

    `rows`: x (M, K), with a scale for as many columns as those of `format`; `data` (E, block rows, bytes) uint8: w of
    `shape` (E, N, K), in a format that computes; `offs` (E,) int32 running ends; `bias` (E, N) in `out_dtype`
    -> (M, N), summed in float32 and rounded once. `gather` and rows past `offs[-1]` as for `grouped_gemm`. For the
    input gradient give the transposed block rows and (E, K, N). Raises `ValueError` for operands that do not fit.
    """
    elements, scales = rows
    if not format.computes:
        raise ValueError(f"{format} has no products of quantized rows: use grouped_gemm_dequantize")
    blocks = format.scales_per_row(shape[2])
    scale = torch.float32 if format.scale is torch.float32 else torch.float8_e8m0fnu
    if elements.dtype is not torch.float8_e4m3fn or elements.dim() != 2:
        raise ValueError(f"the elements of rows must be a matrix of float8_e4m3fn; got {elements.dtype} of shape "
                         f"{tuple(elements.shape)}")
    if (scales.shape, scales.dtype) != ((elements.shape[0], blocks), scale):
        raise ValueError(f"rows must have scales ({elements.shape[0]}, {blocks}) in {scale} for {format}; got "
                         f"{tuple(scales.shape)} in {scales.dtype}")
    _check(elements.new_empty((), dtype=out_dtype).expand(elements.shape), data, format, shape, offs, bias, gather, 2)
    return _grouped_gemm_fp8(elements, scales, data, format.name, *shape[1:], offs, bias, gather, out_dtype)


def grouped_gemm_dequantize(
    x: Tensor, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, *, bias: Tensor | None = None,
    gather: Tensor | None = None, transposed: bool = False,
) -> Tensor:
    """y[m] = w[e] x[m] (+ bias[e]) for every row m of expert e, of weights of any format.

    `x` (M, K), `data` (E, block rows, bytes) uint8: w of `shape` (E, N, K), each number rounded once, to the dtype of
    `x`; `offs` (E,) int32 running ends; `bias` (E, N) in the dtype of `x` -> (M, N). `transposed`: the input gradient,
    x[m] w[e] with `x` (M, N) -> (M, K), and `bias` (E, K). `gather` and rows past `offs[-1]` as for `grouped_gemm`.
    Raises `ValueError` for operands that do not fit.
    """
    _check(x, data, format, shape, offs, bias, gather, 1 if transposed else 2)
    return _grouped_gemm_dequantize(x, data, format.name, *shape[1:], offs, bias, gather, transposed)


def _check(
    x: Tensor, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, summed: int,
) -> None:
    """Refuse operands that do not fit; `summed`: the dimension of the weights that the product sums over."""
    experts, n, k = shape
    expected = (experts, format.block_rows(n), format.row_bytes(k))
    if data.dtype is not torch.uint8 or data.shape != expected:
        raise ValueError(f"data of {format} for weights {tuple(shape)} must be uint8 of shape {expected}; got "
                         f"{data.dtype} of shape {tuple(data.shape)}")
    w = torch.empty((), dtype=x.dtype, device=data.device).expand(shape)  # as the product sees it
    check_operands(offs, [("x", 1), ("w", 2)], gather, bias, w=w if summed == 2 else w.mT, x=x)


# --- references: products of what is dequantized, summed in float32 --------------------------------------------------


def _reference_fp8(
    rows: QuantizedRows, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:
    x = rows.elements.float() * rows.scales.float().repeat_interleave(format.block[1], 1)[:, :k]
    w = dequantize_reference(data, format, n, k)
    return grouped_gemm(x, w, offs, bias=None if bias is None else bias.float(), gather=gather).to(out_dtype)


def _reference_dequantize(
    x: Tensor, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    transposed: bool,
) -> Tensor:
    w = dequantize_reference(data, format, n, k).to(x.dtype)
    return grouped_gemm(x, w.mT if transposed else w, offs, bias=bias, gather=gather)
