"""Accumulators of gradients: every write of a step of this library to the `.grad` of a parameter.

Deferred weight gradients all pass `add_weight_grad`, biases `add_grad`. All writes, in the order of a step:

    zeros for autograd (`create_zeros`), before the first forward
    -> weight gradients, added by their GEMMs (`add_weight_grad`) or after them (`add_grad`)
    -> gradients in another dtype, folded into the accumulator (`fold`), and zeros for parameters without a gradient
    -> FSDP2 reduces, or `move_to` over one rank; sums with the other end of a tie (`add_peer`)
    -> gradients that no rank has, dropped (`drop`); one element spoiled if a loss is not finite (`spoil`); scaled by
       the clip factor (`scale`)
    -> copied for the optimizer's master weights (`copy_to_master`)

Besides, autograd adds what layers return to it, and FSDP2 sets the reduced gradient of a sharded parameter. A hook
divides those of experts before that (`dualpipe.parallel.fsdp.shard`).

The accumulator of a parameter is its own `.grad`, which may be wider than the parameter: with `grad_dtype` float32 a
bfloat16 parameter accumulates in float32, and the GEMMs of its gradient are not rounded to bfloat16. Experts that are
sharded over expert-parallel ranks are DTensors: gradients are computed and added on their local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualpipe.quantized.quantize_model import distribute_like, quantized_part


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor that needs no gradient, sharing its memory; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def accumulation_dtype(param: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype to compute gradients of `param` in.

    This is the dtype of its accumulator if that differs from the dtype of `param`, else `otherwise`. Example: float32
    for a bfloat16 parameter that accumulates in float32.
    """
    if not param.is_leaf:
        return otherwise
    dtype = param.grad_dtype if param.grad is None else param.grad.dtype
    return otherwise if dtype is None or dtype is param.dtype else dtype


def as_grad_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `param` from the gradient of its local shard: a DTensor if `param` is one."""
    return grad if isinstance(grad, DTensor) else distribute_like(param, grad)


def add_grad(param: Tensor, grad: Tensor) -> None:
    """Add `grad` to `param.grad` like autograd does for a leaf, with the same dtypes.

    Adds to an existing `.grad` in place, which keeps its dtype. Without one, sets `.grad` to `grad`, cast to
    `param.grad_dtype` (None allows any).

    grad: the local shard if `param` is a DTensor; no other code may hold it.
    """
    accumulator = param.grad
    if accumulator is not None and accumulator.layout is torch.strided:
        local(accumulator).add_(grad)
        return
    if param.grad_dtype is not None:
        grad = grad.to(param.grad_dtype)
    # A gradient that is not strided comes from an embedding with sparse=True: no dense tensor can be added in place.
    param.grad = as_grad_of(param, grad) if accumulator is None else grad + accumulator


def add_weight_grad(weight: Tensor, compute: Callable[[Tensor | None], Tensor]) -> None:
    """Add a gradient to `weight.grad`: in the GEMM that computes it, if there is an accumulator already.

    compute: returns the gradient of the local shard; given a tensor, adds to that instead.
    """
    accumulator = weight.grad
    if accumulator is not None and accumulator.layout is torch.strided:
        compute(local(accumulator))
    else:
        add_grad(weight, compute(None))


def create_zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Set `param.grad` to zeros and return it; for a quantized parameter too it is a plain tensor."""
    part = quantized_part(param)
    if part is None:
        param.grad = torch.zeros_like(param, dtype=dtype)
    else:
        param.grad = distribute_like(param, torch.zeros(part.shape, dtype=dtype, device=part.device))
    assert param.grad is not None
    return param.grad


def fold(param: Tensor, dtype: torch.dtype) -> None:
    """Make `dtype` the dtype of the accumulator of a gathered parameter, and cast a gradient that is there to it.

    A reduce-scatter takes one dtype, and FSDP2 reduces each parameter's `.grad` as it is. A gradient in the parameter's
    dtype is left there by backwards outside of steps, and by code that assigns one. The order matters: everything has
    been accumulated before the conversion, which replaces the tensor, so that a bfloat16 gradient that comes after the
    accumulator exists is added to it and never takes its place.
    """
    if param.grad_dtype is dtype:
        return
    grad = param.grad
    param.grad = None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad.to(dtype)


def move_to(sharded: Tensor, gathered: Tensor, grad: Tensor) -> None:
    """Take the accumulator from a gathered parameter. The sharded one gets `grad`, which has the same memory."""
    gathered.grad = None
    sharded.grad = grad


def add_peer(param: Tensor, exchange: Callable[[Tensor], Tensor], earlier: Tensor | None) -> None:
    """Add the gradient of a tied parameter's copy at the other end of the pipeline. Collective over both ends.

    exchange: sends a tensor to the other end and returns the tensor of that end.
    earlier: gradient that is a sum over both ends already.
    """
    if param.grad is None:
        create_zeros(param, param.grad_dtype or param.dtype)
    assert param.grad is not None
    grad = local(param.grad)
    # Before `earlier` is added: the sum of two tensors is bitwise equal at both ends, in either order.
    grad += exchange(grad.contiguous())
    if earlier is not None:
        grad += local(earlier)


def scale(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply local gradients of one dtype by a factor, a scalar on their device."""
    torch._foreach_mul_([*grads], factor)


def spoil(param: Tensor, value: Tensor) -> None:
    """Add `value`, 0 or NaN, to the first element of a gradient, so that the norm of all gradients shows it."""
    assert param.grad is not None, "the caller has checked"
    grad = local(param.grad)
    grad[(0,) * grad.dim()].add_(value.to(grad.dtype))


def coalesce(param: Tensor) -> Tensor:
    """Sum the entries of a sparse gradient that have the same indices; return the gradient."""
    assert param.grad is not None, "the caller has checked"
    param.grad = param.grad.coalesce()
    return param.grad


def copy_to_master(master: Tensor, param: Tensor) -> None:
    """Set the gradient of an optimizer's master weight to that of its parameter, in the master's dtype."""
    master.grad = None if param.grad is None else param.grad.to(master.dtype)


def take(param: Tensor) -> Tensor | None:
    """Return `param.grad` and leave None in its place."""
    grad = param.grad
    param.grad = None
    return grad


def drop(params: Iterable[Tensor]) -> None:
    """Set the gradients of parameters to None."""
    for param in params:
        param.grad = None
