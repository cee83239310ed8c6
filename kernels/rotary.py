"""Rotary embedding of queries and keys, fused with the norm of heads: one launch in each direction for both.

As PyTorch operations, the two norms and rotations of a bfloat16 Qwen3 layer take 26 launches in the forward and 46 in
the backward, most of which write a tensor of the queries' size. Here, the results of the projections are read once and
written once. A pair (a, b) of a head's dimensions is rotated by the angle of its position:

    n  = weight * x * scale, scale = 1 / sqrt(mean(x^2) + eps) over the head     as in `norm`; n is x without a norm
    y1 = n_a cos - n_b sin,   y2 = n_b cos + n_a sin
    dn_a = dy1 cos + dy2 sin, dn_b = dy2 cos - dy1 sin,   and from dn as in `norm`

In the layout of halves, a pair is dimensions i and i + D/2. In the interleaved layout (DeepSeek), it is 2i and 2i + 1;
the result has the layout of halves for both. This changes the order of dimensions of queries and keys alike, so it does
not change attention scores.

Example, cos = 0 and sin = 1, a rotation by 90 degrees, without norms: in halves, x = [1, 2, 3, 4] has the pairs (1, 3)
and (2, 4), so y = [-3, -4, 1, 2]; interleaved, it has (1, 2) and (3, 4), so y = [-2, -4, 1, 3].

Dimension letters: B batch, S sequence, T tokens (B * S), A heads of queries, G heads of keys, D head dimension, R rows
of the tables (T, or S if all sequences have the same positions), P blocks of rows with a partial weight gradient each.
A row is a pair (token, head).
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
    """Load the first and second elements of the pairs of some rows, each (BLOCK_R, BLOCK_D), in their stored dtype."""
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
    """Load cos and sin (BLOCK_R, BLOCK_D) of some rows, rounded to the dtype of the result."""
    pairs = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (pairs < D // 2)[None, :]
    at = ((rows // heads) % R).to(tl.int64)[:, None] * D + pairs[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(DTYPE).to(COMPUTE)
    return cos, tl.load(sin_ptr + at, mask=mask, other=0.0).to(DTYPE).to(COMPUTE)


@triton.jit
def _load_weight(
    weight_ptr, D: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load the norm's weight for the first and second elements of pairs, each (1, BLOCK_D)."""
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
    """Normalize and rotate one block of rows of queries or keys."""
    N = T * heads
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    first, second = _load_pairs(x_ptr, rows, N, heads, token_stride, head_stride, D, STEP, APART, BLOCK_D)
    a = first.to(COMPUTE)
    b = second.to(COMPUTE)
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
    q_ptr,  # (T, A, D), any strides of tokens and heads
    k_ptr,  # (T, G, D), any strides of tokens and heads
    q_weight_ptr,  # (D,) or unused
    k_weight_ptr,  # (D,) or unused
    cos_ptr,  # (R, D) contiguous, two equal halves
    sin_ptr,  # (R, D) contiguous, two equal halves
    q_out_ptr,  # (T, A, D) contiguous, layout of halves
    k_out_ptr,  # (T, G, D) contiguous, layout of halves
    q_scale_ptr,  # (T * A,) COMPUTE, or unused
    k_scale_ptr,  # (T * G,) COMPUTE, or unused
    T, A, G, R, q_blocks, q_token, q_head, k_token, k_head,
    D: tl.constexpr,
    STEP: tl.constexpr,  # distance between pairs: 1 for halves, 2 interleaved
    APART: tl.constexpr,  # distance between the two elements of a pair: D / 2 for halves, 1 interleaved
    EPS: tl.constexpr, NORM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Rotate queries in the first `q_blocks` programs, and keys in the others."""
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
    """Compute the gradients of `span` rows of queries or keys, and one partial weight gradient."""
    N = T * heads
    pairs = tl.arange(0, BLOCK_D)
    if NORM:
        weight_a, weight_b = _load_weight(weight_ptr, D, STEP, APART, COMPUTE, BLOCK_D)
        d_weight_a = tl.zeros((BLOCK_R, BLOCK_D), COMPUTE)
        d_weight_b = tl.zeros((BLOCK_R, BLOCK_D), COMPUTE)
    for start in range(block * span, tl.minimum(block * span + span, N), BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        dy_first, dy_second = _load_pairs(dy_ptr, rows, N, heads, dy_token, dy_head, D, 1, D // 2, BLOCK_D)
        dy1 = dy_first.to(COMPUTE)
        dy2 = dy_second.to(COMPUTE)
        cos, sin = _load_angles(cos_ptr, sin_ptr, rows, N, heads, R, D, dy_first.dtype, COMPUTE, BLOCK_D)
        d_a = dy1 * cos + dy2 * sin
        d_b = dy2 * cos - dy1 * sin
        if NORM:
            first, second = _load_pairs(x_ptr, rows, N, heads, token_stride, head_stride, D, STEP, APART, BLOCK_D)
            scale = tl.load(scale_ptr + rows, mask=rows < N, other=0.0)[:, None]
            a = first.to(COMPUTE) * scale
            b = second.to(COMPUTE) * scale
            d_weight_a += d_a * a.to(first.dtype).to(COMPUTE)
            d_weight_b += d_b * b.to(first.dtype).to(COMPUTE)
            d_a = d_a * weight_a
            d_b = d_b * weight_b
            mean = ((tl.sum(d_a * a, 1) + tl.sum(d_b * b, 1)) * (1.0 / D))[:, None]
            d_a = scale * (d_a - a * mean)
            d_b = scale * (d_b - b * mean)
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
    dq_out_ptr,  # (T, A, D), any strides of tokens and heads
    dk_out_ptr,  # (T, G, D), any strides of tokens and heads
    q_ptr,  # (T, A, D), any strides of tokens and heads, or unused
    k_ptr,  # (T, G, D), any strides of tokens and heads, or unused
    q_weight_ptr,  # (D,) or unused
    k_weight_ptr,  # (D,) or unused
    q_scale_ptr,  # (T * A,) COMPUTE, or unused
    k_scale_ptr,  # (T * G,) COMPUTE, or unused
    cos_ptr,  # (R, D) contiguous, two equal halves
    sin_ptr,  # (R, D) contiguous, two equal halves
    dq_ptr,  # (T, A, D) contiguous
    dk_ptr,  # (T, G, D) contiguous
    q_parts_ptr,  # (P of queries, D) COMPUTE, or unused
    k_parts_ptr,  # (P of keys, D) COMPUTE, or unused
    T, A, G, R, q_blocks, dq_token, dq_head, dk_token, dk_head, q_token, q_head, k_token, k_head,
    span,  # rows of one program, a multiple of BLOCK_R
    D: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, NORM: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Compute gradients of queries in the first `q_blocks` programs, and of keys in the others."""
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

# Rows of a program in the backward, a multiple of a tile's rows. Partial sums add less than 1% to the memory traffic.
_SPAN = 256


def tile_of(dim: int, dtype: torch.dtype) -> RowTile:
    """Return the tile for heads of `dim` dimensions: its columns are all pairs of a row.

    A thread has 16 bytes of each half.
    """
    pairs = max(8, 1 << (dim // 2 - 1).bit_length())
    return RowTile(rows=max(1, 1024 // pairs), cols=pairs, warps=4).scaled_for(dtype)


def _launch_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    interleaved: bool, results: Rotated,
) -> None:
    """Write the rotated queries and keys and the scales of their norms to `results`."""
    q = _flatten_tokens(q)
    k = _flatten_tokens(k)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    launch, tile_rows = _forward_launcher(
        eps, dim, interleaved, q_weight is not None, q.dtype, results.q_scale.dtype)
    q_blocks = cdiv(tokens * heads, tile_rows)
    k_blocks = cdiv(tokens * kv_heads, tile_rows)
    launch(
        (q_blocks + k_blocks,),
        (q, k, *_weights(q, q_weight, k_weight), cos.contiguous(), sin.contiguous(), *results),
        (tokens, heads, kv_heads, cos.numel() // dim, q_blocks, *q.stride()[:2], *k.stride()[:2]),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _forward_launcher(eps: float, *arguments: Any) -> tuple[Launcher, int]:
    """Return the launcher of the forward kernel, and the rows of one program. arguments: those of `constants`."""
    constexprs = constants(*arguments)
    return Launcher(_forward_kernel, EPS=eps, **constexprs), constexprs["BLOCK_R"]


def _launch_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_scale: Tensor, k_scale: Tensor, interleaved: bool,
    gradients: tuple[Tensor, ...],
) -> None:
    """Write the fields of `RotatedBackward` to `gradients`."""
    dq_out = _flatten_tokens(dq_out)
    dk_out = _flatten_tokens(dk_out)
    # Without norms, the kernel does not read q and k.
    q = dq_out if q is None else _flatten_tokens(q)
    k = dk_out if k is None else _flatten_tokens(k)
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    q_blocks = cdiv(tokens * heads, _SPAN)
    k_blocks = cdiv(tokens * kv_heads, _SPAN)
    strides = (*dq_out.stride()[:2], *dk_out.stride()[:2], *q.stride()[:2], *k.stride()[:2])
    _backward_launcher(dim, interleaved, q_weight is not None, q.dtype, q_scale.dtype)(
        (q_blocks + k_blocks,),
        (dq_out, dk_out, q, k, *_weights(q, q_weight, k_weight), q_scale, k_scale, cos.contiguous(), sin.contiguous(),
         *gradients),
        (tokens, heads, kv_heads, cos.numel() // dim, q_blocks, *strides, _SPAN),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _backward_launcher(*arguments: Any) -> Launcher:
    """Return the launcher of the backward kernel. arguments: those of `constants`."""
    return Launcher(_backward_kernel, **constants(*arguments))


def constants(
    dim: int, interleaved: bool, norm: bool, dtype: torch.dtype, compute: torch.dtype
) -> dict[str, Any]:
    """Return the constants and options that both kernels are compiled with."""
    tile = tile_of(dim, dtype)
    return dict(D=dim, STEP=2 if interleaved else 1, APART=1 if interleaved else dim // 2, NORM=norm,
                COMPUTE=tl_dtype(compute), BLOCK_R=tile.rows, BLOCK_D=tile.cols, num_warps=tile.warps)


def _flatten_tokens(x: Tensor) -> Tensor:
    """Flatten (B, S, A, D) -> (T, A, D); copies only if tokens have no common stride, or heads are not contiguous."""
    x = x.flatten(0, 1)
    return x if x.stride(2) == 1 else x.contiguous()


def _weights(placeholder: Tensor, *weights: Tensor | None) -> list[Tensor]:
    """Return contiguous weights, with a placeholder for those that are None."""
    return [placeholder if weight is None else weight.contiguous() for weight in weights]


# ------------------------------------------------------------------------------------------------------------- public


class Rotated(NamedTuple):
    """Rotated queries and keys, and the scales of the norms, which the backward needs.

    q: (B, S, A, D) contiguous.
    k: (B, S, G, D) contiguous.
    q_scale: (T * A,); empty without norms.
    k_scale: (T * G,); empty without norms.
    """

    q: Tensor
    k: Tensor
    q_scale: Tensor
    k_scale: Tensor


class RotatedBackward(NamedTuple):
    """Gradients of queries and keys, and partial weight gradients (P, D), whose sums over P are the weight gradients.

    P is 0 without norms.
    """

    dq: Tensor
    dk: Tensor
    q_parts: Tensor
    k_parts: Tensor


def rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None = None, k_weight: Tensor | None = None,
    eps: float = 0.0, interleaved: bool = False,
) -> Rotated:
    """Rotate the heads of queries and keys by the angles of their positions, and normalize the heads before.

    Not differentiable; the attention of `dualpipe.nn` is.

    Args:
        q: (B, S, A, D) with even D.
        k: (B, S, G, D).
        cos, sin: (S, D) or (B, 1, S, D), with two equal halves. They are rounded to the dtype of the result, which is
            the common dtype of the queries, or keys, and their weight. All else is computed in at least float32.
        q_weight, k_weight: weights (D,) of the norms; both None: heads are not normalized.
        eps: epsilon of the norms.
        interleaved: pairs of `q` and `k` are interleaved. The result always has the layout of halves.

    Raises:
        ValueError: the shapes do not match.
    """
    dim = q.shape[-1]
    positions = q.shape[1] if q.dim() == 4 else 0
    if q.dim() != 4 or k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != dim or dim % 2:
        raise ValueError(f"queries have shape {tuple(q.shape)} and keys {tuple(k.shape)}, expected (B, S, A, D) and "
                         "(B, S, G, D) with even D")
    if cos.shape != sin.shape or cos.shape[-1] != dim or cos.numel() not in (positions * dim, q[:, :, 0].numel()):
        raise ValueError(f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}, expected {(positions, dim)}, "
                         f"or {(q.shape[0], 1, positions, dim)} with positions of every sequence")
    weight_shapes = [None if weight is None else tuple(weight.shape) for weight in (q_weight, k_weight)]
    if weight_shapes not in ([None, None], [(dim,), (dim,)]):
        raise ValueError(f"the norms' weights have the shapes {weight_shapes}, expected ({dim},) for both, or None for "
                         "both")
    return Rotated(*_rotate_heads(q, k, cos, sin, q_weight, k_weight, eps, interleaved))


def rotate_heads_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_scale: Tensor, k_scale: Tensor, interleaved: bool = False,
) -> RotatedBackward:
    """Compute the gradients of `rotate_heads`.

    Args:
        dq_out, dk_out: gradients of the rotated queries and keys.
        q, k: queries and keys before the rotation; not needed without norms.
        q_scale, k_scale: fields of `Rotated`.
        cos, sin, q_weight, k_weight, interleaved: see `rotate_heads`.
    """
    return RotatedBackward(*_rotate_heads_backward(
        dq_out, dk_out, q, k, cos, sin, q_weight, k_weight, q_scale, k_scale, interleaved
    ))


def _new_results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the fields of `Rotated`."""
    scale_dtype = compute_dtype(q, k, q_weight, k_weight)
    q_out, q_scale = _new_result(q, q_weight, scale_dtype)
    k_out, k_scale = _new_result(k, k_weight, scale_dtype)
    return q_out, k_out, q_scale, k_scale


def _new_result(x: Tensor, weight: Tensor | None, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate the result of the rotation of queries or keys, and the scale of their norm."""
    if weight is None:
        return x.new_empty(x.shape), x.new_empty(0, dtype=scale_dtype)
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return out, x.new_empty(x[..., 0].numel(), dtype=scale_dtype)


@operator(_new_results)
def _rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Rotated`."""
    results = _new_results(q, k, cos, sin, q_weight, k_weight, eps, interleaved)
    if not use_triton(q):
        q_results = rotate_reference(q, cos, sin, q_weight, eps, interleaved)
        k_results = rotate_reference(k, cos, sin, k_weight, eps, interleaved)
        _copy_all(results, (q_results[0], k_results[0], q_results[1], k_results[1]))
    elif q.numel() or k.numel():
        _launch_forward(q, k, cos, sin, q_weight, k_weight, eps, interleaved, Rotated(*results))
    return results


def _copy_all(targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    """Copy tensors into tensors of the same shapes."""
    for target, source in zip(targets, sources):
        target.copy_(source)


def _new_gradients(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_scale: Tensor, k_scale: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the fields of `RotatedBackward`."""
    dim = dq_out.shape[-1]
    dq = dq_out.new_empty(dq_out.shape, dtype=dq_out.dtype if q is None else q.dtype)
    dk = dk_out.new_empty(dk_out.shape, dtype=dk_out.dtype if k is None else k.dtype)
    span = _SPAN if use_triton(dq_out) else max(1, q_scale.numel(), k_scale.numel())
    q_parts = q_scale.new_empty(cdiv(q_scale.numel(), span), dim)
    k_parts = k_scale.new_empty(cdiv(k_scale.numel(), span), dim)
    return dq, dk, q_parts, k_parts


@operator(_new_gradients)
def _rotate_heads_backward(
    dq_out: Tensor, dk_out: Tensor, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor,
    q_weight: Tensor | None, k_weight: Tensor | None, q_scale: Tensor, k_scale: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `RotatedBackward`."""
    operands = (dq_out, dk_out, q, k, cos, sin, q_weight, k_weight, q_scale, k_scale, interleaved)
    gradients = _new_gradients(*operands)
    if not use_triton(dq_out):
        q_gradients = rotate_backward_reference(dq_out, q, cos, sin, q_weight, q_scale, interleaved)
        k_gradients = rotate_backward_reference(dk_out, k, cos, sin, k_weight, k_scale, interleaved)
        _copy_all(gradients, (q_gradients[0], k_gradients[0], q_gradients[1], k_gradients[1]))
    elif dq_out.numel() or dk_out.numel():
        _launch_backward(*operands, gradients)
    return gradients


# ---------------------------------------------------------------------------------------------------------- reference


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (x[i], x[i + D/2]) of (..., D) by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_reference(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Compute in PyTorch, differentiable by autograd, `rotate_heads` of queries or keys (B, S, A, D).

    Returns the rotated heads, and the scale of their norm.
    """
    scale = x.new_empty(0)
    if weight is not None:
        x, _, scale = rms_norm_reference(x, weight, eps)
    if interleaved:
        x = rearrange(x, "B S A (pairs two) -> B S A (two pairs)", two=2)
    return apply_rotary(x, *_tables(cos, sin, x.dtype)), scale


def rotate_backward_reference(
    dy: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, weight: Tensor | None, scale: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Compute in PyTorch `rotate_heads_backward` of queries or keys, in the compute dtype of the kernel.

    Returns the gradient of `x`, and one partial weight gradient; none without a norm.
    """
    cos, sin = (table.to(scale.dtype) for table in _tables(cos, sin, dy.dtype))
    dx = apply_rotary(dy.to(scale.dtype), cos, -sin)
    if interleaved:
        dx = rearrange(dx, "B S A (two pairs) -> B S A (pairs two)", two=2)
    if x is None or weight is None:
        return dx, scale.new_empty(0, dy.shape[-1])
    return rms_norm_backward_reference(dx, None, x, scale, weight)


def _tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return cos and sin as (S, 1, D) or (B, S, 1, D), which broadcast over heads, in `dtype`."""
    return tuple((t.unsqueeze(1) if t.dim() == 2 else t.transpose(1, 2)).to(dtype) for t in (cos, sin))
