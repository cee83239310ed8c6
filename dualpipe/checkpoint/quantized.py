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
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dualpipe.checkpoint.hub_files import Header

_GROUP = 32  # values that share a scale in MXFP4
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

At = tuple[slice, ...]


class Stored(Protocol):
    """A tensor of the hub, whatever its form in the files.

    dtype: what holds its values as well as the hub's own loaders do. value_dtype: what they are computed in.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def value_dtype(self) -> torch.dtype: ...
    @property
    def names(self) -> tuple[str, ...]:
        """The tensors in the files that it is made of."""

    def raw(self, at: At) -> list[tuple[str, At]]:
        """What must be read of them for the part `at`, in the order of `names`."""

    def decode(self, raw: Sequence[Tensor], at: At, out: Tensor) -> None:
        """Fill `out` with the part `at`, from what `raw` said."""


@dataclass(frozen=True)
class Plain:
    """Stored as it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def raw(self, at: At) -> list[tuple[str, At]]:
        return [(self.name, at)]

    def decode(self, raw: Sequence[Tensor], at: At, out: Tensor) -> None:
        out.copy_(raw[0])


@dataclass(frozen=True)
class Mxfp4:
    """See above. Read and decoded by whole groups."""

    name: str
    shape: tuple[int, ...]
    dtype = value_dtype = torch.bfloat16

    @property
    def names(self) -> tuple[str, ...]:
        return f"{self.name}_blocks", f"{self.name}_scales"

    def raw(self, at: At) -> list[tuple[str, At]]:
        blocks, scales = self.names
        groups = _blocks_of(at[-1], _GROUP)
        return [(blocks, (*at[:-1], groups, slice(0, _GROUP // 2))), (scales, (*at[:-1], groups))]

    def decode(self, raw: Sequence[Tensor], at: At, out: Tensor) -> None:
        blocks, scales = raw
        if out.ndim > 2:  # one expert at a time: the values take 8 times the memory of the blocks
            for index in range(out.shape[0]):
                self.decode((blocks[index], scales[index]), at[1:], out[index])
            return
        pairs = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)], device="cpu")
        values_NGV = pairs[blocks.int()].flatten(-2)
        factors_NG = scales.view(torch.uint8).contiguous().view(torch.float8_e8m0fnu).float()
        values_NH = (values_NGV * factors_NG.unsqueeze(-1)).flatten(-2)
        first = at[-1].start % _GROUP
        out.copy_(values_NH[..., first : first + out.shape[-1]])


@dataclass(frozen=True)
class Fp8:
    """See above; block: (rows, columns) that share a scale."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    dtype = torch.bfloat16
    value_dtype = torch.float32

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, f"{self.name}_scale_inv"

    def raw(self, at: At) -> list[tuple[str, At]]:
        weight, scales = self.names
        over = tuple(_blocks_of(part, size) for part, size in zip(at[-2:], self.block))
        return [(weight, at), (scales, (*at[:-2], *over))]

    def decode(self, raw: Sequence[Tensor], at: At, out: Tensor) -> None:
        weight, scales = raw
        if out.ndim > 2:
            for index in range(out.shape[0]):
                self.decode((weight[index], scales[index]), at[1:], out[index])
            return
        height, width = self.block
        rows, columns = at
        offset = columns.start % width
        for index, scale in enumerate(scales.float()):  # of one row of blocks: no second tensor of this size is made
            start = max(0, (rows.start // height + index) * height - rows.start)
            stop = min(out.shape[0], (rows.start // height + index + 1) * height - rows.start)
            factors_H = scale.repeat_interleave(width)[offset : offset + out.shape[1]]
            out[start:stop] = weight[start:stop].float() * factors_H


def _blocks_of(part: slice, size: int) -> slice:
    """The blocks that a part touches."""
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
    return tuple(block)


def find_stored(header: Header, name: str, block: tuple[int, int] | None) -> Stored | None:
    """How a tensor is stored; None where it is missing.

    Raises `ValueError` where it is incomplete, or the forms of its tensors do not fit each other.
    """
    if name not in header:
        return _find_mxfp4(header, name)
    info = header[name]
    if info.dtype.itemsize > 1 or not info.dtype.is_floating_point:
        return Plain(name, info.shape, info.dtype)
    found = Fp8(name, info.shape, block or (1, 1))
    scales = found.names[1]
    if scales not in header:
        raise ValueError(f"{name} is {info.dtype}, and its scales {scales} are missing")
    if block is None:
        raise ValueError(f"{name} is {info.dtype}; config.json does not say how, in a quantization_config with "
                         "quant_method fp8 and weight_block_size")
    if info.dtype is not torch.float8_e4m3fn or len(info.shape) < 2:
        raise ValueError(f"{name} is {info.dtype} {info.shape}; only torch.float8_e4m3fn matrices are supported")
    _require_shape(header, scales, (*info.shape[:-2], *(-(-n // size) for n, size in zip(info.shape[-2:], block))))
    if not header[scales].dtype.is_floating_point:
        raise ValueError(f"{scales} is {header[scales].dtype}; scales must be floating-point")
    return found


def _find_mxfp4(header: Header, name: str) -> Mxfp4 | None:
    blocks, scales = Mxfp4(name, ()).names
    if blocks not in header and scales not in header:
        return None
    if lacking := next((part for part in (blocks, scales) if part not in header), None):
        raise ValueError(f"{lacking} is missing; {name} is stored in MXFP4, which needs both blocks and scales")
    info = header[blocks]
    if len(info.shape) < 3 or info.shape[-1] != _GROUP // 2 or info.dtype is not torch.uint8:
        raise ValueError(f"{blocks} must be torch.uint8 (..., N, H/32, 16); it is {info.dtype} {info.shape}")
    *rows, groups, _ = info.shape
    if header[scales].dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"{scales} must be torch.uint8; it is {header[scales].dtype}")
    _require_shape(header, scales, (*rows, groups))
    return Mxfp4(name, (*rows, groups * _GROUP))


def _require_shape(header: Header, name: str, expected: tuple[int, ...]) -> None:
    if header[name].shape != expected:
        raise ValueError(f"{name} is {header[name].shape}; {expected} is needed")
