"""Tiles of the grouped products: how big they are, and which of them a program works on.

Sizes are in one table by architecture, dtype and shape class, the same on every run. Nothing is tuned while training:
ranks would wait for each other, and choose differently from one run to the next. In a checkout, `python
benchmarks/compile_kernels.py --match grouped` shows what each entry costs in registers and shared memory.

Every expert's rows start a tile of their own, so that a tile never holds rows of two experts. Their number is known on
the device alone: experts e with r_e rows need sum(cdiv(r_e, TILE_ROWS)) tiles of rows, at most M // TILE_ROWS +
min(E, M), which is what the host sizes the grid by. A table of them would be one more launch for every product; each
program finds its own tile instead, with three sums over E numbers, and returns at once if it is one too many.

Example: offs = [2, 2, 9], tiles of 4 rows and 2 tiles of columns. Experts 0, 1, 2 have 1, 0 and 2 tiles of rows, so
tiles 0 and 1 belong to expert 0 and tiles 2 to 5 to expert 2: (expert, first row, tile of columns) are (0, 0, 0),
(0, 0, 1), (2, 2, 0), (2, 6, 0), (2, 2, 1), (2, 6, 1). Within an expert GROUP tiles of rows share a tile of columns
before the next one, so that programs that run at the same time read the same weights from the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dualpipe.kernels.common import tl, tl_dtype, triton
from dualpipe.kernels.swiglu import Activation

GROUP = 8  # tiles of rows that share a tile of weights before the next one
MOST_MERGED = 4  # micro-batches that the kernel for weight gradients has arguments for

# --- how big ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmConfig:
    """One tile: `rows` x `cols` of the result, summed in steps of `depth`."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


# Shape classes of grouped_gemm and its input gradient. 128 x 256 with 8 warps keeps the tensor cores of Hopper fed; a
# result that is narrower would leave half of such a tile empty. Experts with few rows leave much of any tile empty, but
# what takes time there is to read their weights: 128 rows are 128 operations a byte, where an H100 does 295 meanwhile.
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
# The weight gradient has tiles of N x H whatever the experts got; rows are what it sums over. Where these are
# gathered, a row is loaded only when its index is there. The two loads in a chain take two of Triton's stages for
# each buffer: a gathered form needs 2 b - 1 stages for b buffers on sm_90, where the other form needs b, and 2 b + 1
# on sm_80, where the other form needs b + 1. With as many stages as the other form it has 2 buffers instead of 3 on
# sm_90, and each step of the loop begins with a wait for all loads; on sm_80 it has 1 instead of 2. (Triton 3.7.1,
# read in its TTGIR and SASS.)
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
# Operands that cannot be read 16 bytes at a time pass through registers, which takes small tiles: 128 x 256 spills 1.4
# KB a thread. float32 and float64 are multiplied as they are and are there to check results.
_ANY = {
    "odd": GemmConfig(64, 64, 32, 4, 3),
    "float32": GemmConfig(32, 64, 32, 4, 2),
    "float64": GemmConfig(32, 32, 16, 4, 1),
}
# Products of e4m3 (grouped_gemm_quantized.py), by what is under one scale. `block`, 128 x 128: registers hold the sum
# and what is promoted into it every 128 numbers, 153 of them with eight warps; four warps spill. `mx`: promoted every
# 32 numbers, until sm_100 scales as it multiplies. The first line is for sm_89 and the interpreter.
_FP8 = {
    80: {"block": GemmConfig(64, 64, 128, 4, 3), "mx": GemmConfig(64, 64, 32, 4, 4)},
    90: {"block": GemmConfig(128, 128, 128, 8, 4), "mx": GemmConfig(128, 128, 32, 8, 6)},
    100: {"block": GemmConfig(128, 128, 128, 8, 4), "mx": GemmConfig(128, 256, 128, 8, 4)},
}
# What products of e4m3 are faster by than ours of bfloat16 where nothing but arithmetic counts. Counted, not
# measured: 128 x 128 x 128 takes Hopper's tensor cores 512 cycles, in bfloat16 1024; to promote it once, 128 more,
# and every 32 with a scale for each row and column, 1024. sm_100 takes 256 and 512, and as long as before to promote.
# On sm_90 the machine code waits for all matrix instructions before it promotes a block (`WARPGROUP.DEPBAR.LE gsb0,
# 0x0`), about 130 cycles more, and one program fits on a multiprocessor, so that nothing hides this, nor the first
# tile and the last write: counted so, 1.25 at K = 2048 and 1.3 at 7168, and other counts give 1.0 and 1.3. The table
# is in the middle until a GPU has measured it.
_FP8_RATE = {(90, "block"): 1.15, (90, "mx"): 0.65, (100, "block"): 1.0, (100, "mx"): 1.9}
# Weights that are dequantized on their way: 128 registers, so that two programs share a multiprocessor and one's matrix
# instructions hide the other's conversions.
_DEQUANTIZE = {
    "half": GemmConfig(128, 128, 64, 8, 3),
    "odd": GemmConfig(64, 64, 32, 4, 3),
    "float32": GemmConfig(32, 32, 32, 8, 2),
}
# Where SwiGLU, in the clamped form or not, is computed in the product before it: everywhere but where the compiler
# spilled (Triton 3.7.1 on sm_80, 3.6 on sm_100). It saves a launch and reading gate and up back, 4 I bytes a row in
# half precision, about a tenth of the first product's time at the shapes of Qwen3 and DeepSeek. Chosen from compiling
# and counting bytes; not yet measured on a GPU.
_APART = {(80, "wide", True), (100, "narrow", True), (100, "narrow", False)}


def row_configs(arch: int) -> dict[str, GemmConfig]:
    """Tiles of products that make rows on sm_`arch`, by shape class."""
    return _ROWS[80 if arch < 90 else 90] | _ANY


def weight_configs(arch: int) -> dict[str, GemmConfig]:
    """Tiles of weight gradients on sm_`arch`, by shape class."""
    return _WEIGHT[80 if arch < 90 else 90] | _ANY


def most_merged(arch: int) -> int:
    """Micro-batches that one kernel for weight gradients takes on sm_`arch`.

    With three or four, tiles of 128 x 128 x 32 spill 8 to 16 bytes on sm_80 (Triton 3.7.1).
    """
    return 2 if arch < 90 else MOST_MERGED


def merged_sizes(count: int, most: int) -> list[int]:
    """Micro-batches of each kernel for `count` of them, at most `most` in one; of seven, three and four."""
    num_kernels = -(-count // most)
    ends = [count * i // num_kernels for i in range(num_kernels + 1)]
    return [end - start for start, end in pairwise(ends)]


def fp8_configs(arch: int) -> dict[str, GemmConfig]:
    """Tiles of products of e4m3 on sm_`arch`, by shape class."""
    return _FP8[80 if arch < 90 else 90 if arch < 100 else 100]


def fp8_gain(arch: int, shape: str, rows: float, cols: int) -> float:
    """How many times faster than in bfloat16 a product is in FP8, with its rows quantized for it; an estimate.

    rows: of an expert on average; cols: of the result. In both, time goes by the bytes of the weights or by operations,
    of which 200 fit beside a byte; to quantize a row reads and writes three bytes a number.
    """
    bfloat16 = max(rows * cols / 100, 2.0 * cols)
    return bfloat16 / (max(rows * cols / 100 / _FP8_RATE[90 if arch < 100 else 100, shape], cols) + 3 * rows)


def dequantize_configs() -> dict[str, GemmConfig]:
    """Tiles of products with weights that are dequantized on their way, by shape class."""
    return _DEQUANTIZE


def row_shape(dtype: torch.dtype, *, cols: int, aligned: bool = True) -> str:
    """Shape class of products that make rows, `cols` wide; `aligned`: both operands can be read 16 bytes at a time."""
    return _shape_class(dtype, aligned, "narrow" if cols <= 128 else "wide")


def weight_shape(
    dtype: torch.dtype, *, out: int, hidden: int, aligned: bool = True, gathered: bool = False
) -> str:
    """Shape class of weight gradients of (out, hidden) for each expert; `aligned` as for `row_shape`.

    gathered: the rows of the input are read where an index says.
    """
    width = "narrow" if hidden <= 128 or out <= 64 else "wide"
    return _shape_class(dtype, aligned, f"{width}_gathered" if gathered else width)


def _shape_class(dtype: torch.dtype, aligned: bool, by_shape: str) -> str:
    exact = {torch.float32: "float32", torch.float64: "float64"}
    return exact.get(dtype, by_shape if aligned else "odd")


def fuses_swiglu(arch: int, shape: str, clamped: bool) -> bool:
    """Return True if the product computes its SwiGLU too."""
    return (80 if arch < 90 else 90 if arch < 100 else 100, shape, clamped) not in _APART


def w_block(config: GemmConfig, forward: bool, activation: Activation | None) -> list[int]:
    """What a descriptor of the weights loads at a time; of halves, from w as (E, 2, I, H)."""
    if activation is not None and not activation.clamped:
        return [1, 2, config.cols // 2, config.depth]
    return [1, config.cols, config.depth] if forward else [1, config.depth, config.cols]


def tile_constants(config: GemmConfig, experts: int) -> dict[str, Any]:
    """What every kernel that makes rows has to know to find its tile."""
    return dict(ROWS=config.rows, COLS=config.cols, DEPTH=config.depth, GROUP=GROUP,
                E_PADDED=max(16, 1 << (experts - 1).bit_length()))


def most_tiles(config: GemmConfig, rows: int, cols: int, experts: int) -> int:
    """Tiles that there can be at most, one at least."""
    return max(1, rows // config.rows + min(experts, rows)) * -(-cols // config.cols)


def rows_constants(
    config: GemmConfig, forward: bool, a_descriptor: bool, w_descriptor: bool, aligned: bool, depth: int, experts: int,
    dtype: torch.dtype, activation: Activation | None,
) -> dict[str, Any]:
    """The constants of `_rows_kernel`."""
    return dict(
        FORWARD=forward, A_DESCRIPTOR=a_descriptor, W_DESCRIPTOR=w_descriptor, ALIGNED=aligned,
        EVEN=depth % config.depth == 0, **tile_constants(config, experts),
        ACC=tl_dtype(torch.promote_types(dtype, torch.float32)),
        SWIGLU="" if activation is None else "pairs" if activation.clamped else "halves",
        ALPHA=1.0 if activation is None else activation.alpha,
        LIMIT=0.0 if activation is None else activation.limit,
    )


def weight_constants(
    config: GemmConfig, accumulate: bool, dy_descriptor: bool, x_descriptor: bool, out_descriptor: bool, aligned: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The constants of `_weight_kernel`."""
    return dict(
        ACCUMULATE=accumulate, DY_DESCRIPTOR=dy_descriptor, X_DESCRIPTOR=x_descriptor, OUT_DESCRIPTOR=out_descriptor,
        ALIGNED=aligned, ROWS=config.rows, COLS=config.cols, DEPTH=config.depth,
        ACC=tl_dtype(torch.promote_types(dtype, torch.float32)),
    )


# --- which one -------------------------------------------------------------------------------------------------------


@triton.jit
def tiles_per_expert(offs, M, E, TILE_ROWS: tl.constexpr, E_PADDED: tl.constexpr):
    """(E_PADDED,) tiles of rows of each expert. Ends outside of 0 to M count as 0 or M: no other row is touched."""
    e = tl.arange(0, E_PADDED)
    ends = tl.minimum(tl.load(offs + e, mask=e < E, other=0), M)
    starts = tl.load(offs + e - 1, mask=(e > 0) & (e < E), other=0)
    return tl.cdiv(tl.maximum(ends - tl.maximum(starts, 0), 0), TILE_ROWS)


@triton.jit
def rows_of(offs, expert, M):
    """(first row, end) of an expert, clamped as in `tiles_per_expert`."""
    start = tl.load(offs + expert - 1, mask=expert > 0, other=0)
    return tl.maximum(start, 0), tl.minimum(tl.load(offs + expert), M)


@triton.jit
def find_tile(tile, offs, row_tiles, col_tiles, M, TILE_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(expert, first row, end of its rows, tile of columns) of `tile`.

    `row_tiles` is `tiles_per_expert`, `col_tiles` the tiles of columns of any expert.
    """
    before = tl.cumsum(row_tiles, 0) <= tile // col_tiles  # experts whose tiles are all before this one
    expert = tl.sum(before.to(tl.int32))
    local = tile - tl.sum(tl.where(before, row_tiles, 0)) * col_tiles
    start, end = rows_of(offs, expert, M)
    group = local // (GROUP * col_tiles)
    rows_in_group = tl.minimum(tl.cdiv(end - start, TILE_ROWS) - group * GROUP, GROUP)
    in_group = local % (GROUP * col_tiles)
    row_tile = group * GROUP + in_group % rows_in_group
    return expert, start + row_tile * TILE_ROWS, end, in_group // rows_in_group
