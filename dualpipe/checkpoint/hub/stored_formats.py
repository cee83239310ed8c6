"""The forms in which a Hugging Face checkpoint stores a tensor, and how they are decoded: as it is, in MXFP4, in FP8.

MXFP4 is that of gpt-oss, FP8 with a scale for each block that of DeepSeek-V3:

    MXFP4  <name>_blocks (..., N, H/32, 16) uint8, two values a byte, low nibble first
           <name>_scales (..., N, H/32) uint8                        value = e2m1 * 2 ** (scale - 127)
    FP8    <name> (..., N, H) e4m3
           <name>_scale_inv (..., ceil(N/128), ceil(H/128))          value = e4m3 * scale

Products are taken in float32 and rounded once, to what they are copied into. Those of MXFP4 are exact in bfloat16;
those of FP8 are not, so a float32 parameter gets more of them than the bfloat16 that the hub's own loaders make.
A weight that is stored in the format "mxfp4" or "fp8_block" takes elements and scales as they are, without loss.

Dimension letters: N outputs, H inputs, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dualpipe.checkpoint.tensors import Box, TensorHeader
from dualpipe.kernels.formats import FORMATS, Format, decode_rows

SUFFIXES = ("", "_scale_inv", "_blocks", "_scales")  # behind a tensor's name, those of what it may be stored as

_GROUP = 32  # values that share a scale in MXFP4


@dataclass(frozen=True)
class Stored:
    """A tensor that is stored as it is; subclasses: in other forms, decoded one expert at a time, as the values take up
    to 8 times the memory of what is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16  # the narrowest that holds its values as well as the hub's own loaders do
    format: ClassVar[Format | None] = None  # has the same elements and scales, in blocks that may be larger or smaller
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # of what `raw` names, where that is elements and scales

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        """The tensors in the files, and the boxes of them, that a box of this one is made of."""
        return [(self.name, box)]

    def decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        """Fill `out` with a box, from the boxes that `raw` names."""
        out.copy_(raw[0])


@dataclass(frozen=True)
class Mxfp4(Stored):
    """A tensor in MXFP4. Read and decoded by whole groups."""

    format, dtypes = FORMATS["mxfp4"], (torch.uint8, torch.uint8)

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        """Blocks and scales of the groups that the box touches."""
        groups = *box.slices[:-1], _touched(box.slices[-1], _GROUP)
        blocks = Box.at((*groups, slice(0, _GROUP // 2)))
        return [(f"{self.name}_blocks", blocks), (f"{self.name}_scales", Box.at(groups))]

    def decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        """Multiply the values of each group by its scale; each row has scales of its own."""
        first = box.offsets[-1] % _GROUP
        for expert in np.ndindex(out.shape[:-2]):
            blocks_NGB, scales_NG = (each[expert] for each in raw)
            scales_NG = scales_NG.view(torch.uint8).contiguous().view(torch.float8_e8m0fnu)
            values_NH = decode_rows(blocks_NGB.flatten(-2).unsqueeze(-2), scales_NG, 4, _GROUP).squeeze(-2)
            out[expert] = values_NH[..., first : first + out.shape[-1]]


@dataclass(frozen=True)
class Fp8(Stored):
    """A tensor in FP8, computed in float32; block: (rows, columns) that share a scale."""

    block: tuple[int, int] = (128, 128)
    format, dtypes = FORMATS["fp8_block"], (torch.float8_e4m3fn, torch.float32)

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        """The values of the box, and the scales of the blocks that it touches."""
        *experts, rows, columns = box.slices
        blocks = _touched(rows, self.block[0]), _touched(columns, self.block[1])
        return [(self.name, box), (f"{self.name}_scale_inv", Box.at((*experts, *blocks)))]

    def decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        """Multiply each row of blocks by its scales."""
        height, width = self.block
        above, left = box.offsets[-2] % height, box.offsets[-1] % width  # of the first block, what is outside
        for expert in np.ndindex(out.shape[:-2]):
            weight, scales = (each[expert] for each in raw)
            for index, scale in enumerate(scales):  # of a row of blocks: no second tensor of this size is made
                rows = slice(max(0, index * height - above), (index + 1) * height - above)
                out[expert][rows] = decode_rows(weight[rows], scale, 8, width, left)


def _touched(part: slice, size: int) -> slice:
    """The blocks of `size` that a part of a dimension touches."""
    return slice(part.start // size, -(-part.stop // size))


def fp8_block(hub: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, by a `config.json`; None where it speaks of no FP8.

    Raises `ValueError` for a way of quantizing that is not supported.
    """
    config = hub.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config must be a JSON object; got {config!r}")
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if method == "mxfp4":
        return None
    if method != "fp8":
        raise ValueError(f"quantization_config: quant_method {method!r} is not supported; only mxfp4, and fp8 with "
                         "weight_block_size: take a checkpoint in bfloat16")
    if not (isinstance(block, Sequence) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(f"quantization_config: fp8 needs a weight_block_size such as [128, 128]; got {block!r}")
    return block[0], block[1]


def find_stored(header: Mapping[str, TensorHeader], name: str, block: tuple[int, int] | None) -> Stored | None:
    """How a tensor is stored; None where it is missing.

    Raises `ValueError` where it is incomplete, or the forms of its tensors do not fit each other.
    """
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    found: Stored
    if name in header:
        dtype, shape, *_ = header[name]
        scales = f"{name}_scale_inv"
        if dtype.itemsize > 1 or not dtype.is_floating_point:
            return Stored(name, shape, dtype)
        if scales not in header:
            raise ValueError(f"{name} is {dtype}, and its scales {scales} are missing")
        if block is None:
            raise ValueError(f"{name} is {dtype}; config.json does not say how, in a quantization_config with "
                             "quant_method fp8 and weight_block_size")
        if dtype is not torch.float8_e4m3fn or len(shape) < 2:
            raise ValueError(f"{name} is {dtype} {shape}; only torch.float8_e4m3fn matrices are supported")
        if not header[scales].dtype.is_floating_point:
            raise ValueError(f"{scales} is {header[scales].dtype}; scales must be floating-point")
        expected = *shape[:-2], *(-(-size // each) for size, each in zip(shape[-2:], block))
        found = Fp8(name, shape, block=block)
    elif lacking := [each for each in (blocks, scales) if each not in header]:
        if len(lacking) == 2:
            return None
        raise ValueError(f"{lacking[0]} is missing; {name} is stored in MXFP4, which needs both blocks and scales")
    else:
        dtype, shape, *_ = header[blocks]
        if len(shape) < 3 or shape[-1] != _GROUP // 2 or dtype is not torch.uint8:
            raise ValueError(f"{blocks} must be torch.uint8 (..., N, H/32, 16); it is {dtype} {shape}")
        if header[scales].dtype not in (torch.uint8, torch.float8_e8m0fnu):
            raise ValueError(f"{scales} must be torch.uint8; it is {header[scales].dtype}")
        expected, found = shape[:-1], Mxfp4(name, (*shape[:-2], shape[-2] * _GROUP))
    if header[scales].shape != expected:
        raise ValueError(f"{scales} is {header[scales].shape}; {expected} is needed")
    return found
