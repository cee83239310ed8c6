"""To quantize matrices and activations, and back: the formats of `kernels/formats.py` in one pass over memory each.

As PyTorch operations, quantizing reads and writes a matrix a dozen times in float32; here it is read once and its bytes
are written once, and the activation between an expert's products is quantized while it is in registers. Both give the
same bytes.

Dimension letters: N, K rows and columns of a matrix (weight matrices are N out x K in), M rows of activations, R block
rows, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualpipe.kernels.common import operator
from dualpipe.kernels.formats import (
    FORMATS,
    Format,
    QuantizedRows,
    dequantize_reference,
    format_of,
    quantize_reference,
)
from dualpipe.kernels.formats import matrix_amax as matrix_amax_reference
from dualpipe.kernels.swiglu import check_gate_up, swiglu_form, swiglu_reference

# --- operators: torch.compile and FakeTensor see these as one call each ----------------------------------------------


@operator(lambda *_: None, mutates=("out",))
def _quantize(x: Tensor, out: Tensor, format: str, amax: Tensor | None, seed: int | None) -> None:
    generator = None if seed is None else torch.Generator(x.device).manual_seed(seed)
    out.copy_(quantize_reference(x, FORMATS[format], amax, generator=generator))


@operator(lambda data, _, rows, columns, dtype: data.new_empty((*data.shape[:-2], rows, columns), dtype=dtype))
def _dequantize(data: Tensor, format: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return dequantize_reference(data, FORMATS[format], rows, columns).to(dtype).contiguous()


@operator(lambda x, format: x.new_empty(x.shape[:-2], dtype=torch.float32))
def _matrix_amax(x: Tensor, format: str) -> Tensor:
    return matrix_amax_reference(x, FORMATS[format])


def _new_rows(x: Tensor, columns: int, block: int) -> tuple[Tensor, Tensor]:
    format = _ROWS[block]
    return (x.new_empty(x.shape[0], columns, dtype=torch.float8_e4m3fn),
            x.new_empty(x.shape[0], format.scales_per_row(columns), dtype=format.scale))


@operator(lambda x, block: _new_rows(x, x.shape[1], block))
def _quantize_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return quantize_rows_reference(x, block)


def _new_activation(gate_up: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    width = gate_up.shape[1] // 2
    return gate_up.new_empty(gate_up.shape[0], width), *_new_rows(gate_up, width, block)


@operator(lambda gate_up, weight, block, *_: _new_activation(gate_up, block))
def _swiglu_quantize(
    gate_up: Tensor, weight: Tensor | None, block: int, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    h = swiglu_reference(gate_up, weight, clamped, alpha, limit).to(gate_up.dtype)
    return h, *quantize_rows_reference(h, block)


@operator(lambda data, format, rows, columns: transpose_blocks_reference(data, FORMATS[format], rows, columns))
def _transpose_blocks(data: Tensor, format: str, rows: int, columns: int) -> Tensor:
    return transpose_blocks_reference(data, FORMATS[format], rows, columns)


# --- public functions ------------------------------------------------------------------------------------------------


def quantize(
    x: Tensor, format: Format | str, amax: Tensor | None = None, *, seed: int | None = None, out: Tensor | None = None
) -> Tensor:
    """(..., N, K) of any floating-point dtype -> its block rows (..., R, bytes) uint8: see `quantize_reference`.

    amax: of each whole matrix (...) in float32, where `x` is a part of it (see `matrix_amax`); only formats with a
    matrix scale look at it. seed: rounds stochastically, the same for the same seed and kind of device; without, to
    the nearest, the same everywhere. out: where to write them, any view whose rows start at multiples of 16 bytes.

    Raises `ValueError` for a shape that the format does not have, and for an `amax` or `out` that does not fit.
    """
    format = format_of(format)
    format.check(x.shape)
    if not x.is_floating_point():
        raise ValueError(f"only floating-point numbers are quantized; got {x.dtype}")
    if amax is not None and (amax.shape != x.shape[:-2] or amax.device != x.device):
        raise ValueError(f"amax must be {tuple(x.shape[:-2])} on {x.device}, one for each matrix; got "
                         f"{tuple(amax.shape)} on {amax.device}")
    shape = (*x.shape[:-2], format.block_rows(x.shape[-2]), format.row_bytes(x.shape[-1]))
    if out is None:
        out = x.new_empty(shape, dtype=torch.uint8)
    elif out.shape != shape or out.dtype is not torch.uint8 or out.device != x.device:
        raise ValueError(f"out must be uint8 of shape {shape} on {x.device}; got {out.dtype} of shape "
                         f"{tuple(out.shape)} on {out.device}")
    _quantize(x.detach(), out, format.name, amax, seed)
    torch.autograd.graph.increment_version(out)  # which the operator does not; what was made of these bytes is outdated
    return out


def dequantize(
    data: Tensor, format: Format | str, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Block rows (..., R, bytes) uint8 -> (..., rows, columns), exact in float32, rounded to `dtype` once.

    Raises `ValueError` where the bytes are not those of such a matrix.
    """
    format = format_of(format)
    _check_data(data, format, rows, columns)
    return _dequantize(data, format.name, rows, columns, dtype)


def matrix_amax(x: Tensor, format: Format | str) -> Tensor:
    """The largest magnitude of each matrix (..., N, K) -> (...), float32; blocks that are not finite do not count.

    Of a matrix in parts: the largest of its parts', which `quantize` takes.
    """
    return _matrix_amax(x.detach(), format_of(format).name)


def quantize_rows(x: Tensor, block: int) -> QuantizedRows:
    """Activations (M, K), each `block` of a row under a scale: for 128 in float32, as in fp8_block; for 32 as in mxfp8.

    A row depends on nothing but itself: what rows without a token hold, NaN too, stays there. Not differentiable.
    Raises `ValueError` for another shape or block.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x must be floating-point (M, K); got {x.dtype} of shape {tuple(x.shape)}")
    return QuantizedRows(*_quantize_rows(x.detach(), _checked_block(block)))


def dequantize_rows(rows: QuantizedRows, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `quantize_rows` made -> (M, K), exact in float32, rounded to `dtype` once."""
    elements, scales = rows
    block = next(size for size, format in _ROWS.items() if format.scale is scales.dtype)
    return (elements.float() * scales.float().repeat_interleave(block, 1)[:, : elements.shape[1]]).to(dtype)


def swiglu_quantize(
    gate_up: Tensor, weight: Tensor | None = None, *, block: int, clamped: bool = False, alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[Tensor, QuantizedRows]:
    """(h, quantize_rows(h, block)) with h = swiglu(gate_up, weight), or clamped_swiglu, bit for bit, in one pass.

    `gate_up` (M, 2I), `weight` (M,) the routing weight of each row -> (M, I) in the dtype of `gate_up`. Not
    differentiable: `swiglu_backward` is the backward. Raises `ValueError` for operands that do not fit.
    """
    check_gate_up(gate_up, weight)
    h, *rows = _swiglu_quantize(gate_up.detach(), weight, _checked_block(block), *swiglu_form(clamped, alpha, limit))
    return h, QuantizedRows(*rows)


def transpose_blocks(data: Tensor, format: Format | str, rows: int, columns: int) -> Tensor:
    """Block rows of the matrices (..., rows, columns) -> those of their transposes, elements and scales moved, exact.

    For formats whose blocks are square. Raises `ValueError` for another one, and where the bytes are not those of such
    a matrix.
    """
    format = format_of(format)
    if format.block[0] != format.block[1]:
        raise ValueError(f"blocks of {format} are {format.block[0]} x {format.block[1]}, not square, so what is "
                         "transposed has other scales: quantize it again, or dequantize it")
    _check_data(data, format, rows, columns)
    return _transpose_blocks(data, format.name, rows, columns)


def _check_data(data: Tensor, format: Format, rows: int, columns: int) -> None:
    shape = (format.block_rows(rows), format.row_bytes(columns))
    if data.dtype is not torch.uint8 or data.shape[-2:] != shape:
        raise ValueError(f"{format} matrices of {rows} x {columns} are uint8 (..., {shape[0]}, {shape[1]}); got "
                         f"{data.dtype} of shape {tuple(data.shape)}")


def _checked_block(block: int) -> int:
    if block not in _ROWS:
        raise ValueError(f"activations are quantized in blocks of {' or '.join(map(str, _ROWS))}; got {block}")
    return block


# --- reference: of what kernels/formats.py has none for --------------------------------------------------------------

_ROWS = {128: Format("rows", 8, (1, 128), torch.float32), 32: FORMATS["mxfp8"]}  # by block, as what rows are quantized


def quantize_rows_reference(x: Tensor, block: int) -> QuantizedRows:
    """The rows of (M, K), as a matrix with scales for parts of rows."""
    format, columns = _ROWS[block], x.shape[1]
    data = quantize_reference(x, format)
    elements = format.elements(data, columns).squeeze(-2).view(torch.float8_e4m3fn)
    return QuantizedRows(elements.contiguous(), format.scales(data, columns).contiguous())


def transpose_blocks_reference(data: Tensor, format: Format, rows: int, columns: int) -> Tensor:
    """Elements as a matrix, which is transposed and cut into block rows again; scales likewise."""
    band, bands = format.block[0], format.block_rows(columns)
    turned = data.new_zeros((*data.shape[:-2], bands, format.row_bytes(rows)))
    elements = format.elements(data, columns).flatten(-3, -2)[..., :rows, :].mT  # (..., columns, rows)
    elements = torch.nn.functional.pad(elements, (0, 0, 0, -columns % band))
    format.elements(turned, rows).copy_(elements.unflatten(-2, (bands, band)))
    format.scales(turned, rows).copy_(format.scales(data, columns).mT)
    return turned
