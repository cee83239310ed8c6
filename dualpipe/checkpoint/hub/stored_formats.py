"""Storage forms of tensors in Hugging Face checkpoints, and how to decode them: unchanged, MXFP4, or FP8.

MXFP4 is the form of gpt-oss. FP8 with block scales is the form of DeepSeek-V3:

    MXFP4  <name>_blocks (..., N, H/32, 16) uint8, two values a byte, low nibble first
           <name>_scales (..., N, H/32) uint8                        value = e2m1 * 2 ** (scale - 127)
    FP8    <name> (..., N, H) e4m3
           <name>_scale_inv (..., ceil(N/128), ceil(H/128))          value = e4m3 * scale

Values are computed in float32 and rounded once, to the dtype of their destination. MXFP4 values are exact in bfloat16.
FP8 values are not, so a float32 parameter is more precise than the bfloat16 that the hub's loaders produce. A weight
that is kept in the format "mxfp4" or "fp8_block" takes elements and scales unchanged, without loss.

Dimension letters: N outputs, H inputs, G groups of 32 inputs, B bytes of a group.
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

SUFFIXES = ("", "_scale_inv", "_blocks", "_scales")  # appended to a tensor's name, in any of the storage forms

_GROUP = 32  # values that share a scale in MXFP4


@dataclass(frozen=True)
class Stored:
    """A tensor that is stored unchanged, and the base class of the other storage forms.

    Those decode one expert at a time: decoded values take up to 8 times the memory of the stored ones.

    Args:
        name: name of the tensor on the hub.
        shape: shape of the decoded tensor.
        dtype: the dtype in the file, or bfloat16 if the tensor is quantized, as from the hub's own loaders.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    # The format of this library with the same elements and scales. The blocks of the file may have another size.
    format: ClassVar[Format | None] = None
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # dtypes of the tensors from `raw`: elements and scales

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        """Return the file tensors that a box is decoded from, and the box to read of each."""
        return [(self.name, box)]

    def decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        """Decode a box into `out`, from the tensors that `raw(box)` names."""
        out.copy_(raw[0])


@dataclass(frozen=True)
class Mxfp4(Stored):
    """A tensor in MXFP4. Read and decoded in whole groups."""

    format = FORMATS["mxfp4"]
    dtypes = (torch.uint8, torch.uint8)

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        """Return blocks and scales of the groups that the box touches."""
        groups = (*box.slices[:-1], _touched_blocks(box.slices[-1], _GROUP))
        blocks = Box.from_slices((*groups, slice(0, _GROUP // 2)))
        return [(f"{self.name}_blocks", blocks), (f"{self.name}_scales", Box.from_slices(groups))]

    def decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        """Multiply the values of each group by its scale. Every row has separate scales."""
        blocks, scales = raw
        first = box.offsets[-1] % _GROUP
        for expert in np.ndindex(out.shape[:-2]):
            blocks_NGB = blocks[expert]
            scales_NG = scales[expert].view(torch.uint8).contiguous().view(torch.float8_e8m0fnu)
            values_NH = decode_rows(blocks_NGB.flatten(-2).unsqueeze(-2), scales_NG, 4, _GROUP).squeeze(-2)
            out[expert] = values_NH[..., first : first + out.shape[-1]]


@dataclass(frozen=True)
class Fp8(Stored):
    """A tensor in FP8, decoded in float32.

    block: (rows, columns) that share a scale.
    """

    block: tuple[int, int] = (128, 128)
    format = FORMATS["fp8_block"]
    dtypes = (torch.float8_e4m3fn, torch.float32)

    def raw(self, box: Box) -> list[tuple[str, Box]]:
        """Return the elements of the box, and the scales of the blocks that it touches."""
        *experts, rows, columns = box.slices
        block_rows = _touched_blocks(rows, self.block[0])
        block_columns = _touched_blocks(columns, self.block[1])
        scales = Box.from_slices((*experts, block_rows, block_columns))
        return [(self.name, box), (f"{self.name}_scale_inv", scales)]

    def decode(self, raw: Sequence[Tensor], box: Box, out: Tensor) -> None:
        """Multiply each row of blocks by its scales."""
        elements, scales = raw
        height, width = self.block
        above = box.offsets[-2] % height  # rows of the first block that are outside of the box
        left = box.offsets[-1] % width  # columns of it
        for expert in np.ndindex(out.shape[:-2]):
            # One row of blocks at a time: no second tensor of this size is allocated.
            for index, row_scales in enumerate(scales[expert]):
                rows = slice(max(0, index * height - above), (index + 1) * height - above)
                out[expert][rows] = decode_rows(elements[expert][rows], row_scales, 8, width, left)


def _touched_blocks(span: slice, size: int) -> slice:
    """Return the blocks of `size` that a span of a dimension touches."""
    return slice(span.start // size, -(-span.stop // size))


def fp8_block(hub: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale according to a `config.json`, or None if it has no FP8.

    Raises:
        ValueError: the quantization method is not supported.
    """
    config = hub.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config must be a JSON object; got {config!r}")
    method = config.get("quant_method")
    if method == "mxfp4":
        return None
    if method != "fp8":
        raise ValueError(f"quantization_config: quant_method {method!r} is not supported, only mxfp4, and fp8 with "
                         "weight_block_size; use a checkpoint in bfloat16")
    block = config.get("weight_block_size")
    if not (isinstance(block, Sequence) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(f"quantization_config: fp8 needs a weight_block_size such as [128, 128]; got {block!r}")
    return block[0], block[1]


def find_stored(header: Mapping[str, TensorHeader], name: str, block: tuple[int, int] | None) -> Stored | None:
    """Return the storage form of a tensor, or None if the checkpoint does not have it.

    Args:
        header: all tensors of the checkpoint, by name.
        name: name of the tensor on the hub.
        block: from `fp8_block`.

    Raises:
        ValueError: elements or scales are missing, or have dtypes or shapes that are not supported.
    """
    if name in header:
        return _find_plain_or_fp8(header, name, block)
    parts = (f"{name}_blocks", f"{name}_scales")
    missing = [part for part in parts if part not in header]
    if len(missing) == 2:
        return None
    if missing:
        raise ValueError(f"{missing[0]} is missing; {name} is stored in MXFP4, which needs both blocks and scales")
    return _find_mxfp4(header, name)


def _find_plain_or_fp8(header: Mapping[str, TensorHeader], name: str, block: tuple[int, int] | None) -> Stored:
    """Return the storage form of a tensor whose elements have its own name."""
    dtype, shape, *_ = header[name]
    if dtype.itemsize > 1 or not dtype.is_floating_point:
        return Stored(name, shape, dtype)
    scales = f"{name}_scale_inv"
    if scales not in header:
        raise ValueError(f"{name} is {dtype}, and its scales {scales} are missing; is the download complete?")
    if block is None:
        raise ValueError(f"{name} is {dtype}, but config.json does not say how it is scaled; it needs a "
                         "quantization_config with quant_method fp8 and weight_block_size")
    if dtype is not torch.float8_e4m3fn or len(shape) < 2:
        raise ValueError(f"{name} is {dtype} {shape}; only torch.float8_e4m3fn matrices are supported")
    if not header[scales].dtype.is_floating_point:
        raise ValueError(f"{scales} is {header[scales].dtype}; scales must be floating-point")
    blocks = (-(-size // block_size) for size, block_size in zip(shape[-2:], block))
    _check_scales_shape(header, scales, (*shape[:-2], *blocks))
    return Fp8(name, shape, block=block)


def _find_mxfp4(header: Mapping[str, TensorHeader], name: str) -> Mxfp4:
    """Return the storage form of a tensor that has blocks and scales."""
    blocks = f"{name}_blocks"
    scales = f"{name}_scales"
    dtype, shape, *_ = header[blocks]
    if len(shape) < 3 or shape[-1] != _GROUP // 2 or dtype is not torch.uint8:
        raise ValueError(f"{blocks} is {dtype} {shape}; it must be torch.uint8 (..., N, H/32, 16)")
    if header[scales].dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"{scales} is {header[scales].dtype}; it must be torch.uint8")
    _check_scales_shape(header, scales, shape[:-1])
    return Mxfp4(name, (*shape[:-2], shape[-2] * _GROUP))


def _check_scales_shape(header: Mapping[str, TensorHeader], scales: str, expected: tuple[int, ...]) -> None:
    if header[scales].shape != expected:
        raise ValueError(f"{scales} has shape {header[scales].shape}; it must have {expected}")
