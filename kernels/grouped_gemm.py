"""Grouped GEMMs: every expert multiplies its rows of one matrix, with any number of rows per expert.

Rows are sorted by expert. `offs` has the end of every expert's rows, on the device, so that no size is copied to the
host and no row is padded. Example: offs = [2, 2, 5] assigns rows 0 and 1 to expert 0, none to expert 1, and rows 2 to 4
to expert 2. Rows from 5 on are unassigned: no result depends on them, and they are not written.

Advantage over one GEMM per expert: one launch instead of E, and no copy of the sizes to the host. Advantage over a
batched GEMM: no padding. `gather` reads rows through an index, which saves writing and reading a sorted copy of the
activations, with one row for each expert of a token. `grouped_gemm_swiglu` activates gate and up in registers, which
saves a launch and reading gate and up. The weight gradient is added to its float32 accumulator from registers, which
saves a rounded copy of all weights. Every element of a result has one writer and one order of additions, so results are
bitwise reproducible.

There are two kernels: one computes rows (forward and input gradient), the other sums over rows (weight gradient), with
a variant that sums over several micro-batches. They launch one program per tile, and the hardware starts the next
program when a multiprocessor becomes idle. There is no persistent kernel, with a fixed share of the tiles for every
multiprocessor, for two reasons. Experts have different numbers of rows. And a program (147 KB of shared memory or more)
does not fit on a multiprocessor next to a block of NCCL (82 KB and 640 threads, NVIDIA/nccl#689): the shares of the
multiprocessors that NCCL occupies would run in a second wave.

On sm_90 and later, operands whose rows are 16-byte aligned are read through tensor descriptors (see launcher.py). Other
operands, gathered rows, and all operands on sm_80 are read through pointers. These functions have no backward;
`dualpipe.nn.GroupedLinear` and `GroupedSwiGLU` do.

With DUALPIPE_CHECK_OFFSETS=1 in the environment, every call on CUDA checks that `offs` rises to at most M and that
`gather` stays within `x`, and waits for the device to do so. Without it, invalid ends give wrong results, because
kernels clamp them to the range from 0 to M, and an invalid `gather` may read memory outside of `x`. On CPU both are
always checked.

Dimension letters: M rows, E experts, H in_features, N out_features; in the kernel that computes rows, C columns of the
result (N in the forward, H for the input gradient) and D the summed dimension (H or N); R rows of an operand before
`gather`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import dualpipe.kernels.grouped_gemm_tiles as tiling
from dualpipe.kernels.common import (
    INTERPRET,
    WithoutBackward,
    architecture,
    cdiv,
    needs_gradient,
    operator,
    tl,
    triton,
    use_triton,
)
from dualpipe.kernels.grouped_gemm_tiles import MOST_MERGED, GemmConfig, find_tile, rows_of, tiles_per_expert
from dualpipe.kernels.launcher import MAX_LAUNCHERS, Block, Launcher
from dualpipe.kernels.swiglu import Activation, activate, check_weight, launch_swiglu, swiglu_form, swiglu_reference

HALF = (torch.bfloat16, torch.float16)
SwigluForm = tuple[bool, float, float]  # (clamped, alpha, limit): see `dualpipe.kernels.swiglu.swiglu_form`

# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    a,  # (R, D): descriptor of [ROWS, DEPTH] or pointer; R is M unless gathered
    w,  # forward (E, C, D), input gradient (E, D, C): descriptor or pointer
    y,  # (M, C)
    h,  # (M, C // 2), or None without SWIGLU
    weight,  # (M,) or None; multiplies the rows of h
    bias,  # (E, C) or None
    gather,  # (M,) int32 or int64, or None
    offs,  # (E,) int32
    M, C, D, E,
    a_row, a_d, w_e, w_c, w_d,  # strides in elements
    FORWARD: tl.constexpr, A_DESCRIPTOR: tl.constexpr, W_DESCRIPTOR: tl.constexpr,
    ALIGNED: tl.constexpr,  # see _all_aligned
    EVEN: tl.constexpr,  # D is a multiple of DEPTH
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, E_PADDED: tl.constexpr,
    ACC: tl.constexpr,  # dtype of the accumulator
    SWIGLU: tl.constexpr,  # layout of gate and up columns, "halves" or "pairs"; "": no activation
    ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):
    """y[m, c] = sum_d a[m, d] w[e, c, d] for the rows m of expert e; w[e, d, c] for the input gradient.

    A tile may compute rows of the next expert and columns past C; it does not store them. Columns past D are zero in
    both operands. SWIGLU: h = swiglu(y), computed from the rounded y. In halves, a tile has COLS // 2 gate columns on
    the left, and their up columns on the right. Example: C = 12, COLS = 4 gives tiles with the columns (0, 1, 6, 7),
    (2, 3, 8, 9) and (4, 5, 10, 11).
    """
    if ALIGNED:  # tells the compiler about multiples of 8: Triton detects multiples of 16 only
        C = C // 8 * 8
        D = D // 8 * 8
        a_row = a_row // 8 * 8
        w_e = w_e // 8 * 8
        if FORWARD:
            w_c = w_c // 8 * 8
        else:
            w_d = w_d // 8 * 8
    HALF: tl.constexpr = COLS // 2
    split = C // 2  # first up column, in halves
    if ALIGNED:
        split = split // 8 * 8
    col_tiles = tl.cdiv(C, COLS)
    row_tiles = tiles_per_expert(offs, M, E, ROWS, E_PADDED)
    tile = tl.program_id(0)
    if tile >= tl.sum(row_tiles) * col_tiles:
        return
    expert, row, end, col_tile = find_tile(tile, offs, row_tiles, col_tiles, M, ROWS, GROUP)
    rows = row + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    if SWIGLU == "halves":
        left = col_tile * HALF
        left_end = split
        right = col_tile * HALF + split
        cols = tl.where(cols < HALF, left + cols, right - HALF + cols)
    else:
        left = col_tile * COLS
        left_end = C
        right = col_tile * COLS + HALF
        cols = left + cols
    if not A_DESCRIPTOR:
        source = rows
        if gather is not None:
            source = tl.load(gather + rows, mask=rows < end, other=0)
        a_rows = a + source.to(tl.int64)[:, None] * a_row
    if not W_DESCRIPTOR:
        w_cols = w + expert.to(tl.int64) * w_e + cols.to(tl.int64)[None, :] * w_c
    acc = tl.zeros((ROWS, COLS), dtype=ACC)
    for d in range(0, D, DEPTH):
        ds = d + tl.arange(0, DEPTH)
        if A_DESCRIPTOR:
            a_tile = a.load([row, d])
        else:
            a_mask = (rows < end)[:, None]
            if not EVEN:
                a_mask &= (ds < D)[None, :]
            a_tile = tl.load(a_rows + ds.to(tl.int64)[None, :] * a_d, mask=a_mask, other=0.0)
        if W_DESCRIPTOR and SWIGLU == "halves":
            w_tile = w.load([expert, 0, left, d]).reshape(COLS, DEPTH).T
        elif W_DESCRIPTOR and FORWARD:
            w_tile = w.load([expert, left, d]).reshape(COLS, DEPTH).T
        elif W_DESCRIPTOR:
            w_tile = w.load([expert, d, left]).reshape(DEPTH, COLS)
        else:
            w_mask = (cols < C)[None, :]
            if not EVEN:
                w_mask &= (ds < D)[:, None]
            w_tile = tl.load(w_cols + ds.to(tl.int64)[:, None] * w_d, mask=w_mask, other=0.0)
        acc = tl.dot(a_tile, w_tile, acc, input_precision="ieee", out_dtype=ACC)
    # Two halves need fewer registers than the whole tile.
    part0, part1 = acc.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
    part0 = store_rows(y, bias, part0, expert, rows, end, left, left_end, C)
    if SWIGLU == "pairs":
        gate, up = part0.reshape(ROWS, HALF // 2, 2).split()
        _store_activated(h, weight, gate, up, rows, end, left // 2, split, ACC, ALPHA, LIMIT, True)
    part1 = store_rows(y, bias, part1, expert, rows, end, right, C, C)
    if SWIGLU == "pairs":
        gate, up = part1.reshape(ROWS, HALF // 2, 2).split()
        _store_activated(h, weight, gate, up, rows, end, right // 2, split, ACC, ALPHA, LIMIT, True)
    if SWIGLU == "halves":
        _store_activated(h, weight, part0, part1, rows, end, left, split, ACC, ALPHA, LIMIT, False)


@triton.jit
def store_rows(y, bias, part, expert, rows, end, col, col_end, C):
    """Store columns of a tile, from `col` to `col_end` at most, plus the bias; return the rounded values."""
    cols = col + tl.arange(0, part.shape[1])
    inside = cols < col_end
    if bias is not None:
        part += tl.load(bias + (expert.to(tl.int64) * C + cols), mask=inside, other=0.0).to(part.dtype)[None, :]
    part = part.to(y.dtype.element_ty)
    at = y + (rows.to(tl.int64) * C)[:, None] + cols.to(tl.int64)[None, :]
    tl.store(at, part, mask=(rows < end)[:, None] & inside[None, :])
    return part


@triton.jit
def _store_activated(h, weight, gate, up, rows, end, col, width, COMPUTE: tl.constexpr, ALPHA: tl.constexpr,
                     LIMIT: tl.constexpr, CLAMPED: tl.constexpr):
    """Store the activation of some columns, computed like `dualpipe.kernels.swiglu`."""
    gate, s, u = activate(gate.to(COMPUTE), up.to(COMPUTE), ALPHA, LIMIT, CLAMPED)
    part = u * gate * s
    if weight is not None:
        part = part * tl.load(weight + rows.to(tl.int64), mask=rows < end, other=0.0).to(COMPUTE)[:, None]
    cols = col + tl.arange(0, part.shape[1])
    at = h + (rows.to(tl.int64) * width)[:, None] + cols.to(tl.int64)[None, :]
    tl.store(at, part.to(h.dtype.element_ty), mask=(rows < end)[:, None] & (cols < width)[None, :])


@triton.jit
def _load_rows(
    source,  # (R, S): descriptor of [DEPTH, COLS] or pointer
    gather, row, end, col, S, stride_row, stride_col,
    DESCRIPTOR: tl.constexpr, TRANSPOSED: tl.constexpr, MASKED: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr,
):
    """Load DEPTH rows from `row`, or the gathered ones, and COLS columns from `col`.

    MASKED sets rows from `end` on to zero. TRANSPOSED returns the tile transposed: with a descriptor it transposes the
    loaded tile, otherwise the pointers, because a load followed by a transpose is not asynchronous on sm_80.
    """
    rows = row + tl.arange(0, DEPTH)
    cols = col + tl.arange(0, COLS)
    inside = rows < end
    if DESCRIPTOR:
        tile = source.load([row, col])
        if MASKED:
            tile = tl.where(inside[:, None], tile, 0.0)
        if TRANSPOSED:
            tile = tile.T
    else:
        if gather is not None:
            rows = tl.load(gather + rows, mask=inside, other=0)
        row_offsets = rows.to(tl.int64) * stride_row
        col_offsets = cols.to(tl.int64) * stride_col
        if TRANSPOSED:
            pointers = source + (col_offsets[:, None] + row_offsets[None, :])
            mask = (cols < S)[:, None]
            if MASKED:
                mask &= inside[None, :]
        else:
            pointers = source + (row_offsets[:, None] + col_offsets[None, :])
            mask = (cols < S)[None, :]
            if MASKED:
                mask &= inside[:, None]
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def _store_columns(out, part, expert, row, col, N, H, out_e, out_n, out_h, ACCUMULATE: tl.constexpr,
                   DESCRIPTOR: tl.constexpr):
    """Store some columns of a tile of the weight gradient, or add them."""
    if DESCRIPTOR:  # TMA adds, so the accumulator is not read into registers
        out.atomic_add([expert, row, col], part.reshape(1, part.shape[0], part.shape[1]))
    else:
        rows = row + tl.arange(0, part.shape[0])
        cols = col + tl.arange(0, part.shape[1])
        at = out + expert.to(tl.int64) * out_e + rows.to(tl.int64)[:, None] * out_n
        at += cols.to(tl.int64)[None, :] * out_h
        mask = (rows < N)[:, None] & (cols < H)[None, :]
        if ACCUMULATE:
            part += tl.load(at, mask=mask, other=0.0).to(part.dtype)
        tl.store(at, part.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_outer_products(
    acc,  # (ROWS, COLS)
    dy, x, gather, start, end, n, h, N, H, dy_row, dy_n, x_row, x_h,
    DY_DESCRIPTOR: tl.constexpr, X_DESCRIPTOR: tl.constexpr, DEPTH: tl.constexpr,
):
    """Return acc[i, j] + sum over the rows m from `start` to `end` of dy[m, n + i] x[m, h + j].

    Only the last step of an expert can reach into the next one's rows, and is the only one that masks them.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    full_end = start + (end - start) // DEPTH * DEPTH  # of the steps that need no mask
    for m in range(start, full_end, DEPTH):
        dy_t = _load_rows(dy, None, m, end, n, N, dy_row, dy_n, DY_DESCRIPTOR, True, False, DEPTH, ROWS)
        x_tile = _load_rows(x, gather, m, end, h, H, x_row, x_h, X_DESCRIPTOR, False, False, DEPTH, COLS)
        acc = tl.dot(dy_t, x_tile, acc, input_precision="ieee", out_dtype=acc.dtype)
    if full_end < end:
        dy_t = _load_rows(dy, None, full_end, end, n, N, dy_row, dy_n, DY_DESCRIPTOR, True, True, DEPTH, ROWS)
        x_tile = _load_rows(x, gather, full_end, end, h, H, x_row, x_h, X_DESCRIPTOR, False, True, DEPTH, COLS)
        acc = tl.dot(dy_t, x_tile, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def _store_tile(out, acc, expert, row, col, N, H, out_e, out_n, out_h, ACCUMULATE: tl.constexpr,
                DESCRIPTOR: tl.constexpr):
    """Write or add a tile of the weight gradient.

    In two halves: to load the whole accumulator next to `acc` would spill at 128 x 256.
    """
    HALF: tl.constexpr = acc.shape[1] // 2
    left, right = acc.reshape(acc.shape[0], 2, HALF).permute(0, 2, 1).split()
    _store_columns(out, left, expert, row, col, N, H, out_e, out_n, out_h, ACCUMULATE, DESCRIPTOR)
    _store_columns(out, right, expert, row, col + HALF, N, H, out_e, out_n, out_h, ACCUMULATE, DESCRIPTOR)


@triton.jit(do_not_specialize=["M"])
def _weight_kernel(
    dy,  # (M, N): descriptor of [DEPTH, ROWS] or pointer
    x,  # (R, H): descriptor of [DEPTH, COLS] or pointer; R is M unless gathered
    out,  # (E, N, H): descriptor of [1, ROWS, COLS // 2] or pointer
    gather,  # (M,) int32 or int64, or None
    offs,  # (E,) int32
    M, N, H,
    dy_row, dy_n, x_row, x_h, out_e, out_n, out_h,  # strides in elements
    ACCUMULATE: tl.constexpr, DY_DESCRIPTOR: tl.constexpr, X_DESCRIPTOR: tl.constexpr, OUT_DESCRIPTOR: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    ACC: tl.constexpr,  # dtype of the accumulator
):
    """out[e, n, h] (+)= sum over the rows m of expert e of dy[m, n] x[m, h]."""
    if ALIGNED:  # see _rows_kernel
        N = N // 8 * 8
        H = H // 8 * 8
        dy_row = dy_row // 8 * 8
        x_row = x_row // 8 * 8
        out_e = out_e // 8 * 8
        out_n = out_n // 8 * 8
    col_tiles = tl.cdiv(H, COLS)
    tiles = tl.cdiv(N, ROWS) * col_tiles
    expert = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles // col_tiles * ROWS
    h = tl.program_id(0) % tiles % col_tiles * COLS
    start, end = rows_of(offs, expert, M)
    if ACCUMULATE and end <= start:
        return
    acc = tl.zeros((ROWS, COLS), dtype=ACC)
    acc = _add_outer_products(acc, dy, x, gather, start, end, n, h, N, H, dy_row, dy_n, x_row, x_h,
                              DY_DESCRIPTOR, X_DESCRIPTOR, DEPTH)
    _store_tile(out, acc, expert, n, h, N, H, out_e, out_n, out_h, ACCUMULATE, OUT_DESCRIPTOR)


@triton.jit(do_not_specialize=["M0", "M1", "M2", "M3"])
def _merged_weight_kernel(
    dy0, dy1, dy2, dy3,  # one for each micro-batch, as in `_weight_kernel`; None beyond the last micro-batch
    x0, x1, x2, x3,
    gather0, gather1, gather2, gather3,
    offs0, offs1, offs2, offs3,
    out,
    M0, M1, M2, M3,  # rows of each micro-batch
    N, H,
    dy_row, dy_n, x_row, x_h, out_e, out_n, out_h,  # strides in elements, the same in every micro-batch
    ACCUMULATE: tl.constexpr, DY_DESCRIPTOR: tl.constexpr, X_DESCRIPTOR: tl.constexpr, OUT_DESCRIPTOR: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    ACC: tl.constexpr,
):
    """`_weight_kernel` for two to four micro-batches: `out` is read and written once for all of them.

    The sum stays in registers from the first micro-batch to the last. Every micro-batch has its own arguments and its
    own loop, because a kernel cannot index a list of descriptors with a variable.
    """
    if ALIGNED:  # see _rows_kernel
        N = N // 8 * 8
        H = H // 8 * 8
        dy_row = dy_row // 8 * 8
        x_row = x_row // 8 * 8
        out_e = out_e // 8 * 8
        out_n = out_n // 8 * 8
    col_tiles = tl.cdiv(H, COLS)
    tiles = tl.cdiv(N, ROWS) * col_tiles
    expert = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles // col_tiles * ROWS
    h = tl.program_id(0) % tiles % col_tiles * COLS
    start0, end0 = rows_of(offs0, expert, M0)
    start1, end1 = rows_of(offs1, expert, M1)
    most = tl.maximum(end0 - start0, end1 - start1)
    if dy2 is not None:
        start2, end2 = rows_of(offs2, expert, M2)
        most = tl.maximum(most, end2 - start2)
    if dy3 is not None:
        start3, end3 = rows_of(offs3, expert, M3)
        most = tl.maximum(most, end3 - start3)
    if ACCUMULATE and most <= 0:
        return
    acc = tl.zeros((ROWS, COLS), dtype=ACC)
    acc = _add_outer_products(acc, dy0, x0, gather0, start0, end0, n, h, N, H, dy_row, dy_n, x_row, x_h,
                              DY_DESCRIPTOR, X_DESCRIPTOR, DEPTH)
    acc = _add_outer_products(acc, dy1, x1, gather1, start1, end1, n, h, N, H, dy_row, dy_n, x_row, x_h,
                              DY_DESCRIPTOR, X_DESCRIPTOR, DEPTH)
    if dy2 is not None:
        acc = _add_outer_products(acc, dy2, x2, gather2, start2, end2, n, h, N, H, dy_row, dy_n, x_row, x_h,
                                  DY_DESCRIPTOR, X_DESCRIPTOR, DEPTH)
    if dy3 is not None:
        acc = _add_outer_products(acc, dy3, x3, gather3, start3, end3, n, h, N, H, dy_row, dy_n, x_row, x_h,
                                  DY_DESCRIPTOR, X_DESCRIPTOR, DEPTH)
    _store_tile(out, acc, expert, n, h, N, H, out_e, out_n, out_h, ACCUMULATE, OUT_DESCRIPTOR)


# --- launchers -------------------------------------------------------------------------------------------------------


def rows_aligned(tensor: Tensor) -> bool:
    """Return True if rows are contiguous and start at multiples of 16 bytes and of 8 elements."""
    return _strides_aligned(tensor.stride(), tensor.dtype) and tensor.data_ptr() % 16 == 0


def _strides_aligned(strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True if the last stride is 1 and the others are multiples of 16 bytes and of 8 elements."""
    step = max(8, 16 // dtype.itemsize)
    return strides[-1] == 1 and all(stride > 0 and stride % step == 0 for stride in strides[:-1])


def takes_descriptor(tensor: Tensor, dtypes: tuple[torch.dtype, ...] = HALF) -> bool:
    """Return True if TMA (sm_90 and later) accesses `tensor`: it has one of `dtypes` and aligned rows."""
    supports_tensor = tensor.dtype in dtypes and rows_aligned(tensor) and 0 not in tensor.shape[1:]
    return supports_tensor and architecture(tensor.device) >= 90


def operand(tensor: Tensor, block: tuple[int, ...] | None) -> Tensor | Block:
    """Return the kernel's argument for a tensor: a descriptor with this block, or without a block the tensor itself."""
    if block is None:
        return tensor
    if not tensor.shape[0]:  # a descriptor needs at least one row; the kernel does not read it
        tensor = tensor.new_empty_strided((1, *tensor.shape[1:]), tensor.stride())
    return Block(tensor, block, tensor.shape, tensor.stride())


class _OperandForm(NamedTuple):
    """Properties of an operand that the choice of a launcher depends on.

    columns: shape without the first dimension, whose size may vary between launches.
    starts_aligned: the memory starts at a multiple of 16 bytes.
    """

    dtype: torch.dtype
    columns: tuple[int, ...]
    strides: tuple[int, ...]
    starts_aligned: bool

    def is_aligned(self) -> bool:
        """Return True if rows are aligned; see `rows_aligned`."""
        return self.starts_aligned and _strides_aligned(self.strides, self.dtype)

    def takes_descriptor(self, arch: int, dtypes: tuple[torch.dtype, ...] = HALF) -> bool:
        """Return True if TMA accesses the operand; see `takes_descriptor`."""
        return self.dtype in dtypes and self.is_aligned() and 0 not in self.columns and arch >= 90


def _form_of(tensor: Tensor) -> _OperandForm:
    """Return the `_OperandForm` of a tensor."""
    return _OperandForm(tensor.dtype, tensor.shape[1:], tensor.stride(), tensor.data_ptr() % 16 == 0)


def _all_aligned(*forms: _OperandForm) -> bool:
    """Return True if all operands can be accessed 16 bytes at a time, up to their last column."""
    return all(form.is_aligned() and form.columns[-1] % 8 == 0 for form in forms)


def _num_rows(x: Tensor, gather: Tensor | None) -> int:
    """Return the number of rows of the result."""
    return (x if gather is None else gather).shape[0]


class _RowsLaunch(NamedTuple):
    """Launch of `_rows_kernel` for one shape, with any number of rows.

    is_fused: the kernel computes the activation.
    a_block, w_block: blocks of the descriptors; None: pointers.
    w_shape, w_strides: of the descriptor of the weights.
    numbers: scalar arguments of the kernel that follow the number of rows.
    """

    launch: Launcher
    config: GemmConfig
    is_fused: bool
    a_block: tuple[int, ...] | None
    w_block: tuple[int, ...] | None
    w_shape: tuple[int, ...]
    w_strides: tuple[int, ...]
    numbers: tuple[int, ...]


@lru_cache(maxsize=MAX_LAUNCHERS)
def _rows_launch(
    arch: int, a: _OperandForm, w: _OperandForm, experts: int, forward: bool, gathered: bool,
    activation: SwigluForm | None, weight_dtype: torch.dtype | None,
) -> _RowsLaunch:
    """Prepare the launch of `_rows_kernel` for operands of these forms.

    activation: form of the activation after the GEMM, if any.
    weight_dtype: dtype of the rows' routing weights, if any.
    """
    depth = a.columns[0]
    cols = w.columns[0 if forward else 1]
    y = _OperandForm(a.dtype, (cols,), (cols, 1), starts_aligned=True)
    aligned = _all_aligned(a, w, y)
    shape = tiling.row_shape(a.dtype, cols=cols, aligned=aligned)
    config = tiling.row_configs(arch)[shape]
    fused = None
    if activation is not None and tiling.fuses_swiglu(arch, shape, activation[0]):
        halves_aligned = cols % 16 == 0 or not aligned  # up columns must be aligned, too
        compute = torch.promote_types(a.dtype, torch.float32)
        if halves_aligned and (weight_dtype is None or torch.promote_types(compute, weight_dtype) is compute):
            fused = Activation(None, *activation)
    a_descriptor = not gathered and a.takes_descriptor(arch)
    w_descriptor = w.takes_descriptor(arch)
    constants = tiling.rows_constants(
        config, forward, a_descriptor, w_descriptor, aligned, depth, experts, a.dtype, fused
    )
    w_shape = (experts, *w.columns)
    w_strides = w.strides
    if constants["SWIGLU"] == "halves":
        w_shape = (experts, 2, cols // 2, depth)
        w_strides = (w.strides[0], cols // 2 * w.strides[1], *w.strides[1:])
    e, n, h = w.strides
    kernel_w_strides = (e, n, h) if forward else (e, h, n)
    return _RowsLaunch(
        Launcher(_rows_kernel, **constants, num_warps=config.warps, num_stages=config.stages), config,
        is_fused=fused is not None, a_block=(config.rows, config.depth) if a_descriptor else None,
        w_block=tuple(tiling.w_block(config, forward, fused)) if w_descriptor else None,
        w_shape=w_shape, w_strides=w_strides, numbers=(cols, depth, experts, *a.strides, *kernel_w_strides),
    )


def _launch_rows(
    a: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, gather: Tensor | None, *, forward: bool,
    h: Tensor | None = None, activation: Activation | None = None,
) -> Tensor:
    """Compute the forward from `a` = x (R, H), or the input gradient from `a` = dy (M, N); `w` is (E, N, H) in both.

    h: receives the activation of the result, from the same kernel if fusion is advantageous.
    """
    experts, n, hidden = w.shape
    rows = _num_rows(a, gather)
    cols = n if forward else hidden
    y = a.new_empty(rows, cols)
    if not cols:
        return y
    form = None if activation is None else activation[1:]
    weight = None if activation is None else activation.weight
    prepared = _rows_launch(architecture(a.device), _form_of(a), _form_of(w), experts, forward, gather is not None,
                            form, None if weight is None else weight.dtype)
    w_operand: Tensor | Block = w
    if prepared.w_block is not None:
        w_operand = Block(w, prepared.w_block, prepared.w_shape, prepared.w_strides)
    fused_weight = weight.contiguous() if prepared.is_fused and weight is not None else None
    pointers = (
        operand(a, prepared.a_block), w_operand, y, h if prepared.is_fused else None, fused_weight,
        None if bias is None else bias.contiguous(), None if gather is None else gather.contiguous(),
        offs.contiguous(),
    )
    with torch.cuda.device_of(a):
        grid = (tiling.max_tiles(prepared.config, rows, cols, experts),)
        prepared.launch(grid, pointers, (rows, *prepared.numbers))
    if activation is not None and h is not None and not prepared.is_fused:
        launch_swiglu(y, activation, h)
    return y


class WgradOperands(NamedTuple):
    """One micro-batch's operands of `grouped_gemm_wgrad`."""

    dy: Tensor
    x: Tensor
    offs: Tensor
    gather: Tensor | None = None


class _WeightLaunch(NamedTuple):
    """Launch of `_weight_kernel` or `_merged_weight_kernel` for one shape, with any number of rows.

    dy_block, x_block, out_block: blocks of the descriptors; None: pointers.
    numbers: scalar arguments of the kernel that follow the numbers of rows.
    """

    launch: Launcher
    grid: tuple[int]
    dy_block: tuple[int, ...] | None
    x_block: tuple[int, ...] | None
    out_block: tuple[int, ...] | None
    numbers: tuple[int, ...]


@lru_cache(maxsize=MAX_LAUNCHERS)
def _weight_launch(
    arch: int, dy: _OperandForm, x: _OperandForm, out: _OperandForm, experts: int, accumulate: bool, gathered: bool,
    is_merged: bool = False,
) -> _WeightLaunch:
    """Prepare the launch of `_weight_kernel` for operands of these forms, or of `_merged_weight_kernel`."""
    n, h = out.columns
    dy_descriptor = dy.takes_descriptor(arch)
    x_descriptor = not gathered and x.takes_descriptor(arch)
    out_descriptor = accumulate and x.dtype in HALF and out.takes_descriptor(arch, dtypes=(torch.float32,))
    out_descriptor &= not INTERPRET  # the interpreter has no atomic_add of descriptors
    aligned = _all_aligned(dy, x, out)
    config = tiling.weight_configs(arch)[
        tiling.weight_shape(dy.dtype, out=n, hidden=h, aligned=aligned, gathered=gathered)]
    constants = tiling.weight_constants(
        config, accumulate, dy_descriptor, x_descriptor, out_descriptor, aligned, dy.dtype
    )
    kernel = _merged_weight_kernel if is_merged else _weight_kernel
    return _WeightLaunch(
        Launcher(kernel, **constants, num_warps=config.warps, num_stages=config.stages),
        grid=(experts * cdiv(n, config.rows) * cdiv(h, config.cols),),
        dy_block=(config.depth, config.rows) if dy_descriptor else None,
        x_block=(config.depth, config.cols) if x_descriptor else None,
        out_block=(1, config.rows, config.cols // 2) if out_descriptor else None,
        numbers=(n, h, *dy.strides, *x.strides, *out.strides),
    )


def _launch_weight(dy: Tensor, x: Tensor, offs: Tensor, out: Tensor, accumulate: bool, gather: Tensor | None) -> None:
    """Compute the weight gradient (E, N, H) in `out`."""
    if not out.numel():
        return
    if out.dtype is torch.float64:  # float64 tensor cores need float64 operands
        dy = dy.double()
        x = x.double()
    prepared = _weight_launch(architecture(dy.device), _form_of(dy), _form_of(x), _form_of(out), out.shape[0],
                              accumulate, gather is not None)
    pointers = (
        operand(dy, prepared.dy_block), operand(x, prepared.x_block), operand(out, prepared.out_block),
        None if gather is None else gather.contiguous(), offs.contiguous(),
    )
    with torch.cuda.device_of(dy):
        prepared.launch(prepared.grid, pointers, (dy.shape[0], *prepared.numbers))


def _launch_merged_weight(operands: Sequence[WgradOperands], out: Tensor, accumulate: bool) -> None:
    """Compute the weight gradient of several micro-batches in `out`, with as few launches as possible."""
    if not out.numel():
        return
    for batch in _mergeable_batches(operands, out):
        if len(batch) == 1:
            dy, x, offs, gather = batch[0]
            _launch_weight(dy, x, offs, out, accumulate, gather)
        else:
            _launch_merged_batch(batch, out, accumulate)
        accumulate = True


def _mergeable_batches(operands: Sequence[WgradOperands], out: Tensor) -> list[Sequence[WgradOperands]]:
    """Divide `operands` into lists that one launch can take: neighbours with equal `_mergeable_properties`."""
    batches: list[Sequence[WgradOperands]] = []
    for _, group in groupby(operands, _mergeable_properties):
        neighbours = list(group)
        is_converted = out.dtype is torch.float64 and neighbours[0].dy.dtype is not torch.float64
        # One micro-batch at a time is copied to float64.
        most = 1 if is_converted else tiling.most_merged(architecture(out.device))
        ends = accumulate(tiling.merged_sizes(len(neighbours), most), initial=0)
        batches += [neighbours[start:end] for start, end in pairwise(ends)]
    return batches


def _mergeable_properties(operands: WgradOperands) -> tuple[Any, ...]:
    """Return the properties that must be equal in all micro-batches of a launch."""
    gather = operands.gather
    return _form_of(operands.dy), _form_of(operands.x), None if gather is None else gather.dtype


def _launch_merged_batch(batch: Sequence[WgradOperands], out: Tensor, accumulate: bool) -> None:
    """Compute the weight gradient of one of `_mergeable_batches` in `out`, with one launch."""
    dy, x, _, gather = batch[0]
    prepared = _weight_launch(architecture(dy.device), _form_of(dy), _form_of(x), _form_of(out), out.shape[0],
                              accumulate, gather is not None, is_merged=True)
    absent = (None,) * (MOST_MERGED - len(batch))
    pointers = (
        *(operand(item.dy, prepared.dy_block) for item in batch), *absent,
        *(operand(item.x, prepared.x_block) for item in batch), *absent,
        *(None if item.gather is None else item.gather.contiguous() for item in batch), *absent,
        *(item.offs.contiguous() for item in batch), *absent,
        operand(out, prepared.out_block),
    )
    rows = (*(item.dy.shape[0] for item in batch), *(0 for _ in absent))
    with torch.cuda.device_of(dy):
        prepared.launch(prepared.grid, pointers, (*rows, *prepared.numbers))


def forget_launches() -> None:
    """Clear the caches of launches, after a change of the tables of tiles."""
    _rows_launch.cache_clear()
    _weight_launch.cache_clear()


# --- operators: a single call for torch.compile and FakeTensor ------------------------------------------------------


@operator(lambda x, w, offs, bias, gather: x.new_empty(_num_rows(x, gather), w.shape[1]))
def _grouped_gemm(x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, gather: Tensor | None) -> Tensor:
    """Compute `grouped_gemm` with checked operands."""
    check_values(offs, _num_rows(x, gather), gather, x.shape[0])
    run = _launch_rows if use_triton(x) else _reference_rows
    return run(x, w, offs, bias, gather, forward=True)


def _new_activated(
    x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, gather: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    """Allocate h and gate_up."""
    rows = _num_rows(x, gather)
    return x.new_empty(rows, w.shape[1] // 2), x.new_empty(rows, w.shape[1])


@operator(_new_activated)
def _grouped_gemm_swiglu(
    x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, gather: Tensor | None, weight: Tensor | None,
    clamped: bool, alpha: float, limit: float,
) -> tuple[Tensor, Tensor]:
    """Return (h, gate_up)."""
    rows = _num_rows(x, gather)
    check_values(offs, rows, gather, x.shape[0])
    if use_triton(x):
        h = x.new_empty(rows, w.shape[1] // 2)
        activation = Activation(weight, clamped, alpha, limit)
        return h, _launch_rows(x, w, offs, bias, gather, forward=True, h=h, activation=activation)
    gate_up = _reference_rows(x, w, offs, bias, gather, forward=True)
    return swiglu_reference(gate_up, weight, clamped, alpha, limit).to(x.dtype), gate_up


@operator(lambda dy, w, offs: dy.new_empty(dy.shape[0], w.shape[2]))
def _grouped_gemm_dgrad(dy: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Compute `grouped_gemm_dgrad` with checked operands."""
    check_values(offs, dy.shape[0])
    run = _launch_rows if use_triton(dy) else _reference_rows
    return run(dy, w, offs, None, None, forward=False)


@operator(lambda *_: None, mutates=("out",))
def _grouped_gemm_wgrad(
    dy: Tensor, x: Tensor, offs: Tensor, out: Tensor, accumulate: bool, gather: Tensor | None
) -> None:
    """Compute `grouped_gemm_wgrad` with checked operands."""
    check_values(offs, dy.shape[0], gather, x.shape[0])
    torch.autograd.graph.increment_version(out)
    run = _launch_weight if use_triton(dy) else _reference_weight
    run(dy, x, offs, out, accumulate, gather)


@operator(lambda *_: None, mutates=("out",))
def _grouped_gemm_wgrad_merged(
    dys: Sequence[Tensor], xs: Sequence[Tensor], offsets: Sequence[Tensor], gathers: Sequence[Tensor | None],
    out: Tensor, accumulate: bool,
) -> None:
    """Compute `grouped_gemm_wgrad_merged` with checked operands, one list for each field of `WgradOperands`."""
    operands = [*map(WgradOperands, dys, xs, offsets, gathers)]
    for dy, x, offs, gather in operands:  # before anything is added
        check_values(offs, dy.shape[0], gather, x.shape[0])
    torch.autograd.graph.increment_version(out)
    run = _launch_merged_weight if use_triton(out) else _reference_merged_weight
    run(operands, out, accumulate)


def _no_backward_error() -> RuntimeError:
    """Return the error for a backward of the operators."""
    return RuntimeError("operands require gradients, but grouped_gemm and related functions have no backward; use "
                        "dualpipe.nn.GroupedLinear or GroupedSwiGLU")


# --- public functions ------------------------------------------------------------------------------------------------


def grouped_gemm(
    x: Tensor, w: Tensor, offs: Tensor, *, bias: Tensor | None = None, gather: Tensor | None = None
) -> Tensor:
    """Compute y[m] = w[e] x[m] (+ bias[e]) for every row m of expert e -> (M, N) in the dtype of `x`.

    All strides are supported; rows with 16-byte alignment are fast.

    Args:
        x: (M, H) rows sorted by expert; with `gather`, any number of rows (R, H).
        w: (E, N, H), the layout of nn.Linear.
        offs: (E,) int32, end of every expert's rows, cumulative. Rows from `offs[-1]` on stay uninitialized.
        bias: (E, N).
        gather: (M,) int32 or int64; the rows are `x[gather]`.

    Raises:
        ValueError: the operands do not match.
    """
    check_operands(offs, [("x", 1), ("w", 2)], gather, bias, w=w, x=x)
    if needs_gradient(x, w, bias):
        return WithoutBackward.apply(_grouped_gemm, _no_backward_error, x, w, offs, bias, gather)
    return _grouped_gemm(x, w, offs, bias, gather)


def grouped_gemm_swiglu(
    x: Tensor, w: Tensor, offs: Tensor, *, bias: Tensor | None = None, gather: Tensor | None = None,
    weight: Tensor | None = None, clamped: bool = False, alpha: float = 1.702, limit: float = 7.0,
) -> tuple[Tensor, Tensor]:
    """Compute gate_up = grouped_gemm(x, w, offs) and h = swiglu(gate_up, weight), or clamped_swiglu -> (h, gate_up).

    h (M, I) and gate_up (M, 2I) are bitwise equal to the results of the two functions: h is computed from the rounded
    gate_up. The backward needs gate_up.

    Args:
        x, offs, bias, gather: see `grouped_gemm`.
        w: (E, 2I, H), for gate and up as halves, or interleaved if `clamped`.
        weight: (M,), routing weight of every row.
        clamped: `clamped_swiglu` with `alpha` and `limit`, instead of `swiglu`.

    Raises:
        ValueError: the operands do not match.
    """
    check_operands(offs, [("x", 1), ("w", 2)], gather, bias, w=w, x=x)
    if w.shape[1] % 2:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected (E, 2I, H) for gate and up")
    check_weight(weight, _num_rows(x, gather), x.device)
    operands = (x, w, offs, bias, gather, weight, *swiglu_form(clamped, alpha, limit))
    if needs_gradient(x, w, bias, weight):
        return WithoutBackward.apply(_grouped_gemm_swiglu, _no_backward_error, *operands)
    return _grouped_gemm_swiglu(*operands)


def grouped_gemm_dgrad(dy: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Compute the input gradient of `grouped_gemm`: dx[m] = w[e]^T dy[m] -> (M, H).

    All strides are supported.

    Args:
        dy: (M, N).
        w: (E, N, H), read without a transposed copy.
        offs: (E,) int32, end of every expert's rows, cumulative. Rows from `offs[-1]` on stay uninitialized.

    Raises:
        ValueError: the operands do not match.
    """
    check_operands(offs, [("dy", 1), ("w", 1)], w=w, dy=dy)
    if needs_gradient(dy, w):
        return WithoutBackward.apply(_grouped_gemm_dgrad, _no_backward_error, dy, w, offs)
    return _grouped_gemm_dgrad(dy, w, offs)


def grouped_gemm_wgrad(
    dy: Tensor, x: Tensor, offs: Tensor, *, out: Tensor, accumulate: bool, gather: Tensor | None = None
) -> None:
    """Compute the weight gradient of `grouped_gemm`: dw[e] = sum over the rows m of expert e of dy[m] x[m]^T.

    The result has the dtype of `out`; for a float32 `out`, it is never rounded to bfloat16. All strides are supported,
    except for an `out` whose elements share memory.

    Args:
        dy: (M, N).
        x: (M, H); with `gather`, any number of rows (R, H).
        offs: (E,) int32, end of every expert's rows, cumulative.
        out: (E, N, H), receives the result.
        accumulate: add the result to `out`. Otherwise experts without rows get zeros.
        gather: (M,) int32 or int64; the rows are `x[gather]`.

    Raises:
        ValueError: the operands do not match.
    """
    _check_wgrad(dy, x, offs, out, gather)
    _grouped_gemm_wgrad(dy, x, offs, out, accumulate, gather)


def grouped_gemm_wgrad_merged(operands: Sequence[WgradOperands], *, out: Tensor, accumulate: bool) -> None:
    """Compute the weight gradient of `grouped_gemm`, summed over micro-batches: `GroupedLinear`'s for any number.

    One launch takes up to four successive micro-batches (two on sm_80) whose operands have the same dtypes, strides and
    alignment, and which all have a `gather` or none. It reads and writes `out` once. With 256 rows per expert, reading
    and writing a float32 `out` takes most of the time of a launch.

    Results are reproducible. On CPU, they are bitwise equal to calls of `grouped_gemm_wgrad` for one micro-batch after
    the other. A launch on a GPU rounds differently: it sums its micro-batches, in their order and in at least float32,
    and then adds the sum to `out`. Example: an expert's rows give 1 and 2 in two micro-batches and `out` holds 4: the
    result is (1 + 2) + 4 instead of (4 + 1) + 2.

    Args:
        operands: operands of every micro-batch, at least one.
        out, accumulate: see `grouped_gemm_wgrad`.

    Raises:
        ValueError: the operands do not match. Nothing has been added to `out`.
    """
    if not operands:
        raise ValueError("operands must hold those of at least one micro-batch; got none")
    for dy, x, offs, gather in operands:
        _check_wgrad(dy, x, offs, out, gather)
    dys, xs, offsets, gathers = (list(column) for column in zip(*operands))
    _grouped_gemm_wgrad_merged(dys, xs, offsets, gathers, out, accumulate)


def _check_wgrad(dy: Tensor, x: Tensor, offs: Tensor, out: Tensor, gather: Tensor | None) -> None:
    """Raise ValueError if the operands of `grouped_gemm_wgrad` do not match."""
    check_operands(offs, [("dy", 0), ("x" if gather is None else "gather", 0)], gather, out=out, dy=dy, x=x)
    if out.shape[1:] != (dy.shape[1], x.shape[1]):
        raise ValueError(f"out has shape {tuple(out.shape)}, expected (E, {dy.shape[1]}, {x.shape[1]}) for dy and x")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape)):
        raise ValueError(f"out has strides {out.stride()}, with which elements share memory; give a tensor that is not "
                         "expanded")


def check_operands(
    offs: Tensor, equal: Sequence[tuple[str, int]], gather: Tensor | None = None, bias: Tensor | None = None,
    **operands: Tensor,
) -> None:
    """Raise ValueError if operands do not match each other.

    equal: two sizes that must be equal, each by operand (or "gather") and dimension.
    operands: by name; the first one, `w` or `out`, is (E, N, H), the others are matrices.
    """
    weights = next(iter(operands.values()))
    _check_dtypes(offs, weights, operands)
    if offs.dtype is not torch.int32:
        raise ValueError(f"offs is {offs.dtype}, expected int32; convert it with offs.to(torch.int32)")
    if gather is not None:
        if gather.dim() != 1 or gather.dtype not in (torch.int32, torch.int64) or gather.device != offs.device:
            raise ValueError(f"gather is {gather.dtype} of shape {tuple(gather.shape)} on {gather.device}, expected "
                             f"int32 or int64 of shape (M,) on {offs.device}")
        operands["gather"] = gather
    sizes = [operands[name].shape[dim] for name, dim in equal]
    if sizes[0] != sizes[1]:
        names = [f"{name}.shape[{dim}]" for name, dim in equal]
        raise ValueError(f"{names[0]} is {sizes[0]} and {names[1]} is {sizes[1]}, expected equal sizes")
    experts = weights.shape[0]
    if experts < 1:
        raise ValueError(f"the weights have shape {tuple(weights.shape)}, expected at least one expert")
    if offs.shape != (experts,):
        raise ValueError(f"offs has shape {tuple(offs.shape)}, expected one end for each of {experts} experts")
    if bias is None:
        return
    bias_shape = weights.shape[:2]
    if (bias.shape, bias.dtype, bias.device) != (bias_shape, weights.dtype, offs.device):
        raise ValueError(f"bias is {bias.dtype} of shape {tuple(bias.shape)} on {bias.device}, expected "
                         f"{weights.dtype} of shape {tuple(bias_shape)} on {offs.device}, one row for each expert")


def _check_dtypes(offs: Tensor, weights: Tensor, operands: dict[str, Tensor]) -> None:
    """Raise ValueError for operands with wrong dimensions, on several devices, or with several dtypes.

    `out` may have another dtype than the others.
    """
    dtype = None
    for name, operand in operands.items():
        num_dims = 3 if operand is weights else 2
        if operand.dim() != num_dims or not operand.is_floating_point():
            raise ValueError(f"{name} is {operand.dtype} of shape {tuple(operand.shape)}, expected a floating-point "
                             f"tensor with {num_dims} dimensions")
        if operand.device != offs.device:
            devices = [str(tensor.device) for tensor in (*operands.values(), offs)]
            raise ValueError(f"the operands are on {devices}, expected one device")
        if name == "out":
            continue
        if dtype is not None and operand.dtype is not dtype:
            dtypes = {name: operand.dtype for name, operand in operands.items() if name != "out"}
            raise ValueError(f"{' and '.join(dtypes)} have the dtypes {[*dtypes.values()]}, expected one dtype")
        dtype = operand.dtype


def check_values(offs: Tensor, rows: int, gather: Tensor | None = None, gathered_rows: int = 0) -> None:
    """Raise ValueError for invalid values of `offs` and `gather`.

    The check copies values to the host. On CUDA it waits for the device, so it runs only with DUALPIPE_CHECK_OFFSETS=1.
    """
    if offs.is_cuda and os.environ.get("DUALPIPE_CHECK_OFFSETS", "0") != "1":
        return
    ends = [0, *offs.tolist()]
    if any(a > b for a, b in pairwise(ends)) or ends[-1] > rows:
        raise ValueError(f"offs is {ends[1:]}, expected ends that rise from 0 to at most {rows}, the number of rows")
    if gather is None or ends[-1] == 0:
        return
    low, high = (int(value) for value in gather[: ends[-1]].aminmax())
    if low < 0 or high >= gathered_rows:
        raise ValueError(f"gather has values from {low} to {high}, expected values within the {gathered_rows} rows of "
                         "x")


# --- references for operands on the CPU. On CUDA they wait for the device, to copy `offs` to the host ----------------


def _reference_rows(
    a: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, gather: Tensor | None, *, forward: bool
) -> Tensor:
    """Compute rows by `torch.nn.functional.grouped_mm` if it supports the operands, else by one GEMM per expert."""
    if gather is not None:
        a = _gather_rows(a, gather, offs)
    w_EDC = w.mT if forward else w
    if bias is None and _supports_grouped_mm(a, w):
        return F.grouped_mm(a, w_EDC, offs=offs)
    y = a.new_empty(a.shape[0], w_EDC.shape[2])
    for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        if bias is None:
            torch.mm(a[start:end], w_EDC[e], out=y[start:end])
        else:
            torch.addmm(bias[e], a[start:end], w_EDC[e], out=y[start:end])
    return y


def _reference_weight(
    dy: Tensor, x: Tensor, offs: Tensor, out: Tensor, accumulate: bool, gather: Tensor | None
) -> None:
    """Compute the weight gradient by `F.grouped_mm` if it supports the operands, else by one GEMM per expert."""
    if gather is not None:
        x = _gather_rows(x, gather, offs)
    if out.dtype is x.dtype and _supports_grouped_mm(dy, x):
        dw = F.grouped_mm(dy.t(), x, offs=offs)
        out.add_(dw) if accumulate else out.copy_(dw)
        return
    for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        dw = dy[start:end].to(out.dtype).t().mm(x[start:end].to(out.dtype))
        out[e].add_(dw) if accumulate else out[e].copy_(dw)


def _reference_merged_weight(operands: Sequence[WgradOperands], out: Tensor, accumulate: bool) -> None:
    """Add one micro-batch after the other."""
    for dy, x, offs, gather in operands:
        _reference_weight(dy, x, offs, out, accumulate, gather)
        accumulate = True


def _gather_rows(x: Tensor, gather: Tensor, offs: Tensor) -> Tensor:
    """Return x[gather] up to the last end; later rows are uninitialized, and later indices are not read."""
    rows = x.new_empty(gather.shape[0], x.shape[1])
    num_assigned = int(offs[-1])
    torch.index_select(x, 0, gather[:num_assigned], out=rows[:num_assigned])
    return rows


def _supports_grouped_mm(*operands: Tensor) -> bool:
    """Return True if `F.grouped_mm` supports row-major operands: half precision, rows with 16-byte alignment."""
    return all(
        tensor.dtype in HALF and tensor.is_contiguous() and tensor.numel() > 0 and tensor.data_ptr() % 16 == 0
        and tensor.shape[-1] * tensor.element_size() % 16 == 0 for tensor in operands
    )
