"""Rotary embedding of queries and keys, with the norm of each head before it: one launch each way for both.

As PyTorch operations the two norms and rotations of a bfloat16 Qwen3 layer are 26 launches forward and 46 backward,
most of which write a tensor of the queries' size. Here the queries and keys are read once as their projections left
them, and written once. A pair (a, b) of a head's dimensions is turned by its position's angle:

    n  = weight * x * scale, scale = 1 / sqrt(mean(x^2) + eps) over the head     as in `norm`; n is x without a norm
    y1 = n_a cos - n_b sin,   y2 = n_b cos + n_a sin
    dn_a = dy1 cos + dy2 sin, dn_b = dy2 cos - dy1 sin,   and from dn as in `norm`

As halves a pair is dimensions i and i + D/2. Interleaved (DeepSeek) it is 2i and 2i + 1, and comes out as halves too:
queries and keys in one order, on which their products do not depend.

Example, cos = 0 and sin = 1, a quarter turn, without norms: x = [1, 2, 3, 4] has as halves the pairs (1, 3) and (2, 4),
so y = [-3, -4, 1, 2]; interleaved (1, 2) and (3, 4), so y = [-2, -4, 1, 3].

Dimension letters: B batch, S sequence, T tokens (B * S), A heads of queries, G of keys, D head dimension, R rows of the
tables (T, or S where all sequences have the same positions), P blocks of rows (token, head).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from dualpipe.kernels.common import RowTile, cdiv, compute_dtype, operator, tl, tl_dtype, triton, use_triton
from dualpipe.kernels.launcher import MAX_LAUNCHERS, Launcher
from dualpipe.kernels.norm import rms_norm_backward_reference, rms_norm_reference

# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _load_pairs(
    ptr, rows, N, heads, token_stride, head_stride, D: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The first and second elements of the pairs of some rows (token, head), each (BLOCK_R, BLOCK_D), as stored."""
    start = (rows // heads).to(tl.int64) * token_stride + (rows % heads).to(tl.int64) * head_stride
    pairs = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (pairs < D // 2)[None, :]
    ptrs = ptr + start[:, None] + (pairs * STEP)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + APART, mask=mask, other=0.0)


@triton.jit
def _load_angles(
    cos_ptr, sin_ptr, rows, N, heads, R, D: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """cos and sin (BLOCK_R, BLOCK_D) of some rows, rounded to the dtype of the result first."""
    pairs = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (pairs < D // 2)[None, :]
    at = ((rows // heads) % R).to(tl.int64)[:, None] * D + pairs[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(DTYPE).to(COMPUTE)
    return cos, tl.load(sin_ptr + at, mask=mask, other=0.0).to(DTYPE).to(COMPUTE)


@triton.jit
def _load_weight(
    weight_ptr, D: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The norm's weight for the first and second elements of pairs, each (1, BLOCK_D)."""
    pairs = tl.arange(0, BLOCK_D)
    ptrs = weight_ptr + pairs * STEP
    first = tl.load(ptrs, mask=pairs < D // 2, other=0.0).to(COMPUTE)
    second = tl.load(ptrs + APART, mask=pairs < D // 2, other=0.0).to(COMPUTE)
    return first[None, :], second[None, :]


@triton.jit
def _forward_rows(
    x_ptr, weight_ptr, y_ptr, scale_ptr, cos_ptr, sin_ptr, block, T, heads, token_stride, head_stride, R,
    D: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    N = T * heads
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    first, second = _load_pairs(x_ptr, rows, N, heads, token_stride, head_stride, D, STEP, APART, BLOCK_D)
    a, b = first.to(COMPUTE), second.to(COMPUTE)
    y_type = y_ptr.dtype.element_ty
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + EPS)
        tl.store(scale_ptr + rows, scale, mask=rows < N)
        weight_a, weight_b = _load_weight(weight_ptr, D, STEP, APART, COMPUTE, BLOCK_D)
        a = (weight_a * (a * scale[:, None]).to(first.dtype).to(COMPUTE)).to(y_type).to(COMPUTE)
        b = (weight_b * (b * scale[:, None]).to(first.dtype).to(COMPUTE)).to(y_type).to(COMPUTE)
    cos, sin = _load_angles(cos_ptr, sin_ptr, rows, N, heads, R, D, y_type, COMPUTE, BLOCK_D)
    pairs = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (pairs < D // 2)[None, :]
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * D + pairs[None, :]
    tl.store(y_ptrs, (a * cos - b * sin).to(y_type), mask=mask)
    tl.store(y_ptrs + D // 2, (b * cos + a * sin).to(y_type), mask=mask)


@triton.jit
def _forward_kernel(
    q_ptr,  # (T, A, D), tokens and heads any distance apart
    k_ptr,  # (T, G, D), likewise
    q_weight_ptr,  # (D,) or unused, as the next
    k_weight_ptr,
    cos_ptr,  # (R, D) contiguous, both halves alike
    sin_ptr,
    q_out_ptr,  # (T, A, D) contiguous, halves
    k_out_ptr,  # (T, G, D) likewise
    q_scale_ptr,  # (T * A,) COMPUTE, or unused, as the next
    k_scale_ptr,
    T, A, G, R, q_blocks, q_token, q_head, k_token, k_head,
    D: tl.constexpr,
    STEP: tl.constexpr,  # from pair to pair: 1 for halves, 2 interleaved
    APART: tl.constexpr,  # from the first element of a pair to the second: D / 2, or 1
    EPS: tl.constexpr, NORM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """The first programs turn queries, the others keys."""
    block = tl.program_id(0)
    if block < q_blocks:
        _forward_rows(q_ptr, q_weight_ptr, q_out_ptr, q_scale_ptr, cos_ptr, sin_ptr, block, T, A, q_token, q_head, R,
                      D, STEP, APART, EPS, NORM, COMPUTE, BLOCK_R, BLOCK_D)
    else:
        _forward_rows(k_ptr, k_weight_ptr, k_out_ptr, k_scale_ptr, cos_ptr, sin_ptr, block - q_blocks, T, G, k_token,
                      k_head, R, D, STEP, APART, EPS, NORM, COMPUTE, BLOCK_R, BLOCK_D)


@triton.jit
def _backward_rows(
    dy_ptr, x_ptr, weight_ptr, scale_ptr, dx_ptr, parts_ptr, cos_ptr, sin_ptr, block, T, heads, dy_token, dy_head,
    token_stride, head_stride, R, span,
    D: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, NORM: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    N = T * heads
    pairs = tl.arange(0, BLOCK_D)
    if NORM:
        weight_a, weight_b = _load_weight(weight_ptr, D, STEP, APART, COMPUTE, BLOCK_D)
        d_weight_a = tl.zeros((BLOCK_R, BLOCK_D), COMPUTE)
        d_weight_b = tl.zeros((BLOCK_R, BLOCK_D), COMPUTE)
    for start in range(block * span, tl.minimum(block * span + span, N), BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        dy_first, dy_second = _load_pairs(dy_ptr, rows, N, heads, dy_token, dy_head, D, 1, D // 2, BLOCK_D)
        dy1, dy2 = dy_first.to(COMPUTE), dy_second.to(COMPUTE)
        cos, sin = _load_angles(cos_ptr, sin_ptr, rows, N, heads, R, D, dy_first.dtype, COMPUTE, BLOCK_D)
        d_a, d_b = dy1 * cos + dy2 * sin, dy2 * cos - dy1 * sin
        if NORM:
            first, second = _load_pairs(x_ptr, rows, N, heads, token_stride, head_stride, D, STEP, APART, BLOCK_D)
            scale = tl.load(scale_ptr + rows, mask=rows < N, other=0.0)[:, None]
            a, b = first.to(COMPUTE) * scale, second.to(COMPUTE) * scale
            d_weight_a += d_a * a.to(first.dtype).to(COMPUTE)
            d_weight_b += d_b * b.to(first.dtype).to(COMPUTE)
            d_a, d_b = d_a * weight_a, d_b * weight_b
            mean = ((tl.sum(d_a * a, 1) + tl.sum(d_b * b, 1)) * (1.0 / D))[:, None]
            d_a, d_b = scale * (d_a - a * mean), scale * (d_b - b * mean)
        mask = (rows < N)[:, None] & (pairs < D // 2)[None, :]
        dx_ptrs = dx_ptr + rows.to(tl.int64)[:, None] * D + (pairs * STEP)[None, :]
        tl.store(dx_ptrs, d_a.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptrs + APART, d_b.to(dx_ptr.dtype.element_ty), mask=mask)
    if NORM:
        part_ptrs = parts_ptr + block.to(tl.int64) * D + pairs * STEP
        tl.store(part_ptrs, tl.sum(d_weight_a, 0), mask=pairs < D // 2)
        tl.store(part_ptrs + APART, tl.sum(d_weight_b, 0), mask=pairs < D // 2)


@triton.jit
def _backward_kernel(
    dq_out_ptr,  # (T, A, D), tokens and heads any distance apart, as of the next three
    dk_out_ptr,  # (T, G, D)
    q_ptr,  # (T, A, D) or unused, as the next
    k_ptr,  # (T, G, D)
    q_weight_ptr,  # (D,) or unused, as the next three
    k_weight_ptr,
    q_scale_ptr,  # (T * A,) COMPUTE
    k_scale_ptr,
    cos_ptr,  # (R, D) contiguous, both halves alike
    sin_ptr,
    dq_ptr,  # (T, A, D) contiguous
    dk_ptr,  # (T, G, D) contiguous
    q_parts_ptr,  # (q_blocks, D) COMPUTE, or unused, as the next
    k_parts_ptr,
    T, A, G, R, q_blocks, dq_token, dq_head, dk_token, dk_head, q_token, q_head, k_token, k_head,
    span,  # rows of one program, a multiple of BLOCK_R
    D: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, NORM: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    block = tl.program_id(0)
    if block < q_blocks:
        _backward_rows(dq_out_ptr, q_ptr, q_weight_ptr, q_scale_ptr, dq_ptr, q_parts_ptr, cos_ptr, sin_ptr, block, T,
                       A, dq_token, dq_head, q_token, q_head, R, span, D, STEP, APART, NORM, COMPUTE, BLOCK_R,
                       BLOCK_D)
    else:
        _backward_rows(dk_out_ptr, k_ptr, k_weight_ptr, k_scale_ptr, dk_ptr, k_parts_ptr, cos_ptr, sin_ptr,
                       block - q_blocks, T, G, dk_token, dk_head, k_token, k_head, R, span, D, STEP, APART, NORM,
                       COMPUTE, BLOCK_R, BLOCK_D)


# ---------------------------------------------------------------------------------------------------------- launchers

# Rows (token, head) of a program in the backward, a multiple of a tile's; parts add less than 1% to what is moved.
_SPAN = 256


def tile_of(dim: int, dtype: torch.dtype) -> RowTile:
    """The tile for heads of `dim` dimensions: rows, and pairs of a row, all of them; 16 bytes of each half a thread."""
    pairs = max(8, 1 << (dim // 2 - 1).bit_length())
    return RowTile(rows=max(1, 1024 // pairs), cols=pairs, warps=4).scaled_for(dtype)


def _launch_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    interleaved: bool, results: Rotated,
) -> None:
    q, k = _rows(q), _rows(k)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    launch, tile_rows = _forward_launcher(
        eps, dim, interleaved, q_weight is not None, q.dtype, results.q_scale.dtype)
    q_blocks, k_blocks = cdiv(tokens * heads, tile_rows), cdiv(tokens * kv_heads, tile_rows)
    launch(
        (q_blocks + k_blocks,),
        (q, k, *_weights(q, q_weight, k_weight), cos.contiguous(), sin.contiguous(), *results),
        (tokens, heads, kv_heads, cos.numel() // dim, q_blocks, *q.stride()[:2], *k.stride()[:2]),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _forward_launcher(eps: float, *compiled_for: Any) -> tuple[Launcher, int]:
    """The launcher, and the rows of one program. compiled_for: arguments of `constants`."""
    compiled = constants(*compiled_for)
    return Launcher(_forward_kernel, EPS=eps, **compiled), compiled["BLOCK_R"]


def _launch_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_scale: Tensor, k_scale: Tensor, interleaved: bool,
    gradients: tuple[Tensor, ...],
) -> None:
    dq_out, dk_out = _rows(dq_out), _rows(dk_out)
    q, k = dq_out if q is None else _rows(q), dk_out if k is None else _rows(k)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    q_blocks, k_blocks = cdiv(tokens * heads, _SPAN), cdiv(tokens * kv_heads, _SPAN)
    strides = *dq_out.stride()[:2], *dk_out.stride()[:2], *q.stride()[:2], *k.stride()[:2]
    _backward_launcher(dim, interleaved, q_weight is not None, q.dtype, q_scale.dtype)(
        (q_blocks + k_blocks,),
        (dq_out, dk_out, q, k, *_weights(q, q_weight, k_weight), q_scale, k_scale, cos.contiguous(), sin.contiguous(),
         *gradients),
        (tokens, heads, kv_heads, cos.numel() // dim, q_blocks, *strides, _SPAN),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _backward_launcher(*compiled_for: Any) -> Launcher:
    return Launcher(_backward_kernel, **constants(*compiled_for))


def constants(
    dim: int, interleaved: bool, norm: bool, dtype: torch.dtype, compute: torch.dtype
) -> dict[str, Any]:
    """What both kernels are compiled for."""
    tile = tile_of(dim, dtype)
    return dict(D=dim, STEP=2 if interleaved else 1, APART=1 if interleaved else dim // 2, NORM=norm,
                COMPUTE=tl_dtype(compute), BLOCK_R=tile.rows, BLOCK_D=tile.cols, num_warps=tile.warps)


def _rows(x: Tensor) -> Tensor:
    """(B, S, A, D) -> (T, A, D), copied where tokens are not all equally far apart, or dimensions no neighbours."""
    x = x.flatten(0, 1)
    return x if x.stride(2) == 1 else x.contiguous()


def _weights(unused: Tensor, *weights: Tensor | None) -> list[Tensor]:
    return [unused if weight is None else weight.contiguous() for weight in weights]


# ------------------------------------------------------------------------------------------------------------- public


class Rotated(NamedTuple):
    """Queries and keys as attention takes them, and what the norms divided their heads by, for the backward."""

    q: Tensor  # (B, S, A, D) contiguous
    k: Tensor  # (B, S, G, D) contiguous
    q_scale: Tensor  # (T * A,), as the next; empty without norms
    k_scale: Tensor  # (T * G,)


class RotatedBackward(NamedTuple):
    """The gradients of queries and keys as they came, and parts (P, D) of the weights', for `parts.sum(0)`."""

    dq: Tensor
    dk: Tensor
    q_parts: Tensor
    k_parts: Tensor


def rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    eps: float = 0.0, interleaved: bool = False,
) -> Rotated:
    """Turn the heads of queries (B, S, A, D) and keys (B, S, G, D) by their positions' angles, normalised before where
    there are weights (D,), both or none.

    `cos` and `sin` (S, D) or (B, 1, S, D), both halves alike, are rounded to the dtype of the result: the common one of
    the queries, or keys, and their weight. Everything else is computed in at least float32. Not differentiable; the
    attention of `dualpipe.nn` is. Raises `ValueError` for operands that do not fit.
    """
    dim, positions = q.shape[-1], q.shape[1] if q.dim() == 4 else 0
    if q.dim() != 4 or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != dim or dim % 2:
        raise ValueError(f"queries (B, S, A, D) and keys (B, S, G, D) of even D are needed; got {tuple(q.shape)} and "
                         f"{tuple(k.shape)}")
    if cos.shape != sin.shape or cos.shape[-1] != dim or cos.numel() not in (positions * dim, q[:, :, 0].numel()):
        raise ValueError(f"cos and sin must be {(positions, dim)}, or one for each sequence; got {tuple(cos.shape)} "
                         f"and {tuple(sin.shape)}")
    given = [None if weight is None else tuple(weight.shape) for weight in (q_weight, k_weight)]
    if given not in ([None, None], [(dim,), (dim,)]):
        raise ValueError(f"weights of the norms must both be ({dim},), or None; got {given}")
    return Rotated(*_rotate_heads(q, k, cos, sin, q_weight, k_weight, eps, interleaved))


def rotate_heads_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_scale: Tensor, k_scale: Tensor, interleaved: bool = False,
) -> RotatedBackward:
    """The backward of `rotate_heads`; without norms `q` and `k` are not needed, and there are no parts."""
    return RotatedBackward(*_rotate_heads_backward(
        dq_out, dk_out, q, k, cos, sin, q_weight, k_weight, q_scale, k_scale, interleaved
    ))


def _new_results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, operands = compute_dtype(q, k, q_weight, k_weight), ((q, q_weight), (k, k_weight))
    q_out, k_out = (x.new_empty(x.shape, dtype=x.dtype if w is None else torch.promote_types(x.dtype, w.dtype))
                    for x, w in operands)
    q_scale, k_scale = (x.new_empty(0 if w is None else x[..., 0].numel(), dtype=dtype) for x, w in operands)
    return q_out, k_out, q_scale, k_scale


@operator(_new_results)
def _rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Rotated`."""
    results = _new_results(q, k, cos, sin, q_weight, k_weight, eps, interleaved)
    if not use_triton(q):
        for x, weight, out, scale in ((q, q_weight, 0, 2), (k, k_weight, 1, 3)):
            y, found = rotate_reference(x, cos, sin, weight, eps, interleaved)
            results[out].copy_(y)
            results[scale].copy_(found)
    elif q.numel() or k.numel():
        _launch_forward(q, k, cos, sin, q_weight, k_weight, eps, interleaved, Rotated(*results))
    return results


def _new_gradients(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_scale: Tensor, k_scale: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dim, operands = dq_out.shape[-1], ((dq_out, q, q_scale), (dk_out, k, k_scale))
    dq, dk = (dy.new_empty(dy.shape, dtype=dy.dtype if x is None else x.dtype) for dy, x, _ in operands)
    span = _SPAN if use_triton(dq_out) else max(1, *(scale.numel() for _, _, scale in operands))
    q_parts, k_parts = (scale.new_empty(cdiv(scale.numel(), span), dim) for _, _, scale in operands)
    return dq, dk, q_parts, k_parts


@operator(_new_gradients)
def _rotate_heads_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_scale: Tensor, k_scale: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `RotatedBackward`."""
    operands = dq_out, dk_out, q, k, cos, sin, q_weight, k_weight, q_scale, k_scale, interleaved
    gradients = _new_gradients(*operands)
    if not use_triton(dq_out):
        for dy, x, weight, scale, at in ((dq_out, q, q_weight, q_scale, 0), (dk_out, k, k_weight, k_scale, 1)):
            dx, parts = rotate_backward_reference(dy, x, cos, sin, weight, scale, interleaved)
            gradients[at].copy_(dx)
            gradients[at + 2].copy_(parts)
    elif dq_out.numel() or dk_out.numel():
        _launch_backward(*operands, gradients)
    return gradients


# ---------------------------------------------------------------------------------------------------------- reference


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of (..., D) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_reference(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """`rotate_heads` of queries or keys (B, S, A, D) in PyTorch, which autograd can differentiate, and their scale."""
    scale = x.new_empty(0)
    if weight is not None:
        x, _, scale = rms_norm_reference(x, weight, eps)
    if interleaved:
        x = rearrange(x, "B S A (pairs two) -> B S A (two pairs)", two=2)
    return apply_rotary(x, *_tables(cos, sin, x.dtype)), scale


def rotate_backward_reference(
    dy: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, scale: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """`rotate_heads_backward` of queries or keys in PyTorch, in the dtype that the kernel computes in, with the
    weight's gradient in one part."""
    cos, sin = (table.to(scale.dtype) for table in _tables(cos, sin, dy.dtype))
    dx = apply_rotary(dy.to(scale.dtype), cos, -sin)
    if interleaved:
        dx = rearrange(dx, "B S A (two pairs) -> B S A (pairs two)", two=2)
    return (dx, scale.new_empty(0, dy.shape[-1])) if x is None or weight is None else (
        rms_norm_backward_reference(dx, None, x, scale, weight))


def _tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(S, 1, D) or (B, S, 1, D), as heads are"""
    return tuple((t.unsqueeze(1) if t.dim() == 2 else t.transpose(1, 2)).to(dtype) for t in (cos, sin))
