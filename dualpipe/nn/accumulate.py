"""Adding a weight gradient into `.grad` outside of autograd, where a deferred one ends up."""

from __future__ import annotations

import torch
from torch import Tensor


def add_grad(param: Tensor, grad: Tensor) -> None:
    """Add `grad`, which nobody else may hold, to `param.grad`: what autograd does for a leaf, in the same dtypes.

    Where there is no `.grad` yet, `grad` becomes it, cast to `param.grad_dtype` (float32 for a bfloat16 parameter that
    accumulates in float32). An existing one is added to in place and keeps its dtype.
    """
    accumulator = param.grad
    if accumulator is None:
        param.grad = as_grad_dtype(param, grad)
    elif accumulator.layout is torch.strided:
        accumulator.add_(grad)
    else:  # from an embedding with sparse=True that shares the weight: a dense tensor cannot be added in place
        param.grad = as_grad_dtype(param, grad) + accumulator


def as_grad_dtype(param: Tensor, grad: Tensor) -> Tensor:
    """`grad` in the dtype that `param.grad` must have; a `grad_dtype` of None allows any."""
    dtype = param.grad_dtype
    return grad if dtype is None or dtype is grad.dtype else grad.to(dtype)
