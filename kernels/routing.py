"""Dropless, deterministic dispatch of tokens to their experts on a rank, and combine of the results.

Nothing is sent to other ranks: `dispatch_tokens` and `combine_tokens` reorder rows in the memory of one rank, called
permute and unpermute in Megatron. `dualpipe.parallel.experts` sends tokens between ranks.

Every token has K rows, one for each of its experts. Sorting by expert makes the rows of an expert contiguous; the
combine adds a token's rows in a fixed order. There are no atomic additions, and every element has one writer.
Therefore results are bitwise reproducible, forward and backward. No value is copied to the host.

Example with K = 2 and 3 experts: choices [[2, 0], [0, 1]] give rows 0 to 3 for experts 2, 0, 0, 1. Sorted by expert,
order = [1, 2, 3, 0], its inverse is [3, 0, 1, 2], offs = [2, 3, 4], and gather = order // K = [0, 1, 1, 0]: sorted row
0 is a row of token 0.

`torch.argsort` sorts 64-bit keys in many passes. For a small number of experts, a counting sort takes two: count the
rows of every (expert, block of rows), compute the running sum over experts and then blocks, and place a row at its
block's start for that expert plus the number of earlier rows of the block with the same expert. In the example with
blocks of two rows: the counts are [[1, 1], [0, 1], [1, 0]] by (expert, block), so the starts are [[0, 1], [2, 2],
[3, 4]]; row 2 is the first row for expert 0 in block 1, so it is placed at 1.

A choice of -1 is unassigned: its row is sorted past `offs[-1]`, is not read or written, and counts as zero in sums.
Such rows need no memory: `SortedTokens.cut` removes them if the host knows their number. Example: choices [[1, -1],
[-1, 0]] give offs = [1, 2] and inverse [1, 2, 3, 0]; cut to two rows, order = [3, 0].

Two kernels move the rows, and each computes the backward of the other. `_sum_kernel` adds the K rows of a token, with
or without weights: it computes `combine_tokens` and the backward of `dispatch_tokens`. `_spread_kernel` writes a token
to its K rows, with or without weights: it computes `dispatch_tokens`, and the backward of `combine_tokens` together
with the gradient of the weights.

`find_destinations` prepares rows for other ranks: a token goes once to each rank that has an expert of it. One kernel
takes the place of some twenty operators on small tensors. Example with 2 ranks of 2 experts: the choices [3, 2] of a
token go to rank 1 alone, which gets one row with the local experts [1, 0]; the choices [0, 3] go to both ranks, with
local experts [0, -1] and [-1, 1].

Dimension letters: T tokens, K experts per token, E experts, N = T * K choices, M sorted rows (N, or fewer after `cut`),
H hidden, B blocks of choices or tokens, G ranks, D destinations of a token (K or G, the smaller one).
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.kernels.common import (
    RowTile,
    WithoutBackward,
    cdiv,
    compute_dtype,
    double_backward_error,
    needs_gradient,
    operator,
    tl,
    tl_dtype,
    triton,
    use_triton,
    with_dense_rows,
)
from dualpipe.kernels.launcher import MAX_LAUNCHERS, Launcher

# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=["N", "B"])
def _count_kernel(
    experts_ptr,  # (N,) int32 or int64
    counts_ptr,  # (E + 1, B) int32; the last row counts unassigned rows
    N, B, num_experts,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,  # power of two, more than num_experts
):
    """Count the rows of every expert in one block of ROWS rows per program."""
    block = tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    expert = _load_experts(experts_ptr, rows, N, num_experts)
    bins = tl.arange(0, BINS)
    counts = tl.histogram(expert, BINS)
    tl.store(counts_ptr + bins.to(tl.int64) * B + block, counts, mask=bins <= num_experts)


@triton.jit(do_not_specialize=["N", "B"])
def _place_kernel(
    experts_ptr,  # (N,) int32 or int64
    ends_ptr,  # (E + 1, B) int32: running sums of the counts
    counts_ptr,  # (E + 1, B) int32
    order_ptr,  # (N,) int32
    inverse_ptr,  # (N,) int32
    gather_ptr,  # (N,) int32
    N, B, num_experts, top_k,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Place one block of ROWS rows per program in the sorted order."""
    block = tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    expert = _load_experts(experts_ptr, rows, N, num_experts)
    rank = tl.zeros((ROWS,), tl.int32)
    for start in range(0, ROWS, CHUNK):  # compare with all rows of the block, CHUNK at a time
        others = block * ROWS + start + tl.arange(0, CHUNK)
        same = _load_experts(experts_ptr, others, N, num_experts)[None, :] == expert[:, None]
        rank += tl.sum((same & (others[None, :] < rows[:, None])).to(tl.int32), 1)
    cell = expert.to(tl.int64) * B + block
    mask = rows < N
    start = tl.load(ends_ptr + cell, mask=mask, other=0) - tl.load(counts_ptr + cell, mask=mask, other=0)
    target = start + rank
    tl.store(inverse_ptr + rows, target, mask=mask)
    tl.store(order_ptr + target, rows, mask=mask)
    tl.store(gather_ptr + target, rows // top_k, mask=mask)


@triton.jit
def _load_experts(experts_ptr, rows, N, num_experts):
    """Load the experts of some rows as int32; `num_experts` for unassigned rows and rows past the end."""
    expert = tl.load(experts_ptr + rows, mask=rows < N, other=0)
    valid = (expert >= 0) & (expert < num_experts)
    tl.device_assert(valid | (expert == -1), "sort_tokens: an expert is not between -1 and num_experts - 1")
    return tl.where(valid & (rows < N), expert, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["T", "top_k"])  # top_k: layers compute it as rows / tokens, or pass 1 without tokens
def _sum_kernel(
    rows_ptr,  # (M, H), rows `stride` apart
    weights_ptr,  # (T, K) contiguous, or unused
    inverse_ptr,  # (N,) int32
    offs_ptr,  # (E,) int32
    out_ptr,  # (T, H) contiguous
    T, E, H, stride, top_k,
    HAS_WEIGHTS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """out[t] = sum over k, in ascending order, of weights[t, k] * rows[inverse[t * K + k]]; zero if unassigned."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    end = tl.load(offs_ptr + E - 1)
    total = tl.zeros((BLOCK_T, BLOCK_H), COMPUTE)
    for k in tl.range(0, top_k, loop_unroll_factor=UNROLL):
        choice = tokens * top_k + k
        row = tl.load(inverse_ptr + choice, mask=tokens < T, other=end)
        valid = row < end
        mask = valid[:, None] & (cols < H)[None, :]
        row_ptrs = rows_ptr + row.to(tl.int64)[:, None] * stride
        value = tl.load(row_ptrs + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
        if HAS_WEIGHTS:
            value *= tl.load(weights_ptr + choice, mask=valid, other=0.0).to(COMPUTE)[:, None]
        total += value
    out_ptrs = out_ptr + tokens.to(tl.int64)[:, None] * H + cols[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & (cols < H)[None, :])


@triton.jit(do_not_specialize=["T", "top_k"])
def _spread_kernel(
    x_ptr,  # (T, H), rows `stride` apart
    weights_ptr,  # (T, K) contiguous, or unused
    rows_ptr,  # (M, H), rows `row_stride` apart, or unused: the rows that the weights were multiplied with
    inverse_ptr,  # (N,) int32
    offs_ptr,  # (E,) int32
    out_ptr,  # (M, H) contiguous
    d_weights_ptr,  # (T, K) contiguous, or unused
    T, E, H, stride, row_stride, top_k,
    HAS_WEIGHTS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """out[row] = weights[t, k] * x[t], d_weights[t, k] = x[t] . rows[row], for every k and row = inverse[t * K + k].

    Unassigned rows are not read or written, and their d_weights is zero.
    """
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    here = tokens < T
    end = tl.load(offs_ptr + E - 1)
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * stride
    for k in range(top_k):
        choice = tokens * top_k + k
        row = tl.load(inverse_ptr + choice, mask=here, other=end).to(tl.int64)[:, None]
        valid = row < end
        if HAS_WEIGHTS:
            weight = tl.load(weights_ptr + choice, mask=here, other=0.0).to(COMPUTE)[:, None]
            d_weight = tl.zeros((BLOCK_T, BLOCK_H), COMPUTE)
        for start in range(0, H, BLOCK_H):
            cols = start + tl.arange(0, BLOCK_H)
            mask = valid & (cols < H)[None, :]
            value = tl.load(x_ptrs + cols[None, :], mask=mask, other=0.0)  # from the cache after the first k
            if HAS_WEIGHTS:
                other = tl.load(rows_ptr + row * row_stride + cols[None, :], mask=mask, other=0.0)
                d_weight += value.to(COMPUTE) * other.to(COMPUTE)
                value = (value.to(COMPUTE) * weight).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * H + cols[None, :], value, mask=mask)
        if HAS_WEIGHTS:
            d_weight_T = tl.sum(d_weight, 1).to(d_weights_ptr.dtype.element_ty)
            tl.store(d_weights_ptr + choice, d_weight_T, mask=here)


@triton.jit(do_not_specialize=["T"])
def _destinations_kernel(
    experts_ptr,  # (T, K) int32 or int64
    weights_ptr,  # (T, K)
    ranks_ptr,  # (T, D) int32
    local_ptr,  # (T, D, K) int32
    copies_ptr,  # (T, D, K)
    places_ptr,  # (T, K) int32
    counts_ptr,  # (B, G, 2) int32
    T, G, experts_per_rank,
    K: tl.constexpr, D: tl.constexpr, BY_RANK: tl.constexpr, TOKENS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):
    """Find the destinations of TOKENS tokens per program, BLOCK_T at a time.

    BY_RANK: place d is for rank d (D is G). Otherwise the ranks of a token's choices are sorted, and a rank has the
    place of its first choice: choices of the ranks [2, -1, 5, 2] give [-1, 2, -1, 5].
    """
    block = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    num_rows = tl.zeros((BLOCK_G,), tl.int32)
    num_choices = tl.zeros((BLOCK_G,), tl.int32)
    for start in range(0, TOKENS, BLOCK_T):
        tokens = block * TOKENS + start + tl.arange(0, BLOCK_T)
        choices = tokens.to(tl.int64)[:, None] * K + k[None, :]
        mask = (tokens < T)[:, None] & (k < K)[None, :]
        expert = tl.load(experts_ptr + choices, mask=mask, other=-1).to(tl.int32)
        rank = tl.where(expert >= 0, expert // experts_per_rank, -1)
        is_choice = rank[:, :, None] == g[None, None, :]
        choices_of_rank = tl.sum(is_choice.to(tl.int32), 1)
        is_destination = choices_of_rank > 0
        if BY_RANK:
            place_of_rank = tl.zeros((BLOCK_T, BLOCK_G), tl.int32) + g[None, :]
        else:
            num_unassigned = K - tl.sum(choices_of_rank, 1)
            place_of_rank = num_unassigned[:, None] + tl.cumsum(choices_of_rank, 1) - choices_of_rank
        is_place = is_destination[:, None, :] & (place_of_rank[:, None, :] == d[None, :, None])
        destination = tl.max(tl.where(is_place, g[None, None, :], -1), 2)
        rows = tokens.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(ranks_ptr + rows, destination, mask=(tokens < T)[:, None] & (d < D)[None, :])
        place = tl.sum(tl.where(is_choice, place_of_rank[:, None, :], 0), 2)
        place = tl.where((rank >= 0) & (rank < G), place, -1)
        tl.store(places_ptr + choices, place, mask=mask)
        weight = tl.load(weights_ptr + choices, mask=mask, other=0.0).to(copies_ptr.dtype.element_ty)
        is_here = place[:, None, :] == d[None, :, None]
        local = tl.where(is_here, (expert - rank * experts_per_rank)[:, None, :], -1)
        copies = tl.where(is_here, weight[:, None, :], 0.0)
        cells = rows[:, :, None] * K + k[None, None, :]
        cell_mask = mask[:, None, :] & (d < D)[None, :, None]
        tl.store(local_ptr + cells, local, mask=cell_mask)
        tl.store(copies_ptr + cells, copies, mask=cell_mask)
        num_rows += tl.sum(is_destination.to(tl.int32), 0)
        num_choices += tl.sum(choices_of_rank, 0)
    count_ptrs = counts_ptr + (block.to(tl.int64) * G + g) * 2
    tl.store(count_ptrs, num_rows, mask=g < G)
    tl.store(count_ptrs + 1, num_choices, mask=g < G)


@triton.jit(do_not_specialize=["N"])
def _collect_kernel(
    d_copies_ptr,  # (T, D, K) contiguous
    places_ptr,  # (T, K) int32
    d_weights_ptr,  # (T, K) contiguous
    N,
    K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):
    """d_weights[t, k] = d_copies[t, places[t, k], k]; zero for an unassigned choice."""
    choices = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = choices < N
    place = tl.load(places_ptr + choices, mask=mask, other=-1)
    cells = ((choices // K).to(tl.int64) * D + place) * K + choices % K
    value = tl.load(d_copies_ptr + cells, mask=mask & (place >= 0), other=0.0)
    tl.store(d_weights_ptr + choices, value.to(d_weights_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------------------- launchers

_DESTINATION_TOKENS = 32  # of one program
_DESTINATION_CELLS = 4096  # elements of the largest intermediate result of a program
_COLLECT_CHOICES = 1024  # of one program
_SORT_ROWS = 256  # rows of one program
_SORT_CHUNK = 16  # rows of one comparison: 32 pairs per thread
# By shape class, for every architecture: one access of 16 bytes per thread; "narrow" has 8 bytes, because 16 spill
# registers on sm_100.
_TILES = {"wide": RowTile(1, 1024, 4, unroll=4), "narrow": RowTile(8, 128, 8), "column": RowTile(64, 4, 2)}


def _tile(hidden: int, dtype: torch.dtype) -> RowTile:
    """Return the tile for rows of `hidden` elements."""
    if hidden > 256:
        return _TILES["wide"].scaled_for(dtype)
    if hidden > 8:
        return _TILES["narrow"].scaled_for(dtype)
    return _TILES["column"].scaled_for(dtype)


def _launch_sort(expert_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (order, inverse, offs, gather)."""
    experts = expert_idx.contiguous()
    rows = expert_idx.numel()
    order, inverse, gather = (experts.new_empty(rows, dtype=torch.int32) for _ in range(3))
    blocks = cdiv(max(rows, 1), _SORT_ROWS)
    counts = torch.empty(num_experts + 1, blocks, dtype=torch.int32, device=experts.device)
    bins = max(64, 1 << num_experts.bit_length())  # experts and "unassigned"; `tl.histogram` needs at least a warp
    launch_count, launch_place = _sort_launchers(bins)
    launch_count((blocks,), (experts, counts), (rows, blocks, num_experts))
    ends = counts.view(-1).cumsum(0, dtype=torch.int32).view_as(counts)
    launch_place((blocks,), (experts, ends, counts, order, inverse, gather),
                 (rows, blocks, num_experts, expert_idx.shape[1]))
    return order, inverse, ends[:num_experts, -1].contiguous(), gather


@cache
def _sort_launchers(bins: int) -> tuple[Launcher, Launcher]:
    """Return the launchers of the counting and of the placing kernel."""
    launch_count = Launcher(_count_kernel, ROWS=_SORT_ROWS, BINS=bins, num_warps=4)
    launch_place = Launcher(_place_kernel, ROWS=_SORT_ROWS, CHUNK=_SORT_CHUNK, num_warps=4)
    return launch_count, launch_place


def _launch_sum(rows: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, top_k: int, out: Tensor) -> None:
    """Write the sum of every token's rows to `out` (T, H)."""
    tokens, hidden = out.shape
    rows = with_dense_rows(rows)
    launch, tile = _sum_launcher(hidden, rows.dtype, None if weights is None else weights.dtype)
    launch(
        (cdiv(max(tokens, 1), tile.rows), cdiv(hidden, tile.cols)),
        (rows, rows if weights is None else weights.contiguous(), inverse, offs, out),
        (tokens, offs.shape[0], hidden, rows.stride(0), top_k),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _sum_launcher(
    hidden: int, dtype: torch.dtype, weights_dtype: torch.dtype | None
) -> tuple[Launcher, RowTile]:
    """Return the launcher of the summing kernel, and its tile."""
    tile = _tile(hidden, dtype)
    return Launcher(_sum_kernel, UNROLL=tile.unroll, **_row_constants(tile, dtype, weights_dtype)), tile


def _launch_spread(
    x: Tensor, weights: Tensor | None, rows: Tensor | None, inverse: Tensor, offs: Tensor, top_k: int, out: Tensor,
    d_weights: Tensor | None,
) -> None:
    """Write every token to its rows `out` (M, H), and the gradient of the weights if there are weights."""
    tokens, hidden = x.shape
    x = with_dense_rows(x)
    rows = x if rows is None else with_dense_rows(rows)
    launch, tile = _spread_launcher(hidden, x.dtype, None if weights is None else weights.dtype)
    launch(
        (cdiv(max(tokens, 1), tile.rows),),
        (x, x if weights is None else weights.contiguous(), rows, inverse, offs, out,
         x if d_weights is None else d_weights),
        (tokens, offs.shape[0], hidden, x.stride(0), rows.stride(0), top_k),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _spread_launcher(
    hidden: int, dtype: torch.dtype, weights_dtype: torch.dtype | None
) -> tuple[Launcher, RowTile]:
    """Return the launcher of the spreading kernel, and its tile."""
    tile = _tile(hidden, dtype)
    return Launcher(_spread_kernel, **_row_constants(tile, dtype, weights_dtype)), tile


def _row_constants(tile: RowTile, dtype: torch.dtype, weights_dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the constants that the summing and the spreading kernel share. They compute in at least float32.

    dtype: dtype of the rows.
    weights_dtype: dtype of the weights; None: no weights.
    """
    compute = torch.promote_types(dtype, torch.float32)
    if weights_dtype is not None:
        compute = torch.promote_types(compute, weights_dtype)
    return dict(
        HAS_WEIGHTS=weights_dtype is not None, COMPUTE=tl_dtype(compute), BLOCK_T=tile.rows, BLOCK_H=tile.cols,
        num_warps=tile.warps,
    )


def _launch_destinations(
    experts: Tensor, weights: Tensor, num_ranks: int, experts_per_rank: int, copies: Tensor
) -> tuple[Tensor, ...]:
    """Write the copies of the weights; return ranks, local experts, places and counts."""
    tokens, depth, top_k = copies.shape
    ranks, local, places, partial_counts = (
        experts.new_empty(shape, dtype=torch.int32)
        for shape in ((tokens, depth), copies.shape, experts.shape,
                      (cdiv(max(tokens, 1), _DESTINATION_TOKENS), num_ranks, 2))
    )
    _destinations_launcher(top_k, num_ranks)(
        (partial_counts.shape[0],),
        (experts.contiguous(), weights.contiguous(), ranks, local, copies, places, partial_counts),
        (tokens, num_ranks, experts_per_rank),
    )
    return ranks, local, places, partial_counts.sum(0)


@lru_cache(maxsize=MAX_LAUNCHERS)
def _destinations_launcher(top_k: int, num_ranks: int) -> Launcher:
    """Return the launcher of the kernel that finds destinations."""
    return Launcher(_destinations_kernel, num_warps=4, **destination_constants(top_k, num_ranks))


def destination_constants(top_k: int, num_ranks: int) -> dict[str, Any]:
    """Return the constants of the kernel that finds destinations."""
    depth = min(top_k, num_ranks)
    block_k, block_d, block_g = (1 << (size - 1).bit_length() for size in (top_k, depth, num_ranks))
    block_t = max(1, min(_DESTINATION_TOKENS, _DESTINATION_CELLS // (block_k * block_g)))
    return dict(K=top_k, D=depth, BY_RANK=depth == num_ranks, TOKENS=_DESTINATION_TOKENS, BLOCK_T=block_t,
                BLOCK_K=block_k, BLOCK_D=block_d, BLOCK_G=block_g)


@lru_cache(maxsize=MAX_LAUNCHERS)
def _collect_launcher(top_k: int, depth: int) -> Launcher:
    """Return the launcher of the kernel that collects the gradients of the weights."""
    return Launcher(_collect_kernel, K=top_k, D=depth, BLOCK=_COLLECT_CHOICES, num_warps=4)


# ------------------------------------------------------------------------------------------------------------- public


class Destinations(NamedTuple):
    """Ranks that tokens are sent to. D is the smaller one of K and the number of ranks G.

    ranks: (T, D) integers, the destinations of a token in ascending order; -1 in unused places.
    local_experts: (T, D, K) int32, the numbers of the chosen experts on the rank that has them; -1 elsewhere.
    weights: (T, D, K), the weights of these experts, in at least float32; 0 elsewhere.
    counts: (G, 2) int64, for each rank the number of tokens that go there, and of their choices there.
    """

    ranks: Tensor
    local_experts: Tensor
    weights: Tensor
    counts: Tensor


def find_destinations(experts: Tensor, weights: Tensor, num_ranks: int, experts_per_rank: int) -> Destinations:
    """Return the ranks of every token's experts, each rank once. Differentiable once, with respect to `weights`.

    Args:
        experts: (T, K) int32 or int64; expert e is on rank e // experts_per_rank, and -1 is unassigned.
        weights: (T, K) floating-point.

    Raises:
        ValueError: the operands do not match.
    """
    if experts.dim() != 2 or weights.shape != experts.shape or not weights.is_floating_point():
        raise ValueError(f"experts have shape {tuple(experts.shape)} and weights are {weights.dtype} of shape "
                         f"{tuple(weights.shape)}, expected (T, K) and floating-point (T, K)")
    run = _FindDestinations.apply if needs_gradient(weights) else _find_destinations
    ranks, local_experts, copies, counts, _ = run(experts, weights, num_ranks, experts_per_rank)
    return Destinations(ranks, local_experts, copies, counts)


class SortedTokens(NamedTuple):
    """Permutation of rows that sorts them by expert, as int32 tensors. Sorted rows from `offs[-1]` on are unassigned.

    order: (M,): sorted row m is row order[m] of (T, K).
    inverse: (N,): row n of (T, K) is sorted row inverse[n].
    offs: (E,): end of every expert's sorted rows.
    gather: (M,): sorted row m is a row of token gather[m] = order[m] // K; the `gather` of `grouped_gemm`.
    """

    order: Tensor
    inverse: Tensor
    offs: Tensor
    gather: Tensor

    def cut(self, rows: int) -> SortedTokens:
        """Return a copy without the sorted rows from `rows` on. `rows` must be at least `offs[-1]`."""
        return self._replace(order=self.order[:rows], gather=self.gather[:rows])


def sort_tokens(expert_idx: Tensor, num_experts: int) -> SortedTokens:
    """Sort rows by expert. The sort is stable: the rows of an expert keep the order of (T, K).

    Args:
        expert_idx: (T, K) int32 or int64, the chosen experts; -1: the row is unassigned, and sorted past `offs[-1]`.
        num_experts: number of experts.

    Raises:
        ValueError: arguments are invalid; on the CPU also for an expert outside -1 to `num_experts` - 1. On a GPU such
            a row is unassigned, or fails an assertion with `TRITON_DEBUG=1`.
    """
    if expert_idx.dim() != 2 or expert_idx.dtype not in (torch.int32, torch.int64) or expert_idx.shape[1] < 1:
        raise ValueError(f"expert_idx is {expert_idx.dtype} of shape {tuple(expert_idx.shape)}, expected int32 or "
                         "int64 of shape (T, K), K experts for each of T tokens")
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}, expected at least 1")
    if expert_idx.numel() >= 2**31:
        raise ValueError(f"expert_idx has {expert_idx.numel()} rows, but at most 2^31 - 1 can be sorted at once; use "
                         "smaller batches")
    return SortedTokens(*_sort_tokens(expert_idx, num_experts))


def dispatch_tokens(x: Tensor, tokens: SortedTokens, top_k: int) -> Tensor:
    """Copy every token to its `top_k` sorted rows: `x` (T, H) -> (M, H).

    Unassigned rows stay uninitialized. The gradient of a token is the sum of the gradients of its rows.
    `grouped_gemm(..., gather=tokens.gather)` reads the tokens without this copy.

    Raises:
        ValueError: the operands do not match.
    """
    _check_rows("x", x, tokens.inverse, top_k)
    if x.shape[0] * top_k != tokens.inverse.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows, expected one row for each of {tokens.inverse.shape[0]} / {top_k} "
                         "sorted tokens")
    return _dispatch(x, tokens.inverse, tokens.offs, top_k, tokens.order.shape[0])


def combine_tokens(y: Tensor, weights: Tensor | None, tokens: SortedTokens, *, top_k: int | None = None) -> Tensor:
    """Sum the K sorted rows of every token, in ascending order of K -> (T, H).

    Sums in at least float32; the result has the dtype of `y`. Unassigned rows count as zero, even if they contain NaN.
    Differentiable once, with respect to `y` and `weights`.

    Args:
        y: (M, H) sorted rows.
        weights: (T, K), multiply the rows; None: the rows are weighted already, as by `swiglu`.
        tokens: result of `sort_tokens`.
        top_k: K; required without weights.

    Raises:
        ValueError: the operands do not match.
    """
    if weights is None:
        if top_k is None:
            raise ValueError("weights and top_k are None; pass weights of shape (T, K), or top_k for weighted rows")
    else:
        if weights.dim() != 2 or not weights.is_floating_point() or weights.device != y.device:
            raise ValueError(f"weights are {weights.dtype} of shape {tuple(weights.shape)} on {weights.device}, "
                             f"expected floating-point (T, K) on {y.device}")
        if top_k not in (None, weights.shape[1]) or weights.numel() != tokens.inverse.shape[0]:
            raise ValueError(f"weights have shape {tuple(weights.shape)} and top_k is {top_k}, expected one element "
                             f"for each of {tokens.inverse.shape[0]} rows, and top_k columns")
        top_k = weights.shape[1]
    _check_rows("y", y, tokens.inverse, top_k)
    if y.shape[0] != tokens.order.shape[0]:
        raise ValueError(f"y has {y.shape[0]} rows, expected one for each of {tokens.order.shape[0]} sorted rows")
    return _combine(y, weights, tokens.inverse, tokens.offs, top_k)


def _check_rows(name: str, x: Tensor, inverse: Tensor, top_k: int) -> None:
    """Raise ValueError for an invalid matrix of rows, or an invalid `top_k`."""
    if x.dim() != 2 or not x.is_floating_point() or x.device != inverse.device:
        raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}, expected a floating-point "
                         f"matrix on {inverse.device}, the device of the sorted tokens")
    if top_k < 1 or inverse.shape[0] % top_k:
        raise ValueError(f"top_k is {top_k}, expected a divisor of the {inverse.shape[0]} sorted rows")


def _new_order(expert_idx: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Allocate order, inverse, offs and gather."""
    rows = expert_idx.numel()
    return tuple(expert_idx.new_empty(size, dtype=torch.int32) for size in (rows, rows, num_experts, rows))


@operator(_new_order)
def _sort_tokens(expert_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (order, inverse, offs, gather)."""
    if use_triton(expert_idx):
        return _launch_sort(expert_idx, num_experts)
    return sort_tokens_reference(expert_idx, num_experts)


@operator(lambda x, inverse, offs, top_k, rows: x.new_empty(rows, x.shape[1]))
def _dispatch_tokens(x: Tensor, inverse: Tensor, offs: Tensor, top_k: int, rows: int) -> Tensor:
    """Compute `dispatch_tokens` without a backward. rows: M."""
    out = x.new_empty(rows, x.shape[1])
    if not use_triton(x):
        choices = _assigned_choices(inverse, offs)
        out.index_copy_(0, inverse[choices].long(), x.index_select(0, choices // top_k))
    elif out.shape[1]:
        _launch_spread(x, None, None, inverse, offs, top_k, out, None)
    return out


@operator(lambda y, _, inverse, __, top_k: y.new_empty(inverse.shape[0] // top_k, y.shape[1]))
def _combine_tokens(y: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """Compute `combine_tokens` without a backward."""
    out = y.new_empty(inverse.shape[0] // top_k, y.shape[1])
    if not use_triton(y):
        out.copy_(combine_tokens_reference(y, weights, inverse, offs, top_k))
    elif out.shape[1]:
        _launch_sum(y, weights, inverse, offs, top_k, out)
    return out


@operator(lambda d_out, y, weights, *_: (y.new_empty(y.shape), weights.new_empty(weights.shape)))
def _combine_tokens_backward(
    d_out: Tensor, y: Tensor, weights: Tensor, inverse: Tensor, offs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients (dy, d_weights) of the weighted sum."""
    dy = y.new_empty(y.shape)
    d_weights = weights.new_empty(weights.shape)
    if not use_triton(y):
        reference_dy, reference_d_weights = combine_tokens_backward_reference(d_out, y, weights, inverse, offs)
        dy.copy_(reference_dy)
        d_weights.copy_(reference_d_weights)
    elif y.shape[1]:
        _launch_spread(d_out, weights, y, inverse, offs, weights.shape[1], dy, d_weights)
    else:
        d_weights.zero_()
    return dy, d_weights


class _Dispatch(torch.autograd.Function):
    """Autograd function of `dispatch_tokens`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor, offs: Tensor, top_k: int, rows: int) -> Tensor:
        """Dispatch, and save the permutation for the backward."""
        ctx.top_k = top_k
        ctx.save_for_backward(inverse, offs)
        return _dispatch_tokens(x, inverse, offs, top_k, rows)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradients of every token's rows."""
        inverse, offs = ctx.saved_tensors
        return _combine(d_out, None, inverse, offs, ctx.top_k), None, None, None, None


class _Combine(torch.autograd.Function):
    """Autograd function of `combine_tokens`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, top_k: int) -> Tensor:
        """Combine, and save the operands of the backward. Without weights, it does not need the rows."""
        ctx.top_k = top_k
        ctx.rows = y.shape[0]
        ctx.save_for_backward(None if weights is None else y, weights, inverse, offs)
        return _combine_tokens(y, weights, inverse, offs, top_k)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Spread the gradient of every token to its rows, and compute the gradient of the weights."""
        y, weights, inverse, offs = ctx.saved_tensors
        if weights is None:
            return _dispatch(d_out, inverse, offs, ctx.top_k, ctx.rows), None, None, None, None
        operands = (d_out, y, weights, inverse, offs)
        if needs_gradient(d_out, y, weights):
            grads = WithoutBackward.apply(_combine_tokens_backward, _double_backward_error, *operands)
        else:
            grads = _combine_tokens_backward(*operands)
        return *grads, None, None, None


def _double_backward_error() -> NotImplementedError:
    return double_backward_error("combine_tokens with weights", "dualpipe.kernels.routing.combine_tokens_reference")


def _new_destinations(experts: Tensor, weights: Tensor, num_ranks: int, experts_per_rank: int) -> tuple[Tensor, ...]:
    """Allocate ranks, local experts, copies of the weights, counts and places."""
    tokens, top_k = experts.shape
    depth = min(top_k, num_ranks)
    return (
        experts.new_empty(tokens, depth, dtype=torch.int32),
        experts.new_empty(tokens, depth, top_k, dtype=torch.int32),
        weights.new_empty(tokens, depth, top_k, dtype=compute_dtype(weights)),
        experts.new_empty(num_ranks, 2, dtype=torch.int64),
        experts.new_empty(tokens, top_k, dtype=torch.int32),
    )


@operator(_new_destinations)
def _find_destinations(
    experts: Tensor, weights: Tensor, num_ranks: int, experts_per_rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (ranks, local experts, copies of the weights, counts, places of the choices)."""
    if not use_triton(experts):
        return find_destinations_reference(experts, weights, num_ranks, experts_per_rank)
    tokens, top_k = experts.shape
    copies = weights.new_empty(tokens, min(top_k, num_ranks), top_k, dtype=compute_dtype(weights))
    ranks, local, places, counts = _launch_destinations(experts, weights, num_ranks, experts_per_rank, copies)
    return ranks, local, copies, counts, places


@operator(lambda d_copies, places, dtype: d_copies.new_empty(places.shape, dtype=dtype))
def _collect_weights(d_copies: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the weights (T, K) from that of their copies."""
    if not use_triton(d_copies):
        return collect_weights_reference(d_copies, places).to(dtype)
    d_weights = d_copies.new_empty(places.shape, dtype=dtype)
    _, depth, top_k = d_copies.shape
    launch = _collect_launcher(top_k, depth)
    grid = (cdiv(max(places.numel(), 1), _COLLECT_CHOICES),)
    launch(grid, (d_copies.contiguous(), places, d_weights), (places.numel(),))
    return d_weights


class _FindDestinations(torch.autograd.Function):
    """Autograd function of `find_destinations`."""

    @staticmethod
    def forward(
        ctx: Any, experts: Tensor, weights: Tensor, num_ranks: int, experts_per_rank: int
    ) -> tuple[Tensor, ...]:
        """Find the destinations, and save the places of the choices for the backward."""
        results: tuple[Tensor, ...] = _find_destinations(experts, weights, num_ranks, experts_per_rank)
        ctx.dtype = weights.dtype
        ctx.set_materialize_grads(False)  # no zeros for the integers
        ctx.save_for_backward(results[4])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient of the weights."""
        (places,) = ctx.saved_tensors
        d_copies = grads[2]
        if d_copies is None:
            return None, None, None, None
        if needs_gradient(d_copies):
            d_weights = WithoutBackward.apply(_collect_weights, _destinations_error, d_copies, places, ctx.dtype)
        else:
            d_weights = _collect_weights(d_copies, places, ctx.dtype)
        return None, d_weights, None, None


def _destinations_error() -> NotImplementedError:
    return double_backward_error("find_destinations", "dualpipe.kernels.routing.find_destinations_reference")


def _dispatch(x: Tensor, inverse: Tensor, offs: Tensor, top_k: int, rows: int) -> Tensor:
    """Compute `dispatch_tokens` with checked operands, recorded by autograd if needed."""
    run = _Dispatch.apply if needs_gradient(x) else _dispatch_tokens
    return run(x, inverse, offs, top_k, rows)


def _combine(y: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """Compute `combine_tokens` with checked operands, recorded by autograd if needed."""
    run = _Combine.apply if needs_gradient(y, weights) else _combine_tokens
    return run(y, weights, inverse, offs, top_k)


# ---------------------------------------------------------------------------------------------------------- reference


def sort_tokens_reference(expert_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (order, inverse, offs, gather) by a stable sort.

    Raises:
        ValueError: an expert is out of range.
    """
    chosen = expert_idx.flatten()
    invalid = chosen[(chosen < -1) | (chosen >= num_experts)]
    if invalid.numel():
        raise ValueError(f"expert_idx contains {invalid[0].item()}, expected experts between 0 and {num_experts - 1}, "
                         "or -1 for none")
    chosen = chosen.where(chosen >= 0, num_experts)  # unassigned rows come last
    order = torch.argsort(chosen, stable=True)
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    offs = torch.bincount(chosen, minlength=num_experts + 1)[:-1].cumsum(0, dtype=torch.int32)
    return order.to(torch.int32), inverse, offs, (order // expert_idx.shape[1]).to(torch.int32)


def combine_tokens_reference(y: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """Sum the rows of every token in the compute dtype of the kernel: (M, H), (T, K) -> (T, H)."""
    y_TKH = _rows_by_token(y, weights, inverse, offs, top_k)
    if weights is not None:
        y_TKH = y_TKH * _assigned_weights(weights, y, inverse, offs)
    return y_TKH.sum(1)


def combine_tokens_backward_reference(
    d_out: Tensor, y: Tensor, weights: Tensor, inverse: Tensor, offs: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients (dy, d_weights) of the weighted sum, in the compute dtype of the kernel."""
    d_out_T1H = d_out.to(compute_dtype(y, weights)).unsqueeze(1)
    choices = _assigned_choices(inverse, offs)
    d_rows = (d_out_T1H * _assigned_weights(weights, y, inverse, offs)).flatten(0, 1)  # (N, H), in the order of (T, K)
    dy = d_rows.new_empty(y.shape).index_copy_(0, inverse[choices].long(), d_rows.index_select(0, choices))
    d_weights = (_rows_by_token(y, weights, inverse, offs, weights.shape[1]) * d_out_T1H).sum(-1)
    return dy, d_weights.where(inverse.view_as(weights) < offs[-1], 0)


def _assigned_choices(inverse: Tensor, offs: Tensor) -> Tensor:
    """Return the choices (0 to N - 1) that have an expert, in ascending order."""
    return (inverse < offs[-1]).nonzero().squeeze(1)


def _rows_by_token(y: Tensor, weights: Tensor | None, inverse: Tensor, offs: Tensor, top_k: int) -> Tensor:
    """Reorder sorted rows (M, H) -> (T, K, H) in the compute dtype. Unassigned rows are zero."""
    choices = _assigned_choices(inverse, offs)
    sorted_rows = y.to(compute_dtype(y, weights))
    rows = sorted_rows.new_zeros(inverse.shape[0], y.shape[1])
    rows.index_copy_(0, choices, sorted_rows.index_select(0, inverse[choices]))
    return rows.unflatten(0, (inverse.shape[0] // top_k, top_k))


def _assigned_weights(weights: Tensor, y: Tensor, inverse: Tensor, offs: Tensor) -> Tensor:
    """Return the weights (T, K) -> (T, K, 1) in the compute dtype. Weights of unassigned rows are zero."""
    return weights.to(compute_dtype(y, weights)).where(inverse.view_as(weights) < offs[-1], 0).unsqueeze(-1)


def find_destinations_reference(
    experts: Tensor, weights: Tensor, num_ranks: int, experts_per_rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `find_destinations` in PyTorch; also return the place of every choice (T, K), -1 if unassigned."""
    ranks_TK = torch.div(experts, experts_per_rank, rounding_mode="floor")  # -1 stays -1
    all_ranks_G = torch.arange(num_ranks, device=experts.device)
    is_choice_TKG = ranks_TK.unsqueeze(-1) == all_ranks_G
    is_destination_TG = is_choice_TKG.any(1)
    ranks_TD = _destination_ranks(ranks_TK, is_destination_TG, all_ranks_G).to(torch.int32)
    is_local_TDK = (ranks_TD.unsqueeze(2) == ranks_TK.unsqueeze(1)) & (experts >= 0).unsqueeze(1)
    local_TDK = (experts % experts_per_rank).unsqueeze(1).where(is_local_TDK, -1).to(torch.int32)
    copies_TDK = weights.to(compute_dtype(weights)).unsqueeze(1).where(is_local_TDK, 0)
    counts_G2 = torch.stack((is_destination_TG.sum(0), is_choice_TKG.sum((0, 1))), 1)
    places_TK = is_local_TDK.to(torch.uint8).argmax(1).where(experts >= 0, -1).to(torch.int32)
    return ranks_TD, local_TDK, copies_TDK, counts_G2, places_TK


def _destination_ranks(ranks_TK: Tensor, is_destination_TG: Tensor, all_ranks_G: Tensor) -> Tensor:
    """Return the destinations of each token (T, D), ascending and without duplicates, -1 in unused places."""
    if ranks_TK.shape[1] >= len(all_ranks_G):
        return all_ranks_G.where(is_destination_TG, -1)
    sorted_TK = ranks_TK.sort(-1).values
    return sorted_TK.where(sorted_TK.diff(dim=-1, prepend=sorted_TK[:, :1] - 1) != 0, -1)


def collect_weights_reference(d_copies: Tensor, places: Tensor) -> Tensor:
    """Compute the gradient of the weights (T, K) in PyTorch."""
    d_weights = d_copies.gather(1, places.clamp(min=0).long().unsqueeze(1)).squeeze(1)
    return d_weights.where(places >= 0, 0)
