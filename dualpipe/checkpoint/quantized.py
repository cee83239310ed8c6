"""How a tensor is stored: as it is, in MXFP4 (gpt-oss), or in FP8 with a scale for each block (DeepSeek-V3).

    MXFP4  <name>_blocks (..., N, H/32, 16) uint8, two values a byte, low nibble first
           <name>_scales (..., N, H/32) uint8                        value = e2m1 * 2 ** (scale - 127)
    FP8    <name> (..., N, H) e4m3
           <name>_scale_inv (..., ceil(N/128), ceil(H/128))          value = e4m3 * scale

Products are taken in float32 and rounded once, to what they are copied into. Those of MXFP4 are exact in bfloat16;
those of FP8 are not, so a float32 parameter gets more of them than the bfloat16 that the hub's own loaders make.

Dimension letters: N outputs, H inputs, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dualpipe.checkpoint.tensors import Box, TensorHeader

SUFFIXES = ("", "_scale_inv", "_blocks", "_scales")  # behind a tensor's name, those of what it may be stored as

_GROUP = 32  # values that share a scale in MXFP4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Stored:
    """A tensor that is stored as it is; subclasses: in other forms.

    dtype: the narrowest that holds its values as well as the hub's own loaders do.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype in which `decode` computes."""
        return self.dtype

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        """The tensors in the files, and the boxes of them, that a box of this one is made of."""
        return [(self.name, box)]

    def decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        """Fill `out` with a box, from the boxes that `raw` names."""
        if out.ndim > 2:  # one expert at a time: the values take up to 8 times the memory of what is stored
            for index in range(out.shape[0]):
                self.decode([each[index] for each in raw], Box(box.offsets[1:], box.shape[1:]), out[index])
        else:
            self._decode(raw, box, out)

    def _decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        out.copy_(raw[0])


@dataclass(frozen=True)
class Mxfp4(Stored):
    """A tensor in MXFP4. Read and decoded by whole groups."""

    dtype: torch.dtype = field(default=torch.bfloat16, init=False)

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        groups = *box.slices[:-1], _touched(box.slices[-1], _GROUP)
        blocks = Box.at((*groups, slice(0, _GROUP // 2)))
        return [(f"{self.name}_blocks", blocks), (f"{self.name}_scales", Box.at(groups))]

    def _decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        blocks, scales = raw
        pairs = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)], device="cpu")
        values_NGV = pairs[blocks.int()].flatten(-2)
        factors_NG = scales.view(torch.uint8).contiguous().view(torch.float8_e8m0fnu).float()
        values_NH = (values_NGV * factors_NG.unsqueeze(-1)).flatten(-2)
        first = box.offsets[-1] % _GROUP
        out.copy_(values_NH[..., first : first + out.shape[-1]])


@dataclass(frozen=True)
class Fp8(Stored):
    """A tensor in FP8; block: (rows, columns) that share a scale."""

    dtype: torch.dtype = field(default=torch.bfloat16, init=False)
    block: tuple[int, int]

    @property
    def value_dtype(self) -> torch.dtype:
        return torch.float32

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        *experts, rows, columns = box.slices
        blocks = _touched(rows, self.block[0]), _touched(columns, self.block[1])
        return [(self.name, box), (f"{self.name}_scale_inv", Box.at((*experts, *blocks)))]

    def _decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        weight, scales = raw
        height, width = self.block
        above, left = box.offsets[0] % height, box.offsets[1] % width  # of the first block, what is outside
        for index, scale in enumerate(scales.float()):  # of one row of blocks: no second tensor of this size is made
            rows = slice(max(0, index * height - above), (index + 1) * height - above)
            factors_H = scale.repeat_interleave(width)[left : left + out.shape[1]]
            out[rows] = weight[rows].float() * factors_H


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
    if name not in header:
        return _find_mxfp4(header, name)
    dtype, shape = header[name].dtype, header[name].shape
    if dtype.itemsize > 1 or not dtype.is_floating_point:
        return Stored(name, shape, dtype)
    scales = f"{name}_scale_inv"
    if scales not in header:
        raise ValueError(f"{name} is {dtype}, and its scales {scales} are missing")
    if block is None:
        raise ValueError(f"{name} is {dtype}; config.json does not say how, in a quantization_config with "
                         "quant_method fp8 and weight_block_size")
    if dtype is not torch.float8_e4m3fn or len(shape) < 2:
        raise ValueError(f"{name} is {dtype} {shape}; only torch.float8_e4m3fn matrices are supported")
    _require_shape(header, scales, (*shape[:-2], *(-(-n // size) for n, size in zip(shape[-2:], block))))
    if not header[scales].dtype.is_floating_point:
        raise ValueError(f"{scales} is {header[scales].dtype}; scales must be floating-point")
    return Fp8(name, shape, block)


def _find_mxfp4(header: Mapping[str, TensorHeader], name: str) -> Mxfp4 | None:
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    if blocks not in header and scales not in header:
        return None
    if lacking := next((part for part in (blocks, scales) if part not in header), None):
        raise ValueError(f"{lacking} is missing; {name} is stored in MXFP4, which needs both blocks and scales")
    dtype, shape = header[blocks].dtype, header[blocks].shape
    if len(shape) < 3 or shape[-1] != _GROUP // 2 or dtype is not torch.uint8:
        raise ValueError(f"{blocks} must be torch.uint8 (..., N, H/32, 16); it is {dtype} {shape}")
    if header[scales].dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"{scales} must be torch.uint8; it is {header[scales].dtype}")
    _require_shape(header, scales, shape[:-1])
    return Mxfp4(name, (*shape[:-2], shape[-2] * _GROUP))


def _require_shape(header: Mapping[str, TensorHeader], name: str, expected: tuple[int, ...]) -> None:
    if header[name].shape != expected:
        raise ValueError(f"{name} is {header[name].shape}; {expected} is needed")
