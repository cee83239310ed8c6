"""Formats of quantized matrices: their elements, their scales, and the byte layout of both.

A matrix (N, K) is stored as block rows. A block row holds all rows that share scales, one row or 128: first their
elements, then their scales, then zeros up to a multiple of 16 bytes. Therefore a cut between block rows is one range of
bytes, and an all-gather is a concatenation. A scale of the whole matrix is repeated in the last four bytes of every
block row, so that every part of the matrix has it.

    mxfp8   K = 64   | 64 x e4m3 | 2 x e8m0 | 14 zeros                           80 bytes per row
    nvfp4   K = 64   | 32 bytes, two e2m1 each | 4 x e4m3 | 8 zeros | fp32       48 bytes per row

Methods: MXFP8 and MXFP4 follow the OCP Microscaling specification 1.0, NVFP4 follows NVIDIA's Blackwell, block FP8
follows DeepSeek-V3 (arXiv:2412.19437, section 3.3). The choice of scales differs, so that every format is idempotent:
quantizing a dequantized matrix gives the same bytes. `quantize_reference` has the rules.

Dimension letters: N rows, K columns, R block rows, C blocks across the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three bits below the sign
_E2M1_VALUES = (*_E2M1_MAGNITUDES, *(-magnitude for magnitude in _E2M1_MAGNITUDES))  # by all four bits


@dataclass(frozen=True)
class Format:
    """Format of a quantized matrix. Compared and hashed by value; `FORMATS` has all formats by name.

    bits: bits of an element: 8 (e4m3), or 4 (e2m1, two per byte, the first in the low half).
    block: rows and columns that share a scale.
    scale: dtype of a block's scale: float8_e8m0fnu, float8_e4m3fn or float32.
    matrix_scale: the whole matrix has an additional scale in float32.
    power_of_two: float32 scales are powers of two.
    computes: GEMMs are in FP8; otherwise they use dequantized values.
    """

    name: str
    bits: int
    block: tuple[int, int]
    scale: torch.dtype
    matrix_scale: bool = False
    power_of_two: bool = False
    computes: bool = False

    @property
    def largest(self) -> float:
        """Largest value of an element."""
        return 448.0 if self.bits == 8 else 6.0

    def scales_per_row(self, columns: int) -> int:
        """Return the number of block scales in a block row."""
        return -(-columns // self.block[1])

    def block_rows(self, rows: int) -> int:
        """Return the number of block rows of a matrix; the last one may be partial."""
        return -(-rows // self.block[0])

    def row_bytes(self, columns: int) -> int:
        """Return the number of bytes of a block row."""
        used_bytes = self._element_bytes(columns) + self.scales_per_row(columns) * self.scale.itemsize
        if self.matrix_scale:
            used_bytes += 4
        return -(-used_bytes // 16) * 16

    def _element_bytes(self, columns: int) -> int:
        """Return the number of bytes of the elements in a block row."""
        return self.block[0] * columns * self.bits // 8

    def elements(self, data: Tensor, columns: int) -> Tensor:
        """View the elements of block rows (..., R, bytes) uint8 -> (..., R, rows of a block, bytes of a row)."""
        bytes_per_row = columns * self.bits // 8
        return data[..., : self._element_bytes(columns)].unflatten(-1, (self.block[0], bytes_per_row))

    def scales(self, data: Tensor, columns: int) -> Tensor:
        """View the block scales of block rows (..., R, bytes) uint8 -> (..., R, C) in their dtype."""
        start = self._element_bytes(columns)
        return data[..., start : start + self.scales_per_row(columns) * self.scale.itemsize].view(self.scale)

    def matrix_scales(self, data: Tensor) -> Tensor:
        """View the copies of the matrix scale in block rows (..., R, bytes) uint8 -> (..., R) float32."""
        return data[..., -4:].view(torch.float32).squeeze(-1)

    def check(self, shape: tuple[int, ...] | torch.Size) -> None:
        """Raise ValueError if a tensor of `shape` cannot be stored in this format."""
        if len(shape) < 2:
            raise ValueError(f"the shape is {tuple(shape)}, but {self.name} stores matrices or stacks of matrices; "
                             "give a tensor with at least two dimensions")
        if shape[-1] * self.bits % 8:
            raise ValueError(f"the shape is {tuple(shape)}, but {self.name} stores two elements per byte, so the last "
                             "dimension must be even")

    def __str__(self) -> str:
        return self.name


_E8M0 = torch.float8_e8m0fnu
_E4M3 = torch.float8_e4m3fn
FORMATS = {format.name: format for format in (
    Format("mxfp8", 8, (1, 32), _E8M0, computes=True),
    Format("nvfp4", 4, (1, 16), _E4M3, matrix_scale=True),
    Format("fp8_block", 8, (128, 128), torch.float32, computes=True),
    Format("fp8_block_pow2", 8, (128, 128), torch.float32, power_of_two=True, computes=True),
    Format("mxfp4", 4, (1, 32), _E8M0),
)}


def format_of(name: str | Format) -> Format:
    """Return the format with a name. Raises ValueError for an unknown name."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


class QuantizedRows(NamedTuple):
    """Activations (M, K), quantized row by row.

    elements: (M, K) float8_e4m3fn.
    scales: (M, ceil(K / block)), one per 128 columns in float32, or one per 32 columns in float8_e8m0fnu.
    """

    elements: Tensor
    scales: Tensor


# --- references ------------------------------------------------------------------------------------------------------


def matrix_amax(x: Tensor, format: Format) -> Tensor:
    """Return the largest magnitude of every matrix (..., N, K) -> (...) float32. Skips blocks that are not finite."""
    if not x.numel():
        return x.new_zeros(x.shape[:-2], dtype=torch.float32)
    width = format.block[1]
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % width)).unflatten(-1, (-1, width)).abs().amax(-1)
    return torch.where(blocks.isfinite(), blocks, 0.0).amax((-2, -1))


def quantize_reference(x: Tensor, format: Format, amax: Tensor | None = None) -> Tensor:
    """Quantize matrices (..., N, K) of any floating-point dtype -> block rows (..., R, bytes) uint8.

    amax: largest magnitude of every whole matrix (...), if `x` is a part of it; None: compute it from `x`. Used only
        by formats with a matrix scale.

    Values are rounded to the nearest element, ties to even. Values beyond the largest element become the largest.

    Scales are chosen so that the largest value of a block rounds to more than half of the largest element:

    - e8m0 and powers of two: the smallest 2^s with amax / 2^s <= 464, or < 7 for e2m1; these limits round to 448 and 6.
      The scale is 2^ceil(log2(amax / 448)), except for the 5% of amax that lie between 448 and 464 times a power of
      two. With that scale, 448.5 would become 224 x 2 = 448; quantized again, 448 would become 448 x 1.
    - float32: amax / 448, rounded to 20 bits, so that its product with an element is exact.
    - nvfp4: the matrix scale is the smallest 2^s with amax / (6 x 2^s) <= 464. A block scale is amax / 6 in units of
      the matrix scale, rounded to the nearest e4m3, and at least 2^-6, the smallest normal number.

    A block of zeros, or of values below the range of the smallest scale, has zeros as elements and the smallest scale;
    there is no division by zero. A block with an infinity or a NaN has the scale NaN and zeros as elements, so that all
    its values are NaN. A value above 2.9e38 may be dequantized to an infinity.
    """
    rows, columns = x.shape[-2:]
    format.check(x.shape)
    block_height, block_width = format.block
    num_block_rows = format.block_rows(rows)
    data = x.new_zeros((*x.shape[:-2], num_block_rows, format.row_bytes(columns)), dtype=torch.uint8)
    if not x.numel():
        return data
    padded = torch.nn.functional.pad(x.float(), (0, -columns % block_width, 0, -rows % block_height))
    # (..., R, rows of a block, C, columns of a block)
    blocks = padded.unflatten(-1, (-1, block_width)).unflatten(-3, (num_block_rows, block_height))
    is_broken = (~blocks.isfinite()).any(-1).any(-2)  # (..., R, C)
    blocks = torch.where(is_broken[..., None, :, None], 0.0, blocks)
    block_amax = blocks.abs().amax((-3, -1))
    if format.matrix_scale:
        matrix_scale = _matrix_scale(matrix_amax(x, format) if amax is None else amax)[..., None]  # (..., 1)
        format.matrix_scales(data).copy_(matrix_scale.expand(data.shape[:-1]))
        scales = _block_scale(block_amax / matrix_scale[..., None], format)
        unit = scales.float() * matrix_scale[..., None]
    else:
        scales = _block_scale(block_amax, format)
        unit = scales.float()
    elements = round_to_element(blocks / unit[..., None, :, None], format)
    format.scales(data, columns).copy_(_with_nan(scales, is_broken))
    elements = elements.flatten(-2)[..., :columns]  # (..., R, rows of a block, K)
    if rows % block_height:
        elements[..., -1, rows % block_height :, :] = 0
    format.elements(data, columns).copy_(_encode(elements, format))
    return data


def _with_nan(scales: Tensor, is_broken: Tensor) -> Tensor:
    """Replace the scales of broken blocks by NaN, in the dtype of the scales."""
    if scales.dtype is torch.float32:
        return torch.where(is_broken, torch.nan, scales)
    nan_byte = 255 if scales.dtype is _E8M0 else 127
    return torch.where(is_broken, nan_byte, scales.view(torch.uint8)).view(scales.dtype)


def dequantize_reference(data: Tensor, format: Format, rows: int, columns: int) -> Tensor:
    """Dequantize block rows (..., R, bytes) uint8 -> (..., rows, columns) float32, exactly."""
    scales = format.scales(data, columns).float()  # (..., R, C)
    if format.matrix_scale:
        scales = scales * format.matrix_scales(data)[..., None]
    values = decode_rows(format.elements(data, columns), scales, format.bits, format.block[1])
    return values.flatten(-3, -2)[..., :rows, :]


def decode_rows(elements: Tensor, scales: Tensor, bits: int, width: int, first: int = 0) -> Tensor:
    """Multiply elements by the scales of their blocks -> (..., rows, columns) float32.

    elements: (..., rows, bytes), rows that share their scales.
    scales: (..., C), one per `width` columns.
    first: column in the first block where the rows start.
    """
    if bits == 4:
        byte_values = [(_E2M1_VALUES[byte & 15], _E2M1_VALUES[byte >> 4]) for byte in range(256)]
        values = torch.tensor(byte_values, device=elements.device)[elements.int()].flatten(-2)
    else:
        values = elements.view(_E4M3).float()
    columns = values.shape[-1]
    factors = scales.float().repeat_interleave(width, -1)[..., None, first : first + columns]
    return values.mul_(factors)


def round_to_element(x: Tensor, format: Format) -> Tensor:
    """Round float32 values in units of their scale to the nearest value of an element, ties to even."""
    min_exponent = -6 if format.bits == 8 else 0  # of the smallest normal element
    mantissa_bits = 3 if format.bits == 8 else 1
    exponent = torch.frexp(x.abs().clamp(2.0**min_exponent, format.largest)).exponent - 1
    ulp = torch.exp2((exponent - mantissa_bits).float())
    num_ulps = (x.clamp(-2 * format.largest, 2 * format.largest) / ulp).round()
    return (num_ulps * ulp).clamp(-format.largest, format.largest)


def _encode(elements: Tensor, format: Format) -> Tensor:
    """Encode values of elements as bytes."""
    if format.bits == 8:
        return elements.to(_E4M3).view(torch.uint8)
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=elements.device)
    codes = torch.bucketize(elements.abs().contiguous(), magnitudes) | (elements.signbit().long() << 3)
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def _exponent(amax: Tensor, mantissa: int, shift: int) -> Tensor:
    """Return the smallest s with amax <= (1 + mantissa / 2^23) x 2^(shift + s), exactly, biased by 127; int32."""
    bits = amax.contiguous().view(torch.int32)
    return (bits >> 23) - shift + ((bits & 0x7FFFFF) > mantissa).int()


def _scale_exponent(amax: Tensor, format: Format) -> Tensor:
    """Return the biased exponent of a block scale that is a power of two."""
    if format.bits == 8:
        return _exponent(amax, 0x680000, 8)  # 464 = 1.8125 x 2^8
    return _exponent(amax, 0x5FFFFF, 2)  # just below 7 = 1.75 x 2^2


def _float32_scale(amax: Tensor) -> Tensor:
    """Return amax / 448, rounded to 20 bits, and at least 2^-100.

    The lower limit avoids a division by zero, and keeps products with elements normal.
    """
    bits = (amax / 448.0).clamp_min(2.0**-100).view(torch.int32)
    return ((bits + 0x8) & ~0xF).view(torch.float32)


def _block_scale(amax: Tensor, format: Format) -> Tensor:
    """Return the scale of a block in the format's dtype.

    amax: largest magnitude of the block, in units of the matrix scale if there is one.
    """
    if format.scale is _E8M0:
        return _scale_exponent(amax, format).clamp(0, 254).to(torch.uint8).view(_E8M0)
    if format.scale is _E4M3:
        return (amax / 6.0).clamp(2.0**-6, 448.0).to(_E4M3)
    if format.power_of_two:
        return (_scale_exponent(amax, format).clamp(27, 254) << 23).view(torch.float32)
    return _float32_scale(amax)


def _matrix_scale(amax: Tensor) -> Tensor:
    """Return the scale of a whole matrix, a power of two in float32."""
    exponent = _exponent(amax.float() / 6.0, 0x680000, 8)
    return (exponent.clamp(27, 254) << 23).view(torch.float32)
