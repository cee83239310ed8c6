"""RMSNorm with the residual addition before it: one launch each way, and no float32 copies of its input.

As PyTorch operations the norm of a bfloat16 tensor is eight launches forward and fifteen backward, and keeps three
float32 tensors of its size. Here the forward reads x and what is added to it once, writes the sum and the result, and
keeps one number a row; the backward takes the gradient of the sum along, and adds up that of the weight by blocks of
rows, which are left to be summed when there is time.

    h  = x + residual                                 in their common dtype, rounded; x itself without a residual
    n  = h * scale, scale = 1 / sqrt(mean(h^2) + eps)  in float32 at least
    y  = weight * n                                   n rounded to the dtype of h first, as in transformers' Qwen3
    dn = dy * weight
    dh = d_sum + scale * (dn - n * mean(dn * n))      d_sum: of those who read h besides; dh is d x and d residual
    dw = sum over the rows of dy * n

Example with eps 0: x = [1, 3], residual = [2, 1], weight = [2, 1]: h = [3, 4], mean(h^2) = 12.5, n = [0.849, 1.131],
y = [1.697, 1.131]. For dy = [1, 0] and no d_sum: dn = [2, 0], mean(dn * n) = 0.849, dh = 0.283 * ([2, 0] - [0.72,
0.96]) = [0.362, -0.272], which is at right angles to h: its length does not change y.

Dimension letters: T rows, H columns, P blocks of rows.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from dualpipe.kernels.common import (
    RowTile,
    cdiv,
    compute_dtype,
    operator,
    tl,
    tl_dtype,
    triton,
    use_triton,
    with_dense_rows,
)
from dualpipe.kernels.launcher import MAX_LAUNCHERS, Launcher

# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _forward_kernel(
    x_ptr,  # (T, H), rows `stride` apart
    residual_ptr,  # (T, H), rows `residual_stride` apart, or unused
    weight_ptr,  # (H,)
    y_ptr,  # (T, H) contiguous
    sum_ptr,  # (T, H) contiguous; without a residual unused, and x
    scale_ptr,  # (T,) COMPUTE
    T, H, stride, residual_stride,
    EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_H)
    mask = (rows < T)[:, None] & (cols < H)[None, :]
    out = rows.to(tl.int64)[:, None] * H + cols[None, :]
    h = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + rows.to(tl.int64)[:, None] * residual_stride + cols[None, :]
        rounded = (h + tl.load(residual_ptrs, mask=mask, other=0.0).to(COMPUTE)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, rounded, mask=mask)
        h = rounded.to(COMPUTE)
    scale = tl.rsqrt(tl.sum(h * h, 1) / H + EPS)
    tl.store(scale_ptr + rows, scale, mask=rows < T)
    n = (h * scale[:, None]).to(sum_ptr.dtype.element_ty).to(COMPUTE)
    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(COMPUTE)
    tl.store(y_ptr + out, (n * weight[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (T, H), rows `stride_dy` apart
    d_sum_ptr,  # (T, H), rows `stride_d_sum` apart, or unused
    sum_ptr,  # (T, H), rows `stride` apart
    scale_ptr,  # (T,) COMPUTE
    weight_ptr,  # (H,)
    dx_ptr,  # (T, H) contiguous
    parts_ptr,  # (P, H) COMPUTE: of the weight's gradient
    T, H, stride_dy, stride_d_sum, stride,
    span,  # rows of one program, a multiple of BLOCK_T
    HAS_D_SUM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):
    first = tl.program_id(0) * span
    cols = tl.arange(0, BLOCK_H)
    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(COMPUTE)[None, :]
    d_weight = tl.zeros((BLOCK_T, BLOCK_H), COMPUTE)
    for start in range(first, tl.minimum(first + span, T), BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        mask = (rows < T)[:, None] & (cols < H)[None, :]
        h = tl.load(sum_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + rows.to(tl.int64)[:, None] * stride_dy + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
        scale = tl.load(scale_ptr + rows, mask=rows < T, other=0.0)[:, None]
        n = h.to(COMPUTE) * scale
        d_weight += dy * n.to(h.dtype).to(COMPUTE)
        dn = dy * weight
        dx = scale * (dn - n * (tl.sum(dn * n, 1) / H)[:, None])
        if HAS_D_SUM:
            d_sum_ptrs = d_sum_ptr + rows.to(tl.int64)[:, None] * stride_d_sum + cols[None, :]
            dx += tl.load(d_sum_ptrs, mask=mask, other=0.0).to(COMPUTE)
        dx_ptrs = dx_ptr + rows.to(tl.int64)[:, None] * H + cols[None, :]
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * H + cols, tl.sum(d_weight, 0), mask=cols < H)


# ---------------------------------------------------------------------------------------------------------- launchers

_WIDEST = 8192  # columns that a program holds at once, 16 elements a thread
_SPAN = 16  # rows of a program in the backward: 4096 rows are 256 programs, whose parts add 6% to what is moved
_MOST_PARTS = 1024


def tile_of(width: int) -> RowTile:
    """The tile for rows of `width` elements, up to `_WIDEST`: a program holds whole rows. With 16 elements a thread the
    backward spills at 2048 on sm_100, and with 8 at 8192."""
    block = max(16, 1 << (width - 1).bit_length())
    return RowTile(rows=max(1, 2048 // block), cols=block, warps=min(16, max(4, block // 256)))


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, y: Tensor, total: Tensor, scale: Tensor
) -> None:
    width = x.shape[-1]
    launch, tile_rows = _forward_launcher(width, eps, residual is not None, scale.dtype)
    x, stride = _rows(x)
    rows = scale.shape[0]
    if residual is None:
        pointers, residual_stride = (x, x, weight.contiguous(), y, x, scale), 0
    else:
        residual, residual_stride = _rows(residual)
        pointers = x, residual, weight.contiguous(), y, total, scale
    launch((cdiv(rows, tile_rows),), pointers, (rows, width, stride, residual_stride))


@lru_cache(maxsize=MAX_LAUNCHERS)
def _forward_launcher(width: int, eps: float, has_residual: bool, dtype: torch.dtype) -> tuple[Launcher, int]:
    """The launcher, and the rows of one program."""
    tile = tile_of(width)
    return Launcher(_forward_kernel, EPS=eps, HAS_RESIDUAL=has_residual, COMPUTE=tl_dtype(dtype), BLOCK_T=tile.rows,
                    BLOCK_H=tile.cols, num_warps=tile.warps), tile.rows


def _launch_backward(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor, dx: Tensor, parts: Tensor
) -> None:
    rows, width = scale.shape[0], total.shape[-1]
    launch = _backward_launcher(width, d_sum is not None, scale.dtype)
    dy, stride_dy = _rows(dy)
    total, stride = _rows(total)
    d_sum, stride_d_sum = (dy, 0) if d_sum is None else _rows(d_sum)
    pointers = dy, d_sum, total, scale, weight.contiguous(), dx, parts
    launch((parts.shape[0],), pointers, (rows, width, stride_dy, stride_d_sum, stride, _span(rows, width)))


@lru_cache(maxsize=MAX_LAUNCHERS)
def _backward_launcher(width: int, has_d_sum: bool, dtype: torch.dtype) -> Launcher:
    tile = tile_of(width)
    return Launcher(_backward_kernel, HAS_D_SUM=has_d_sum, COMPUTE=tl_dtype(dtype), BLOCK_T=tile.rows,
                    BLOCK_H=tile.cols, num_warps=tile.warps)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """Return (..., H) in memory as (T, H) whose rows are dense, and how far apart they are."""
    width = x.shape[-1]
    if x.is_contiguous():
        return x, width
    x = with_dense_rows(x.reshape(-1, width))
    return x, x.stride(0)


def _span(rows: int, width: int) -> int:
    """The rows of a part, by their number alone, so that sums do not depend on the device."""
    block = _tile_rows(width)
    return cdiv(max(_SPAN, cdiv(rows, _MOST_PARTS)), block) * block


@cache
def _tile_rows(width: int) -> int:
    return tile_of(width).rows


# ------------------------------------------------------------------------------------------------------------- public


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of the rows of x + residual: (y, the sum, the scale of each row), as `rms_norm_backward` takes them.

    `x` and `residual` (..., H), `weight` (H,) of any floating-point dtypes -> y (..., H) in the common dtype of all,
    the sum in that of the first two (x itself without a residual), scale (T,) in at least float32. Not differentiable:
    `dualpipe.nn.RMSNorm` is. Raises `ValueError` for operands that do not fit.
    """
    if not x.is_floating_point() or x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have one element for each column of a floating-point x (..., H); got "
                         f"{tuple(weight.shape)} for {x.dtype} of shape {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {tuple(x.shape)}; got {tuple(residual.shape)}")
    y, total, scale = _rms_norm(x, weight, eps, residual)
    return y, x if residual is None else total, scale


def rms_norm_backward(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(the gradient of the sum, and so of x and of the residual, in the sum's dtype; parts (P, H) of the weight's
    gradient, in the dtype of `scale`, for `parts.sum(0)`). d_sum: what is to be added to the former."""
    return _rms_norm_backward(dy, d_sum, total, scale, weight)


@cache
def _result_dtypes(
    x: torch.dtype, weight: torch.dtype, residual: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Of y, the sum and the scale."""
    total = x if residual is None else torch.promote_types(x, residual)
    y = torch.promote_types(total, weight)
    return y, total, torch.promote_types(y, torch.float32)


def _new_results(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    of_y, of_total, of_scale = _result_dtypes(x.dtype, weight.dtype, None if residual is None else residual.dtype)
    return (
        torch.empty_like(x, dtype=of_y, memory_format=torch.contiguous_format),
        torch.empty_like(x, dtype=of_total, memory_format=torch.contiguous_format) if residual is not None
        else x.new_empty(0),
        torch.empty(x.shape[:-1].numel(), dtype=of_scale, device=x.device),
    )


@operator(_new_results)
def _rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(y, the sum or nothing, scale)."""
    if not _has_kernel(x):
        y, total, scale = rms_norm_reference(x, weight, eps, residual)
        return y, x.new_empty(0) if residual is None else total, scale
    y, total, scale = _new_results(x, weight, eps, residual)
    if x.numel():
        _launch_forward(x, residual, weight, eps, y, total, scale)
    return y, total, scale


def _new_gradients(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    rows, width = scale.shape[0], total.shape[-1]
    parts = cdiv(rows, _span(rows, width)) if _has_kernel(total) else 1
    dx = torch.empty_like(total, memory_format=torch.contiguous_format)
    return dx, torch.empty(parts, width, dtype=scale.dtype, device=scale.device)


@operator(_new_gradients)
def _rms_norm_backward(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    if not _has_kernel(total):
        return rms_norm_backward_reference(dy, d_sum, total, scale, weight)
    dx, parts = _new_gradients(dy, d_sum, total, scale, weight)
    if total.numel():
        _launch_backward(dy, d_sum, total, scale, weight, dx, parts)
    return dx, parts


def _has_kernel(x: Tensor) -> bool:
    return use_triton(x) and x.shape[-1] <= _WIDEST


# ---------------------------------------------------------------------------------------------------------- reference


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm` in PyTorch, which autograd can differentiate."""
    total = x if residual is None else x + residual
    wide = total.to(compute_dtype(x, weight, residual))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(total.dtype), total, scale.flatten()


def rms_norm_backward_reference(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`rms_norm_backward` in PyTorch, in the dtype that the kernel computes in, with the weight's gradient in one
    part."""
    dy, scale = dy.to(scale.dtype), scale.view(*total.shape[:-1], 1)
    n, dn = total.to(scale.dtype) * scale, dy * weight
    dx = scale * (dn - n * (dn * n).mean(-1, keepdim=True))
    d_weight = (dy * n.to(total.dtype)).reshape(-1, total.shape[-1]).sum(0, keepdim=True)
    return (dx if d_sum is None else dx + d_sum).to(total.dtype), d_weight
