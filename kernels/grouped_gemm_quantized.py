"""Grouped products of rows with quantized weights, whose bytes are read as they are stored.

`grouped_gemm_fp8` multiplies e4m3 by e4m3, at twice the rate of bfloat16, and promotes partial sums to float32 where a
scale changes: every 128 numbers (fp8_block), before the 14 bits that Hopper's tensor cores sum in lose them
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2), or every 32 (mxfp8), where sm_100 scales in its tensor cores instead.
`grouped_gemm_dequantize` takes rows of any floating-point dtype and weights of any format, and dequantizes tiles of
them on their way to the product: what it saves is to write and read a copy of the weights in bfloat16.

What rows, `offs`, `gather` and `bias` are, and the tiles, is in grouped_gemm.py; a dense product is that of one expert.
The references run on CPU, and on CUDA for float64, for e4m3 that cannot be read 16 bytes at a time, as where K is no
multiple of 16, and below sm_89, which knows no e4m3.

Dimension letters: M rows, E experts, K in_features, N out_features; C columns of a result and D the dimension summed
over, which are N and K, or for the input gradient K and N.
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
    """Scales float32, e4m3 or the bytes of e8m0 -> float32. Bytes of 255 become infinities: their elements are zeros,
    and the product NaN."""
    if scales.dtype == tl.uint8:
        bits = scales.to(tl.int32)
        scales = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
    return scales.to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _fp8_kernel(
    a,  # (R, K) e4m3: descriptor of [ROWS, DEPTH] or pointer; R is M unless gathered
    a_scales,  # (R, blocks) float32, or the bytes of e8m0
    w,  # (E, block rows, BLOCK_HEIGHT, K) e4m3: descriptor of COLS rows in DEPTH columns, or pointer
    w_scales,  # (E, block rows, blocks), as a_scales
    y,  # (M, N)
    bias,  # (E, N) or None
    gather,  # (M,) int32 or int64, or None
    offs,  # (E,) int32
    M, N, K, E,
    a_row, a_scales_row, w_e, w_block_row, w_row, w_scales_e, w_scales_block_row,  # strides in elements
    A_DESCRIPTOR: tl.constexpr, W_DESCRIPTOR: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of DEPTH
    BLOCK_HEIGHT: tl.constexpr,  # rows of a block: 1, or a multiple of COLS
    BLOCK: tl.constexpr,  # columns of a block: DEPTH, or with DOT_SCALED a part of it
    DOT_SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, E_PADDED: tl.constexpr,
):
    """y[m, n] = sum over blocks b of a_scales[m, b] w_scales[e, n, b] sum_k in b of a[m, k] w[e, n, k].

    Both operands lie in memory as the tensor cores take them, K next to each other: nothing is transposed on the way
    (Triton 3.7.1 gets transposed registers of e4m3 wrong on sm_90). The sums of one block start from zero.
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
    w,  # (block rows, BLOCK_HEIGHT, bytes of a row): e4m3, or two e2m1 in a uint8
    w_scales,  # (block rows, blocks): float32, e4m3, or the bytes of e8m0
    matrix_scales,  # (block rows,) float32, of which parts that were written apart may differ, or None
    n, k, N, K, w_block_row, w_row, w_scales_block_row, matrix_scales_block_row,
    BITS: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):
    """HEIGHT rows from `n` and WIDTH columns from `k` of one matrix, float32; zeros outside of it.

    An e2m1 whose bits are put where float16 has its sign, lowest bits of the exponent and highest bit of the mantissa
    is the same number times 2^-14, also where it is subnormal.
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
    w, w_scales,  # (E, ...), see _dequantized
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
    BITS: tl.constexpr, BLOCK_HEIGHT: tl.constexpr, BLOCK: tl.constexpr,  # of an element; rows and columns of a block
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr,  # what is summed in
):
    """y[m, c] = sum_d a[m, d] w[e, c, d] for the rows m of expert e; w[e, d, c] for the input gradient.

    Tiles, and what they do at the borders, are those of grouped_gemm.py.
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
    """The constants of `_fp8_kernel`."""
    return dict(
        A_DESCRIPTOR=a_descriptor, W_DESCRIPTOR=w_descriptor, EVEN=depth % config.depth == 0, BLOCK_HEIGHT=format.block[0],
        BLOCK=format.block[1], DOT_SCALED=config.depth > format.block[1], **tiling.tile_constants(config, experts),
    )


def dequantize_constants(
    config: GemmConfig, format: Format, forward: bool, a_descriptor: bool, depth: int, experts: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The constants of `_dequantize_kernel`."""
    return dict(
        FORWARD=forward, A_DESCRIPTOR=a_descriptor, EVEN=depth % config.depth == 0, BITS=format.bits,
        BLOCK_HEIGHT=format.block[0], BLOCK=format.block[1], **tiling.tile_constants(config, experts),
        ACC=tl_dtype(torch.promote_types(dtype, torch.float32)),
    )


def _fits(tensor: Tensor) -> bool:
    """Return True if there is a kernel: the device must know e4m3, and Triton 3.7.1 does not compile it for float64."""
    return use_triton(tensor) and tensor.dtype != torch.float64 and (INTERPRET or architecture(tensor.device) >= 89)


def _scales(scales: Tensor) -> Tensor:
    """As the kernels take them: Triton knows no e8m0."""
    return scales.view(torch.uint8) if scales.dtype is torch.float8_e8m0fnu else scales


def _launch_fp8(
    rows: QuantizedRows, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:
    a, y = rows.elements, _new_rows(rows.elements, gather, n, out_dtype)
    if not n:
        return y
    w = format.elements(data, k).view(a.dtype)  # (E, block rows, rows of a block, K)
    scales = [_scales(with_dense_rows(rows.scales)), _scales(format.scales(data, k))]
    config = tiling.fp8_configs(architecture(a.device))["block" if format.block[0] > 1 else "mx"]
    block = (1, 1, config.cols, config.depth) if format.block[0] > 1 else (1, config.cols, 1, config.depth)
    a_descriptor, w_descriptor = gather is None and takes_descriptor(a, (a.dtype,)), takes_descriptor(w, (a.dtype,))
    launch = _fp8_launcher(config, format, a_descriptor, w_descriptor, k, len(offs))
    pointers = (
        operand(a, (config.rows, config.depth) if a_descriptor else None), scales[0],
        operand(w, block if w_descriptor else None), scales[1], y,
        *(None if each is None else each.contiguous() for each in (bias, gather, offs)),
    )
    strides = a.stride(0), scales[0].stride(0), *w.stride()[:3], *scales[1].stride()[:2]
    with torch.cuda.device_of(a):
        launch((tiling.most_tiles(config, *y.shape, len(offs)),), pointers, (*y.shape, k, len(offs), *strides))
    return y


@lru_cache(maxsize=MAX_LAUNCHERS)
def _fp8_launcher(
    config: GemmConfig, format: Format, a_descriptor: bool, w_descriptor: bool, depth: int, experts: int
) -> Launcher:
    constants = fp8_constants(config, format, a_descriptor, w_descriptor, depth, experts)
    return Launcher(_fp8_kernel, **constants, num_warps=config.warps, num_stages=config.stages)


def _launch_dequantize(
    a: Tensor, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    transposed: bool,
) -> Tensor:
    y = _new_rows(a, gather, k if transposed else n, a.dtype)
    if not y.shape[1]:
        return y
    w = format.elements(data, k)
    w = w if format.bits == 4 else w.view(torch.float8_e4m3fn)
    scales = _scales(format.scales(data, k))
    matrix_scales = format.matrix_scales(data) if format.matrix_scale else None
    aligned = rows_aligned(a) and rows_aligned(data) and all(each % 16 == 0 for each in (n, k, a.stride(0)))
    config = tiling.dequantize_configs()["float32" if a.dtype is torch.float32 else "half" if aligned else "odd"]
    a_descriptor = gather is None and takes_descriptor(a)
    launch = _dequantize_launcher(config, format, not transposed, a_descriptor, a.shape[1], len(offs), a.dtype)
    pointers = (
        operand(a, (config.rows, config.depth) if a_descriptor else None), w, scales, matrix_scales, y,
        *(None if each is None else each.contiguous() for each in (bias, gather, offs)),
    )
    strides = *a.stride(), *w.stride()[:3], *scales.stride()[:2], *(stride // 4 for stride in data.stride()[:2])
    with torch.cuda.device_of(a):
        launch((tiling.most_tiles(config, *y.shape, len(offs)),), pointers, (y.shape[0], n, k, len(offs), *strides))
    return y


@lru_cache(maxsize=MAX_LAUNCHERS)
def _dequantize_launcher(
    config: GemmConfig, format: Format, forward: bool, a_descriptor: bool, depth: int, experts: int, dtype: torch.dtype
) -> Launcher:
    constants = dequantize_constants(config, format, forward, a_descriptor, depth, experts, dtype)
    return Launcher(_dequantize_kernel, **constants, num_warps=config.warps, num_stages=config.stages)



# --- operators -------------------------------------------------------------------------------------------------------


def _new_rows(x: Tensor, gather: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x if gather is None else gather).shape[0], columns, dtype=dtype)


@operator(lambda elements, _, __, ___, n, ____, _____, ______, gather, dtype: _new_rows(elements, gather, n, dtype))
def _grouped_gemm_fp8(
    elements: Tensor, scales: Tensor, data: Tensor, format: str, n: int, k: int, offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:
    check_values(offs, (elements if gather is None else gather).shape[0], gather, elements.shape[0])
    aligned = k % 16 == 0 and rows_aligned(elements) and rows_aligned(data)  # others would spill 1 KB a thread
    run = _launch_fp8 if aligned and _fits(elements) else _reference_fp8
    return run(QuantizedRows(elements, scales), data, FORMATS[format], n, k, offs, bias, gather, out_dtype)


@operator(lambda x, _, __, n, k, ___, ____, gather, dgrad: _new_rows(x, gather, k if dgrad else n, x.dtype))
def _grouped_gemm_dequantize(
    x: Tensor, data: Tensor, format: str, n: int, k: int, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    transposed: bool,
) -> Tensor:
    check_values(offs, (x if gather is None else gather).shape[0], gather, x.shape[0])
    run = _launch_dequantize if _fits(x) else _reference_dequantize
    return run(x, data, FORMATS[format], n, k, offs, bias, gather, transposed)


# --- public functions ------------------------------------------------------------------------------------------------


def grouped_gemm_fp8(
    rows: QuantizedRows, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, *,
    out_dtype: torch.dtype, bias: Tensor | None = None, gather: Tensor | None = None,
) -> Tensor:
    """y[m] = w[e] x[m] (+ bias[e]) for every row m of expert e, of quantized rows and quantized weights.

    `rows`: x (M, K), with a scale for as many columns as those of `format`; `data` (E, block rows, bytes) uint8: w of
    `shape` (E, N, K), in a format that computes; `offs` (E,) int32 running ends; `bias` (E, N) in `out_dtype`
    -> (M, N), summed in float32 and rounded once. `gather` and rows past `offs[-1]` as for `grouped_gemm`. For the
    input gradient give the transposed block rows and (E, K, N). Raises `ValueError` for operands that do not fit.
    """
    elements, scales = rows
    if not format.computes:
        raise ValueError(f"{format} has no products of quantized rows: use grouped_gemm_dequantize")
    blocks = format.scales_per_row(shape[2])
    scale = torch.float32 if format.scale is torch.float32 else torch.float8_e8m0fnu
    if elements.dtype is not torch.float8_e4m3fn or elements.dim() != 2:
        raise ValueError(f"the elements of rows must be a matrix of float8_e4m3fn; got {elements.dtype} of shape "
                         f"{tuple(elements.shape)}")
    if (scales.shape, scales.dtype) != ((elements.shape[0], blocks), scale):
        raise ValueError(f"rows must have scales ({elements.shape[0]}, {blocks}) in {scale} for {format}; got "
                         f"{tuple(scales.shape)} in {scales.dtype}")
    if not out_dtype.is_floating_point:
        raise ValueError(f"out_dtype must be a floating-point dtype; got {out_dtype}")
    _check(elements.new_empty((), dtype=out_dtype).expand(elements.shape), data, format, shape, offs, bias, gather, 2)
    return _grouped_gemm_fp8(elements, scales, data, format.name, *shape[1:], offs, bias, gather, out_dtype)


def grouped_gemm_dequantize(
    x: Tensor, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, *, bias: Tensor | None = None,
    gather: Tensor | None = None, transposed: bool = False,
) -> Tensor:
    """y[m] = w[e] x[m] (+ bias[e]) for every row m of expert e, of weights of any format.

    `x` (M, K), `data` (E, block rows, bytes) uint8: w of `shape` (E, N, K), each number rounded once, to the dtype of
    `x`; `offs` (E,) int32 running ends; `bias` (E, N) in the dtype of `x` -> (M, N). `transposed`: the input gradient,
    x[m] w[e] with `x` (M, N) -> (M, K), and `bias` (E, K). `gather` and rows past `offs[-1]` as for `grouped_gemm`.
    Raises `ValueError` for operands that do not fit.
    """
    _check(x, data, format, shape, offs, bias, gather, 1 if transposed else 2)
    return _grouped_gemm_dequantize(x, data, format.name, *shape[1:], offs, bias, gather, transposed)


def _check(
    x: Tensor, data: Tensor, format: Format, shape: tuple[int, int, int], offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, summed: int,
) -> None:
    """Refuse operands that do not fit; `summed`: the dimension of the weights that the product sums over."""
    experts, n, k = shape
    expected = (experts, format.block_rows(n), format.row_bytes(k))
    if data.dtype is not torch.uint8 or data.shape != expected:
        raise ValueError(f"data of {format} for weights {tuple(shape)} must be uint8 of shape {expected}; got "
                         f"{data.dtype} of shape {tuple(data.shape)}")
    w = data.new_empty((), dtype=x.dtype if x.is_floating_point() else torch.float32).expand(shape)  # as it would be
    check_operands(offs, [("x", 1), ("w", summed)], gather, bias, w=w, x=x)


def slower_in_fp8(format: Format, shape: tuple[int, int, int], rows: float, device: torch.device) -> str | None:
    """Why `grouped_gemm_fp8` and quantizing its rows take longer than `grouped_gemm` of bfloat16, or None.

    shape: (E, N, K) of the weights, or (E, K, N) of transposed ones; rows: of an expert on average. Of gains that were
    counted and not measured, see grouped_gemm_tiles.py; of those on CPU, where everything quantized is slower, nothing.
    """
    _, cols, depth = shape
    if device.type != "cuda":
        return None
    arch = architecture(device)
    if arch < 89 or depth % 16:
        return f"sm_{arch} has no products of e4m3" if arch < 89 else f"{depth} columns are not a multiple of 16"
    gain = tiling.fp8_gain(arch, "block" if format.block[0] > 1 else "mx", rows, cols)
    if gain >= 1:
        return None
    return f"{format} with {rows:.0f} rows an expert and {cols} columns takes about {1 / gain:.1f} times as long"


# --- references: products of what is dequantized ---------------------------------------------------------------------


def _reference_fp8(
    rows: QuantizedRows, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None,
    gather: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:
    x = rows.elements.float() * rows.scales.float().repeat_interleave(format.block[1], 1)[:, :k]
    w = dequantize_reference(data, format, n, k)
    return grouped_gemm(x, w, offs, bias=None if bias is None else bias.float(), gather=gather).to(out_dtype)


def _reference_dequantize(
    x: Tensor, data: Tensor, format: Format, n: int, k: int, offs: Tensor, bias: Tensor | None, gather: Tensor | None,
    transposed: bool,
) -> Tensor:
    w = dequantize_reference(data, format, n, k).to(x.dtype)
    return grouped_gemm(x, w.mT if transposed else w, offs, bias=bias, gather=gather)
