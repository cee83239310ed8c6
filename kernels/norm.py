"""RMSNorm fused with the addition of the residual: one launch in each direction, without float32 copies of the input.

As PyTorch operations, the norm of a bfloat16 tensor takes 8 launches in the forward and 15 in the backward, and saves
three float32 tensors of its size. Here, the forward reads x and the residual once, writes their sum and the result, and
saves one number per row. The backward adds the gradient of the sum, and computes partial sums of the weight gradient
over blocks of rows; their sum can be deferred.

    h  = x + residual                                  in their common dtype, rounded; x itself without a residual
    n  = h * scale, scale = 1 / sqrt(mean(h^2) + eps)  in float32 at least
    y  = weight * n                                    n rounded to the dtype of h first, as in transformers' Qwen3
    dn = dy * weight
    dh = d_sum + scale * (dn - n * mean(dn * n))       d_sum: gradient from other uses of h; dh is d x and d residual
    dw = sum over the rows of dy * n

Example with eps 0: x = [1, 3], residual = [2, 1], weight = [2, 1]: h = [3, 4], mean(h^2) = 12.5, n = [0.849, 1.131],
y = [1.697, 1.131]. For dy = [1, 0] and no d_sum: dn = [2, 0], mean(dn * n) = 0.849, dh = 0.283 * ([2, 0] - [0.72,
0.96]) = [0.362, -0.272], which is orthogonal to h: the length of h does not change y.

Dimension letters: T rows, H columns, P blocks of rows with a partial weight gradient each.
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
    sum_ptr,  # (T, H) contiguous; without a residual unused, but with the dtype of x
    scale_ptr,  # (T,) COMPUTE
    T, H, stride, residual_stride,
    EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """Normalize BLOCK_T whole rows per program."""
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
    parts_ptr,  # (P, H) COMPUTE: partial weight gradients
    T, H, stride_dy, stride_d_sum, stride,
    span,  # rows of one program, a multiple of BLOCK_T
    HAS_D_SUM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """Compute the input gradients of `span` rows per program, and one partial weight gradient."""
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

_MAX_COLUMNS = 8192  # columns that a program holds at once, 16 elements per thread
# Rows of a program in the backward: 4096 rows make 256 programs, whose partial sums add 6% to the memory traffic.
_MIN_SPAN = 16
_MAX_PARTS = 1024


def tile_of(width: int) -> RowTile:
    """Return the tile for rows of `width` elements, at most `_MAX_COLUMNS`: a program holds whole rows.

    On sm_100 the backward spills registers at 2048 columns with 16 elements per thread, and at 8192 columns with 8.
    """
    block = max(16, 1 << (width - 1).bit_length())
    return RowTile(rows=max(1, 2048 // block), cols=block, warps=min(16, max(4, block // 256)))


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, y: Tensor, total: Tensor, scale: Tensor
) -> None:
    """Write y, the sum `total` if there is a residual, and the scale."""
    width = x.shape[-1]
    launch, tile_rows = _forward_launcher(width, eps, residual is not None, scale.dtype)
    x, stride = _as_rows(x)
    rows = scale.shape[0]
    if residual is None:
        residual_stride = 0
        pointers = (x, x, weight.contiguous(), y, x, scale)
    else:
        residual, residual_stride = _as_rows(residual)
        pointers = (x, residual, weight.contiguous(), y, total, scale)
    launch((cdiv(rows, tile_rows),), pointers, (rows, width, stride, residual_stride))


@lru_cache(maxsize=MAX_LAUNCHERS)
def _forward_launcher(width: int, eps: float, has_residual: bool, dtype: torch.dtype) -> tuple[Launcher, int]:
    """Return the launcher of the forward kernel, and the number of rows of one program."""
    tile = tile_of(width)
    launcher = Launcher(
        _forward_kernel, EPS=eps, HAS_RESIDUAL=has_residual, COMPUTE=tl_dtype(dtype), BLOCK_T=tile.rows,
        BLOCK_H=tile.cols, num_warps=tile.warps,
    )
    return launcher, tile.rows


def _launch_backward(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor, dx: Tensor, parts: Tensor
) -> None:
    """Write the gradient of the sum to `dx`, and partial weight gradients to `parts`."""
    rows = scale.shape[0]
    width = total.shape[-1]
    launch = _backward_launcher(width, d_sum is not None, scale.dtype)
    dy, stride_dy = _as_rows(dy)
    total, stride = _as_rows(total)
    if d_sum is None:
        d_sum = dy  # not read
        stride_d_sum = 0
    else:
        d_sum, stride_d_sum = _as_rows(d_sum)
    pointers = (dy, d_sum, total, scale, weight.contiguous(), dx, parts)
    launch((parts.shape[0],), pointers, (rows, width, stride_dy, stride_d_sum, stride, _span(rows, width)))


@lru_cache(maxsize=MAX_LAUNCHERS)
def _backward_launcher(width: int, has_d_sum: bool, dtype: torch.dtype) -> Launcher:
    """Return the launcher of the backward kernel."""
    tile = tile_of(width)
    return Launcher(_backward_kernel, HAS_D_SUM=has_d_sum, COMPUTE=tl_dtype(dtype), BLOCK_T=tile.rows,
                    BLOCK_H=tile.cols, num_warps=tile.warps)


def _as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor with the memory of (..., H) as T contiguous rows, and the row stride."""
    width = x.shape[-1]
    if x.is_contiguous():
        return x, width
    x = with_dense_rows(x.reshape(-1, width))
    return x, x.stride(0)


def _span(rows: int, width: int) -> int:
    """Return the number of rows of a partial sum. It depends on the shape only, so that sums are device-independent."""
    block = _tile_rows(width)
    return cdiv(max(_MIN_SPAN, cdiv(rows, _MAX_PARTS)), block) * block


@cache
def _tile_rows(width: int) -> int:
    """Return the number of rows of a tile."""
    return tile_of(width).rows


# ------------------------------------------------------------------------------------------------------------- public


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize the rows of x + residual -> (y, sum, scale), the operands of `rms_norm_backward`.

    Not differentiable; `dualpipe.nn.RMSNorm` is.

    Args:
        x: (..., H), floating-point.
        weight: (H,).
        eps: added to the mean square.
        residual: (..., H); None: nothing is added.

    Returns y (..., H) in the common dtype of all operands, the sum (..., H) in the common dtype of `x` and `residual`
    (`x` itself without a residual), and the scale of every row (T,) in at least float32.

    Raises:
        ValueError: the shapes do not match, or `x` is not floating-point.
    """
    if not x.is_floating_point() or x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"x is {x.dtype} of shape {tuple(x.shape)} and weight has shape {tuple(weight.shape)}, "
                         "expected floating-point x (..., H) and weight (H,)")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected that of x, {tuple(x.shape)}")
    y, total, scale = _rms_norm(x, weight, eps, residual)
    return y, x if residual is None else total, scale


def rms_norm_backward(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `rms_norm`.

    Args:
        dy: gradient of y (..., H).
        d_sum: gradient of the sum (..., H) from its other uses, which is added; None: no other use.
        total, scale: sum and scale, as `rms_norm` returned them.
        weight: (H,).

    Returns the gradient of x and of the residual (..., H), in the dtype of `total`, and partial weight gradients
    (P, H) in the dtype of `scale`, whose sum over P is the weight gradient.
    """
    return _rms_norm_backward(dy, d_sum, total, scale, weight)


@cache
def _result_dtypes(
    x: torch.dtype, weight: torch.dtype, residual: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of y, the sum and the scale."""
    total = x if residual is None else torch.promote_types(x, residual)
    y = torch.promote_types(total, weight)
    return y, total, torch.promote_types(y, torch.float32)


def _new_results(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate y, the sum (empty without a residual) and the scale."""
    residual_dtype = None if residual is None else residual.dtype
    y_dtype, total_dtype, scale_dtype = _result_dtypes(x.dtype, weight.dtype, residual_dtype)
    y = torch.empty_like(x, dtype=y_dtype, memory_format=torch.contiguous_format)
    if residual is None:
        total = x.new_empty(0)
    else:
        total = torch.empty_like(x, dtype=total_dtype, memory_format=torch.contiguous_format)
    scale = torch.empty(x.shape[:-1].numel(), dtype=scale_dtype, device=x.device)
    return y, total, scale


@operator(_new_results)
def _rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, sum, scale); the sum is empty without a residual."""
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
    """Allocate the gradient of the sum and the partial weight gradients."""
    rows = scale.shape[0]
    width = total.shape[-1]
    num_parts = cdiv(rows, _span(rows, width)) if _has_kernel(total) else 1
    dx = torch.empty_like(total, memory_format=torch.contiguous_format)
    return dx, torch.empty(num_parts, width, dtype=scale.dtype, device=scale.device)


@operator(_new_gradients)
def _rms_norm_backward(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sum, and partial weight gradients (P, H)."""
    if not _has_kernel(total):
        return rms_norm_backward_reference(dy, d_sum, total, scale, weight)
    dx, parts = _new_gradients(dy, d_sum, total, scale, weight)
    if total.numel():
        _launch_backward(dy, d_sum, total, scale, weight, dx, parts)
    return dx, parts


def _has_kernel(x: Tensor) -> bool:
    """Return True if the Triton kernels support the width of `x`."""
    return use_triton(x) and x.shape[-1] <= _MAX_COLUMNS


# ---------------------------------------------------------------------------------------------------------- reference


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rms_norm` in PyTorch, differentiable by autograd."""
    total = x if residual is None else x + residual
    h = total.to(compute_dtype(x, weight, residual))
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (h * scale).to(total.dtype), total, scale.flatten()


def rms_norm_backward_reference(
    dy: Tensor, d_sum: Tensor | None, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_backward` in PyTorch, in the kernel's compute dtype, with one partial weight gradient."""
    dy = dy.to(scale.dtype)
    scale = scale.view(*total.shape[:-1], 1)
    n = total.to(scale.dtype) * scale
    dn = dy * weight
    dx = scale * (dn - n * (dn * n).mean(-1, keepdim=True))
    if d_sum is not None:
        dx = dx + d_sum
    d_weight = (dy * n.to(total.dtype)).reshape(-1, total.shape[-1]).sum(0, keepdim=True)
    return dx.to(total.dtype), d_weight
