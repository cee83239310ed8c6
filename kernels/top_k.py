"""Softmax router in one launch in each direction: probabilities, the K best experts of every token, and their weights.

As PyTorch operations, the router takes 10 launches in the forward and 12 in the backward, for a matrix with a few
hundred columns.

    p = softmax(x)                                         over the experts, in float32 at least
    experts: the K largest p of a token, in descending order; the first of equal ones
    w[k] = factor * p[k] / total, total = sum_k p[k]       with `norm`; else w[k] = factor * p[k]
    dp[e] = (dw[k] - sum_j dw[j] w[j]) / total             for chosen experts, with `norm` and factor 1; else 0;
                                                           plus the gradient of p from other uses, as by a balance loss
    dx = p * (dp - sum_e dp[e] p[e])

Example: p = [1/2, 1/8, 3/8] and K = 2 choose experts 0 and 2, with weights 1/2 and 3/8, or with `norm` 4/7 and 3/7.

Dimension letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

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
    logits_ptr,  # (T, E), rows `stride` apart
    weights_ptr,  # (T, K) contiguous
    experts_ptr,  # (T, K) int64, contiguous
    probs_ptr,  # (T, E) COMPUTE, contiguous
    T, E, stride,
    K: tl.constexpr, NORM: tl.constexpr, FACTOR: tl.constexpr, TINY: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Route BLOCK_T tokens per program."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_E)
    places = tl.arange(0, BLOCK_K)
    mask = (rows < T)[:, None] & (cols < E)[None, :]
    logits_ptrs = logits_ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    x = tl.load(logits_ptrs, mask=mask, other=float("-inf")).to(COMPUTE)
    x = tl.where((rows < T)[:, None], x, 0.0)  # a row of -inf would be NaN
    exp = tl.exp(x - tl.max(x, 1)[:, None])
    total = tl.sum(exp, 1)
    p = exp / total[:, None]
    tl.store(probs_ptr + rows.to(tl.int64)[:, None] * E + cols[None, :], p, mask=mask)
    p = tl.where((cols < E)[None, :], p, -1.0)
    weights = tl.zeros((BLOCK_T, BLOCK_K), COMPUTE) + (total - total)[:, None]  # keeps NaN, which the maximum drops
    experts = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    for k in tl.static_range(K):
        best = tl.minimum(tl.argmax(p, 1), E - 1)  # in range even if all p are NaN
        here = (places == k)[None, :]
        weights += tl.where(here, tl.max(p, 1)[:, None], 0.0)
        experts = tl.where(here, best[:, None], experts)
        p = tl.where(cols[None, :] == best[:, None], -1.0, p)
    if NORM:
        weights = weights / (tl.sum(weights, 1) + TINY)[:, None]
    at = rows.to(tl.int64)[:, None] * K + places[None, :]
    mask = (rows < T)[:, None] & (places < K)[None, :]
    tl.store(weights_ptr + at, (weights * FACTOR).to(weights_ptr.dtype.element_ty), mask=mask)
    tl.store(experts_ptr + at, experts.to(tl.int64), mask=mask)


@triton.jit
def _backward_kernel(
    d_weights_ptr,  # (T, K), rows `d_stride` apart
    d_probs_ptr,  # (T, E) with strides `row_stride` and `col_stride`, 0 for the gradient of a mean; or unused
    experts_ptr,  # (T, K) int64, contiguous
    probs_ptr,  # (T, E) COMPUTE, contiguous
    d_logits_ptr,  # (T, E) contiguous
    T, E, d_stride, row_stride, col_stride,
    HAS_D_PROBS: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, FACTOR: tl.constexpr, TINY: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):
    """Compute the gradients of the logits of BLOCK_T tokens per program."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_E)
    mask = (rows < T)[:, None] & (cols < E)[None, :]
    at = rows.to(tl.int64)[:, None] * E + cols[None, :]
    p = tl.load(probs_ptr + at, mask=mask, other=0.0)
    chosen = tl.zeros((BLOCK_T, BLOCK_E), tl.int1)
    dp = tl.zeros((BLOCK_T, BLOCK_E), COMPUTE)
    for k in tl.static_range(K):
        expert = tl.load(experts_ptr + rows.to(tl.int64) * K + k, mask=rows < T, other=0)
        d_weight = tl.load(d_weights_ptr + rows.to(tl.int64) * d_stride + k, mask=rows < T, other=0.0).to(COMPUTE)
        here = cols[None, :] == expert[:, None]
        dp = tl.where(here, d_weight[:, None] * FACTOR, dp)
        chosen = chosen | here
    if NORM:
        total = tl.sum(tl.where(chosen, p, 0.0), 1) + TINY
        mean = tl.sum(dp * p, 1) / total
        dp = tl.where(chosen, (dp - mean[:, None]) / total[:, None], 0.0)
    if HAS_D_PROBS:
        d_probs_ptrs = d_probs_ptr + rows.to(tl.int64)[:, None] * row_stride + (cols * col_stride)[None, :]
        dp += tl.load(d_probs_ptrs, mask=mask, other=0.0).to(COMPUTE)
    dx = p * (dp - tl.sum(dp * p, 1)[:, None])
    tl.store(d_logits_ptr + at, dx.to(d_logits_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------------------------------------------------- launchers

_TINY = 1e-20  # avoids 0 / 0 if all K probabilities underflow


def constants(num_experts: int, top_k: int, norm: bool, factor: float, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants and options that both kernels are compiled with, except BLOCK_K.

    dtype: compute dtype.
    """
    block = max(16, 1 << (num_experts - 1).bit_length())
    tile = RowTile(rows=max(1, 2048 // block), cols=block, warps=max(4, block // 512))
    return dict(K=top_k, NORM=norm, FACTOR=factor, TINY=_TINY, COMPUTE=tl_dtype(dtype), BLOCK_T=tile.rows,
                BLOCK_E=tile.cols, num_warps=tile.warps)


def block_k(top_k: int) -> int:
    """Return K rounded up to a power of two."""
    return 1 << (top_k - 1).bit_length()


def _launch_forward(logits: Tensor, weights: Tensor, experts: Tensor, probs: Tensor, norm: bool, factor: float) -> None:
    """Write weights, experts and probabilities."""
    tokens, num_experts = logits.shape
    logits = with_dense_rows(logits)
    launch, tile_rows = _forward_launcher(num_experts, weights.shape[1], norm, factor, probs.dtype)
    launch((cdiv(tokens, tile_rows),), (logits, weights, experts, probs), (tokens, num_experts, logits.stride(0)))


@lru_cache(maxsize=MAX_LAUNCHERS)
def _forward_launcher(
    num_experts: int, top_k: int, norm: bool, factor: float, dtype: torch.dtype
) -> tuple[Launcher, int]:
    """Return the launcher of the forward kernel, and the number of rows of one program."""
    constexprs = constants(num_experts, top_k, norm, factor, dtype)
    return Launcher(_forward_kernel, BLOCK_K=block_k(top_k), **constexprs), constexprs["BLOCK_T"]


def _launch_backward(
    d_weights: Tensor, d_probs: Tensor | None, experts: Tensor, probs: Tensor, norm: bool, factor: float,
    d_logits: Tensor,
) -> None:
    """Write the gradient of the logits to `d_logits`."""
    tokens, num_experts = probs.shape
    d_weights = with_dense_rows(d_weights)
    launch, tile_rows = _backward_launcher(
        d_probs is not None, num_experts, experts.shape[1], norm, factor, probs.dtype)
    d_probs_strides = (0, 0) if d_probs is None else d_probs.stride()
    if d_probs is None:
        d_probs = probs  # not read
    launch(
        (cdiv(tokens, tile_rows),), (d_weights, d_probs, experts, probs, d_logits),
        (tokens, num_experts, d_weights.stride(0), *d_probs_strides),
    )


@lru_cache(maxsize=MAX_LAUNCHERS)
def _backward_launcher(
    has_d_probs: bool, num_experts: int, top_k: int, norm: bool, factor: float, dtype: torch.dtype
) -> tuple[Launcher, int]:
    """Return the launcher of the backward kernel, and the number of rows of one program."""
    constexprs = constants(num_experts, top_k, norm, factor, dtype)
    return Launcher(_backward_kernel, HAS_D_PROBS=has_d_probs, **constexprs), constexprs["BLOCK_T"]


# ------------------------------------------------------------------------------------------------------------- public


def softmax_top_k(
    logits: Tensor, top_k: int, norm: bool = False, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of every token by their softmax probabilities.

    Not differentiable; `dualpipe.nn.Router` is.

    Args:
        logits: (T, E), floating-point.
        top_k: number of experts per token, 1 to E.
        norm: the weights of a token sum to `factor`; otherwise they are `factor` times the probabilities.
        factor: see `norm`.

    Returns the weights (T, K) in the dtype of `logits`, the experts (T, K) int64, and the probabilities (T, E) in at
    least float32, which is also the compute dtype.

    Raises:
        ValueError: `logits` or `top_k` are invalid.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"logits are {logits.dtype} of shape {tuple(logits.shape)} and top_k is {top_k}, expected "
                         "floating-point (T, E) and top_k from 1 to E")
    return _softmax_top_k(logits, top_k, norm, factor)


def softmax_top_k_backward(
    d_weights: Tensor, d_probs: Tensor | None, experts: Tensor, probs: Tensor, norm: bool = False, factor: float = 1.0
) -> Tensor:
    """Compute the gradient of the logits (T, E), in the dtype of `d_weights`.

    Args:
        d_weights: gradient of the weights (T, K).
        d_probs: gradient of the probabilities (T, E) from other uses; None: no other use.
        experts, probs: results of `softmax_top_k`.
        norm, factor: see `softmax_top_k`.
    """
    return _softmax_top_k_backward(d_weights, d_probs, experts, probs, norm, factor)


def _new_results(logits: Tensor, top_k: int, norm: bool, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate weights, experts and probabilities."""
    weights = logits.new_empty(logits.shape[0], top_k)
    experts = logits.new_empty(weights.shape, dtype=torch.int64)
    probs = logits.new_empty(logits.shape, dtype=compute_dtype(logits))
    return weights, experts, probs


@operator(_new_results)
def _softmax_top_k(logits: Tensor, top_k: int, norm: bool, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights, experts, probabilities)."""
    if not use_triton(logits):
        return softmax_top_k_reference(logits, top_k, norm, factor)
    weights, experts, probs = _new_results(logits, top_k, norm, factor)
    if logits.numel():
        _launch_forward(logits, weights, experts, probs, norm, factor)
    return weights, experts, probs


@operator(lambda d_weights, _, __, probs, *___: d_weights.new_empty(probs.shape))
def _softmax_top_k_backward(
    d_weights: Tensor, d_probs: Tensor | None, experts: Tensor, probs: Tensor, norm: bool, factor: float
) -> Tensor:
    """Return the gradient of the logits."""
    if not use_triton(probs):
        return softmax_top_k_backward_reference(d_weights, d_probs, experts, probs, norm, factor).to(d_weights.dtype)
    d_logits = d_weights.new_empty(probs.shape)
    if d_logits.numel():
        _launch_backward(d_weights, d_probs, experts, probs, norm, factor, d_logits)
    return d_logits


# ---------------------------------------------------------------------------------------------------------- reference


def softmax_top_k_reference(
    logits: Tensor, top_k: int, norm: bool, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `softmax_top_k` in PyTorch, differentiable by autograd. Chooses any of equal probabilities."""
    probs = logits.to(compute_dtype(logits)).softmax(-1)
    experts = probs.detach().topk(top_k, dim=-1).indices
    weights = probs.gather(1, experts)
    if norm:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    if factor != 1:
        weights = weights * factor
    return weights.to(logits.dtype), experts, probs


def softmax_top_k_backward_reference(
    d_weights: Tensor, d_probs: Tensor | None, experts: Tensor, probs: Tensor, norm: bool, factor: float
) -> Tensor:
    """Compute in PyTorch the gradient of the logits, in the compute dtype of the kernel."""
    d_chosen = d_weights.to(probs.dtype) * factor
    if norm:
        chosen = probs.gather(1, experts)
        total = chosen.sum(-1, keepdim=True) + _TINY
        d_chosen = (d_chosen - (d_chosen * chosen).sum(-1, keepdim=True) / total) / total
    dp = torch.zeros_like(probs).scatter(1, experts, d_chosen)
    if d_probs is not None:
        dp = dp + d_probs
    return probs * (dp - (dp * probs).sum(-1, keepdim=True))
