"""`nn.Linear` whose weight gradient can be deferred.

The backward of y = x W^T + b computes dx = dy W at once; dW = dy^T x and db = sum(dy) are handed to the
`WeightGradStore` of the running pipeline, which runs them at the matching "W". Method: zero-bubble pipeline parallelism
(Qi et al., arXiv:2401.10241); a queue of closures instead of a walk over the autograd graph, as in DeepSeek's DualPipe.

Dimension letters: M rows (all leading dimensions together), H in_features, N out_features.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualpipe.nn.accumulate import accumulation_dtype, weight_grads

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Linear(nn.Linear):
    """`nn.Linear` that defers its weight and bias gradients while the running `WeightGradStore` does.

    Where nothing is deferred, gradients go through autograd as those of `nn.Linear`, and are bitwise the same. Those of
    a parameter with hooks (`register_hook`, `register_post_accumulate_grad_hook`) are not deferred, so that hooks run.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says

    def forward(self, x: Tensor, wide: torch.dtype | None = None) -> Tensor:
        """(..., H) -> (..., N).

        wide: compute and return in this dtype, whatever autocast says; x, which may be narrower, is kept for the
        backward as it came.
        """
        if torch.compiler.is_compiling():
            from dualpipe.nn.compiled import linear  # not at the top: it brings the compiler

            return linear(self, x, wide)
        weight, bias, dtype = self.weight, self.bias, None
        # Parameters that come from others, by pruning or weight norm, or that torch.func replaces or batches.
        if not weight.is_leaf or (bias is not None and not bias.is_leaf) or torch._C._are_functorch_transforms_active():
            return _product(x, weight, bias, wide)
        if wide is None and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)  # autocast leaves float64 alone
            x = x.to(dtype)
        return _Linear.apply(x, weight, bias, dtype, wide)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, wide: torch.dtype | None
    ) -> Tensor:
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves: saved tensors may come back as copies
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        need_x, need_weight, _, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        return _product(x, weight, bias, wide)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:  # after a wide product, autograd casts it to the dtype of x
            dx = dy.matmul(weight if weight.dtype is dy.dtype else weight.to(dy.dtype))
        return dx, *weight_grads(ctx, dy, x, _weight_grad, _bias_grad), None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype | None) -> Tensor:
    if wide is None:
        return F.linear(x, weight, bias)
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def _weight_grad(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """(N, H), not rounded to half precision where the accumulator is float32."""
    dy_NM, x_MH, dtype = _rows(dy).t(), _rows(x), accumulation_dtype(weight, dy.dtype)
    if x_MH.dtype is not dy.dtype:  # narrower, of a wide product
        x_MH = x_MH.to(dy.dtype)
    if dtype is dy.dtype:
        return dy_NM.mm(x_MH)
    if dy.is_cuda and dtype is torch.float32:
        return torch.mm(dy_NM, x_MH, out_dtype=dtype)
    return dy_NM.to(dtype).mm(x_MH.to(dtype))


def _bias_grad(bias: Tensor, dy: Tensor) -> Tensor:
    return _rows(dy).sum(0, dtype=accumulation_dtype(bias, dy.dtype))  # (N,)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else torch.atleast_2d(x).flatten(0, -2)


def defer_weight_grads(module: ModuleT) -> ModuleT:
    """Make every plain `nn.Linear` in `module`, itself included, a `dualpipe.nn.Linear`, in place; returns `module`.

    Only the class of these modules changes: parameters, state-dict keys and hooks stay. Subclasses of `nn.Linear`
    (parametrized, quantized, already deferring) and weights computed from others (pruning) are left alone, so call this
    before wrappers that change the class, such as FSDP2's `fully_shard`. A weight that is used several times, or shared
    with another module, gets every contribution.
    """
    for child in module.modules():
        if type(child) is nn.Linear and isinstance(child._parameters.get("weight"), nn.Parameter):
            child.__class__ = Linear
    return module
