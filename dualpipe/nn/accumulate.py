"""The accumulator of a weight gradient: a parameter's `.grad`, which may be wider than the parameter.

With `grad_dtype` float32 a bfloat16 parameter accumulates in float32, and the products that make its gradient are not
rounded to bfloat16 on the way. Experts that are distributed over expert-parallel ranks are DTensors: gradients are
computed and added on their local tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def accumulation_dtype(param: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """The dtype in which to make gradients of `param`: its accumulator's where that is not its own, or `otherwise`."""
    dtype = param.grad_dtype if param.grad is None else param.grad.dtype
    return otherwise if dtype is None or dtype is param.dtype else dtype


def add_grad(param: Tensor, grad: Tensor) -> None:
    """Add `grad`, which nobody else may hold, to `param.grad`: what autograd does for a leaf, in the same dtypes.

    Where there is no `.grad` yet, `grad` becomes it, cast to `param.grad_dtype` (float32 for a bfloat16 parameter that
    accumulates in float32). An existing one is added to in place and keeps its dtype. `grad` is the local part where
    `param` is a DTensor.
    """
    accumulator = param.grad
    if accumulator is None:
        param.grad = as_grad_of(param, as_grad_dtype(param, grad))
    elif accumulator.layout is torch.strided:
        local(accumulator).add_(grad)
    else:  # from an embedding with sparse=True that shares the weight: a dense tensor cannot be added in place
        param.grad = as_grad_dtype(param, grad) + accumulator


def has_hooks(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether somebody has hooks on these parameters, which only a gradient that goes through autograd passes."""
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return True
    return bias is not None and bool(bias._backward_hooks or bias._post_accumulate_grad_hooks)


def as_grad_dtype(param: Tensor, grad: Tensor) -> Tensor:
    """`grad` in the dtype that `param.grad` must have; a `grad_dtype` of None allows any."""
    dtype = param.grad_dtype
    return grad if dtype is None or dtype is grad.dtype else grad.to(dtype)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor that needs no gradient, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_grad_of(param: Tensor, grad: Tensor) -> Tensor:
    """The local `grad` as a gradient of `param`: distributed where `param` is."""
    if not isinstance(param, DTensor):
        return grad
    return DTensor.from_local(
        grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
