"""Quantization and dequantization of matrices and activations in the formats of `kernels/formats.py`, in one pass.

As PyTorch operations, quantization reads and writes a matrix 12 times in float32. Here, the matrix is read once and its
bytes are written once; the activation between an expert's GEMMs is quantized while it is in registers. Kernels and
references give the same bytes.

Dimension letters: E matrices, N rows, K columns (weight matrices are N out x K in), M rows of activations, R block
rows, I intermediate size.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.kernels.common import (
    RowTile,
    cdiv,
    compute_dtype,
    operator,
    tl,
    tl_dtype,
    triton,
    use_triton,
    with_dense_rows,
)
from dualpipe.kernels.formats import (
    FORMATS,
    Format,
    QuantizedRows,
    dequantize_reference,
    format_of,
    quantize_reference,
)
from dualpipe.kernels.formats import matrix_amax as matrix_amax_reference
from dualpipe.kernels.launcher import MAX_LAUNCHERS, Launcher
from dualpipe.kernels.swiglu import activate, check_gate_up, load_gate_up, swiglu_form, swiglu_reference

# --- kernels ---------------------------------------------------------------------------------------------------------
# These kernels handle elements and scales as integers, with exact arithmetic on bits, so that bytes do not depend on
# the architecture. Functions and constants with the same name in kernels/formats.py are explained there.


@triton.jit
def _exponent(amax, MANTISSA: tl.constexpr, SHIFT: tl.constexpr):
    """Return the biased exponent of the smallest sufficient power of two."""
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - SHIFT + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)


@triton.jit
def _float32_scale(amax):
    """Return the bits of a block scale."""
    return (tl.maximum(tl.div_rn(amax, 448.0), 2.0**-100).to(tl.int32, bitcast=True) + 0x8) & -0x10


@triton.jit
def _matrix_scale(amax):
    """Return the bits of a matrix scale."""
    return tl.minimum(tl.maximum(_exponent(tl.div_rn(amax, 6.0), 0x680000, 8), 27), 254) << 23


@triton.jit
def _encode(scaled, BITS: tl.constexpr):
    """Encode values in units of their scale as elements, int32."""
    LARGEST: tl.constexpr = 448.0 if BITS == 8 else 6.0
    MIN_EXPONENT: tl.constexpr = -6 if BITS == 8 else 0
    MANTISSA_BITS: tl.constexpr = 3 if BITS == 8 else 1
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, MIN_EXPONENT)
    num_ulps = magnitude * ((127 + MANTISSA_BITS - exponent) << 23).to(tl.float32, bitcast=True)  # below 16
    rounded = (num_ulps + 8388608.0).to(tl.int32, bitcast=True) & 0xFF  # adding 2^23 rounds to integers, ties to even
    return (((exponent - MIN_EXPONENT) << MANTISSA_BITS) + rounded) | (((bits >> 31) & 1) << (BITS - 1))


@triton.jit
def decode(elements, BITS: tl.constexpr):
    """Decode elements, int32 -> float32."""
    MANTISSA_BITS: tl.constexpr = 3 if BITS == 8 else 1
    BIAS: tl.constexpr = 7 if BITS == 8 else 1
    low = elements & ((1 << (BITS - 1)) - 1)  # without the sign
    subnormal = (low.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA_BITS)).to(tl.int32, bitcast=True)
    bits = tl.where((low >> MANTISSA_BITS) == 0, subnormal, (low << (23 - MANTISSA_BITS)) + ((127 - BIAS) << 23))
    if BITS == 8:
        bits = tl.where(low == 127, 0x7FC00000, bits)
    return (bits | ((elements >> (BITS - 1)) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def decode_scale(scale, SCALE: tl.constexpr):
    """Decode stored scales, int32 -> float32."""
    if SCALE == "e4m3":
        return decode(scale, 8)
    if SCALE == "e8m0":
        scale = tl.where(scale == 255, 0x7FC00000, tl.where(scale == 0, 0x400000, scale << 23))
    return scale.to(tl.float32, bitcast=True)


@triton.jit
def _quantize_tile(
    x, matrix_scale, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):
    """Quantize x (ROWS, COLS) float32 -> elements (ROWS, COLS), scales (ROWS / BLOCK_HEIGHT, COLS / BLOCK), int32.

    Both results have their stored bits. Compares magnitudes as integers: an infinity is larger than every number, and
    NaN is larger than an infinity.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    blocks = tl.reshape(magnitude, (ROWS // BLOCK_HEIGHT, BLOCK_HEIGHT, COLS // BLOCK, BLOCK))
    largest = tl.max(tl.max(blocks, 3), 1)
    is_broken = largest >= 0x7F800000
    amax = tl.where(is_broken, 0, largest).to(tl.float32, bitcast=True)
    x = tl.reshape(x, (ROWS // BLOCK_HEIGHT, BLOCK_HEIGHT, COLS // BLOCK, BLOCK))
    x = tl.where(is_broken[:, None, :, None], 0.0, x)
    if SCALE == "e8m0" or POWER_OF_TWO:
        biased = _exponent(amax, 0x680000, 8) if BITS == 8 else _exponent(amax, 0x5FFFFF, 2)
        biased = tl.maximum(biased, 0 if SCALE == "e8m0" else 27)
        # Exact; the factor may be subnormal: 2^-127.
        x *= ((254 - biased) << 23).to(tl.float32, bitcast=True)[:, None, :, None]
        scale = biased if SCALE == "e8m0" else biased << 23
    else:
        if SCALE == "e4m3":
            relative_scale = tl.div_rn(tl.div_rn(amax, matrix_scale), 6.0)
            scale = _encode(tl.maximum(relative_scale, 0.015625), 8)
            unit = decode(scale, 8) * matrix_scale
        else:
            scale = _float32_scale(amax)
            unit = scale.to(tl.float32, bitcast=True)
        x = tl.div_rn(
            x, tl.broadcast_to(unit[:, None, :, None], (ROWS // BLOCK_HEIGHT, BLOCK_HEIGHT, COLS // BLOCK, BLOCK)))
    NAN_BYTE: tl.constexpr = 255 if SCALE == "e8m0" else 127
    NAN: tl.constexpr = 0x7FC00000 if SCALE == "float32" else NAN_BYTE
    return _encode(tl.reshape(x, (ROWS, COLS)), BITS), tl.where(is_broken, NAN, scale)


@triton.jit
def _store_tile(
    elements_ptr, scales_ptr, elements, scales, first, column, N, K, elements_block_row, scales_block_row,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):
    """Store the results of `_quantize_tile`. In the last block row, stores the rows past N as well; they are zeros."""
    if BITS == 4:
        low, high = tl.split(tl.reshape(elements, (ROWS, COLS // 2, 2)))
        elements = low | (high << 4)
    rows = first + tl.arange(0, ROWS)
    row_bytes = K * BITS // 8
    if BLOCK_HEIGHT == 1:
        starts = rows.to(tl.int64) * elements_block_row
    else:  # the tile is in one block row, so offsets in it have 32 bits
        elements_ptr += (first // BLOCK_HEIGHT).to(tl.int64) * elements_block_row
        starts = (rows - first) * row_bytes
    at = column * BITS // 8 + tl.arange(0, COLS * BITS // 8)
    tl.store(elements_ptr + starts[:, None] + at[None, :], elements.to(tl.uint8),
             mask=(rows // BLOCK_HEIGHT * BLOCK_HEIGHT < N)[:, None] & (at < row_bytes)[None, :])
    block_rows = first // BLOCK_HEIGHT + tl.arange(0, ROWS // BLOCK_HEIGHT)
    blocks = column // BLOCK + tl.arange(0, COLS // BLOCK)
    tl.store(scales_ptr + block_rows.to(tl.int64)[:, None] * scales_block_row + blocks[None, :],
             scales.to(scales_ptr.dtype.element_ty),
             mask=(block_rows * BLOCK_HEIGHT < N)[:, None] & (blocks * BLOCK < K)[None, :])


@triton.jit(do_not_specialize=["N"])
def _quantize_kernel(
    x_ptr,  # (E, N, K), contiguous rows
    elements_ptr,  # (E, R, ...) bytes
    scales_ptr,  # (E, R, ...) bytes, or int32 for float32 scales
    amax_ptr,  # (E,) or unused
    N, K, x_matrix, x_row, elements_matrix, elements_block_row, scales_matrix, scales_block_row,
    used,  # bytes of elements and scales in a block row
    row_bytes,  # bytes of a block row, with zeros and the matrix scale, which TAIL writes
    MATRIX_SCALE: tl.constexpr, TAIL: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BLOCK_HEIGHT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr,
):
    """Quantize one tile (ROWS, COLS) of a matrix per program."""
    tiles = tl.maximum(tl.cdiv(N, ROWS), 1)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    column = tl.program_id(1) * COLS
    rows = first + tl.arange(0, ROWS)
    cols = column + tl.arange(0, COLS)
    x = tl.load(x_ptr + matrix * x_matrix + rows.to(tl.int64)[:, None] * x_row + cols[None, :],
                mask=(rows < N)[:, None] & (cols < K)[None, :], other=0.0).to(tl.float32)
    matrix_scale_bits = _matrix_scale(tl.load(amax_ptr + matrix)) if MATRIX_SCALE else tl.full((), 0, tl.int32)
    matrix_scale = matrix_scale_bits.to(tl.float32, bitcast=True)
    elements, scales = _quantize_tile(x, matrix_scale, ROWS, COLS, BLOCK_HEIGHT, BLOCK, BITS, SCALE, POWER_OF_TWO)
    elements_ptr += matrix * elements_matrix
    _store_tile(elements_ptr, scales_ptr + matrix * scales_matrix, elements, scales, first, column, N, K,
                elements_block_row, scales_block_row, ROWS, COLS, BLOCK_HEIGHT, BLOCK, BITS)
    if TAIL and tl.program_id(1) == 0:
        block_rows = first // BLOCK_HEIGHT + tl.arange(0, ROWS // BLOCK_HEIGHT)
        at = row_bytes - 32 + tl.arange(0, 32)  # at most 19 of these bytes are past `used`
        scale_start = row_bytes - 4 if MATRIX_SCALE else row_bytes
        tail = tl.where(at < scale_start, 0, matrix_scale_bits >> (tl.maximum(at - scale_start, 0) * 8))
        tl.store(elements_ptr + block_rows.to(tl.int64)[:, None] * elements_block_row + at[None, :],
                 tl.broadcast_to(tail.to(tl.uint8)[None, :], (ROWS // BLOCK_HEIGHT, 32)),
                 mask=(block_rows * BLOCK_HEIGHT < N)[:, None] & (at >= used)[None, :])


@triton.jit(do_not_specialize=["M"])
def _swiglu_quantize_kernel(
    gate_up_ptr,  # (M, 2I), rows `stride` apart
    weight_ptr,  # (M,) or unused
    h_ptr,  # (M, I) contiguous
    elements_ptr,  # (M, I) contiguous bytes
    scales_ptr,  # (M, I / BLOCK) contiguous bytes, or int32 for float32 scales
    M, width, stride,  # width is I
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_WEIGHT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Compute and quantize one tile (ROWS, COLS) of the activation per program."""
    first = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLS
    rows = first + tl.arange(0, ROWS)
    cols = column + tl.arange(0, COLS)
    gate, up = load_gate_up(gate_up_ptr, rows, column, M, width, stride, CLAMPED, ROWS, COLS)
    gate, s, u = activate(gate.to(COMPUTE), up.to(COMPUTE), ALPHA, LIMIT, CLAMPED)
    h = u * gate * s
    if HAS_WEIGHT:
        h = h * tl.load(weight_ptr + rows, mask=rows < M, other=0.0).to(COMPUTE)[:, None]
    h = h.to(h_ptr.dtype.element_ty)  # quantize the rounded values
    h_ptrs = h_ptr + rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(h_ptrs, h, mask=(rows < M)[:, None] & (cols < width)[None, :])
    elements, scales = _quantize_tile(h.to(tl.float32), 0.0, ROWS, COLS, BLOCK_HEIGHT, BLOCK, BITS, SCALE, False)
    _store_tile(elements_ptr, scales_ptr, elements, scales, first, column, M, width, width, tl.cdiv(width, BLOCK), ROWS,
                COLS, BLOCK_HEIGHT, BLOCK, BITS)


@triton.jit(do_not_specialize=["N"])
def _dequantize_kernel(
    y_ptr,  # (E, N, K) contiguous
    elements_ptr,  # (E, R, ...) bytes
    scales_ptr,  # (E, R, ...) bytes, or int32 for float32 scales
    matrix_scales_ptr,  # (E, R) or unused
    N, K, elements_matrix, elements_block_row, scales_matrix, scales_block_row, matrix_scales_matrix,
    matrix_scales_block_row,
    MATRIX_SCALE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, SCALE: tl.constexpr,
):
    """Dequantize one tile (ROWS, COLS) of a matrix per program."""
    tiles = tl.maximum(tl.cdiv(N, ROWS), 1)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS
    block_rows = (rows // BLOCK_HEIGHT).to(tl.int64)
    row_bytes = K * BITS // 8
    at = column * BITS // 8 + tl.arange(0, COLS * BITS // 8)
    starts = matrix * elements_matrix + block_rows * elements_block_row + (rows % BLOCK_HEIGHT).to(tl.int64) * row_bytes
    elements = tl.load(elements_ptr + starts[:, None] + at[None, :],
                       mask=(rows < N)[:, None] & (at < row_bytes)[None, :], other=0).to(tl.int32)
    if BITS == 4:
        elements = tl.interleave(elements & 0xF, elements >> 4)
    y = tl.reshape(decode(elements, BITS), (ROWS, COLS // BLOCK, BLOCK))
    blocks = column // BLOCK + tl.arange(0, COLS // BLOCK)
    scales = tl.load(scales_ptr + matrix * scales_matrix + (block_rows * scales_block_row)[:, None] + blocks[None, :],
                     mask=(rows < N)[:, None] & (blocks * BLOCK < K)[None, :], other=0)
    unit = decode_scale(scales.to(tl.int32), SCALE)
    if MATRIX_SCALE:
        matrix_scales_ptrs = matrix_scales_ptr + matrix * matrix_scales_matrix + block_rows * matrix_scales_block_row
        unit *= tl.load(matrix_scales_ptrs, mask=rows < N, other=0.0)[:, None]
    cols = column + tl.arange(0, COLS)
    tl.store(y_ptr + (matrix * N + rows)[:, None] * K + cols[None, :],
             tl.reshape(y * unit[:, :, None], (ROWS, COLS)).to(y_ptr.dtype.element_ty),
             mask=(rows < N)[:, None] & (cols < K)[None, :])


@triton.jit
def _amax_kernel(
    x_ptr,  # (E, N, K), contiguous rows
    amax_ptr,  # (E,) float32 as int32, initialized to zeros
    N, K, x_matrix, x_row, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Update the largest magnitude of a matrix with one tile (ROWS, COLS) per program."""
    tiles = tl.cdiv(N, ROWS)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    x = tl.load(x_ptr + matrix * x_matrix + rows.to(tl.int64)[:, None] * x_row + cols[None, :],
                mask=(rows < N)[:, None] & (cols < K)[None, :], other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.reshape(magnitude, (ROWS * COLS // BLOCK, BLOCK)), 1)
    tl.atomic_max(amax_ptr + matrix, tl.max(tl.where(largest < 0x7F800000, largest, 0), 0))


@triton.jit
def _transpose_kernel(
    x_ptr,  # (E, N / BLOCK, bytes)
    y_ptr,  # (E, K / BLOCK, bytes)
    x_scales_ptr,  # (E, N / BLOCK, K / BLOCK) float32 as int32
    y_scales_ptr,  # (E, K / BLOCK, N / BLOCK) float32 as int32
    N, K, x_matrix, x_block_row, y_matrix, y_block_row, x_scales_matrix, x_scales_block_row, y_scales_matrix,
    y_scales_block_row,
    used,  # bytes of elements and scales in a block row of y
    row_bytes,  # bytes of a block row of y, with zeros
    BLOCK: tl.constexpr,
):
    """Transpose one block per program, by reading its rows as columns: tl.trans of Triton 3.7 is wrong for bytes."""
    block_row = tl.program_id(0).to(tl.int64)
    block_col = tl.program_id(1).to(tl.int64)
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK)[None, :]
    col = tl.arange(0, BLOCK)[:, None]
    x_ptr = x_ptr + matrix * x_matrix + block_row * x_block_row
    y_ptr = y_ptr + matrix * y_matrix + block_col * y_block_row
    inside = block_row * BLOCK + row < N
    block = tl.load(x_ptr + row * K + (block_col * BLOCK + col), mask=inside & (block_col * BLOCK + col < K), other=0)
    tl.store(y_ptr + col * N + (block_row * BLOCK + row), block, mask=inside & (col < BLOCK))
    scale = tl.load(x_scales_ptr + matrix * x_scales_matrix + block_row * x_scales_block_row + block_col)
    tl.store(y_scales_ptr + matrix * y_scales_matrix + block_col * y_scales_block_row + block_row, scale)
    if block_row == 0:
        at = used + tl.arange(0, 16)
        tl.store(y_ptr + at, tl.zeros((16,), tl.uint8), mask=at < row_bytes)


# --- launchers -------------------------------------------------------------------------------------------------------

ROW_FORMATS = {128: Format("rows", 8, (1, 128), torch.float32), 32: FORMATS["mxfp8"]}  # formats of rows, by block
_SCALES = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3", torch.float32: "float32"}


def tile_of(format: Format, dtype: torch.dtype) -> RowTile:
    """Return the tile of one program: a block, or for blocks of one row, two accesses of 16 bytes per thread."""
    if format.block[0] > 1:
        return RowTile(*format.block, 8)
    return RowTile(8, 256, 4).scaled_for(dtype)


def constants(format: Format, tile: RowTile) -> dict[str, Any]:
    """Return the constants and options that all kernels of a format share."""
    return dict(ROWS=tile.rows, COLS=tile.cols, BLOCK_HEIGHT=format.block[0], BLOCK=format.block[1], BITS=format.bits,
                SCALE=_SCALES[format.scale], num_warps=tile.warps)


class _BlockRows(NamedTuple):
    """Operands of the kernels for quantized matrices.

    elements: (E, R, ...) bytes; rows start with their elements.
    scales: (E, R, ...) bytes, or int32 for float32 scales.
    used_bytes: bytes of elements and scales in a block row; 0 if both are separate tensors.
    row_bytes: bytes of a block row; 0 if elements and scales are separate tensors.
    """

    elements: Tensor
    scales: Tensor
    used_bytes: int = 0
    row_bytes: int = 0

    @classmethod
    def from_data(cls, data: Tensor, format: Format, columns: int) -> _BlockRows:
        """Return the operands for block rows (..., R, bytes)."""
        data = data.view(-1, *data.shape[-2:])
        scales = _as_integers(format.scales(data, columns))
        element_bytes = format.block[0] * columns * format.bits // 8
        scale_bytes = format.scales_per_row(columns) * format.scale.itemsize
        return cls(data, scales, element_bytes + scale_bytes, format.row_bytes(columns))

    @classmethod
    def from_rows(cls, elements: Tensor, scales: Tensor) -> _BlockRows:
        """Return the operands for the elements and scales of `QuantizedRows`."""
        return cls(elements.view(torch.uint8)[None], _as_integers(scales)[None])

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the elements, then of the scales."""
        return *_strides(self.elements), *_strides(self.scales)


def _as_integers(scales: Tensor) -> Tensor:
    """View scales as int32 or uint8."""
    return scales.view(torch.int32 if scales.dtype is torch.float32 else torch.uint8)


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of matrices and of rows.

    The stride of a single matrix is 0: its real value would depend on its number of rows, which changes every step.
    """
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1)


def _as_matrices(x: Tensor) -> Tensor:
    """Reshape (..., N, K) -> (E, N, K) with contiguous rows; copies only if necessary."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _grid(x: Tensor, tile: RowTile) -> tuple[int, int]:
    """Return the grid for matrices (E, N, K). Matrices and rows share its first dimension: others end at 65535."""
    return x.shape[0] * max(cdiv(x.shape[1], tile.rows), 1), cdiv(x.shape[2], tile.cols)


def _launch_quantize(x: Tensor, out: _BlockRows, format: Format, amax: Tensor | None = None) -> None:
    """Quantize `x` (E, N, K) to `out`. amax: (E,), for formats with a matrix scale."""
    launch, tile = _quantize_launcher(format, x.dtype, amax is not None, out.row_bytes > 0)
    launch(
        _grid(x, tile), (x, out.elements, out.scales, x if amax is None else amax),
        (x.shape[1], x.shape[2], *_strides(x), *out.strides, out.used_bytes, out.row_bytes),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _quantize_launcher(
    format: Format, dtype: torch.dtype, has_matrix_scale: bool, has_tail: bool
) -> tuple[Launcher, RowTile]:
    """Return the launcher of the quantizing kernel, and its tile."""
    tile = tile_of(format, dtype)
    launch = Launcher(_quantize_kernel, MATRIX_SCALE=has_matrix_scale, TAIL=has_tail, POWER_OF_TWO=format.power_of_two,
                      **constants(format, tile))
    return launch, tile


def _launch_dequantize(data: _BlockRows, matrix_scales: Tensor | None, format: Format, y: Tensor) -> None:
    """Dequantize `data` to `y` (E, N, K), contiguous."""
    launch, tile = _dequantize_launcher(format, matrix_scales is not None)
    if matrix_scales is None:
        matrix_scales = y  # not read
        matrix_scale_strides = (0, 0)
    else:
        matrix_scale_strides = _strides(matrix_scales)
    launch(
        _grid(y, tile), (y, data.elements, data.scales, matrix_scales),
        (y.shape[1], y.shape[2], *data.strides, *matrix_scale_strides),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _dequantize_launcher(format: Format, matrix_scale: bool) -> tuple[Launcher, RowTile]:
    """Return the launcher of the dequantizing kernel, and its tile."""
    tile = tile_of(ROW_FORMATS[32], torch.bfloat16)
    return Launcher(_dequantize_kernel, MATRIX_SCALE=matrix_scale, **constants(format, tile)), tile


# --- operators: a single call for torch.compile and FakeTensor -------------------------------------------------------
# Their argument `format` is a name in FORMATS.


@operator(lambda *_: None, mutates=("out",))
def _quantize(x: Tensor, out: Tensor, format: str, amax: Tensor | None) -> None:
    """Quantize `x` (..., N, K) to the block rows `out`."""
    block_format = FORMATS[format]
    if not x.numel():
        out.zero_()
        return
    if not use_triton(x):
        out.copy_(quantize_reference(x, block_format, amax))
        return
    if block_format.matrix_scale:
        amax = (_matrix_amax(x, format) if amax is None else amax.float()).reshape(-1)
    else:
        amax = None
    _launch_quantize(_as_matrices(x), _BlockRows.from_data(out, block_format, x.shape[-1]), block_format, amax)


@operator(lambda data, _, rows, columns, dtype: data.new_empty((*data.shape[:-2], rows, columns), dtype=dtype))
def _dequantize(data: Tensor, format: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Dequantize block rows -> (..., rows, columns)."""
    block_format = FORMATS[format]
    y = data.new_empty((*data.shape[:-2], rows, columns), dtype=dtype)
    if y.numel() and not use_triton(data):
        y.copy_(dequantize_reference(data, block_format, rows, columns))
    elif y.numel():
        data = _as_matrices(data)
        matrix_scales = block_format.matrix_scales(data) if block_format.matrix_scale else None
        block_rows = _BlockRows.from_data(data, block_format, columns)
        _launch_dequantize(block_rows, matrix_scales, block_format, y.view(-1, rows, columns))
    return y


@operator(lambda x, format: x.new_empty(x.shape[:-2], dtype=torch.float32))
def _matrix_amax(x: Tensor, format: str) -> Tensor:
    """Return the largest magnitude of every matrix."""
    if not use_triton(x) or not x.numel():
        return matrix_amax_reference(x, FORMATS[format])
    amax = x.new_zeros(x.shape[:-2], dtype=torch.float32)
    x = _as_matrices(x)
    launch, tile = _amax_launcher(FORMATS[format].block[1], x.dtype)
    launch(_grid(x, tile), (x, amax.view(torch.int32)), (x.shape[1], x.shape[2], *_strides(x)))
    return amax


@cache
def _amax_launcher(block: int, dtype: torch.dtype) -> tuple[Launcher, RowTile]:
    """Return the launcher of the kernel for largest magnitudes, and its tile."""
    tile = tile_of(FORMATS["mxfp8"], dtype)
    launch = Launcher(_amax_kernel, ROWS=tile.rows, COLS=tile.cols, BLOCK=block, num_warps=tile.warps)
    return launch, tile


def _new_rows(x: Tensor, columns: int, block: int) -> tuple[Tensor, Tensor]:
    """Allocate the elements and scales of quantized rows."""
    format = ROW_FORMATS[block]
    elements = x.new_empty(x.shape[0], columns, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(x.shape[0], format.scales_per_row(columns), dtype=format.scale)
    return elements, scales


@operator(lambda x, block: _new_rows(x, x.shape[1], block))
def _quantize_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the elements and scales of `QuantizedRows`."""
    elements, scales = _new_rows(x, x.shape[1], block)
    if not use_triton(x):
        return quantize_rows_reference(x, block) if x.numel() else (elements, scales)
    if x.shape[1]:
        _launch_quantize(with_dense_rows(x)[None], _BlockRows.from_rows(elements, scales), ROW_FORMATS[block])
    return elements, scales


@operator(lambda elements, _, dtype: elements.new_empty(elements.shape, dtype=dtype))
def _dequantize_rows(elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize the elements and scales of `QuantizedRows`."""
    block = next(size for size, format in ROW_FORMATS.items() if format.scale is scales.dtype)
    if not use_triton(elements):
        return (elements.float() * scales.float().repeat_interleave(block, 1)[:, : elements.shape[1]]).to(dtype)
    y = elements.new_empty(elements.shape, dtype=dtype)
    if y.shape[1]:
        _launch_dequantize(_BlockRows.from_rows(elements, scales), None, ROW_FORMATS[block], y[None])
    return y


def _new_activation(gate_up: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the activation, and its elements and scales."""
    width = gate_up.shape[1] // 2
    return gate_up.new_empty(gate_up.shape[0], width), *_new_rows(gate_up, width, block)


@operator(lambda gate_up, weight, block, *_: _new_activation(gate_up, block))
def _swiglu_quantize(
    gate_up: Tensor, weight: Tensor | None, block: int, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the activation, and its elements and scales."""
    if not use_triton(gate_up):
        h = swiglu_reference(gate_up, weight, clamped, alpha, limit).to(gate_up.dtype)
        return h, *_quantize_rows(h, block)
    h, elements, scales = _new_activation(gate_up, block)
    if h.shape[1]:
        gate_up = with_dense_rows(gate_up)
        launch, tile = _swiglu_launcher(
            block, gate_up.dtype, compute_dtype(gate_up, weight), weight is not None, clamped, alpha, limit)
        launch(
            (max(cdiv(h.shape[0], tile.rows), 1), cdiv(h.shape[1], tile.cols)),
            (gate_up, h if weight is None else weight.contiguous(), h, elements.view(torch.uint8),
             _as_integers(scales)),
            (*h.shape, gate_up.stride(0)),
        )
    return h, elements, scales


@lru_cache(maxsize=MAX_LAUNCHERS)
def _swiglu_launcher(
    block: int, dtype: torch.dtype, compute: torch.dtype, has_weight: bool, clamped: bool, alpha: float, limit: float
) -> tuple[Launcher, RowTile]:
    """Return the launcher of the kernel that quantizes the activation, and its tile. compute: compute dtype."""
    format = ROW_FORMATS[block]
    tile = tile_of(format, dtype)
    launch = Launcher(_swiglu_quantize_kernel, CLAMPED=clamped, ALPHA=alpha, LIMIT=limit, HAS_WEIGHT=has_weight,
                      COMPUTE=tl_dtype(compute), **constants(format, tile))
    return launch, tile


@operator(lambda data, format, rows, columns: transpose_blocks_reference(data, FORMATS[format], rows, columns))
def _transpose_blocks(data: Tensor, format: str, rows: int, columns: int) -> Tensor:
    """Return the block rows of the transposed matrices."""
    block_format = FORMATS[format]
    if not data.numel() or not use_triton(data):
        return transpose_blocks_reference(data, block_format, rows, columns)
    out = data.new_empty((*data.shape[:-2], block_format.block_rows(columns), block_format.row_bytes(rows)))
    x = _BlockRows.from_data(_as_matrices(data), block_format, columns)
    y = _BlockRows.from_data(out, block_format, rows)
    operands = (x.elements, y.elements, x.scales, y.scales)
    strides = [stride for operand in operands for stride in _strides(operand)]
    _transpose_launcher(block_format.block[0])(
        (block_format.block_rows(rows), block_format.block_rows(columns), x.elements.shape[0]),
        operands, (rows, columns, *strides, y.used_bytes, y.row_bytes),
    )
    return out


@cache
def _transpose_launcher(block: int) -> Launcher:
    """Return the launcher of the transposing kernel."""
    return Launcher(_transpose_kernel, BLOCK=block, num_warps=8)


# --- public functions ------------------------------------------------------------------------------------------------


def quantize(
    x: Tensor, format: Format | str, amax: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Quantize matrices -> their block rows (..., R, bytes) uint8; see `quantize_reference`.

    Args:
        x: (..., N, K), any floating-point dtype.
        format: format, or its name.
        amax: largest magnitude of every whole matrix (...) in float32, if `x` is a part of it (see `matrix_amax`);
            None: compute it from `x`. Used only by formats with a matrix scale.
        out: receives the block rows; any view whose rows start at multiples of 16 bytes.

    Raises:
        ValueError: the format cannot store the shape, `x` is not floating-point, or `amax` or `out` does not match.
    """
    format = format_of(format)
    format.check(x.shape)
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}, expected a floating-point dtype")
    if amax is not None and (amax.shape != x.shape[:-2] or amax.device != x.device):
        raise ValueError(f"amax has shape {tuple(amax.shape)} on {amax.device}, expected {tuple(x.shape[:-2])} on "
                         f"{x.device}, one number for each matrix")
    shape = (*x.shape[:-2], format.block_rows(x.shape[-2]), format.row_bytes(x.shape[-1]))
    if out is None:
        out = x.new_empty(shape, dtype=torch.uint8)
    elif out.shape != shape or out.dtype is not torch.uint8 or out.device != x.device:
        raise ValueError(f"out is {out.dtype} of shape {tuple(out.shape)} on {out.device}, expected uint8 of shape "
                         f"{shape} on {x.device}")
    _quantize(x.detach(), out, format.name, amax)
    # The operator does not increase the version. Values computed from the old bytes are outdated.
    torch.autograd.graph.increment_version(out)
    return out


def dequantize(
    data: Tensor, format: Format | str, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dequantize block rows (..., R, bytes) uint8 -> (..., rows, columns).

    The values are exact in float32, and rounded to `dtype` once.

    Raises:
        ValueError: the shape of `data` does not match the format and the matrix.
    """
    format = format_of(format)
    _check_data(data, format, rows, columns)
    return _dequantize(data, format.name, rows, columns, dtype)


def matrix_amax(x: Tensor, format: Format | str) -> Tensor:
    """Return the largest magnitude of every matrix (..., N, K) -> (...) float32. Skips blocks that are not finite.

    For a matrix that is divided into parts, pass the maximum over its parts to `quantize`.
    """
    return _matrix_amax(x.detach(), format_of(format).name)


def quantize_rows(x: Tensor, block: int) -> QuantizedRows:
    """Quantize activations (M, K) row by row. Not differentiable.

    Rows are independent of each other: a NaN in a row without a token does not affect other rows.

    Args:
        x: (M, K), floating-point.
        block: number of columns that share a scale: 128 with float32 scales, as in fp8_block; or 32, as in mxfp8.

    Raises:
        ValueError: `x` is not a floating-point matrix, or `block` is neither 128 nor 32.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {x.dtype} of shape {tuple(x.shape)}, expected floating-point (M, K)")
    _check_block(block)
    return QuantizedRows(*_quantize_rows(x.detach(), block))


def dequantize_rows(rows: QuantizedRows, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize the result of `quantize_rows` -> (M, K), exact in float32, rounded to `dtype` once."""
    return _dequantize_rows(*rows, dtype)


def swiglu_quantize(
    gate_up: Tensor, weight: Tensor | None = None, *, block: int, clamped: bool = False, alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[Tensor, QuantizedRows]:
    """Compute (h, quantize_rows(h, block)) with h = swiglu(gate_up, weight), or clamped_swiglu, in one pass.

    The results are bitwise equal to those of separate calls. Not differentiable; the backward is `swiglu_backward`.

    Args:
        gate_up: (M, 2I).
        weight: (M,), routing weight of every row.
        block: see `quantize_rows`.
        clamped: `clamped_swiglu` with `alpha` and `limit`, instead of `swiglu`.

    Returns h (M, I) in the dtype of `gate_up`, and its quantized rows.

    Raises:
        ValueError: arguments are invalid.
    """
    check_gate_up(gate_up, weight)
    _check_block(block)
    form = swiglu_form(clamped, alpha, limit)
    h, elements, scales = _swiglu_quantize(gate_up.detach(), weight, block, *form)
    return h, QuantizedRows(elements, scales)


def transpose_blocks(data: Tensor, format: Format | str, rows: int, columns: int) -> Tensor:
    """Transpose matrices (..., rows, columns) in their block rows: moves elements and scales, without rounding.

    Raises:
        ValueError: the blocks of the format are not square, or the shape of `data` does not match.
    """
    format = format_of(format)
    if format.block[0] != format.block[1]:
        raise ValueError(f"blocks of {format} are {format.block[0]} x {format.block[1]}, not square, so the transpose "
                         "has other scales; quantize the transpose, or dequantize the matrix")
    _check_data(data, format, rows, columns)
    return _transpose_blocks(data, format.name, rows, columns)


def _check_data(data: Tensor, format: Format, rows: int, columns: int) -> None:
    """Raise ValueError unless `data` has the shape of block rows of matrices (rows, columns)."""
    shape = (format.block_rows(rows), format.row_bytes(columns))
    if data.dtype is not torch.uint8 or data.shape[-2:] != shape:
        raise ValueError(f"data is {data.dtype} of shape {tuple(data.shape)}, but {format} matrices of {rows} x "
                         f"{columns} are uint8 (..., {shape[0]}, {shape[1]})")


def _check_block(block: int) -> None:
    """Raise ValueError for a block that rows are not quantized in."""
    if block not in ROW_FORMATS:
        raise ValueError(f"block is {block}, but rows are quantized in blocks of {' or '.join(map(str, ROW_FORMATS))}")


# --- references that kernels/formats.py does not have ----------------------------------------------------------------


def quantize_rows_reference(x: Tensor, block: int) -> QuantizedRows:
    """Quantize the rows of (M, K), with M and K above 0, as a matrix padded to whole blocks."""
    format = ROW_FORMATS[block]
    columns = x.shape[1]
    x = torch.nn.functional.pad(x, (0, -columns % block))
    data = quantize_reference(x, format)
    elements = format.elements(data, x.shape[1])[:, 0, :columns].view(torch.float8_e4m3fn)
    return QuantizedRows(elements.contiguous(), format.scales(data, x.shape[1]).contiguous())


def transpose_blocks_reference(data: Tensor, format: Format, rows: int, columns: int) -> Tensor:
    """Transpose the matrix of elements, cut it into block rows, and transpose the scales."""
    block_height = format.block[0]
    num_block_rows = format.block_rows(columns)
    out = data.new_zeros((*data.shape[:-2], num_block_rows, format.row_bytes(rows)))
    if not data.numel():
        return out
    elements = format.elements(data, columns).flatten(-3, -2)[..., :rows, :].mT  # (..., columns, rows)
    elements = torch.nn.functional.pad(elements, (0, 0, 0, -columns % block_height))
    format.elements(out, rows).copy_(elements.unflatten(-2, (num_block_rows, block_height)))
    format.scales(out, rows).copy_(format.scales(data, columns).mT)
    return out
