"""The layers that models share: a linear one and an embedding, whose weight gradients can be deferred, and are added to
their accumulators in place; a norm (Zhang and Sennrich, arXiv:1910.07467); the loss of a language model.

The backward of y = x W^T + b computes dx = dy W at once, and dW = dy^T x and db = sum(dy) when the running
`WeightGradStore` says.

Dimension letters: M rows (all leading dimensions together), H in_features, N out_features, V words, P parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe.kernels import cross_entropy
from dualpipe.kernels.formats import QuantizedRows
from dualpipe.kernels.norm import rms_norm, rms_norm_backward, rms_norm_reference
from dualpipe.kernels.quantize import quantize_rows
from dualpipe.nn.deferral import accumulation_dtype, weight_grads
from dualpipe.nn.products import Products, input_grad, product, row_block, weight_grad_of_rows
from dualpipe.quantized import QuantizedTensor

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_CHUNK = 2**24  # elements of a weight's gradient that are made at a time to be added to its accumulator: 64 MB of fp32


class Linear(nn.Linear):
    """`nn.Linear` that defers its weight and bias gradients while the running `WeightGradStore` does.

    Where nothing is deferred, gradients go through autograd as those of `nn.Linear`, and are bitwise the same. Those of
    a parameter with hooks (`register_hook`, `register_post_accumulate_grad_hook`) are not deferred, so that hooks run.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says
    products: Products = "auto"  # this and the next count where the weight is quantized: see `dualpipe.nn.products`
    fp8_weight_grad = False
    quantizable = True  # whether a plan's formats are for the weight

    def forward(self, x: Tensor, wide: torch.dtype | None = None) -> Tensor:
        """(..., H) -> (..., N). wide: compute and return in this dtype, whatever autocast says; x, which may be
        narrower, is kept for the backward as it came."""
        if torch.compiler.is_compiling():
            from dualpipe.nn.compiled import linear  # not at the top: it brings the compiler

            return linear(self, x, wide)
        weight, bias, dtype = self.weight, self.bias, None
        # Parameters that come from others, by pruning or weight norm, or that torch.func replaces or batches.
        if not weight.is_leaf or (bias is not None and not bias.is_leaf) or torch._C._are_functorch_transforms_active():
            return _product(x, weight, bias, wide)
        if wide is None and not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)  # autocast leaves float64 alone
            x = x.to(dtype)
        if isinstance(weight, QuantizedTensor):
            x = x if wide is None else x.to(wide)
            return _Quantized.apply(x, weight, bias, row_block(self, x.dtype), self.fp8_weight_grad)
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
        return dx, *weight_grads(ctx, dy, x, _weight_grad, _bias_grad, in_place=True), None, None


class _Quantized(torch.autograd.Function):
    """The product with a quantized weight, in the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, block: int | None, fp8_weight_grad: bool
    ) -> Tensor:
        ctx.weight, ctx.bias, ctx.block = weight, bias, block
        x_MH, x_rows = _rows(x), None
        ctx.ends = torch.full((1,), x_MH.shape[0], dtype=torch.int32, device=x.device)  # one expert's
        if block is not None:
            x_rows = quantize_rows(x_MH, block)
        bias_1N = None if bias is None else bias.to(x.dtype).unsqueeze(0)
        y_MN = product(x_rows or x_MH, weight, ctx.ends, bias_1N, None, x.dtype)
        need_weight = ctx.needs_input_grad[1]
        x_rows = x_rows if need_weight and fp8_weight_grad else None
        ctx.save_for_backward(x if need_weight and x_rows is None else None, *(x_rows or (None, None)))
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, *x_rows = ctx.saved_tensors
        dx = dy_rows = None
        if ctx.needs_input_grad[0]:
            dx, dy_rows = input_grad(_rows(dy), ctx.weight, ctx.ends, ctx.block)
            dx = dx.view(*dy.shape[:-1], dx.shape[1])
        weight_grad: Callable[..., Tensor] = _weight_grad
        if x_rows[0] is not None:
            weight_grad = weight_grad_of_rows(weight_grad, _rows(dy), dy_rows, QuantizedRows(*x_rows), ctx.block)
            dy = dy if ctx.needs_input_grad[2] else dy.new_empty(0)  # the bias's alone reads it: not kept otherwise
        return dx, *weight_grads(ctx, dy, x, weight_grad, _bias_grad, in_place=True), None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype | None) -> Tensor:
    if wide is None:
        return F.linear(x, weight, bias)
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if kind != "meta" and torch.is_autocast_enabled(kind) else nullcontext():
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def _weight_grad(weight: Tensor, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """(N, H), not rounded to half precision where the accumulator is float32; added to `out` if given."""
    dy_NM, x_MH, dtype = _rows(dy).t(), _rows(x), accumulation_dtype(weight, dy.dtype)
    if (dy.is_cuda or dy.is_meta) and dtype is torch.float32 and dy.dtype in (torch.bfloat16, torch.float16):
        if out is None:
            return torch.mm(dy_NM, x_MH, out_dtype=dtype)
        return torch.addmm(out, dy_NM, x_MH, out_dtype=dtype, out=out)  # in the product's epilogue: no temporary
    if x.dtype is not dtype:  # asked first, because to() takes 0.4 us even where it changes nothing
        x_MH = x_MH.to(dtype)
    # mm and add_ instead of addmm_: bitwise what autograd accumulates over micro-batches, but for chunks.
    if out is None or out.numel() <= _CHUNK:
        dw = (dy_NM if dy.dtype is dtype else dy_NM.to(dtype)).mm(x_MH)
        return dw if out is None else out.add_(dw)
    rows = max(1, _CHUNK // x_MH.shape[1])
    for out_NH, part_NM in zip(out.split(rows), dy_NM.split(rows)):
        out_NH.add_(part_NM.to(dtype).mm(x_MH))
    return out


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


class Embedding(nn.Embedding):
    """`nn.Embedding` that defers its gradient as `Linear` does, and adds it to a float32 accumulator row by row.

    Otherwise torch makes a gradient of the whole table for each micro-batch: 0.6 GB in bfloat16 for 151936 words of
    2048 numbers, and 1.2 GB where it is cast to be added.
    """

    makes_accumulators = True  # of the dtype that `grad_dtype` says

    def __init__(
        self, num_embeddings: int, embedding_dim: int, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) int32 or int64 -> (..., H)."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not self.weight.is_leaf:
            return F.embedding(tokens, self.weight)
        return _Embedding.apply(tokens, self.weight, None)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: None) -> Tensor:
        ctx.weight, ctx.bias = weight, bias
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        (tokens,) = ctx.saved_tensors
        return None, *weight_grads(ctx, dy, tokens, _embedding_grad, _bias_grad, in_place=True)


def _embedding_grad(weight: Tensor, dy: Tensor, tokens: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient of the table (V, H), each word's rows of `dy` summed in a fixed order; added to `out` if given."""
    dtype = accumulation_dtype(weight, dy.dtype) if out is None else out.dtype
    if dtype.itemsize < 4:  # torch sums in float32 and rounds once
        dw = torch.ops.aten.embedding_dense_backward(dy, tokens, weight.shape[0], -1, False)
        return dw if out is None else out.add_(dw)
    out = dy.new_zeros(weight.shape, dtype=dtype) if out is None else out
    tokens, rows = tokens.flatten(), _rows(dy).to(dtype)
    if dy.is_cuda:  # it sorts, where index_add_ has atomics
        return out.index_put_((tokens,), rows, accumulate=True)
    words, at = tokens.unique(return_inverse=True)  # each word's sum first: bitwise what autograd accumulates
    return out.index_add_(0, words, rows.new_zeros(len(words), rows.shape[1]).index_add_(0, at, rows))


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in `promote_types(dtype, float32)` and
    rounded to the dtype of `x` before the weight is applied, as in transformers' Qwen3. The weight's gradient is
    deferred while the running `WeightGradStore` does."""

    makes_accumulators = True  # of the dtype that `grad_dtype` says

    def __init__(
        self, size: int, eps: float = 1e-6, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None, *, keep: bool = False) -> Any:
        """(..., size) -> the norm of x + residual, in the common dtype of x, residual and weight; keep: and the sum,
        whose gradient is then added in the norm's backward. Differentiable once."""
        weight = self.weight
        if torch.compiler.is_compiling() or not weight.is_leaf or torch._C._are_functorch_transforms_active():
            y, total, _ = rms_norm_reference(x, weight, self.eps, residual)
            return (y, total) if keep else y
        y, total = _Norm.apply(x, weight, None, residual, self.eps)
        return (y, total) if keep else y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: None, residual: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, total, scale = rms_norm(x, weight, eps, residual)
        ctx.weight, ctx.bias, ctx.added = weight, None, residual is not None
        ctx.set_materialize_grads(False)  # a gradient of zeros is not worth a launch
        ctx.save_for_backward(total, scale, weight)
        return y, total.view_as(total) if residual is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return d_sum, None, None, d_sum if ctx.added else None, None
        dx, parts = rms_norm_backward(dy, d_sum, *ctx.saved_tensors)
        of_weight = partial(norm_weight_grad, parts=parts)
        dw, _ = weight_grads(ctx, parts, None, of_weight, of_weight)
        return dx, dw, None, dx if ctx.added else None, None


def norm_weight_grad(weight: Tensor, *_: Any, parts: Tensor) -> Tensor:
    """Sum of the parts (P, size) that a norm's backward left of its weight's gradient."""
    return parts.sum(0, dtype=accumulation_dtype(weight, weight.dtype))


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, *, in_place: bool = False,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Mean cross-entropy over the labels that are not `ignore_index`, a scalar in at least float32.

    `logits` (..., V) over the vocabulary, `labels` (...) the next token at each position, already shifted. Where every
    label is ignored the loss and its gradient are 0 instead of NaN, so that an empty micro-batch leaves the others
    alone. With `denominator`, such as the number of labels in all micro-batches, the sum is divided by that instead.
    `in_place` writes the gradient over the logits, which must not be used afterwards.

    Raises `ValueError` for operands that do not fit.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels must have the shape {tuple(logits.shape[:-1])} of logits without the vocabulary; "
                         f"got {tuple(labels.shape)}")
    return cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, in_place=in_place, denominator=denominator
    )
