"""Grouped GEMMs with quantized weights. Kernels read the stored bytes of the weights.

`grouped_gemm_fp8` multiplies e4m3 by e4m3, at twice the rate of bfloat16. It promotes partial sums to float32 at every
change of scale. For fp8_block that is every 128 elements, before the partial sums lose precision in the 14 bits of
Hopper's tensor cores (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). For mxfp8 it is every 32 elements, except on
sm_100, whose tensor cores apply the scales.

`grouped_gemm_dequantize` takes rows of any floating-point dtype and weights of any format. It dequantizes tiles of the
weights while loading them, which saves writing and reading a bfloat16 copy of the weights.

grouped_gemm.py explains rows, `offs`, `gather`, `bias` and tiles. A dense GEMM is one with a single expert. The
references run on CPU. On CUDA they run for float64, below sm_89, which does not support e4m3, and for e4m3 operands
without 16-byte alignment, for example if K is not a multiple of 16.

Dimension letters: M rows, E experts, K in_features, N out_features; C columns of the result and D the summed dimension,
which are N and K in the forward, and K and N for the input gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import dualpipe.kernels.grouped_gemm_tiles as tiling
from dualpipe.kernels.common import (
    INTERPRET,
    architecture,
    operator,
    tl,
    tl_dtype,
    triton,
    use_triton,
    with_dense_rows,
)
from dualpipe.kernels.formats import FORMATS, Format, QuantizedRows, dequantize_reference
from dualpipe.kernels.grouped_gemm import (
    MAX_LAUNCHERS,
    check_operands,
    check_values,
    grouped_gemm,
    operand,
    rows_aligned,
    store_rows,
    takes_descriptor,
)
from dualpipe.kernels.grouped_gemm_tiles import GemmConfig, find_tile, tiles_per_expert
from dualpipe.kernels.launcher import Launcher

# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _as_float(scales):
    """Convert scales in float32, e4m3 or bytes of e8m0 -> float32.

    A byte of 255 becomes an infinity. The elements of its block are zeros, so their products are NaN.
    """
    if scales.dtype == tl.uint8:
        bits = scales.to(tl.int32)
        scales = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
    return scales.to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _fp8_kernel(
    a,  # (R, K) e4m3: descriptor of [ROWS, DEPTH] or pointer; R is M unless gathered
    a_scales,  # (R, blocks) float32, or bytes of e8m0
    w,  # (E, block rows, BLOCK_HEIGHT, K) e4m3: descriptor of COLS rows and DEPTH columns, or pointer
    w_scales,  # (E, block rows, blocks) float32, or bytes of e8m0
    y,  # (M, N)
    bias,  # (E, N) or None
    gather,  # (M,) int32 or int64, or None
    offs,  # (E,) int32
    M, N, K, E,
    a_row, a_scales_row, w_e, w_block_row, w_row, w_scales_e, w_scales_block_row,  # strides in elements
    A_DESCRIPTOR: tl.constexpr, W_DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of DEPTH
    BLOCK_HEIGHT: tl.constexpr,  # rows of a block: 1, or a multiple of COLS
    BLOCK: tl.constexpr,  # columns of a block: DEPTH, or a divisor of DEPTH with DOT_SCALED
    DOT_SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, E_PADDED: tl.constexpr,
):
    """y[m, n] = sum over blocks b of a_scales[m, b] w_scales[e, n, b] sum_k in b of a[m, k] w[e, n, k].

    Both operands are contiguous along K in memory, as the tensor cores require, so the kernel transposes none (Triton
    3.7.1 miscompiles transposed e4m3 registers on sm_90). The partial sum of every block starts from zero.
    """
    col_tiles = tl.cdiv(N, COLS)
    row_tiles = tiles_per_expert(offs, M, E, ROWS, E_PADDED)
    tile = tl.program_id(0)
    if tile >= tl.sum(row_tiles) * col_tiles:
        return
    expert, row, end, col_tile = find_tile(tile, offs, row_tiles, col_tiles, M, ROWS, GROUP)
    rows = row + tl.arange(0, ROWS)
    col = col_tile * COLS
    cols = col + tl.arange(0, COLS)
    source = rows.to(tl.int64)
    if gather is not None:
        source = tl.load(gather + rows, mask=rows < end, other=0).to(tl.int64)
    a_scales += source * a_scales_row
    w_scales += expert.to(tl.int64) * w_scales_e
    if BLOCK_HEIGHT == 1:
        w_scales += cols.to(tl.int64) * w_scales_block_row
    else:
        w_scales += (col // BLOCK_HEIGHT).to(tl.int64) * w_scales_block_row
    if not A_DESCRIPTOR:
        a_rows = a + (source * a_row)[:, None]
    if not W_DESCRIPTOR:
        w_cols = w + expert.to(tl.int64) * w_e
        w_starts = (cols // BLOCK_HEIGHT).to(tl.int64) * w_block_row + (cols % BLOCK_HEIGHT).to(tl.int64) * w_row
        w_cols += w_starts[None, :]
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for d in range(0, K, DEPTH):
        ds = d + tl.arange(0, DEPTH)
        if A_DESCRIPTOR:
            a_tile = a.load([row, d])
        else:
            a_mask = (rows < end)[:, None]
            if not EVEN:
                a_mask &= (ds < K)[None, :]
            a_tile = tl.load(a_rows + ds[None, :], mask=a_mask, other=0.0)
        if W_DESCRIPTOR:
            w_tile = w.load([expert, col // BLOCK_HEIGHT, col % BLOCK_HEIGHT, d]).reshape(COLS, DEPTH).T
        else:
            w_mask = (cols < N)[None, :]
            if not EVEN:
                w_mask &= (ds < K)[:, None]
            w_tile = tl.load(w_cols + ds[:, None], mask=w_mask, other=0.0)
        block = d // BLOCK
        if DOT_SCALED:
            blocks = block + tl.arange(0, DEPTH // BLOCK)
            inside = (blocks * BLOCK < K)[None, :]
            a_scale = tl.load(a_scales[:, None] + blocks[None, :], mask=inside & (rows < end)[:, None], other=0)
            w_scale = tl.load(w_scales[:, None] + blocks[None, :], mask=inside & (cols < N)[:, None], other=0)
            acc = tl.dot_scaled(a_tile, a_scale, "e4m3", w_tile, w_scale, "e4m3", acc)
        else:
            part = tl.dot(a_tile, w_tile)
            a_scale = _as_float(tl.load(a_scales + block, mask=rows < end, other=0))
            if BLOCK_HEIGHT == 1:
                w_scale = _as_float(tl.load(w_scales + block, mask=cols < N, other=0))
                acc += part * a_scale[:, None] * w_scale[None, :]
            else:
                acc += part * (a_scale * _as_float(tl.load(w_scales + block)))[:, None]
    part0, part1 = acc.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1).split()
    store_rows(y, bias, part0, expert, rows, end, col, N, N)
    store_rows(y, bias, part1, expert, rows, end, col + COLS // 2, N, N)


@triton.jit
def _dequantized(
    w,  # (block rows, BLOCK_HEIGHT, bytes of a row): e4m3, or two e2m1 per uint8
    w_scales,  # (block rows, blocks): float32, e4m3, or bytes of e8m0
    matrix_scales,  # (block rows,) float32, or None; may differ between parts that were quantized separately
    n, k, N, K, w_block_row, w_row, w_scales_block_row, matrix_scales_block_row,
    BITS: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):
    """Dequantize HEIGHT rows from `n` and WIDTH columns from `k` of one matrix -> float32; zeros outside of the matrix.

    The bits of an e2m1, moved to the sign, the low exponent bits and the high mantissa bit of a float16, give its value
    times 2^-14, for subnormal numbers too.
    """
    rows = n + tl.arange(0, HEIGHT)
    inside = (rows < N)[:, None]
    block_row = (rows // BLOCK_HEIGHT).to(tl.int64)
    at = w + (block_row * w_block_row + (rows % BLOCK_HEIGHT).to(tl.int64) * w_row)[:, None]
    if BITS == 4:
        pairs = k // 2 + tl.arange(0, WIDTH // 2)
        bytes = tl.load(at + pairs[None, :], mask=inside & (pairs < K // 2)[None, :], other=0)
        codes = tl.join(bytes & 15, bytes >> 4).reshape(HEIGHT, WIDTH).to(tl.uint16)
        halves = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.float16, bitcast=True)
        tile = halves.to(tl.float32) * 16384.0
    else:
        cols = k + tl.arange(0, WIDTH)
        tile = tl.load(at + cols[None, :], mask=inside & (cols < K)[None, :], other=0.0).to(tl.float32)
    ACROSS: tl.constexpr = WIDTH // BLOCK if WIDTH > BLOCK else 1
    blocks = k // BLOCK + tl.arange(0, ACROSS)
    at = w_scales + (block_row * w_scales_block_row)[:, None] + blocks[None, :]
    scale = _as_float(tl.load(at, mask=inside & (blocks * BLOCK < K)[None, :], other=0.0))
    if matrix_scales is not None:
        scale *= tl.load(matrix_scales + block_row * matrix_scales_block_row, mask=rows < N, other=0.0)[:, None]
    return (tile.reshape(HEIGHT, ACROSS, WIDTH // ACROSS) * scale[:, :, None]).reshape(HEIGHT, WIDTH)


@triton.jit(do_not_specialize=["M"])
def _dequantize_kernel(
    a,  # (R, D): descriptor of [ROWS, DEPTH] or pointer; R is M unless gathered
    w,  # (E, ...), see _dequantized
    w_scales,  # (E, ...), see _dequantized
    matrix_scales,  # (E, block rows) float32, or None
    y,  # (M, C)
    bias,  # (E, C) or None
    gather,  # (M,) int32 or int64, or None
    offs,  # (E,) int32
    M, N, K, E,
    a_row, a_d, w_e, w_block_row, w_row, w_scales_e, w_scales_block_row,  # strides in elements
    matrix_scales_e, matrix_scales_block_row,
    FORWARD: tl.constexpr, A_DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,  # D is a multiple of DEPTH
    BITS: tl.constexpr,  # of an element
    BLOCK_HEIGHT: tl.constexpr,  # rows of a block
    BLOCK: tl.constexpr,  # columns of a block
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr,  # dtype of the accumulator
):
    """y[m, c] = sum_d a[m, d] w[e, c, d] for the rows m of expert e; w[e, d, c] for the input gradient.

    Tiles and their borders are handled as by `_rows_kernel` in grouped_gemm.py.
    """
    C = N if FORWARD else K
    D = K if FORWARD else N
    col_tiles = tl.cdiv(C, COLS)
    row_tiles = tiles_per_expert(offs, M, E, ROWS, E_PADDED)
    tile = tl.program_id(0)
    if tile >= tl.sum(row_tiles) * col_tiles:
        return
    expert, row, end, col_tile = find_tile(tile, offs, row_tiles, col_tiles, M, ROWS, GROUP)
    rows = row + tl.arange(0, ROWS)
    col = col_tile * COLS
    if not A_DESCRIPTOR:
        source = rows
        if gather is not None:
            source = tl.load(gather + rows, mask=rows < end, other=0)
        a_rows = a + (source.to(tl.int64) * a_row)[:, None]
    w += expert.to(tl.int64) * w_e
    w_scales += expert.to(tl.int64) * w_scales_e
    if matrix_scales is not None:
        matrix_scales += expert.to(tl.int64) * matrix_scales_e
    acc = tl.zeros((ROWS, COLS), dtype=ACC)
    for d in range(0, D, DEPTH):
        if A_DESCRIPTOR:
            a_tile = a.load([row, d])
        else:
            ds = d + tl.arange(0, DEPTH)
            a_mask = (rows < end)[:, None]
            if not EVEN:
                a_mask &= (ds < D)[None, :]
            a_tile = tl.load(a_rows + ds.to(tl.int64)[None, :] * a_d, mask=a_mask, other=0.0)
        if FORWARD:
            w_tile = _dequantized(w, w_scales, matrix_scales, col, d, N, K, w_block_row, w_row, w_scales_block_row,
                                  matrix_scales_block_row, BITS, BLOCK_HEIGHT, BLOCK, COLS, DEPTH).to(a_tile.dtype).T
        else:
            w_tile = _dequantized(w, w_scales, matrix_scales, d, col, N, K, w_block_row, w_row, w_scales_block_row,
                                  matrix_scales_block_row, BITS, BLOCK_HEIGHT, BLOCK, DEPTH, COLS).to(a_tile.dtype)
        acc = tl.dot(a_tile, w_tile, acc, input_precision="ieee", out_dtype=ACC)
    part0, part1 = acc.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1).split()
    store_rows(y, bias, part0, expert, rows, end, col, C, C)
    store_rows(y, bias, part1, expert, rows, end, col + COLS // 2, C, C)


# --- launchers -------------------------------------------------------------------------------------------------------


def fp8_constants(
    config: GemmConfig, format: Format, a_descriptor: bool, w_descriptor: bool, depth: int, experts: int
) -> dict[str, Any]:
    """Return the constants of `_fp8_kernel`. depth: K. experts: E."""
    return dict(
        A_DESCRIPTOR=a_descriptor, W_DESCRIPTOR=w_descriptor, EVEN=depth % config.depth == 0,
        BLOCK_HEIGHT=format.block[0], BLOCK=format.block[1], DOT_SCALED=config.depth > format.block[1],
        **tiling.tile_constants(config, experts),
    )


def dequantize_constants(
    config: GemmConfig, format: Format, forward: bool, a_descriptor: bool, depth: int, experts: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the constants of `_dequantize_kernel`. depth: D. experts: E. dtype: dtype of the rows."""
    return dict(
        FORWARD=forward, A_DESCRIPTOR=a_descriptor, EVEN=depth % config.depth == 0, BITS=format.bits,
        BLOCK_HEIGHT=format.block[0], BLOCK=format.block[1], **tiling.tile_constants(config, experts),
        ACC=tl_dtype(torch.promote_types(dtype, torch.float32)),
    )


def _has_kernel(tensor: Tensor) -> bool:
    """Return True if a kernel supports the rows: the device must have e4m3, and Triton 3.7.1 fails for float64."""
    return use_triton(tensor) and tensor.dtype != torch.float64 and (INTERPRET or architecture(tensor.device) >= 89)


def _as_kernel_scales(scales: Tensor) -> Tensor:
    """View e8m0 scales as bytes, because Triton does not have e8m0; return others unchanged."""
    return scales.view(torch.uint8) if scales.dtype is torch.float8_e8m0fnu else scales


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor, or None for None."""
    return None if tensor is None else tensor.contiguous()


def _launch_fp8(
    rows: QuantizedRows, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:
    """Compute (M, K) -> (M, N) of quantized rows, in `out_dtype`."""
    a = rows.elements
    y = _new_rows(a, gather, n, out_dtype)
    if not n:
        return y
    has_square_blocks = format.block[0] > 1
    w = format.elements(data, k).view(a.dtype)  # (E, block rows, rows of a block, K)
    a_scales = _as_kernel_scales(with_dense_rows(rows.scales))
    w_scales = _as_kernel_scales(format.scales(data, k))
    config = tiling.fp8_configs(architecture(a.device))["block" if has_square_blocks else "mx"]
    a_block = (config.rows, config.depth)
    w_block = (1, 1, config.cols, config.depth) if has_square_blocks else (1, config.cols, 1, config.depth)
    a_descriptor = gather is None and takes_descriptor(a, (a.dtype,))
    w_descriptor = takes_descriptor(w, (a.dtype,))
    launch = _fp8_launcher(config, format, a_descriptor, w_descriptor, k, len(offs))
    pointers = (
        operand(a, a_block if a_descriptor else None), a_scales,
        operand(w, w_block if w_descriptor else None), w_scales,
        y, _contiguous(bias), _contiguous(gather), offs.contiguous(),
    )
    strides = (a.stride(0), a_scales.stride(0), *w.stride()[:3], *w_scales.stride()[:2])
    with torch.cuda.device_of(a):
        launch((tiling.max_tiles(config, *y.shape, len(offs)),), pointers, (*y.shape, k, len(offs), *strides))
    return y


@lru_cache(maxsize=MAX_LAUNCHERS)
def _fp8_launcher(
    config: GemmConfig, format: Format, a_descriptor: bool, w_descriptor: bool, depth: int, experts: int
) -> Launcher:
    """Return the launcher of `_fp8_kernel`."""
    constants = fp8_constants(config, format, a_descriptor, w_descriptor, depth, experts)
    return Launcher(_fp8_kernel, **constants, num_warps=config.warps, num_stages=config.stages)


def _launch_dequantize(
    a: Tensor, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    transposed: bool,
) -> Tensor:
    """Compute (M, K) -> (M, N), or the input gradient (M, N) -> (M, K) if `transposed`, with dequantized weights."""
    y = _new_rows(a, gather, k if transposed else n, a.dtype)
    if not y.shape[1]:
        return y
    w = format.elements(data, k)
    if format.bits == 8:
        w = w.view(torch.float8_e4m3fn)
    w_scales = _as_kernel_scales(format.scales(data, k))
    matrix_scales = format.matrix_scales(data) if format.matrix_scale else None
    config = _dequantize_config(a, data, n, k)
    a_descriptor = gather is None and takes_descriptor(a)
    launch = _dequantize_launcher(config, format, not transposed, a_descriptor, a.shape[1], len(offs), a.dtype)
    pointers = (
        operand(a, (config.rows, config.depth) if a_descriptor else None), w, w_scales, matrix_scales, y,
        _contiguous(bias), _contiguous(gather), offs.contiguous(),
    )
    matrix_scale_strides = (stride // 4 for stride in data.stride()[:2])  # bytes -> elements of float32
    strides = (*a.stride(), *w.stride()[:3], *w_scales.stride()[:2], *matrix_scale_strides)
    with torch.cuda.device_of(a):
        launch((tiling.max_tiles(config, *y.shape, len(offs)),), pointers, (y.shape[0], n, k, len(offs), *strides))
    return y


@lru_cache(maxsize=MAX_LAUNCHERS)
def _dequantize_launcher(
    config: GemmConfig, format: Format, forward: bool, a_descriptor: bool, depth: int, experts: int, dtype: torch.dtype
) -> Launcher:
    """Return the launcher of `_dequantize_kernel`."""
    constants = dequantize_constants(config, format, forward, a_descriptor, depth, experts, dtype)
    return Launcher(_dequantize_kernel, **constants, num_warps=config.warps, num_stages=config.stages)


def _dequantize_config(a: Tensor, data: Tensor, n: int, k: int) -> GemmConfig:
    """Return the tile of `_dequantize_kernel` for rows `a` and block rows `data`."""
    configs = tiling.dequantize_configs()
    if a.dtype is torch.float32:
        return configs["float32"]
    sizes_aligned = all(size % 16 == 0 for size in (n, k, a.stride(0)))
    return configs["half" if sizes_aligned and rows_aligned(a) and rows_aligned(data) else "odd"]


# --- operators -------------------------------------------------------------------------------------------------------


def _new_rows(x: Tensor, gather: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """Allocate a result with M rows."""
    return x.new_empty((x if gather is None else gather).shape[0], columns, dtype=dtype)


@operator(lambda elements, scales, data, format, n, k, offs, bias, gather, dtype: _new_rows(elements, gather, n, dtype))
def _grouped_gemm_fp8(
    elements: Tensor, scales: Tensor, data: Tensor, format: str, n: int, k: int, offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:
    """Compute `grouped_gemm_fp8` with checked operands."""
    check_values(offs, (elements if gather is None else gather).shape[0], gather, elements.shape[0])
    aligned = k % 16 == 0 and rows_aligned(elements) and rows_aligned(data)  # otherwise 1 KB per thread is spilled
    run = _launch_fp8 if aligned and _has_kernel(elements) else _reference_fp8
    return run(QuantizedRows(elements, scales), data, FORMATS[format], n, k, offs, bias, gather, out_dtype)


@operator(lambda x, data, format, n, k, offs, bias, gather, dgrad: _new_rows(x, gather, k if dgrad else n, x.dtype))
def _grouped_gemm_dequantize(
    x: Tensor, data: Tensor, format: str, n: int, k: int, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    transposed: bool,
) -> Tensor:
    """Compute `grouped_gemm_dequantize` with checked operands."""
    check_values(offs, (x if gather is None else gather).shape[0], gather, x.shape[0])
    run = _launch_dequantize if _has_kernel(x) else _reference_dequantize
    return run(x, data, FORMATS[format], n, k, offs, bias, gather, transposed)


# --- public functions ------------------------------------------------------------------------------------------------


def grouped_gemm_fp8(
    rows: QuantizedRows, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, *,
    out_dtype: torch.dtype, bias: Tensor | None = None, gather: Tensor | None = None,
) -> Tensor:
    """Compute y[m] = w[e] x[m] (+ bias[e]) for every row m of expert e, with quantized rows and weights -> (M, N).

    Sums in float32 and rounds once. For the input gradient, pass the transposed block rows and (E, K, N).

    Args:
        rows: x (M, K), with blocks as wide as those of `format`.
        data: block rows of w (E, block rows, bytes) uint8.
        format: format of w, which must support FP8 GEMMs (`Format.computes`).
        shape: (E, N, K).
        offs: (E,) int32, end of every expert's rows, cumulative.
        out_dtype: dtype of the result.
        bias: (E, N) in `out_dtype`.
        gather: see `grouped_gemm`. Rows from `offs[-1]` on stay uninitialized.

    Raises:
        ValueError: the operands do not match.
    """
    elements, scales = rows
    if not format.computes:
        raise ValueError(f"format is {format}, which has no FP8 GEMM; use grouped_gemm_dequantize")
    num_blocks = format.scales_per_row(shape[2])
    scale_dtype = torch.float32 if format.scale is torch.float32 else torch.float8_e8m0fnu
    if elements.dtype is not torch.float8_e4m3fn or elements.dim() != 2:
        raise ValueError(f"the elements of rows are {elements.dtype} of shape {tuple(elements.shape)}, expected a "
                         "matrix of float8_e4m3fn")
    if (scales.shape, scales.dtype) != ((elements.shape[0], num_blocks), scale_dtype):
        raise ValueError(f"rows have scales {tuple(scales.shape)} in {scales.dtype}, expected scales "
                         f"({elements.shape[0]}, {num_blocks}) in {scale_dtype} for {format}")
    if not out_dtype.is_floating_point:
        raise ValueError(f"out_dtype is {out_dtype}, expected a floating-point dtype")
    x = elements.new_empty((), dtype=out_dtype).expand(elements.shape)  # without memory
    _check_operands(x, data, format, shape, offs, bias, gather, summed_dim=2)
    return _grouped_gemm_fp8(elements, scales, data, format.name, *shape[1:], offs, bias, gather, out_dtype)


def grouped_gemm_dequantize(
    x: Tensor, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, *, bias: Tensor | None = None,
    gather: Tensor | None = None, transposed: bool = False,
) -> Tensor:
    """Compute y[m] = w[e] x[m] (+ bias[e]) for every row m of expert e, with weights of any format -> (M, N).

    Every element of w is rounded once, to the dtype of `x`.

    Args:
        x: (M, K); (M, N) if `transposed`.
        data: block rows of w (E, block rows, bytes) uint8.
        format: format of w.
        shape: (E, N, K).
        offs: (E,) int32, end of every expert's rows, cumulative.
        bias: (E, N) in the dtype of `x`; (E, K) if `transposed`.
        gather: see `grouped_gemm`. Rows from `offs[-1]` on stay uninitialized.
        transposed: compute the input gradient x[m] w[e] -> (M, K).

    Raises:
        ValueError: the operands do not match.
    """
    _check_operands(x, data, format, shape, offs, bias, gather, summed_dim=1 if transposed else 2)
    return _grouped_gemm_dequantize(x, data, format.name, *shape[1:], offs, bias, gather, transposed)


def _check_operands(
    x: Tensor, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, *, summed_dim: int,
) -> None:
    """Raise ValueError if operands do not match. summed_dim: dimension of the weights that the GEMM sums over."""
    experts, n, k = shape
    expected_shape = (experts, format.block_rows(n), format.row_bytes(k))
    if data.dtype is not torch.uint8 or data.shape != expected_shape:
        raise ValueError(f"data is {data.dtype} of shape {tuple(data.shape)}, expected uint8 of shape {expected_shape} "
                         f"for {format} weights {tuple(shape)}")
    dtype = x.dtype if x.is_floating_point() else torch.float32
    w = data.new_empty((), dtype=dtype).expand(shape)  # dequantized weights, without memory
    check_operands(offs, [("x", 1), ("w", summed_dim)], gather, bias, w=w, x=x)


def slower_in_fp8(format: Format, shape: tuple[int, int, int], rows: float, device: torch.device) -> str | None:
    """Return a reason if `grouped_gemm_fp8`, with quantization of rows, is slower than bfloat16, else None.

    The gains are estimates, not measurements; see grouped_gemm_tiles.py. There is none for the CPU: all quantized GEMMs
    are slower there, and the result is None.

    shape: (E, N, K) of the weights, or (E, K, N) for transposed weights.
    rows: mean number of rows of an expert.
    """
    _, cols, depth = shape
    if device.type != "cuda":
        return None
    arch = architecture(device)
    if arch < 89:
        return f"sm_{arch} has no e4m3 GEMMs"
    if depth % 16:
        return f"{depth} columns are not a multiple of 16"
    gain = tiling.fp8_gain(arch, "block" if format.block[0] > 1 else "mx", rows, cols)
    if gain >= 1:
        return None
    return f"{format} with {rows:.0f} rows per expert and {cols} columns takes about {1 / gain:.1f} times as long"


# --- references: GEMMs of dequantized operands -----------------------------------------------------------------------


def _reference_fp8(
    rows: QuantizedRows, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:
    """Compute `grouped_gemm_fp8` in float32 with dequantized operands, rounded to `out_dtype`."""
    x = rows.elements.float() * rows.scales.float().repeat_interleave(format.block[1], 1)[:, :k]
    w = dequantize_reference(data, format, n, k)
    return grouped_gemm(x, w, offs, bias=None if bias is None else bias.float(), gather=gather).to(out_dtype)


def _reference_dequantize(
    x: Tensor, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    transposed: bool,
) -> Tensor:
    """Compute `grouped_gemm_dequantize` with dequantized weights in the dtype of `x`."""
    w = dequantize_reference(data, format, n, k).to(x.dtype)
    return grouped_gemm(x, w.mT if transposed else w, offs, bias=bias, gather=gather)
