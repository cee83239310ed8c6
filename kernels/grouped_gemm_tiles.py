"""Tiles of the grouped GEMMs: tables of their sizes, and the assignment of tiles to programs.

Sizes are in tables by architecture, dtype and shape class (a range of shapes with one tile, such as "wide"), and are
the same in every run. There is no autotuning in training: ranks would wait for each other, and choices would differ
between runs. In a checkout, `python benchmarks/compile_kernels.py --match grouped` prints the registers and shared
memory of every entry.

The rows of every expert start a new tile, so that a tile never has rows of two experts. Only the device knows the
number of tiles: experts e with r_e rows have sum(cdiv(r_e, TILE_ROWS)) row tiles. The host launches a grid for at most
M // TILE_ROWS + min(E, M) row tiles. A table of tiles would take one more launch for every GEMM; instead, every program
finds its tile with three sums over E numbers, and a program without a tile returns immediately.

Example: offs = [2, 2, 9], tiles of 4 rows, and 2 column tiles. Experts 0, 1, 2 have 1, 0 and 2 row tiles, so tiles 0
and 1 belong to expert 0, and tiles 2 to 5 to expert 2: (expert, first row, column tile) are (0, 0, 0), (0, 0, 1),
(2, 2, 0), (2, 6, 0), (2, 2, 1), (2, 6, 1). Within an expert, GROUP row tiles with the same column tile are consecutive,
so that concurrent programs read the same weights from the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dualpipe.kernels.common import tl, tl_dtype, triton
from dualpipe.kernels.swiglu import Activation

GROUP = 8  # consecutive row tiles with the same column tile
MOST_MERGED = 4  # micro-batches that the kernel for weight gradients has arguments for

# --- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmConfig:
    """Tile of `rows` x `cols` of the result, summed in steps of `depth`, and its warps and pipeline stages."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# Shape classes of grouped_gemm and its input gradient. 128 x 256 with 8 warps keeps the tensor cores of Hopper busy; a
# narrower result would leave half of such a tile empty. Experts with few rows leave a large part of any tile empty, but
# then the time is that of reading the weights: 128 rows are 128 operations per byte, and an H100 can do 295.
_ROWS = {
    80: {
        "wide": GemmConfig(128, 256, 32, 8, 4),
        "narrow": GemmConfig(128, 128, 32, 8, 4),
    },
    90: {
        "wide": GemmConfig(128, 256, 64, 8, 3),
        "narrow": GemmConfig(128, 128, 64, 8, 3),
    },
}
# The weight gradient has tiles of N x H for any number of rows, and sums over rows. With gathered rows, the load of a
# row depends on the load of its index. This chain of two loads takes two of Triton's stages per buffer, so "_gathered"
# has more stages for the same number of buffers (Triton 3.7.1, read in its TTGIR and SASS):
#
#     stages for b buffers    sm_90        sm_80
#     contiguous rows         b            b + 1
#     gathered rows           2 b - 1      2 b + 1
#
# With the stages for contiguous rows, gathered rows would have 2 buffers instead of 3 on sm_90, and every step of the
# loop would start by waiting for all loads; on sm_80 they would have 1 buffer instead of 2.
_WEIGHT = {
    80: {
        "wide": GemmConfig(128, 128, 64, 8, 3),
        "narrow": GemmConfig(128, 128, 32, 8, 4),
        "wide_gathered": GemmConfig(128, 128, 64, 8, 5),
        "narrow_gathered": GemmConfig(128, 128, 32, 8, 7),
    },
    90: {
        "wide": GemmConfig(128, 256, 64, 8, 3),
        "narrow": GemmConfig(128, 128, 64, 8, 3),
        "wide_gathered": GemmConfig(128, 256, 64, 8, 5),
        "narrow_gathered": GemmConfig(128, 128, 64, 8, 5),
    },
}
# Operands without 16-byte alignment are loaded through registers, which requires small tiles: 128 x 256 spills 1.4 KB
# per thread. float32 and float64 are multiplied in full precision; they serve to check results.
_ANY = {
    "odd": GemmConfig(64, 64, 32, 4, 3),
    "float32": GemmConfig(32, 64, 32, 4, 2),
    "float64": GemmConfig(32, 32, 16, 4, 1),
}
# e4m3 GEMMs (grouped_gemm_quantized.py), by the shape of a block. "block", 128 x 128: registers hold the sum and the
# partial sum that is promoted into it every 128 elements, 153 registers with eight warps; four warps spill. "mx":
# promoted every 32 elements, except on sm_100, whose tensor cores apply the scales. The first line is for sm_89 and the
# interpreter.
_FP8 = {
    80: {"block": GemmConfig(64, 64, 128, 4, 3), "mx": GemmConfig(64, 64, 32, 4, 4)},
    90: {"block": GemmConfig(128, 128, 128, 8, 4), "mx": GemmConfig(128, 128, 32, 8, 6)},
    100: {"block": GemmConfig(128, 128, 128, 8, 4), "mx": GemmConfig(128, 256, 128, 8, 4)},
}
# Speedup of e4m3 GEMMs over bfloat16 if arithmetic limits both. Estimated from cycle counts, not measured: 128 x 128 x
# 128 takes 512 cycles on Hopper's tensor cores, and 1024 in bfloat16; promoting once takes 128 more cycles, and
# promoting every 32 elements with scales of rows and columns takes 1024. sm_100 takes 256 and 512 cycles, and the same
# cycles for promoting. On sm_90 the machine code waits for all matrix instructions before it promotes a block
# (`WARPGROUP.DEPBAR.LE gsb0, 0x0`), about 130 more cycles. Only one program fits on a multiprocessor, so nothing hides
# this wait, the first loads and the last store: this count gives 1.25 at K = 2048 and 1.3 at 7168; other counts give
# 1.0 and 1.3. The table has values in between until a GPU has measured them.
_FP8_RATE = {(90, "block"): 1.15, (90, "mx"): 0.65, (100, "block"): 1.0, (100, "mx"): 1.9}
# Weights that are dequantized while loading: 128 registers, so that two programs share a multiprocessor and the matrix
# instructions of one hide the conversions of the other.
_DEQUANTIZE = {
    "half": GemmConfig(128, 128, 64, 8, 3),
    "odd": GemmConfig(64, 64, 32, 4, 3),
    "float32": GemmConfig(32, 32, 32, 8, 2),
}
# SwiGLU is fused into the preceding GEMM except in these cases (architecture, shape class, clamped), in which the
# compiler spilled registers (Triton 3.7.1 on sm_80, 3.6 on sm_100). Fusion saves a launch and reading gate and up, 4 I
# bytes per row in half precision, about a tenth of the GEMM's time at the shapes of Qwen3 and DeepSeek. Chosen by
# compiling and counting bytes; not yet measured on a GPU.
_UNFUSED = {(80, "wide", True), (100, "narrow", True), (100, "narrow", False)}


def _generation(arch: int) -> int:
    """Return the architecture whose tables sm_`arch` uses: 80, 90 or 100."""
    if arch < 90:
        return 80
    return 90 if arch < 100 else 100


def row_configs(arch: int) -> dict[str, GemmConfig]:
    """Return the tiles of GEMMs that compute rows on sm_`arch`, by shape class."""
    return _ROWS[80 if arch < 90 else 90] | _ANY


def weight_configs(arch: int) -> dict[str, GemmConfig]:
    """Return the tiles of weight gradients on sm_`arch`, by shape class."""
    return _WEIGHT[80 if arch < 90 else 90] | _ANY


def most_merged(arch: int) -> int:
    """Return the largest number of micro-batches that one launch for weight gradients takes on sm_`arch`.

    With three or four, tiles of 128 x 128 x 32 spill 8 to 16 bytes on sm_80 (Triton 3.7.1).
    """
    return 2 if arch < 90 else MOST_MERGED


def merged_sizes(count: int, most: int) -> list[int]:
    """Divide `count` micro-batches evenly over launches that take at most `most`: 7 with `most` 4 gives [3, 4]."""
    num_launches = -(-count // most)
    ends = [count * i // num_launches for i in range(num_launches + 1)]
    return [end - start for start, end in pairwise(ends)]


def fp8_configs(arch: int) -> dict[str, GemmConfig]:
    """Return the tiles of e4m3 GEMMs on sm_`arch`, by shape class."""
    return _FP8[_generation(arch)]


def fp8_gain(arch: int, shape: str, rows: float, cols: int) -> float:
    """Estimate the speedup of an FP8 GEMM, with quantization of its rows, over bfloat16.

    shape: shape class of `fp8_configs`.
    rows: mean number of rows of an expert.
    cols: columns of the result.

    The time of a GEMM is that of the weights' bytes or that of its operations, whichever is longer; 200 operations take
    as long as one byte. Quantizing a row reads and writes three bytes per element.
    """
    bfloat16_time = max(rows * cols / 100, 2.0 * cols)
    rate = _FP8_RATE[90 if arch < 100 else 100, shape]
    fp8_time = max(rows * cols / 100 / rate, cols) + 3 * rows
    return bfloat16_time / fp8_time


def dequantize_configs() -> dict[str, GemmConfig]:
    """Return the tiles of GEMMs with weights that are dequantized while loading, by shape class."""
    return _DEQUANTIZE


def row_shape(dtype: torch.dtype, *, cols: int, aligned: bool = True) -> str:
    """Return the shape class of a GEMM that computes rows.

    cols: columns of the result.
    aligned: both operands have 16-byte alignment.
    """
    return _shape_class(dtype, aligned, "narrow" if cols <= 128 else "wide")


def weight_shape(
    dtype: torch.dtype, *, out: int, hidden: int, aligned: bool = True, gathered: bool = False
) -> str:
    """Return the shape class of a weight gradient (out, hidden) for every expert.

    aligned: all operands have 16-byte alignment.
    gathered: the rows of the input are read through an index.
    """
    width = "narrow" if hidden <= 128 or out <= 64 else "wide"
    return _shape_class(dtype, aligned, f"{width}_gathered" if gathered else width)


def _shape_class(dtype: torch.dtype, aligned: bool, half_class: str) -> str:
    """Return the shape class by dtype and alignment. half_class: class for aligned operands in half precision."""
    if dtype is torch.float32:
        return "float32"
    if dtype is torch.float64:
        return "float64"
    return half_class if aligned else "odd"


def fuses_swiglu(arch: int, shape: str, clamped: bool) -> bool:
    """Return True if SwiGLU is fused into the GEMM."""
    return (_generation(arch), shape, clamped) not in _UNFUSED


def w_block(config: GemmConfig, forward: bool, activation: Activation | None) -> list[int]:
    """Return the block that a descriptor of the weights loads; for halves of gate and up, w is (E, 2, I, H)."""
    if activation is not None and not activation.clamped:
        return [1, 2, config.cols // 2, config.depth]
    return [1, config.cols, config.depth] if forward else [1, config.depth, config.cols]


def tile_constants(config: GemmConfig, experts: int) -> dict[str, Any]:
    """Return the constants with which a kernel that computes rows finds its tile."""
    return dict(ROWS=config.rows, COLS=config.cols, DEPTH=config.depth, GROUP=GROUP,
                E_PADDED=max(16, 1 << (experts - 1).bit_length()))


def max_tiles(config: GemmConfig, rows: int, cols: int, experts: int) -> int:
    """Return the largest possible number of tiles of a result (rows, cols); at least one row of tiles."""
    row_tiles = max(1, rows // config.rows + min(experts, rows))
    return row_tiles * -(-cols // config.cols)


def rows_constants(
    config: GemmConfig, forward: bool, a_descriptor: bool, w_descriptor: bool, aligned: bool, depth: int, experts: int,
    dtype: torch.dtype, activation: Activation | None,
) -> dict[str, Any]:
    """Return the constants of `_rows_kernel`. depth: D. experts: E. activation: fused activation, or None."""
    swiglu_layout = ""
    alpha = 1.0
    limit = 0.0
    if activation is not None:
        swiglu_layout = "pairs" if activation.clamped else "halves"
        alpha = activation.alpha
        limit = activation.limit
    return dict(
        FORWARD=forward, A_DESCRIPTOR=a_descriptor, W_DESCRIPTOR=w_descriptor, ALIGNED=aligned,
        EVEN=depth % config.depth == 0, **tile_constants(config, experts),
        ACC=tl_dtype(torch.promote_types(dtype, torch.float32)),
        SWIGLU=swiglu_layout, ALPHA=alpha, LIMIT=limit,
    )


def weight_constants(
    config: GemmConfig, accumulate: bool, dy_descriptor: bool, x_descriptor: bool, out_descriptor: bool, aligned: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the constants of `_weight_kernel`."""
    return dict(
        ACCUMULATE=accumulate, DY_DESCRIPTOR=dy_descriptor, X_DESCRIPTOR=x_descriptor, OUT_DESCRIPTOR=out_descriptor,
        ALIGNED=aligned, ROWS=config.rows, COLS=config.cols, DEPTH=config.depth,
        ACC=tl_dtype(torch.promote_types(dtype, torch.float32)),
    )


# --- assignment ------------------------------------------------------------------------------------------------------


@triton.jit
def tiles_per_expert(offs, M, E, TILE_ROWS: tl.constexpr, E_PADDED: tl.constexpr):
    """Return the number of row tiles of every expert (E_PADDED,). Clamps ends to 0 to M: no other row is accessed."""
    e = tl.arange(0, E_PADDED)
    ends = tl.minimum(tl.load(offs + e, mask=e < E, other=0), M)
    starts = tl.load(offs + e - 1, mask=(e > 0) & (e < E), other=0)
    return tl.cdiv(tl.maximum(ends - tl.maximum(starts, 0), 0), TILE_ROWS)


@triton.jit
def rows_of(offs, expert, M):
    """Return (first row, end) of an expert, clamped as in `tiles_per_expert`."""
    start = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    return tl.maximum(start, 0), tl.minimum(tl.load(offs + expert), M)


@triton.jit
def find_tile(tile, offs, row_tiles, col_tiles, M, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return (expert, first row, end of the expert's rows, column tile) of `tile`.

    row_tiles: result of `tiles_per_expert`.
    col_tiles: number of column tiles, the same for every expert.
    """
    before = tl.cumsum(row_tiles, 0) <= tile // col_tiles  # experts whose tiles all come before this one
    expert = tl.sum(before.to(tl.int32))
    local = tile - tl.sum(tl.where(before, row_tiles, 0)) * col_tiles
    start, end = rows_of(offs, expert, M)
    group = local // (GROUP * col_tiles)
    rows_in_group = tl.minimum(tl.cdiv(end - start, TILE_ROWS) - group * GROUP, GROUP)
    in_group = local % (GROUP * col_tiles)
    row_tile = group * GROUP + in_group % rows_in_group
    return expert, start + row_tile * TILE_ROWS, end, in_group // rows_in_group
