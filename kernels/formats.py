"""Formats of quantized matrices: what their elements and scales are, and where these lie among the bytes.

A matrix (N, K) is stored as block rows: all rows that share scales, one row or 128, as their elements, then their
scales, then zeros up to a multiple of 16 bytes. So a cut between block rows is one range of bytes, and to gather is to
concatenate. A scale of the whole matrix is repeated in the last four bytes of each block row: no part can lose it.

    mxfp8   K = 64   | 64 x e4m3 | 2 x e8m0 | 14 zeros                           80 bytes a row
    nvfp4   K = 64   | 32 bytes, two e2m1 each | 4 x e4m3 | 8 zeros | fp32       48 bytes a row

Methods: MXFP8 and MXFP4 as of the OCP Microscaling specification 1.0, NVFP4 as of NVIDIA's Blackwell, block FP8 as of
DeepSeek-V3 (arXiv:2412.19437, section 3.3). Scales differ from theirs in what makes every format idempotent: to
quantize what was dequantized gives the same bytes. `quantize_reference` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by the three bits below the sign
_E2M1 = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))  # by all four bits


@dataclass(frozen=True)
class Format:
    """How a matrix is quantized. Compared and hashed by value; `FORMATS` has those that there are, by name."""

    name: str
    bits: int  # of an element: 8 (e4m3), or 4 (e2m1, two in a byte, the first in its low half)
    block: tuple[int, int]  # rows and columns under one scale
    scale: torch.dtype  # of a block: float8_e8m0fnu, float8_e4m3fn or float32
    matrix_scale: bool = False  # whether a whole matrix has a scale besides, in float32
    power_of_two: bool = False  # whether float32 scales are powers of two
    computes: bool = False  # whether products are in FP8; else they take what it dequantizes to

    @property
    def largest(self) -> float:
        """The largest number that an element holds."""
        return 448.0 if self.bits == 8 else 6.0

    def scales_per_row(self, columns: int) -> int:
        """Scales of blocks in one block row."""
        return -(-columns // self.block[1])

    def block_rows(self, rows: int) -> int:
        """Block rows of a matrix; the last may be partial."""
        return -(-rows // self.block[0])

    def row_bytes(self, columns: int) -> int:
        """Bytes of a block row."""
        used = self._element_bytes(columns) + self.scales_per_row(columns) * self.scale.itemsize
        return -(-(used + 4 * self.matrix_scale) // 16) * 16

    def _element_bytes(self, columns: int) -> int:
        return self.block[0] * columns * self.bits // 8

    def elements(self, data: Tensor, columns: int) -> Tensor:
        """(..., block rows, bytes) uint8 -> (..., block rows, rows of a block, bytes of a row), a view."""
        row = columns * self.bits // 8
        return data[..., : self._element_bytes(columns)].unflatten(-1, (self.block[0], row))

    def scales(self, data: Tensor, columns: int) -> Tensor:
        """(..., block rows, bytes) uint8 -> the blocks' scales (..., block rows, blocks), a view in their dtype."""
        start = self._element_bytes(columns)
        return data[..., start : start + self.scales_per_row(columns) * self.scale.itemsize].view(self.scale)

    def matrix_scales(self, data: Tensor) -> Tensor:
        """(..., block rows, bytes) uint8 -> the matrix's scale in each block row (..., block rows) float32, a view."""
        return data[..., -4:].view(torch.float32).squeeze(-1)

    def check(self, shape: tuple[int, ...] | torch.Size) -> None:
        """Raise ValueError where a tensor of `shape` cannot be stored so."""
        if len(shape) < 2:
            raise ValueError(f"{self.name} is a format of matrices, or stacks of them; got the shape {tuple(shape)}")
        if shape[-1] * self.bits % 8:
            raise ValueError(f"{self.name} stores two elements in a byte, so the last dimension must be even; got "
                             f"{tuple(shape)}")

    def __str__(self) -> str:
        return self.name


_E8M0, _E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
FORMATS = {each.name: each for each in (
    Format("mxfp8", 8, (1, 32), _E8M0, computes=True),
    Format("nvfp4", 4, (1, 16), _E4M3, matrix_scale=True),
    Format("fp8_block", 8, (128, 128), torch.float32, computes=True),
    Format("fp8_block_pow2", 8, (128, 128), torch.float32, power_of_two=True, computes=True),
    Format("mxfp4", 4, (1, 32), _E8M0),
)}


def format_of(name: str | Format) -> Format:
    """The format of a name; raises ValueError for one that there is not."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"there is no format {name!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


class QuantizedRows(NamedTuple):
    """Activations, each row quantized by itself: elements (M, K) float8_e4m3fn, and a scale (M, ceil(K / block)) for
    each 128 columns in float32, or each 32 in float8_e8m0fnu."""

    elements: Tensor
    scales: Tensor


# --- references ------------------------------------------------------------------------------------------------------


def matrix_amax(x: Tensor, format: Format) -> Tensor:
    """The largest magnitude of each matrix (..., N, K) -> (...), float32; blocks that are not finite do not count."""
    if not x.numel():
        return x.new_zeros(x.shape[:-2], dtype=torch.float32)
    width = format.block[1]
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % width)).unflatten(-1, (-1, width)).abs().amax(-1)
    return torch.where(blocks.isfinite(), blocks, 0.0).amax((-2, -1))


def quantize_reference(x: Tensor, format: Format, amax: Tensor | None = None) -> Tensor:
    """(..., N, K) of any floating-point dtype -> its block rows (..., R, bytes) uint8.

    amax: of each whole matrix (...), where `x` is a part of it, or None; only formats with a matrix scale look at it.
    Numbers are rounded to the nearest, ties to even; those past the largest become the largest.

    Scales, so that the largest number of a block rounds to more than half of the largest element:

    - e8m0 and powers of two: the smallest 2^s with amax / 2^s <= 464, or for e2m1 < 7, which round to 448 and 6. They
      are 2^ceil(log2(amax / 448)) but for the 5% of amax that lie between 448 and 464 times a power of two: with that
      scale 448.5 would become 224 x 2, and 448 again, next time, 448 x 1.
    - float32: amax / 448 rounded to 20 bits, so that an element times it is exact.
    - nvfp4: the matrix's is the smallest 2^s with amax / (6 x 2^s) <= 464; a block's is amax / 6 in units of that,
      rounded to the nearest e4m3, from 2^-6, the smallest that is normal.

    A block of zeros, or of less than the smallest scale can express, is zeros under the smallest scale; nothing is
    divided by zero. A block with an infinity or NaN is NaN as a whole: its scale is, and its elements are zeros. Of a
    number above 2.9e38 the element may be more than float32 holds.
    """
    rows, columns = x.shape[-2:]
    format.check(x.shape)
    step_rows, step_columns = format.block
    bands = format.block_rows(rows)
    data = x.new_zeros((*x.shape[:-2], bands, format.row_bytes(columns)), dtype=torch.uint8)
    if not x.numel():
        return data
    wide = torch.nn.functional.pad(x.float(), (0, -columns % step_columns, 0, -rows % step_rows))
    # (..., bands, rows of a block, blocks across, columns of a block)
    blocks = wide.unflatten(-1, (-1, step_columns)).unflatten(-3, (bands, step_rows))
    broken = (~blocks.isfinite()).any(-1).any(-2)  # (..., bands, blocks across)
    blocks = torch.where(broken[..., None, :, None], 0.0, blocks)
    block_amax = blocks.abs().amax((-3, -1))
    if format.matrix_scale:
        whole = _matrix_scale(matrix_amax(x, format) if amax is None else amax)[..., None]  # (..., 1)
        format.matrix_scales(data).copy_(whole.expand(data.shape[:-1]))
        scales = _block_scale(block_amax / whole[..., None], format)
        unit = scales.float() * whole[..., None]
    else:
        scales = _block_scale(block_amax, format)
        unit = scales.float()
    elements = round_to_element(blocks / unit[..., None, :, None], format)
    if format.scale is torch.float32:
        scales = torch.where(broken, torch.nan, scales)
    else:
        nan = 255 if format.scale is _E8M0 else 127
        scales = torch.where(broken, nan, scales.view(torch.uint8)).view(format.scale)
    format.scales(data, columns).copy_(scales)
    elements = elements.flatten(-2)[..., :columns]  # (..., bands, rows of a block, K)
    if rows % step_rows:
        elements[..., -1, rows % step_rows :, :] = 0
    format.elements(data, columns).copy_(_encode(elements, format))
    return data


def dequantize_reference(data: Tensor, format: Format, rows: int, columns: int) -> Tensor:
    """Block rows (..., R, bytes) uint8 -> (..., rows, columns) float32, exact."""
    scales = format.scales(data, columns).float()  # (..., R, blocks across)
    if format.matrix_scale:
        scales = scales * format.matrix_scales(data)[..., None]
    numbers = decode_rows(format.elements(data, columns), scales, format.bits, format.block[1])
    return numbers.flatten(-3, -2)[..., :rows, :]


def decode_rows(elements: Tensor, scales: Tensor, bits: int, width: int, first: int = 0) -> Tensor:
    """Decode rows that share their scales: elements (..., rows, bytes), scales (..., blocks) -> (..., rows, columns).

    The product of each element and the scale of its block of `width` columns, float32; first: the column of the first
    block that the rows start at.
    """
    if bits == 4:
        pairs = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)], device=elements.device)
        numbers = pairs[elements.int()].flatten(-2)
    else:
        numbers = elements.view(_E4M3).float()
    columns = numbers.shape[-1]
    factors = scales.float().repeat_interleave(width, -1)[..., None, first : first + columns]
    return numbers.mul_(factors)


def round_to_element(x: Tensor, format: Format) -> Tensor:
    """Round numbers in units of their scale, float32, to what an element holds, ties to even."""
    smallest, digits = (-6, 3) if format.bits == 8 else (0, 1)  # exponent of the smallest normal one, bits behind it
    exponent = torch.frexp(x.abs().clamp(2.0**smallest, format.largest)).exponent - 1
    ulp = torch.exp2((exponent - digits).float())
    whole = (x.clamp(-2 * format.largest, 2 * format.largest) / ulp).round()
    return (whole * ulp).clamp(-format.largest, format.largest)


def _encode(elements: Tensor, format: Format) -> Tensor:
    """Numbers that elements hold -> their bytes."""
    if format.bits == 8:
        return elements.to(_E4M3).view(torch.uint8)
    magnitudes = torch.tensor(_MAGNITUDES, device=elements.device)
    codes = torch.bucketize(elements.abs().contiguous(), magnitudes) | (elements.signbit().long() << 3)
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def _exponent(amax: Tensor, mantissa: int, above: int) -> Tensor:
    """The smallest s with amax <= (1 + mantissa / 2^23) x 2^(above + s), exactly, biased by 127; int32."""
    bits = amax.contiguous().view(torch.int32)
    return (bits >> 23) - above + ((bits & 0x7FFFFF) > mantissa).int()


def _power_of_two(amax: Tensor, format: Format) -> Tensor:
    """The biased exponent of a block's scale."""
    if format.bits == 8:
        return _exponent(amax, 0x680000, 8)  # 464 = 1.8125 x 2^8
    return _exponent(amax, 0x5FFFFF, 2)  # just below 7 = 1.75 x 2^2


def _float32_scale(amax: Tensor) -> Tensor:
    """amax / 448, rounded to 20 bits; 2^-100 at least, so that nothing is divided by zero and products stay normal."""
    bits = (amax / 448.0).clamp_min(2.0**-100).view(torch.int32)
    return ((bits + 0x8) & ~0xF).view(torch.float32)


def _block_scale(amax: Tensor, format: Format) -> Tensor:
    if format.scale is _E8M0:
        return _power_of_two(amax, format).clamp(0, 254).to(torch.uint8).view(_E8M0)
    if format.scale is _E4M3:  # of what is in units of the matrix's scale
        return (amax / 6.0).clamp(2.0**-6, 448.0).to(_E4M3)
    if format.power_of_two:
        return (_power_of_two(amax, format).clamp(27, 254) << 23).view(torch.float32)
    return _float32_scale(amax)


def _matrix_scale(amax: Tensor) -> Tensor:
    biased = _exponent(amax.float() / 6.0, 0x680000, 8)
    return (biased.clamp(27, 254) << 23).view(torch.float32)
