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

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, by the three bits below the sign


@dataclass(frozen=True)
class Format:
    """How a matrix is quantized. Compared and hashed by value; `FORMATS` has those that there are, by name."""

    name: str
    bits: int  # of an element: 8 (e4m3), or 4 (e2m1, two in a byte, the first in its low half)
    block: tuple[int, int]  # rows and columns under one scale; columns 0: no scale but the matrix's
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
        return -(-columns // self.block[1]) if self.block[1] else 0

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
    Format("fp8_tensor", 8, (1, 0), torch.float32, matrix_scale=True),
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
    step = format.block[1] or 1
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % step)).unflatten(-1, (-1, step)).abs().amax(-1)
    return torch.where(blocks.isfinite(), blocks, 0.0).amax((-2, -1))


def quantize_reference(
    x: Tensor, format: Format, amax: Tensor | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    """(..., N, K) of any floating-point dtype -> its block rows (..., R, bytes) uint8.

    amax: of each whole matrix (...), where `x` is a part of it, or None; only formats with a matrix scale look at it.
    generator: rounds stochastically with it, each number up with the probability of its distance from the one below;
    without, to the nearest, ties to even. Numbers past the largest become the largest.

    Scales, so that the largest number of a block rounds to more than half of the largest element:

    - e8m0 and powers of two: the smallest 2^s with amax / 2^s <= 464, or for e2m1 < 7, which round to 448 and 6. They
      are 2^ceil(log2(amax / 448)) but for the 5% of amax that lie between 448 and 464 times a power of two: with that
      scale 448.5 would become 224 x 2, and 448 again, next time, 448 x 1.
    - float32: amax / 448 rounded to 20 bits, so that an element times it is exact.
    - nvfp4: the matrix's is the smallest 2^s with amax / (6 x 2^s) <= 464; a block's is amax / 6 in units of that,
      rounded to the nearest e4m3, from 2^-6, the smallest that is normal. fp8_tensor: as float32, of the whole matrix.

    A block of zeros, or of less than the smallest scale can express, is zeros under the smallest scale; nothing is
    divided by zero. A block with an infinity or NaN is NaN as a whole: its scale is, and its elements are zeros; in
    fp8_tensor such elements are NaN themselves. Of a number above 2.9e38 the element may be more than float32 holds.
    """
    rows, columns = x.shape[-2:]
    format.check(x.shape)
    step_rows, step_columns = format.block[0], format.block[1] or columns
    bands, across = format.block_rows(rows), format.scales_per_row(columns)
    data = x.new_zeros((*x.shape[:-2], bands, format.row_bytes(columns)), dtype=torch.uint8)
    if not x.numel():
        return data
    wide = torch.nn.functional.pad(x.float(), (0, -columns % step_columns, 0, -rows % step_rows))
    # (..., bands, rows of a block, blocks across, columns of a block)
    blocks = wide.unflatten(-1, (-1, step_columns)).unflatten(-3, (bands, step_rows))
    broken = (~blocks.isfinite()).any(-1).any(-2)  # (..., bands, blocks across)
    if format.matrix_scale:
        whole = _matrix_scale(matrix_amax(x, format) if amax is None else amax, format)[..., None]  # (..., 1)
        format.matrix_scales(data).copy_(whole.expand(data.shape[:-1]))
    if not across:
        scaled = torch.where(blocks.isfinite(), blocks / whole[..., None, None, None], torch.nan)
        elements = round_to_element(scaled, format, generator)
    else:
        blocks = torch.where(broken[..., None, :, None], 0.0, blocks)
        scales = _block_scale(blocks.abs().amax((-3, -1)) if not format.matrix_scale else
                              blocks.abs().amax((-3, -1)) / whole[..., None], format)
        unit = scales.float() if not format.matrix_scale else scales.float() * whole[..., None]
        elements = round_to_element(blocks / unit[..., None, :, None], format, generator)
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
    elements, blocks = format.elements(data, columns), format.block[1] or columns
    if format.bits == 4:
        values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=data.device)
        codes = torch.stack((elements & 15, elements >> 4), -1).flatten(-2)
        wide = values[codes.long()]
    else:
        wide = elements.view(_E4M3).float()
    if format.scales_per_row(columns):
        scales = format.scales(data, columns).float()  # (..., R, blocks across)
        if format.matrix_scale:
            scales = scales * format.matrix_scales(data)[..., None]
        wide = wide * scales.repeat_interleave(blocks, -1)[..., None, :columns]
    else:
        wide = wide * format.matrix_scales(data)[..., None, None]
    return wide.flatten(-3, -2)[..., :rows, :]


def round_to_element(x: Tensor, format: Format, generator: torch.Generator | None = None) -> Tensor:
    """Numbers in units of their scale, float32, rounded to what an element holds; NaN stays."""
    smallest, digits = (-6, 3) if format.bits == 8 else (0, 1)  # exponent of the smallest normal one, bits behind it
    exponent = torch.frexp(x.abs().clamp(2.0**smallest, format.largest)).exponent - 1
    ulp = torch.exp2((exponent - digits).float())
    x = x.clamp(-2 * format.largest, 2 * format.largest) / ulp
    if generator is None:
        whole = x.round()
    else:
        whole = x.floor()  # compared, as a sum with almost 1 could round up what an element holds
        whole += torch.rand(x.shape, generator=generator, device=x.device) < x - whole
    return (whole * ulp).clamp(-format.largest, format.largest)


def _encode(elements: Tensor, format: Format) -> Tensor:
    """Numbers that elements hold -> their bytes."""
    if format.bits == 8:
        return elements.to(_E4M3).view(torch.uint8)
    values = torch.tensor(_VALUES, device=elements.device)
    codes = torch.bucketize(elements.abs().contiguous(), values) | (elements.signbit().long() << 3)
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


def _matrix_scale(amax: Tensor, format: Format) -> Tensor:
    if format.bits == 8:
        return _float32_scale(amax.float())
    biased = _exponent(amax.float() / 6.0, 0x680000, 8)
    return (biased.clamp(27, 254) << 23).view(torch.float32)
