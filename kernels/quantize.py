"""To quantize matrices and activations, and back: the formats of `kernels/formats.py` in one pass over memory each.

As PyTorch operations, quantizing reads and writes a matrix a dozen times in float32; here it is read once and its bytes
are written once, and the activation between an expert's products is quantized while it is in registers. Both give the
same bytes.

Dimension letters: N, K rows and columns of a matrix (weight matrices are N out x K in), M rows of activations, R block
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
# Elements and scales are integers here, made by exact arithmetic on bits: the same on every architecture. Names that
# kernels/formats.py has too are explained there.


@triton.jit
def _exponent(amax, MANTISSA: tl.constexpr, ABOVE: tl.constexpr):
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - ABOVE + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)


@triton.jit
def _float32_scale(amax):
    """The bits of the scale."""
    return (tl.maximum(tl.div_rn(amax, 448.0), 2.0**-100).to(tl.int32, bitcast=True) + 0x8) & -0x10


@triton.jit
def _matrix_scale(amax):
    """The bits of the scale."""
    return tl.minimum(tl.maximum(_exponent(tl.div_rn(amax, 6.0), 0x680000, 8), 27), 254) << 23


@triton.jit
def _encode(scaled, BITS: tl.constexpr):
    """Numbers in units of their scale -> elements, int32."""
    LARGEST: tl.constexpr = 448.0 if BITS == 8 else 6.0
    SMALLEST: tl.constexpr = -6 if BITS == 8 else 0
    DIGITS: tl.constexpr = 3 if BITS == 8 else 1
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, SMALLEST)
    units = magnitude * ((127 + DIGITS - exponent) << 23).to(tl.float32, bitcast=True)  # of the last place, below 16
    whole = (units + 8388608.0).to(tl.int32, bitcast=True) & 0xFF  # 2^23 plus an integer: rounded, ties to even
    return (((exponent - SMALLEST) << DIGITS) + whole) | (((bits >> 31) & 1) << (BITS - 1))


@triton.jit
def decode(elements, BITS: tl.constexpr):
    """Elements, int32 -> float32."""
    DIGITS: tl.constexpr = 3 if BITS == 8 else 1
    BIAS: tl.constexpr = 7 if BITS == 8 else 1
    low = elements & ((1 << (BITS - 1)) - 1)
    subnormal = (low.to(tl.float32) * 2.0 ** (1 - BIAS - DIGITS)).to(tl.int32, bitcast=True)
    bits = tl.where((low >> DIGITS) == 0, subnormal, (low << (23 - DIGITS)) + ((127 - BIAS) << 23))
    if BITS == 8:
        bits = tl.where(low == 127, 0x7FC00000, bits)
    return (bits | ((elements >> (BITS - 1)) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def decode_scale(scale, SCALE: tl.constexpr):
    """Scales as they are stored, int32 -> float32."""
    if SCALE == "e4m3":
        return decode(scale, 8)
    if SCALE == "e8m0":
        scale = tl.where(scale == 255, 0x7FC00000, tl.where(scale == 0, 0x400000, scale << 23))
    return scale.to(tl.float32, bitcast=True)


@triton.jit
def _quantize_tile(
    x, whole, ROWS: tl.constexpr, COLS: tl.constexpr, BAND: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    SCALE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):
    """Numbers (ROWS, COLS) float32, `whole` the scale of their matrix -> elements (ROWS, COLS) and scales
    (ROWS / BAND, COLS / BLOCK) as they are stored, int32.

    Magnitudes are compared as integers, where an infinity is larger than any number, and NaN larger still.
    """
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    blocks = tl.reshape(magnitude, (ROWS // BAND, BAND, COLS // BLOCK, BLOCK))
    largest = tl.max(tl.max(blocks, 3), 1)
    broken = largest >= 0x7F800000
    amax = tl.where(broken, 0, largest).to(tl.float32, bitcast=True)
    x = tl.reshape(x, (ROWS // BAND, BAND, COLS // BLOCK, BLOCK))
    x = tl.where(broken[:, None, :, None], 0.0, x)
    if SCALE == "e8m0" or POWER_OF_TWO:
        biased = _exponent(amax, 0x680000, 8) if BITS == 8 else _exponent(amax, 0x5FFFFF, 2)
        biased = tl.maximum(biased, 0 if SCALE == "e8m0" else 27)
        x *= ((254 - biased) << 23).to(tl.float32, bitcast=True)[:, None, :, None]  # exact; 2^-127 is subnormal
        scale = biased if SCALE == "e8m0" else biased << 23
    else:
        if SCALE == "e4m3":
            share = tl.div_rn(tl.div_rn(amax, whole), 6.0)
            scale = _encode(tl.maximum(share, 0.015625), 8)
            unit = decode(scale, 8) * whole
        else:
            scale = _float32_scale(amax)
            unit = scale.to(tl.float32, bitcast=True)
        x = tl.div_rn(x, tl.broadcast_to(unit[:, None, :, None], (ROWS // BAND, BAND, COLS // BLOCK, BLOCK)))
    NAN: tl.constexpr = 0x7FC00000 if SCALE == "float32" else 255 if SCALE == "e8m0" else 127
    return _encode(tl.reshape(x, (ROWS, COLS)), BITS), tl.where(broken, NAN, scale)


@triton.jit
def _store_tile(
    elements_ptr, scales_ptr, elements, scales, first, column, N, K, elements_band, scales_band, ROWS: tl.constexpr,
    COLS: tl.constexpr, BAND: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):
    """Write what `_quantize_tile` made, of the last band all rows: those past N are zeros."""
    if BITS == 4:
        low, high = tl.split(tl.reshape(elements, (ROWS, COLS // 2, 2)))
        elements = low | (high << 4)
    rows, row_bytes = first + tl.arange(0, ROWS), K * BITS // 8
    if BAND == 1:
        starts = rows.to(tl.int64) * elements_band
    else:  # of one band, within 32 bits
        elements_ptr += (first // BAND).to(tl.int64) * elements_band
        starts = (rows - first) * row_bytes
    at = column * BITS // 8 + tl.arange(0, COLS * BITS // 8)
    tl.store(elements_ptr + starts[:, None] + at[None, :], elements.to(tl.uint8),
             mask=(rows // BAND * BAND < N)[:, None] & (at < row_bytes)[None, :])
    bands = first // BAND + tl.arange(0, ROWS // BAND)
    blocks = column // BLOCK + tl.arange(0, COLS // BLOCK)
    tl.store(scales_ptr + bands.to(tl.int64)[:, None] * scales_band + blocks[None, :],
             scales.to(scales_ptr.dtype.element_ty),
             mask=(bands * BAND < N)[:, None] & (blocks * BLOCK < K)[None, :])


@triton.jit(do_not_specialize=["N"])
def _quantize_kernel(
    x_ptr,  # (E, N, K), neighbours in a row
    elements_ptr, scales_ptr,  # (E, R, ...) bytes; float32 scales as int32
    amax_ptr,  # (E,) or unused
    N, K, x_matrix, x_row, elements_matrix, elements_band, scales_matrix, scales_band,
    used, row_bytes,  # bytes of elements and scales; those with zeros and the matrix's scale, which `TAIL` writes
    MATRIX_SCALE: tl.constexpr, TAIL: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BAND: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr,
):
    tiles = tl.maximum(tl.cdiv(N, ROWS), 1)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    first, column = tl.program_id(0) % tiles * ROWS, tl.program_id(1) * COLS
    rows, cols = first + tl.arange(0, ROWS), column + tl.arange(0, COLS)
    x = tl.load(x_ptr + matrix * x_matrix + rows.to(tl.int64)[:, None] * x_row + cols[None, :],
                mask=(rows < N)[:, None] & (cols < K)[None, :], other=0.0).to(tl.float32)
    whole_bits = _matrix_scale(tl.load(amax_ptr + matrix)) if MATRIX_SCALE else tl.full((), 0, tl.int32)
    whole = whole_bits.to(tl.float32, bitcast=True)
    elements, scales = _quantize_tile(x, whole, ROWS, COLS, BAND, BLOCK, BITS, SCALE, POWER_OF_TWO)
    elements_ptr += matrix * elements_matrix
    _store_tile(elements_ptr, scales_ptr + matrix * scales_matrix, elements, scales, first, column, N, K, elements_band,
                scales_band, ROWS, COLS, BAND, BLOCK, BITS)
    if TAIL and tl.program_id(1) == 0:
        bands = first // BAND + tl.arange(0, ROWS // BAND)
        at = row_bytes - 32 + tl.arange(0, 32)  # at most 19 of them are past `used`
        last = row_bytes - 4 if MATRIX_SCALE else row_bytes
        tail = tl.where(at < last, 0, whole_bits >> (tl.maximum(at - last, 0) * 8))
        tl.store(elements_ptr + bands.to(tl.int64)[:, None] * elements_band + at[None, :],
                 tl.broadcast_to(tail.to(tl.uint8)[None, :], (ROWS // BAND, 32)),
                 mask=(bands * BAND < N)[:, None] & (at >= used)[None, :])


@triton.jit(do_not_specialize=["M"])
def _swiglu_quantize_kernel(
    gate_up_ptr,  # (M, 2I), rows `stride` apart
    weight_ptr,  # (M,) or unused
    h_ptr, elements_ptr,  # (M, I) contiguous
    scales_ptr,  # (M, I / BLOCK) contiguous, float32 ones as int32
    M, width, stride,  # width is I
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_WEIGHT: tl.constexpr, COMPUTE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BAND: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    SCALE: tl.constexpr,
):
    first, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    rows, cols = first + tl.arange(0, ROWS), column + tl.arange(0, COLS)
    gate, up = load_gate_up(gate_up_ptr, rows, column, M, width, stride, CLAMPED, ROWS, COLS)
    gate, s, u = activate(gate.to(COMPUTE), up.to(COMPUTE), ALPHA, LIMIT, CLAMPED)
    h = u * gate * s
    if HAS_WEIGHT:
        h = h * tl.load(weight_ptr + rows, mask=rows < M, other=0.0).to(COMPUTE)[:, None]
    h = h.to(h_ptr.dtype.element_ty)  # what is quantized is what was rounded
    h_ptrs = h_ptr + rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(h_ptrs, h, mask=(rows < M)[:, None] & (cols < width)[None, :])
    elements, scales = _quantize_tile(h.to(tl.float32), 0.0, ROWS, COLS, BAND, BLOCK, BITS, SCALE, False)
    _store_tile(elements_ptr, scales_ptr, elements, scales, first, column, M, width, width, tl.cdiv(width, BLOCK), ROWS,
                COLS, BAND, BLOCK, BITS)


@triton.jit(do_not_specialize=["N"])
def _dequantize_kernel(
    y_ptr,  # (E, N, K) contiguous
    elements_ptr, scales_ptr,  # (E, R, ...) bytes; float32 scales as int32
    wholes_ptr,  # (E, R) or unused
    N, K, elements_matrix, elements_band, scales_matrix, scales_band, wholes_matrix, wholes_band,
    MATRIX_SCALE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BAND: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, SCALE: tl.constexpr,
):
    tiles = tl.maximum(tl.cdiv(N, ROWS), 1)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    rows, column = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS
    bands, row_bytes = (rows // BAND).to(tl.int64), K * BITS // 8
    at = column * BITS // 8 + tl.arange(0, COLS * BITS // 8)
    starts = matrix * elements_matrix + bands * elements_band + (rows % BAND).to(tl.int64) * row_bytes
    elements = tl.load(elements_ptr + starts[:, None] + at[None, :],
                       mask=(rows < N)[:, None] & (at < row_bytes)[None, :], other=0).to(tl.int32)
    if BITS == 4:
        elements = tl.interleave(elements & 0xF, elements >> 4)
    y = tl.reshape(decode(elements, BITS), (ROWS, COLS // BLOCK, BLOCK))
    blocks = column // BLOCK + tl.arange(0, COLS // BLOCK)
    scales = tl.load(scales_ptr + matrix * scales_matrix + (bands * scales_band)[:, None] + blocks[None, :],
                     mask=(rows < N)[:, None] & (blocks * BLOCK < K)[None, :], other=0)
    unit = decode_scale(scales.to(tl.int32), SCALE)
    if MATRIX_SCALE:
        unit *= tl.load(wholes_ptr + matrix * wholes_matrix + bands * wholes_band, mask=rows < N, other=0.0)[:, None]
    cols = column + tl.arange(0, COLS)
    tl.store(y_ptr + (matrix * N + rows)[:, None] * K + cols[None, :],
             tl.reshape(y * unit[:, :, None], (ROWS, COLS)).to(y_ptr.dtype.element_ty),
             mask=(rows < N)[:, None] & (cols < K)[None, :])


@triton.jit
def _amax_kernel(
    x_ptr,  # (E, N, K), neighbours in a row
    amax_ptr,  # (E,) float32 as int32, zeros
    N, K, x_matrix, x_row, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
):
    tiles = tl.cdiv(N, ROWS)
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    rows, cols = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLS + tl.arange(0, COLS)
    x = tl.load(x_ptr + matrix * x_matrix + rows.to(tl.int64)[:, None] * x_row + cols[None, :],
                mask=(rows < N)[:, None] & (cols < K)[None, :], other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.reshape(magnitude, (ROWS * COLS // BLOCK, BLOCK)), 1)
    tl.atomic_max(amax_ptr + matrix, tl.max(tl.where(largest < 0x7F800000, largest, 0), 0))


@triton.jit
def _transpose_kernel(
    x_ptr, y_ptr,  # (E, N / BLOCK, bytes), (E, K / BLOCK, bytes)
    x_scales_ptr, y_scales_ptr,  # (E, N / BLOCK, K / BLOCK) float32 as int32, and the other way around
    N, K, x_matrix, x_band, y_matrix, y_band, x_scales_matrix, x_scales_band, y_scales_matrix, y_scales_band,
    used, row_bytes,  # of a block row of y: elements and scales; with zeros
    BLOCK: tl.constexpr,
):
    """A block for each program; no tl.trans, which 3.7 has got wrong for single bytes: its rows are read as columns."""
    band, across, matrix = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, col = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK)[:, None]
    x_ptr, y_ptr = x_ptr + matrix * x_matrix + band * x_band, y_ptr + matrix * y_matrix + across * y_band
    inside = band * BLOCK + row < N
    block = tl.load(x_ptr + row * K + (across * BLOCK + col), mask=inside & (across * BLOCK + col < K), other=0)
    tl.store(y_ptr + col * N + (band * BLOCK + row), block, mask=inside & (col < BLOCK))
    scale = tl.load(x_scales_ptr + matrix * x_scales_matrix + band * x_scales_band + across)
    tl.store(y_scales_ptr + matrix * y_scales_matrix + across * y_scales_band + band, scale)
    if band == 0:
        at = used + tl.arange(0, 16)
        tl.store(y_ptr + at, tl.zeros((16,), tl.uint8), mask=at < row_bytes)


# --- launchers -------------------------------------------------------------------------------------------------------

ROW_FORMATS = {128: Format("rows", 8, (1, 128), torch.float32), 32: FORMATS["mxfp8"]}  # of activations, by block
_SCALES = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3", torch.float32: "float32"}


def tile_of(format: Format, dtype: torch.dtype) -> RowTile:
    """What one program takes: a block, or of formats for parts of rows two accesses of 16 bytes a thread."""
    return RowTile(*format.block, 8) if format.block[0] > 1 else RowTile(8, 256, 4).scaled_for(dtype)


def constants(format: Format, tile: RowTile) -> dict[str, Any]:
    """What every kernel knows of a format, and its warps."""
    return dict(ROWS=tile.rows, COLS=tile.cols, BAND=format.block[0], BLOCK=format.block[1], BITS=format.bits,
                SCALE=_SCALES[format.scale], num_warps=tile.warps)


class _Parts(NamedTuple):
    """Where block rows have what: bytes from the first element on, and scales as kernels see them, (E, R, ...)."""

    elements: Tensor
    scales: Tensor
    used: int = 0  # bytes of elements and scales of a block row
    row_bytes: int = 0

    @classmethod
    def of_data(cls, data: Tensor, format: Format, columns: int) -> _Parts:
        """Where block rows (..., R, bytes) have them."""
        data = data.view(-1, *data.shape[-2:])
        scales = _integers(format.scales(data, columns))
        used = format.block[0] * columns * format.bits // 8 + format.scales_per_row(columns) * format.scale.itemsize
        return cls(data, scales, used, format.row_bytes(columns))

    @classmethod
    def of_rows(cls, elements: Tensor, scales: Tensor) -> _Parts:
        return cls(elements.view(torch.uint8)[None], _integers(scales)[None])

    @property
    def strides(self) -> tuple[int, ...]:
        return *_strides(self.elements), *_strides(self.scales)


def _integers(scales: Tensor) -> Tensor:
    return scales.view(torch.int32 if scales.dtype is torch.float32 else torch.uint8)


def _strides(x: Tensor) -> tuple[int, int]:
    """From a matrix to the next, and from a row; of a single matrix no multiple of its rows, whose number is data."""
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1)


def _matrices(x: Tensor) -> Tensor:
    """(..., N, K) -> (E, N, K), neighbours in a row."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _grid(x: Tensor, tile: RowTile) -> tuple[int, int]:
    """Tiles of matrices (E, N, K), of which the first dimension of a grid has more than 65535."""
    return x.shape[0] * max(cdiv(x.shape[1], tile.rows), 1), cdiv(x.shape[2], tile.cols)


def _launch_quantize(x: Tensor, to: _Parts, format: Format, amax: Tensor | None = None) -> None:
    """`x` (E, N, K)."""
    launch, tile = _quantize_launcher(format, x.dtype, amax is not None, to.row_bytes > 0)
    launch(
        _grid(x, tile), (x, to.elements, to.scales, x if amax is None else amax),
        (x.shape[1], x.shape[2], *_strides(x), *to.strides, to.used, to.row_bytes),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _quantize_launcher(
    format: Format, dtype: torch.dtype, matrix_scale: bool, tail: bool
) -> tuple[Launcher, RowTile]:
    tile = tile_of(format, dtype)
    launch = Launcher(_quantize_kernel, MATRIX_SCALE=matrix_scale, TAIL=tail, POWER_OF_TWO=format.power_of_two,
                      **constants(format, tile))
    return launch, tile


def _launch_dequantize(parts: _Parts, wholes: Tensor | None, format: Format, y: Tensor) -> None:
    """`y` (E, N, K) contiguous."""
    launch, tile = _dequantize_launcher(format, wholes is not None)
    launch(
        _grid(y, tile), (y, parts.elements, parts.scales, y if wholes is None else wholes),
        (y.shape[1], y.shape[2], *parts.strides, *((0, 0) if wholes is None else _strides(wholes))),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _dequantize_launcher(format: Format, matrix_scale: bool) -> tuple[Launcher, RowTile]:
    tile = tile_of(ROW_FORMATS[32], torch.bfloat16)
    return Launcher(_dequantize_kernel, MATRIX_SCALE=matrix_scale, **constants(format, tile)), tile


# --- operators: torch.compile and FakeTensor see these as one call each ----------------------------------------------


@operator(lambda *_: None, mutates=("out",))
def _quantize(x: Tensor, out: Tensor, format: str, amax: Tensor | None) -> None:
    how = FORMATS[format]
    if not x.numel():
        out.zero_()
    elif use_triton(x):
        if how.matrix_scale:
            amax = (_matrix_amax(x, format) if amax is None else amax.float()).reshape(-1)
        x_ENK = _matrices(x)
        _launch_quantize(x_ENK, _Parts.of_data(out, how, x.shape[-1]), how, amax if how.matrix_scale else None)
    else:
        out.copy_(quantize_reference(x, how, amax))


@operator(lambda data, _, rows, columns, dtype: data.new_empty((*data.shape[:-2], rows, columns), dtype=dtype))
def _dequantize(data: Tensor, format: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    how, y = FORMATS[format], data.new_empty((*data.shape[:-2], rows, columns), dtype=dtype)
    if y.numel() and not use_triton(data):
        y.copy_(dequantize_reference(data, how, rows, columns))
    elif y.numel():
        data = _matrices(data)
        wholes = how.matrix_scales(data) if how.matrix_scale else None
        _launch_dequantize(_Parts.of_data(data, how, columns), wholes, how, y.view(-1, rows, columns))
    return y


@operator(lambda x, format: x.new_empty(x.shape[:-2], dtype=torch.float32))
def _matrix_amax(x: Tensor, format: str) -> Tensor:
    if not use_triton(x) or not x.numel():
        return matrix_amax_reference(x, FORMATS[format])
    amax = x.new_zeros(x.shape[:-2], dtype=torch.float32)
    x = _matrices(x)
    launch, tile = _amax_launcher(FORMATS[format].block[1], x.dtype)
    launch(_grid(x, tile), (x, amax.view(torch.int32)), (x.shape[1], x.shape[2], *_strides(x)))
    return amax


@cache
def _amax_launcher(block: int, dtype: torch.dtype) -> tuple[Launcher, RowTile]:
    tile = tile_of(FORMATS["mxfp8"], dtype)
    launch = Launcher(_amax_kernel, ROWS=tile.rows, COLS=tile.cols, BLOCK=block, num_warps=tile.warps)
    return launch, tile


def _new_rows(x: Tensor, columns: int, block: int) -> tuple[Tensor, Tensor]:
    format = ROW_FORMATS[block]
    return (x.new_empty(x.shape[0], columns, dtype=torch.float8_e4m3fn),
            x.new_empty(x.shape[0], format.scales_per_row(columns), dtype=format.scale))


@operator(lambda x, block: _new_rows(x, x.shape[1], block))
def _quantize_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    elements, scales = _new_rows(x, x.shape[1], block)
    if not use_triton(x):
        return quantize_rows_reference(x, block) if x.numel() else (elements, scales)
    if x.shape[1]:
        _launch_quantize(with_dense_rows(x)[None], _Parts.of_rows(elements, scales), ROW_FORMATS[block])
    return elements, scales


@operator(lambda elements, _, dtype: elements.new_empty(elements.shape, dtype=dtype))
def _dequantize_rows(elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    block = next(size for size, format in ROW_FORMATS.items() if format.scale is scales.dtype)
    if not use_triton(elements):
        return (elements.float() * scales.float().repeat_interleave(block, 1)[:, : elements.shape[1]]).to(dtype)
    y, parts = elements.new_empty(elements.shape, dtype=dtype), _Parts.of_rows(elements, scales)
    if y.shape[1]:
        _launch_dequantize(parts, None, ROW_FORMATS[block], y[None])
    return y


def _new_activation(gate_up: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    width = gate_up.shape[1] // 2
    return gate_up.new_empty(gate_up.shape[0], width), *_new_rows(gate_up, width, block)


@operator(lambda gate_up, weight, block, *_: _new_activation(gate_up, block))
def _swiglu_quantize(
    gate_up: Tensor, weight: Tensor | None, block: int, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not use_triton(gate_up):
        h = swiglu_reference(gate_up, weight, clamped, alpha, limit).to(gate_up.dtype)
        return h, *_quantize_rows(h, block)
    h, elements, scales = _new_activation(gate_up, block)
    if h.shape[1]:
        gate_up = with_dense_rows(gate_up)
        launch, tile = _swiglu_launcher(
            block, gate_up.dtype, None if weight is None else compute_dtype(gate_up, weight), clamped, alpha, limit)
        launch(
            (max(cdiv(h.shape[0], tile.rows), 1), cdiv(h.shape[1], tile.cols)),
            (gate_up, h if weight is None else weight.contiguous(), h, elements.view(torch.uint8), _integers(scales)),
            (*h.shape, gate_up.stride(0)),
        )
    return h, elements, scales


@lru_cache(maxsize=MAX_LAUNCHERS)
def _swiglu_launcher(
    block: int, dtype: torch.dtype, weighted: torch.dtype | None, clamped: bool, alpha: float, limit: float
) -> tuple[Launcher, RowTile]:
    """weighted: what is computed in where rows have weights."""
    format = ROW_FORMATS[block]
    tile = tile_of(format, dtype)
    compute = weighted or torch.promote_types(dtype, torch.float32)
    launch = Launcher(_swiglu_quantize_kernel, CLAMPED=clamped, ALPHA=alpha, LIMIT=limit,
                      HAS_WEIGHT=weighted is not None, COMPUTE=tl_dtype(compute), **constants(format, tile))
    return launch, tile


@operator(lambda data, format, rows, columns: transpose_blocks_reference(data, FORMATS[format], rows, columns))
def _transpose_blocks(data: Tensor, format: str, rows: int, columns: int) -> Tensor:
    how = FORMATS[format]
    if not data.numel() or not use_triton(data):
        return transpose_blocks_reference(data, how, rows, columns)
    turned = data.new_empty((*data.shape[:-2], how.block_rows(columns), how.row_bytes(rows)))
    x, y = _Parts.of_data(_matrices(data), how, columns), _Parts.of_data(turned, how, rows)
    strides = (stride for x_part, y_part in zip(x[:2], y[:2]) for part in (x_part, y_part) for stride in _strides(part))
    _transpose_launcher(how.block[0])(
        (how.block_rows(rows), how.block_rows(columns), x.elements.shape[0]),
        (x.elements, y.elements, x.scales, y.scales), (rows, columns, *strides, y.used, y.row_bytes),
    )
    return turned


@cache
def _transpose_launcher(block: int) -> Launcher:
    return Launcher(_transpose_kernel, BLOCK=block, num_warps=8)


# --- public functions ------------------------------------------------------------------------------------------------


def quantize(
    x: Tensor, format: Format | str, amax: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """(..., N, K) of any floating-point dtype -> its block rows (..., R, bytes) uint8: see `quantize_reference`.

    amax: of each whole matrix (...) in float32, where `x` is a part of it (see `matrix_amax`); only formats with a
    matrix scale look at it. out: where to write them, any view whose rows start at multiples of 16 bytes.

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
    _quantize(x.detach(), out, format.name, amax)
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
    return _dequantize_rows(*rows, dtype)


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
    if block not in ROW_FORMATS:
        raise ValueError(f"activations are quantized in blocks of {' or '.join(map(str, ROW_FORMATS))}; got {block}")
    return block


# --- reference: of what kernels/formats.py has none for --------------------------------------------------------------


def quantize_rows_reference(x: Tensor, block: int) -> QuantizedRows:
    """The rows of (M, K), neither 0, as those of a matrix of whole blocks."""
    format, columns = ROW_FORMATS[block], x.shape[1]
    x = torch.nn.functional.pad(x, (0, -columns % block))
    data = quantize_reference(x, format)
    elements = format.elements(data, x.shape[1])[:, 0, :columns].view(torch.float8_e4m3fn)
    return QuantizedRows(elements.contiguous(), format.scales(data, x.shape[1]).contiguous())


def transpose_blocks_reference(data: Tensor, format: Format, rows: int, columns: int) -> Tensor:
    """Elements as a matrix, which is transposed and cut into block rows again; scales likewise."""
    band, bands = format.block[0], format.block_rows(columns)
    turned = data.new_zeros((*data.shape[:-2], bands, format.row_bytes(rows)))
    if not data.numel():
        return turned
    elements = format.elements(data, columns).flatten(-3, -2)[..., :rows, :].mT  # (..., columns, rows)
    elements = torch.nn.functional.pad(elements, (0, 0, 0, -columns % band))
    format.elements(turned, rows).copy_(elements.unflatten(-2, (bands, band)))
    format.scales(turned, rows).copy_(format.scales(data, columns).mT)
    return turned
