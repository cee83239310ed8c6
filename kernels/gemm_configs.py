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
# Operands that cannot be read 16 bytes at a time pass through registers, which takes small tiles: 128 x 256 spills 1.4
# KB a thread. float32 and float64 are multiplied as they are and are there to check results.
_ANY = {
    "odd": GemmConfig(64, 64, 32, 4, 3, per_sm=2),
    "float32": GemmConfig(32, 64, 32, 4, 2, per_sm=2),
    "float64": GemmConfig(32, 32, 16, 4, 1, per_sm=2),
}


# Where SwiGLU, in the clamped form or not, is computed in the product before it: everywhere but where the compiler
# spilled (Triton 3.7.1 on sm_80, 3.6 on sm_100). It saves a launch and reading gate and up back, 4 I bytes a row in
# half precision, about a tenth of the first product's time at the shapes of Qwen3 and DeepSeek. Chosen from compiling
# and counting bytes; not yet measured on a GPU.
_APART = {(80, "wide", True), (100, "narrow", True), (100, "narrow", False)}


def row_shape(dtype: torch.dtype, *, rows: int, experts: int, cols: int, aligned: bool = True) -> str:
    """Shape class of products with one result row for each of at most `rows` rows of `experts` experts, `cols` wide.

    `aligned`: both operands can be read 16 bytes at a time.
    """
    few, narrow = rows <= 64 * experts, cols <= 128
    return _shape_class(dtype, aligned, "few" if few else "narrow" if narrow else "wide")


def fuses_swiglu(arch: int, shape: str, clamped: bool) -> bool:
    """Whether the product computes its SwiGLU too."""
    return (80 if arch < 90 else 90 if arch < 100 else 100, shape, clamped) not in _APART


def weight_config(arch: int, dtype: torch.dtype, *, out: int, hidden: int, aligned: bool = True) -> GemmConfig:
    """For weight gradients of (out, hidden) for each expert."""
    narrow = hidden <= 128 or out <= 64
    return weight_configs(arch)[_shape_class(dtype, aligned, "narrow" if narrow else "wide")]


def row_configs(arch: int) -> dict[str, GemmConfig]:
    """Tiles of products that make rows on sm_`arch`, by shape class."""
    return _ROWS[80 if arch < 90 else 90] | _ANY


def weight_configs(arch: int) -> dict[str, GemmConfig]:
    """Everything that `weight_config` can choose on sm_`arch`, by shape class."""
    return _WEIGHT[80 if arch < 90 else 90] | _ANY


def _shape_class(dtype: torch.dtype, aligned: bool, by_shape: str) -> str:
    exact = {torch.float32: "float32", torch.float64: "float64"}
    return exact.get(dtype, by_shape if aligned else "odd")
