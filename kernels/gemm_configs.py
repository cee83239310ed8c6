"""Tile sizes of the grouped products: one table by architecture, dtype and shape class, the same on every run.

Nothing is tuned while training: ranks would wait for each other, and choose differently from one run to the next.
`python -m dualpipe.kernels.compilation --match grouped` shows what each entry costs in registers and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GemmConfig:
    """One tile: `rows` x `cols` of the result, summed in steps of `depth`."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    per_sm: int = 1  # programs that fit on a multiprocessor at once


# Shape classes of grouped_gemm and its input gradient. 128 x 256 with 8 warps keeps the tensor cores of Hopper fed; a
# result that is narrower, or experts with few rows, would leave most of such a tile empty.
_ROWS = {
    80: {
        "wide": GemmConfig(128, 256, 32, 8, 4),
        "narrow": GemmConfig(128, 128, 32, 8, 4),
        "few": GemmConfig(64, 128, 64, 4, 3, per_sm=2),
    },
    90: {
        "wide": GemmConfig(128, 256, 64, 8, 3),
        "narrow": GemmConfig(128, 128, 64, 8, 3, per_sm=2),
        "few": GemmConfig(64, 128, 64, 4, 4, per_sm=2),
    },
}
# The weight gradient has tiles of N x H whatever the experts got; rows are what it sums over.
_WEIGHT = {
    80: {"wide": GemmConfig(128, 128, 64, 8, 3), "narrow": GemmConfig(128, 128, 32, 8, 4)},
    90: {"wide": GemmConfig(128, 256, 64, 8, 3), "narrow": GemmConfig(128, 128, 64, 8, 3)},
}
# float32 is multiplied exactly, without tensor cores, and is there to check results. Operands that cannot be read 16
# bytes at a time pass through registers. Both need small tiles: 128 x 256 spills 1.4 KB a thread.
_FLOAT32 = GemmConfig(32, 64, 32, 4, 2, per_sm=2)
_ODD = GemmConfig(64, 64, 32, 4, 3, per_sm=2)


def row_config(
    arch: int, dtype: torch.dtype, *, rows: int, experts: int, cols: int, aligned: bool = True
) -> GemmConfig:
    """For products with one result row for each of at most `rows` rows of `experts` experts, `cols` wide.

    `aligned`: both operands can be read 16 bytes at a time.
    """
    few, narrow = rows <= 64 * experts, cols <= 128
    return row_configs(arch)[_shape_class(dtype, aligned, "few" if few else "narrow" if narrow else "wide")]


def weight_config(arch: int, dtype: torch.dtype, *, out: int, hidden: int, aligned: bool = True) -> GemmConfig:
    """For weight gradients of (out, hidden) for each expert."""
    narrow = hidden <= 128 or out <= 64
    return weight_configs(arch)[_shape_class(dtype, aligned, "narrow" if narrow else "wide")]


def row_configs(arch: int) -> dict[str, GemmConfig]:
    """Everything that `row_config` can choose on sm_`arch`, by shape class."""
    return _ROWS[80 if arch < 90 else 90] | {"odd": _ODD, "float32": _FLOAT32}


def weight_configs(arch: int) -> dict[str, GemmConfig]:
    """Everything that `weight_config` can choose on sm_`arch`, by shape class."""
    return _WEIGHT[80 if arch < 90 else 90] | {"odd": _ODD, "float32": _FLOAT32}


def _shape_class(dtype: torch.dtype, aligned: bool, by_shape: str) -> str:
    return "float32" if dtype is torch.float32 else by_shape if aligned else "odd"
