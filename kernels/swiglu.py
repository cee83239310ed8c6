"""The gated activation between an expert's two products: forward and backward in one pass over memory each.

`silu(gate) * up` as PyTorch operations reads and writes every intermediate and keeps two of them for the backward.
Here the forward reads gate and up once and writes the result; the backward recomputes from the same input, which is
all that is kept. With `weight`, the routing weight of each row is multiplied in at the same time: where no bias
follows, that is the same as weighting the expert's output, which then need not be kept for the weight's gradient.

    plain    h = up * act(gate)                               gate | up are halves, as in Qwen3 and DeepSeek
    clamped  h = (clamp(up) + 1) * act(min(gate, limit))      gate, up alternate, as in gpt-oss

    act(g) = g * s, s = sigmoid(alpha * g); alpha is 1 for the plain form. With u = up or clamp(up) + 1, w the weight:
    d up   = dh * w * act(gate)                               zero where up was clamped
    d gate = dh * w * u * s * (1 + alpha * gate * (1 - s))    zero where gate was clamped
    d w    = sum over the row of dh * u * act(gate)

Example, clamped with alpha 0, so that act(g) = g / 2, and limit 7: gate 10 and up 3 give (3 + 1) * 7 / 2 = 14; for
dh = 1, d up = 7 / 2 and d gate = 0, because gate was clamped.

Dimension letters: M rows, I intermediate size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.kernels.common import (
    RowTile,
    cdiv,
    compute_dtype,
    forbid_double_backward,
    operator,
    register_backward,
    tl,
    tl_dtype,
    triton,
    use_triton,
    with_dense_rows,
)
from dualpipe.kernels.launcher import MAX_LAUNCHERS, Launcher

# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit
def load_gate_up(
    ptr, rows, start, M, width, stride, CLAMPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr
):
    """gate and up of a tile as they are stored, each (BLOCK_M, BLOCK_I); zero outside the matrix."""
    row_ptrs = ptr + rows.to(tl.int64)[:, None] * stride
    if CLAMPED:  # pairs are loaded as neighbours and parted in registers: whole sectors, not every second element
        cols = 2 * start + tl.arange(0, 2 * BLOCK_I)
        mask = (rows < M)[:, None] & (cols < 2 * width)[None, :]
        pairs = tl.load(row_ptrs + cols[None, :], mask=mask, other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (BLOCK_M, BLOCK_I, 2)))
    else:
        cols = start + tl.arange(0, BLOCK_I)
        mask = (rows < M)[:, None] & (cols < width)[None, :]
        gate = tl.load(row_ptrs + cols[None, :], mask=mask, other=0.0)
        up = tl.load(row_ptrs + width + cols[None, :], mask=mask, other=0.0)
    return gate, up


@triton.jit
def activate(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, CLAMPED: tl.constexpr):
    """(gate after its clamp, sigmoid(alpha * gate), u). Comparisons instead of minimum, so that NaN stays NaN."""
    if CLAMPED:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    return gate, 1.0 / (1.0 + tl.exp(-ALPHA * gate)), up


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    gate_up_ptr,  # (M, 2I), rows `stride` apart
    weight_ptr,  # (M,) or unused
    h_ptr,  # (M, I) contiguous
    M, width, stride,  # width is I
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(1) * BLOCK_I
    gate, up = load_gate_up(gate_up_ptr, rows, start, M, width, stride, CLAMPED, BLOCK_M, BLOCK_I)
    gate, s, u = activate(gate.to(COMPUTE), up.to(COMPUTE), ALPHA, LIMIT, CLAMPED)
    h = u * gate * s
    if HAS_WEIGHT:
        h = h * tl.load(weight_ptr + rows, mask=rows < M, other=0.0).to(COMPUTE)[:, None]
    cols = start + tl.arange(0, BLOCK_I)
    h_ptrs = h_ptr + rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < width)[None, :])


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    dh_ptr,  # (M, I), rows `stride_dh` apart
    gate_up_ptr,  # (M, 2I), rows `stride` apart
    weight_ptr,  # (M,) or unused
    d_gate_up_ptr,  # (M, 2I) contiguous
    d_weight_ptr,  # (M,) or unused
    M, width, stride, stride_dh,  # width is I
    span,  # columns of one program, a multiple of BLOCK_I: all of them where it sums up d_weight
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * span
    d_weight = tl.zeros((BLOCK_M, BLOCK_I), COMPUTE)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + rows, mask=rows < M, other=0.0).to(COMPUTE)[:, None]
    for start in range(first, tl.minimum(first + span, width), BLOCK_I):
        cols = start + tl.arange(0, BLOCK_I)
        mask = (rows < M)[:, None] & (cols < width)[None, :]
        dh_ptrs = dh_ptr + rows.to(tl.int64)[:, None] * stride_dh + cols[None, :]
        dh = tl.load(dh_ptrs, mask=mask, other=0.0).to(COMPUTE)
        raw_gate, raw_up = load_gate_up(gate_up_ptr, rows, start, M, width, stride, CLAMPED, BLOCK_M, BLOCK_I)
        raw_gate, raw_up = raw_gate.to(COMPUTE), raw_up.to(COMPUTE)
        gate, s, u = activate(raw_gate, raw_up, ALPHA, LIMIT, CLAMPED)
        d_u = dh * (gate * s)
        d_gate = dh * u * s * (1.0 + ALPHA * gate * (1.0 - s))
        if HAS_WEIGHT:
            d_weight += d_u * u
            d_u, d_gate = d_u * weight, d_gate * weight
        row_ptrs = d_gate_up_ptr + rows.to(tl.int64)[:, None] * (2 * width)
        if CLAMPED:
            d_gate = tl.where(raw_gate > LIMIT, 0.0, d_gate).to(d_gate_up_ptr.dtype.element_ty)
            d_u = tl.where((raw_up > LIMIT) | (raw_up < -LIMIT), 0.0, d_u).to(d_gate_up_ptr.dtype.element_ty)
            pairs = 2 * start + tl.arange(0, 2 * BLOCK_I)
            pair_mask = (rows < M)[:, None] & (pairs < 2 * width)[None, :]
            tl.store(row_ptrs + pairs[None, :], tl.interleave(d_gate, d_u), mask=pair_mask)
        else:
            tl.store(row_ptrs + cols[None, :], d_gate.to(d_gate_up_ptr.dtype.element_ty), mask=mask)
            tl.store(row_ptrs + width + cols[None, :], d_u.to(d_gate_up_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        tl.store(d_weight_ptr + rows, tl.sum(d_weight, 1).to(d_weight_ptr.dtype.element_ty), mask=rows < M)


# ---------------------------------------------------------------------------------------------------------- launchers

# By shape class, the same on every architecture: one access of 16 bytes a thread; twice as much spills in the backward.
# 256 columns divide 768 and waste 8% of the lanes at 1408 and 6% at 2880.
_TILES = {"wide": RowTile(4, 256, 4), "narrow": RowTile(8, 64, 2)}


class Activation(NamedTuple):
    """Which activation, as the operators take it."""

    weight: Tensor | None  # (M,)
    clamped: bool
    alpha: float
    limit: float


def launch_swiglu(gate_up: Tensor, activation: Activation, h: Tensor) -> None:
    """Write the activation of `gate_up` (M, 2I) to `h` (M, I), contiguous."""
    rows, width = h.shape
    weight, *form = activation
    launch, tile = _launcher(True, width, gate_up.dtype, None if weight is None else weight.dtype, *form)
    gate_up = with_dense_rows(gate_up)
    grid = cdiv(max(rows, 1), tile.rows), cdiv(width, tile.cols)
    launch(grid, (gate_up, h if weight is None else weight.contiguous(), h), (rows, width, gate_up.stride(0)))


def _launch_backward(dh: Tensor, gate_up: Tensor, activation: Activation, d_gate_up: Tensor, d_weight: Tensor) -> None:
    rows, width = dh.shape
    weight, *form = activation
    launch, tile = _launcher(False, width, gate_up.dtype, None if weight is None else weight.dtype, *form)
    dh, gate_up = with_dense_rows(dh), with_dense_rows(gate_up)
    blocks = cdiv(width, tile.cols)
    spans = 1 if weight is not None else blocks
    launch(
        (cdiv(max(rows, 1), tile.rows), spans),
        (dh, gate_up, dh if weight is None else weight.contiguous(), d_gate_up, d_weight),
        (rows, width, gate_up.stride(0), dh.stride(0), blocks // spans * tile.cols),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _launcher(
    forward: bool, width: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, clamped: bool, alpha: float,
    limit: float,
) -> tuple[Launcher, RowTile]:
    """The launcher of the kernel of the forward or of the backward, and its tile."""
    tile = _TILES["wide" if width > 64 else "narrow"].scaled_for(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    launch = Launcher(
        _forward_kernel if forward else _backward_kernel, CLAMPED=clamped, ALPHA=alpha, LIMIT=limit,
        HAS_WEIGHT=weight_dtype is not None, num_warps=tile.warps,
        COMPUTE=tl_dtype(torch.promote_types(wide, weight_dtype or wide)), BLOCK_M=tile.rows, BLOCK_I=tile.cols,
    )
    return launch, tile


# ------------------------------------------------------------------------------------------------------------- public

PLAIN = (False, 1.0, 0.0)  # clamped, alpha, limit


def swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times the weight of the row where one is given.

    `gate_up` (M, 2I) holds gate in its first half of columns and up in the second; `weight` (M,) may have another
    floating-point dtype. The result (M, I) has the dtype of `gate_up`; everything in between is computed in at least
    float32. Differentiable once with respect to both. Raises `ValueError` for operands that do not fit.
    """
    return _checked(gate_up, weight, PLAIN)


def clamped_swiglu(gate_up: Tensor, weight: Tensor | None = None, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """The activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), gate <= limit, -limit <= up <= limit.

    `gate_up` (M, 2I) holds gate in its even columns and up in the odd ones; the rest as for `swiglu`. Source:
    transformers' gpt_oss model. Clamped elements have no gradient, those exactly at the limit have one.
    """
    return _checked(gate_up, weight, swiglu_form(True, alpha, limit))


def swiglu_backward(
    dh: Tensor, gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor | None]:
    """(d_gate_up, d_weight), for a backward that kept the operands itself; no d_weight without a weight."""
    d_gate_up, d_weight = _swiglu_backward(dh, gate_up, weight, clamped, alpha, limit)
    return d_gate_up, None if weight is None else d_weight


def swiglu_form(clamped: bool, alpha: float, limit: float) -> tuple[bool, float, float]:
    """(clamped, alpha, limit) as the operators take them; the plain form has an alpha and no limit of its own."""
    if clamped and not limit > 0:
        raise ValueError(f"limit must be positive; got {limit}")
    return (True, float(alpha), float(limit)) if clamped else PLAIN


def _checked(gate_up: Tensor, weight: Tensor | None, form: tuple[bool, float, float]) -> Tensor:
    check_gate_up(gate_up, weight)
    return _swiglu(gate_up, weight, *form)


def check_gate_up(gate_up: Tensor, weight: Tensor | None) -> None:
    """Raise `ValueError` for operands that are not gate and up, and the weight of each row."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_floating_point():
        raise ValueError(f"gate_up must be a floating-point (M, 2I): gate and up of each row, flattened to two "
                         f"dimensions; got {gate_up.dtype} of shape {tuple(gate_up.shape)}")
    check_weight(weight, gate_up.shape[0], gate_up.device)


def check_weight(weight: Tensor | None, rows: int, device: torch.device) -> None:
    """Raise `ValueError` for a weight that is not one number for each row."""
    if weight is None:
        return
    if weight.shape != (rows,) or not weight.is_floating_point():
        raise ValueError(f"weight must be floating-point of shape ({rows},), one for each row; got {weight.dtype} of "
                         f"shape {tuple(weight.shape)}")
    if weight.device != device:
        raise ValueError(f"weight must be on one device with the rows, {device}; got {weight.device}")


@operator(lambda gate_up, *_: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2))
def _swiglu(gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float) -> Tensor:
    h = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    if not use_triton(gate_up):
        h.copy_(swiglu_reference(gate_up, weight, clamped, alpha, limit))
    elif h.shape[1]:
        launch_swiglu(gate_up, Activation(weight, clamped, alpha, limit), h)
    return h


def _new_gradients(gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    d_weight = gate_up.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return gate_up.new_empty(gate_up.shape), d_weight


@operator(lambda dh, gate_up, weight, *_: _new_gradients(gate_up, weight))
def _swiglu_backward(
    dh: Tensor, gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """(d_gate_up, d_weight); without a weight the second is empty."""
    d_gate_up, d_weight = _new_gradients(gate_up, weight)
    if not use_triton(gate_up):
        d_x, d_w = swiglu_backward_reference(dh, gate_up, weight, clamped, alpha, limit)
        d_gate_up.copy_(d_x)
        d_weight.copy_(d_w)
    elif dh.shape[1]:
        _launch_backward(dh, gate_up, Activation(weight, clamped, alpha, limit), d_gate_up, d_weight)
    else:
        d_weight.zero_()
    return d_gate_up, d_weight


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, weight, *ctx.form = inputs
    ctx.save_for_backward(gate_up, weight)


def _backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    gate_up, weight = ctx.saved_tensors
    return *swiglu_backward(dh, gate_up, weight, *ctx.form), None, None, None


register_backward(_swiglu, _backward, _setup_context)
register_backward(_swiglu_backward, forbid_double_backward("swiglu", "dualpipe.kernels.swiglu.swiglu_reference"))

# ---------------------------------------------------------------------------------------------------------- reference


def swiglu_reference(gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float) -> Tensor:
    """The forward in PyTorch, in the dtype that the kernel computes in; `limit` is for the clamped form."""
    gate, u, _ = _reference_parts(gate_up.to(compute_dtype(gate_up, weight)), clamped, limit)
    h = u * gate * torch.sigmoid(alpha * gate)
    return h if weight is None else h * weight.unsqueeze(1)


def swiglu_backward_reference(
    dh: Tensor, gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """(d_gate_up, d_weight) in PyTorch; without a weight the second is empty."""
    dtype = compute_dtype(gate_up, weight)
    gate, u, kept = _reference_parts(gate_up.to(dtype), clamped, limit)
    dh, s = dh.to(dtype), torch.sigmoid(alpha * gate)
    d_weight = dh.new_empty(0) if weight is None else (dh * (u * gate * s)).sum(1)
    if weight is not None:
        dh = dh * weight.unsqueeze(1)
    d_gate, d_up = dh * u * s * (1 + alpha * gate * (1 - s)), dh * (gate * s)
    if kept is None:
        return torch.cat((d_gate, d_up), 1), d_weight
    return torch.stack((d_gate, d_up), 2).flatten(1).where(kept, 0), d_weight


def _reference_parts(wide: Tensor, clamped: bool, limit: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """(gate after its clamp, u, where nothing was clamped)."""
    if not clamped:
        gate, up = wide.chunk(2, dim=1)
        return gate, up, None
    gate, up = wide[:, ::2], wide[:, 1::2]
    kept = torch.stack((~(gate > limit), ~(up.abs() > limit)), 2).flatten(1)
    return gate.clamp(max=limit), up.clamp(-limit, limit) + 1, kept
