"""SwiGLU, the gated activation between an expert's two GEMMs, with one pass over memory in each direction.

As PyTorch operations, `silu(gate) * up` reads and writes every intermediate tensor, and saves two of them. Here, the
forward reads gate and up once and writes the result; the backward recomputes from the same input, the only saved
tensor. With `weight`, the result is multiplied by the routing weight of its row. If the expert's second GEMM has no
bias, this equals weighting the expert's output, and the output need not be saved for the gradient of the weight.

    plain    h = up * act(gate)                               gate | up are halves, as in Qwen3 and DeepSeek
    clamped  h = (clamp(up) + 1) * act(min(gate, limit))      gate, up are interleaved, as in gpt-oss

    act(g) = g * s, s = sigmoid(alpha * g); alpha is 1 for the plain form. With u = up or clamp(up) + 1, w the weight:
    d up   = dh * w * act(gate)                               zero if up is clamped
    d gate = dh * w * u * s * (1 + alpha * gate * (1 - s))    zero if gate is clamped
    d w    = sum over the row of dh * u * act(gate)

Example, clamped with alpha 0, so that act(g) = g / 2, and limit 7: gate 10 and up 3 give (3 + 1) * 7 / 2 = 14; for
dh = 1, d up = 7 / 2 and d gate = 0, because gate is clamped.

Dimension letters: M rows, I intermediate size.
"""

from __future__ import annotations

from functools import lru_cache
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


@triton.jit
def load_gate_up(
    ptr, rows, start, M, width, stride, CLAMPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr
):
    """Load gate and up of a tile in their stored dtype, each (BLOCK_M, BLOCK_I); zero outside of the matrix."""
    row_ptrs = ptr + rows.to(tl.int64)[:, None] * stride
    if CLAMPED:  # load contiguous pairs and split them in registers: whole sectors, not every second element
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
    """Return (clamped gate, sigmoid(alpha * gate), u). Compares instead of `tl.minimum`, so that NaN stays NaN."""
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
    """Compute one tile (BLOCK_M, BLOCK_I) of the result per program."""
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
    span,  # columns of one program, a multiple of BLOCK_I; all columns if it computes d_weight
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr,
):
    """Compute the gradients of BLOCK_M rows and `span` columns per program."""
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
        raw_gate = raw_gate.to(COMPUTE)
        raw_up = raw_up.to(COMPUTE)
        gate, s, u = activate(raw_gate, raw_up, ALPHA, LIMIT, CLAMPED)
        d_u = dh * (gate * s)
        d_gate = dh * u * s * (1.0 + ALPHA * gate * (1.0 - s))
        if HAS_WEIGHT:
            d_weight += d_u * u
            d_u = d_u * weight
            d_gate = d_gate * weight
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

# By shape class, for every architecture: one access of 16 bytes per thread; with 32 bytes the backward spills
# registers. Tiles of 256 columns waste no lanes at I = 768, 8% at 1408 and 6% at 2880, the sizes of some models.
_TILES = {"wide": RowTile(4, 256, 4), "narrow": RowTile(8, 64, 2)}


class Activation(NamedTuple):
    """Arguments of SwiGLU in the order of the operators: the routing weights (M,) or None, then its `swiglu_form`."""

    weight: Tensor | None
    clamped: bool
    alpha: float
    limit: float


def launch_swiglu(gate_up: Tensor, activation: Activation, h: Tensor) -> None:
    """Write the activation of `gate_up` (M, 2I) to `h` (M, I), contiguous."""
    rows, width = h.shape
    weight, *form = activation
    launch, tile = _launcher(True, width, gate_up.dtype, None if weight is None else weight.dtype, *form)
    gate_up = with_dense_rows(gate_up)
    grid = (cdiv(max(rows, 1), tile.rows), cdiv(width, tile.cols))
    launch(grid, (gate_up, h if weight is None else weight.contiguous(), h), (rows, width, gate_up.stride(0)))


def _launch_backward(dh: Tensor, gate_up: Tensor, activation: Activation, d_gate_up: Tensor, d_weight: Tensor) -> None:
    """Write the gradients to `d_gate_up` (M, 2I) and `d_weight` (M,)."""
    rows, width = dh.shape
    weight, *form = activation
    launch, tile = _launcher(False, width, gate_up.dtype, None if weight is None else weight.dtype, *form)
    dh = with_dense_rows(dh)
    gate_up = with_dense_rows(gate_up)
    num_blocks = cdiv(width, tile.cols)
    num_spans = 1 if weight is not None else num_blocks
    launch(
        (cdiv(max(rows, 1), tile.rows), num_spans),
        (dh, gate_up, dh if weight is None else weight.contiguous(), d_gate_up, d_weight),
        (rows, width, gate_up.stride(0), dh.stride(0), num_blocks // num_spans * tile.cols),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _launcher(
    is_forward: bool, width: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, clamped: bool, alpha: float,
    limit: float,
) -> tuple[Launcher, RowTile]:
    """Return the launcher of the forward or backward kernel, and its tile."""
    tile = _TILES["wide" if width > 64 else "narrow"].scaled_for(dtype)
    compute = torch.promote_types(dtype, torch.float32)
    if weight_dtype is not None:
        compute = torch.promote_types(compute, weight_dtype)
    launch = Launcher(
        _forward_kernel if is_forward else _backward_kernel, CLAMPED=clamped, ALPHA=alpha, LIMIT=limit,
        HAS_WEIGHT=weight_dtype is not None, COMPUTE=tl_dtype(compute), BLOCK_M=tile.rows, BLOCK_I=tile.cols,
        num_warps=tile.warps,
    )
    return launch, tile


# ------------------------------------------------------------------------------------------------------------- public

PLAIN = (False, 1.0, 0.0)  # clamped, alpha, limit


def swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up, times the weight of the row if there is one -> (M, I) in the dtype of `gate_up`.

    Intermediate values have at least float32. Differentiable once, with respect to both operands.

    Args:
        gate_up: (M, 2I), gate in the first half of columns, up in the second half.
        weight: (M,), any floating-point dtype.

    Raises:
        ValueError: the operands do not match.
    """
    check_gate_up(gate_up, weight)
    return _activate(gate_up, weight, *PLAIN)


def clamped_swiglu(gate_up: Tensor, weight: Tensor | None = None, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Compute gpt-oss' activation (up + 1) * gate * sigmoid(alpha * gate), gate <= limit, -limit <= up <= limit.

    Clamped elements have no gradient; elements exactly at the limit have one. Source: transformers' gpt_oss model.
    Otherwise like `swiglu`.

    Args:
        gate_up: (M, 2I), gate in the even columns, up in the odd columns.
        weight: (M,), any floating-point dtype.
        alpha: see the formula.
        limit: positive.

    Raises:
        ValueError: the operands do not match, or `limit` is not positive.
    """
    form = swiglu_form(True, alpha, limit)
    check_gate_up(gate_up, weight)
    return _activate(gate_up, weight, *form)


def swiglu_backward(
    dh: Tensor, gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients (d_gate_up, d_weight), for an autograd function that saved the operands itself.

    d_weight is None without a weight.
    """
    operands = (dh, gate_up, weight, clamped, alpha, limit)
    if needs_gradient(dh, gate_up, weight):
        d_gate_up, d_weight = WithoutBackward.apply(_swiglu_backward, _double_backward_error, *operands)
    else:
        d_gate_up, d_weight = _swiglu_backward(*operands)
    return d_gate_up, None if weight is None else d_weight


def swiglu_form(clamped: bool, alpha: float, limit: float) -> tuple[bool, float, float]:
    """Return (clamped, alpha, limit), the form in which operators take an activation.

    The plain form ignores `alpha` and `limit`. Raises ValueError if the limit of the clamped form is not positive.
    """
    if clamped and not limit > 0:
        raise ValueError(f"limit is {limit}, expected a positive number")
    return (True, float(alpha), float(limit)) if clamped else PLAIN


def check_gate_up(gate_up: Tensor, weight: Tensor | None) -> None:
    """Raise ValueError unless the operands are gate and up (M, 2I), and the weight of every row or None."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_floating_point():
        raise ValueError(f"gate_up is {gate_up.dtype} of shape {tuple(gate_up.shape)}, expected floating-point "
                         "(M, 2I), gate and up of every row: flatten other dimensions")
    check_weight(weight, gate_up.shape[0], gate_up.device)


def check_weight(weight: Tensor | None, rows: int, device: torch.device) -> None:
    """Raise ValueError unless the weight is None, or has one number for each row."""
    if weight is None:
        return
    if weight.shape != (rows,) or not weight.is_floating_point():
        raise ValueError(f"weight is {weight.dtype} of shape {tuple(weight.shape)}, expected floating-point of shape "
                         f"({rows},), one for each row")
    if weight.device != device:
        raise ValueError(f"weight is on {weight.device}, but the rows are on {device}; expected one device")


@operator(lambda gate_up, *_: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2))
def _swiglu(gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float) -> Tensor:
    """Return the activation (M, I) without a backward."""
    h = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    if not use_triton(gate_up):
        h.copy_(swiglu_reference(gate_up, weight, clamped, alpha, limit))
    elif h.shape[1]:
        launch_swiglu(gate_up, Activation(weight, clamped, alpha, limit), h)
    return h


def _new_gradients(gate_up: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate d_gate_up and d_weight, which is empty without a weight."""
    d_weight = gate_up.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    return gate_up.new_empty(gate_up.shape), d_weight


@operator(lambda dh, gate_up, weight, *_: _new_gradients(gate_up, weight))
def _swiglu_backward(
    dh: Tensor, gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Return (d_gate_up, d_weight); d_weight is empty without a weight."""
    d_gate_up, d_weight = _new_gradients(gate_up, weight)
    if not use_triton(gate_up):
        reference_gate_up, reference_weight = swiglu_backward_reference(dh, gate_up, weight, clamped, alpha, limit)
        d_gate_up.copy_(reference_gate_up)
        d_weight.copy_(reference_weight)
    elif dh.shape[1]:
        _launch_backward(dh, gate_up, Activation(weight, clamped, alpha, limit), d_gate_up, d_weight)
    else:
        d_weight.zero_()
    return d_gate_up, d_weight


class _Activate(torch.autograd.Function):
    """Autograd function of `swiglu` and `clamped_swiglu`."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float
    ) -> Tensor:
        """Activate, and save the operands for the backward."""
        ctx.form = (clamped, alpha, limit)
        ctx.save_for_backward(gate_up, weight)
        return _swiglu(gate_up, weight, clamped, alpha, limit)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of gate_up and weight."""
        gate_up, weight = ctx.saved_tensors
        return *swiglu_backward(dh, gate_up, weight, *ctx.form), None, None, None


def _activate(gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float) -> Tensor:
    """Return the activation (M, I), recorded by autograd if needed."""
    run = _Activate.apply if needs_gradient(gate_up, weight) else _swiglu
    return run(gate_up, weight, clamped, alpha, limit)


def _double_backward_error() -> NotImplementedError:
    return double_backward_error("swiglu", "dualpipe.kernels.swiglu.swiglu_reference")


# ---------------------------------------------------------------------------------------------------------- reference


def swiglu_reference(gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float) -> Tensor:
    """Compute the forward in PyTorch, in the compute dtype of the kernel. The plain form ignores `limit`."""
    gate, u, _ = _clamp(gate_up.to(compute_dtype(gate_up, weight)), clamped, limit)
    h = u * gate * torch.sigmoid(alpha * gate)
    return h if weight is None else h * weight.unsqueeze(1)


def swiglu_backward_reference(
    dh: Tensor, gate_up: Tensor, weight: Tensor | None, clamped: bool, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Compute (d_gate_up, d_weight) in PyTorch; d_weight is empty without a weight."""
    dtype = compute_dtype(gate_up, weight)
    gate, u, has_gradient = _clamp(gate_up.to(dtype), clamped, limit)
    dh = dh.to(dtype)
    s = torch.sigmoid(alpha * gate)
    if weight is None:
        d_weight = dh.new_empty(0)
    else:
        d_weight = (dh * (u * gate * s)).sum(1)
        dh = dh * weight.unsqueeze(1)
    d_gate = dh * u * s * (1 + alpha * gate * (1 - s))
    d_up = dh * (gate * s)
    if has_gradient is None:
        return torch.cat((d_gate, d_up), 1), d_weight
    return torch.stack((d_gate, d_up), 2).flatten(1).where(has_gradient, 0), d_weight


def _clamp(gate_up: Tensor, clamped: bool, limit: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (clamped gate, u, mask (M, 2I) of elements that are not clamped; None for the plain form)."""
    if not clamped:
        gate, up = gate_up.chunk(2, dim=1)
        return gate, up, None
    gate = gate_up[:, ::2]
    up = gate_up[:, 1::2]
    has_gradient = torch.stack((~(gate > limit), ~(up.abs() > limit)), 2).flatten(1)
    return gate.clamp(max=limit), up.clamp(-limit, limit) + 1, has_gradient
