"""The head of a language model and its loss in parts: the logits of all rows never exist at once.

The logits of 4096 tokens and 152000 words take 1.2 GB in bfloat16, and their gradient as much again, on the rank that
holds the most already. Here a part of the rows goes through the head at a time. One pass computes everything:

    for each part of the rows:   logits = x W^T + b   ->   loss, d logits in the memory of the logits
                                 d x = d logits W     d W += d logits^T x     d b += sum of d logits

The input gradient is kept for the backward, in place of the logits. The weight gradient is added to the accumulator in
the forward, instead of being deferred to a "W": its operand is the gradient of the logits, which is what must not be
kept, and recomputing it takes a fourth GEMM beside three. On a CPU with float32 and 256 hidden features, a pass of this
kind takes 0.60 of the time of the plain form, and one that recomputes 0.79; with more features the GEMMs dominate, and
recomputing takes 4/3 of the plain form (docs/results/head.md).

Adding to an accumulator in a forward needs the gradient that the loss will get, which only a pipeline's step knows: 1
for the result of its criterion. So the pipeline offers `HeadRows` in place of logits to a criterion that takes them.

Dimension letters: M rows (all leading dimensions together), H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from dualpipe.kernels.cross_entropy import check_labels, cross_entropy_with_grad_
from dualpipe.nn.accumulators import add_grad, add_weight_grad
from dualpipe.nn.deferral import has_hooks_on, needs_plain_autograd
from dualpipe.nn.linear import LARGEST_WEIGHT_GRAD, LINEAR, Linear, LinearOperands, autocast_dtype_of, flatten_rows
from dualpipe.quantized import QuantizedTensor

PART_BYTES = 500_000_000  # default limit of the logits of a part, counted in float32
LOSS_IN_PARTS = "_LossInParts"  # name of the autograd function, as graphs show it


@dataclass(frozen=True)
class LinearHead:
    """A head that is a plain linear layer, and what is done to its outputs.

    logits = cap * tanh(scale * (x W^T + b) / cap)       without a cap: scale * (x W^T + b)

    Attributes:
        layer: the linear layer.
        scale: factor of its outputs.
        cap: soft cap of the logits, as in Gemma; None: none.
    """

    layer: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    @property
    def can_run_in_parts(self) -> bool:
        """Return True unless the layer's forward or its gradients need autograd, hooks or another form of GEMM."""
        layer = self.layer
        weight = layer.weight
        bias = layer.bias
        if type(layer).forward not in (Linear.forward, nn.Linear.forward) or isinstance(weight, QuantizedTensor):
            return False
        if layer._modules:  # an adapter, which the layer's forward adds
            return False
        if weight.layout is not torch.strided or needs_plain_autograd(weight, bias):
            return False
        trained = [param for param in (weight, bias) if param is not None and param.requires_grad]
        return not any(has_hooks_on(param, get_gradient_edge(param).node) for param in trained)

    def needs_parts(self, num_rows: int, dtype: torch.dtype, part_bytes: int) -> bool:
        """Return True if the logits of `num_rows` rows are more than a part; 0 bytes: there are no parts."""
        return part_bytes > 0 and num_rows > rows_per_part(self.layer.out_features, dtype, part_bytes)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of rows (..., H) in the plain form (..., V)."""
        return self.finish(self.layer(x))

    def finish(self, outputs: Tensor) -> Tensor:
        """Return the logits for outputs of the layer."""
        if self.scale != 1:
            outputs = outputs * self.scale
        return outputs if self.cap is None else torch.tanh(outputs / self.cap) * self.cap


class HeadedStage(nn.Module):
    """Base class of stages that apply a head, unless a pipeline runs it in parts with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self._applies_head = True  # False inside of `without_head`

    @contextmanager
    def without_head(self) -> Iterator[None]:
        """Return the hidden states that the head would read, in place of logits, inside of the `with`."""
        self._applies_head = False
        try:
            yield
        finally:
            self._applies_head = True


class HeadRows:
    """The rows that a head reads, in place of its logits: what a criterion with `takes_head_rows` gets.

    `dualpipe.nn.cross_entropy_loss` takes it like logits. shape: that of the logits. part_bytes: limit of the logits of
    a part, counted in float32.
    """

    def __init__(self, rows: Tensor, head: LinearHead, part_bytes: int = PART_BYTES) -> None:
        self.rows = rows
        self.head = head
        self.part_bytes = part_bytes
        self.shape = torch.Size((*rows.shape[:-1], head.layer.out_features))

    def logits(self) -> Tensor:
        """Return the logits in the plain form."""
        return self.head.logits(self.rows)

    def argmax(self, dim: int = -1) -> Tensor:
        """Return the likeliest word of every row, the index of its largest logit. dim: -1, as of logits."""
        assert dim in (-1, len(self.shape) - 1), "rows are computed in parts"
        with torch.no_grad():
            parts = flatten_rows(self.rows).split(rows_per_part(self.shape[-1], self.rows.dtype, self.part_bytes))
            # Scales and caps are monotonic, but the logits that they round to may be equal.
            return torch.cat([self.head.logits(part).argmax(-1) for part in parts]).view(self.shape[:-1])

    def cross_entropy(
        self, labels: Tensor, ignore_index: int = -100, *, denominator: Tensor | float | None = None,
        z_loss: float = 0.0, upstream: float = 1.0,
    ) -> Tensor:
        """Compute the loss in parts; see `dualpipe.nn.cross_entropy_loss`.

        With gradients enabled, this adds the gradients of the weight and the bias to their accumulators.

        Args:
            upstream: the gradient that the loss will get in the backward. Another one there raises ValueError.
        """
        if self.shape[:-1] != labels.shape:
            raise ValueError(f"labels have the shape {tuple(labels.shape)}, expected {tuple(self.shape[:-1])}: labels "
                             "must have the shape of logits without the vocabulary dimension")
        layer = self.head.layer
        dtype = autocast_dtype_of(self.rows) or layer.weight.dtype
        labels_M = labels.flatten()
        check_labels(labels_M, self.shape[-1], ignore_index)
        options = _Options(self.head, torch.is_grad_enabled(), ignore_index, z_loss, upstream, self.part_bytes, dtype)
        device = self.rows.device
        with torch.autocast(device.type, enabled=False) if device.type != "meta" else nullcontext():
            divisor = loss_divisor(
                labels_M != ignore_index, denominator, torch.promote_types(dtype, torch.float32))
            loss: Tensor = _LossInParts.apply(self.rows, layer.weight, layer.bias, labels_M, divisor, options)
        return loss


def rows_per_part(vocabulary: int, dtype: torch.dtype, part_bytes: int) -> int:
    """Return the number of rows of a part, at least 1. dtype: dtype of the logits."""
    return max(1, part_bytes // (vocabulary * torch.promote_types(dtype, torch.float32).itemsize))


def part_peak_bytes(head: LinearHead, num_rows: int, dtype: torch.dtype, part_bytes: int, *, cpu: bool) -> int:
    """Return the bytes of the logits that exist at once for `num_rows` rows, with temporaries of their size.

    Logits in half precision have a float32 copy for a scale or a cap, and always on the CPU, where the gradient of a
    trained weight is a temporary too, before it is added to its accumulator.

    dtype: dtype of the logits.
    """
    layer = head.layer
    wide = torch.promote_types(dtype, torch.float32).itemsize
    bytes_per_logit = dtype.itemsize
    if dtype.itemsize < wide and (cpu or head.scale != 1 or head.cap is not None):
        bytes_per_logit += wide
    if head.cap is not None:  # its slope
        bytes_per_logit += wide
    rows = min(num_rows, rows_per_part(layer.out_features, dtype, part_bytes))
    weight_grad = 0
    if cpu and layer.weight.requires_grad:
        weight_grad = min(layer.in_features * layer.out_features, LARGEST_WEIGHT_GRAD) * wide
    return rows * layer.out_features * bytes_per_logit + weight_grad


@dataclass(frozen=True)
class _Options:
    """Arguments of `_LossInParts` besides tensors.

    needs_grad: gradients are enabled. dtype: dtype of the head's GEMMs. Others: see `HeadRows.cross_entropy`.
    """

    head: LinearHead
    needs_grad: bool
    ignore_index: int
    z_loss: float
    upstream: float
    part_bytes: int
    dtype: torch.dtype


def loss_divisor(is_counted: Tensor, denominator: Tensor | float | None, dtype: torch.dtype) -> Tensor:
    """Return the divisor of a summed loss, a scalar: `denominator`, or the number of rows that count. 0 counts as 1."""
    if denominator is None:
        return is_counted.sum().clamp(min=1).to(dtype)
    divisor = torch.as_tensor(denominator, device=is_counted.device).reshape(()).to(dtype)
    return divisor.where(divisor != 0, 1)


class _LossInParts(torch.autograd.Function):
    """Loss of a head, with the gradients computed in the forward.

    The weight and the bias are inputs so that the graph shows their use; autograd gets no gradient for them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, divisor: Tensor, options: _Options
    ) -> Tensor:
        needs_x, needs_weight, needs_bias = (options.needs_grad and needs for needs in ctx.needs_input_grad[:3])
        x_MH = flatten_rows(x.detach())
        dx_MH = torch.empty_like(x_MH) if needs_x else None
        cast_weight = weight.detach().to(options.dtype)
        cast_bias = None if bias is None else bias.detach().to(options.dtype)
        scale = options.upstream / divisor
        total = torch.zeros_like(divisor)
        size = rows_per_part(weight.shape[0], options.dtype, options.part_bytes)
        for start in range(0, x_MH.shape[0], size):
            part = slice(start, start + size)
            rows_MH = x_MH[part].to(options.dtype)
            logits_MV = F.linear(rows_MH, cast_weight, cast_bias)
            total += _loss_with_grad_(logits_MV, labels[part], scale, options)
            operands = LinearOperands(logits_MV, rows_MH)  # the logits are their gradient by now
            if dx_MH is not None:
                dx_MH[part] = logits_MV.mm(cast_weight)
            if needs_weight:
                add_weight_grad(weight, partial(LINEAR.weight_grad, weight, [operands]))
            if bias is not None and needs_bias:
                add_grad(bias, LINEAR.compute_bias_grad(bias, operands))
            del logits_MV, operands  # before the next part's
        ctx.save_for_backward(None if dx_MH is None else dx_MH.view(x.shape))
        ctx.upstream = options.upstream
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        _require_upstream(d_loss, ctx.upstream)
        (dx,) = ctx.saved_tensors
        return dx, None, None, None, None, None


def _loss_with_grad_(outputs_MV: Tensor, labels_M: Tensor, scale: Tensor, options: _Options) -> Tensor:
    """Return the summed loss of a part, and overwrite the outputs of the head's layer with their gradient."""
    head = options.head
    loss_with_grad_ = partial(
        cross_entropy_with_grad_, labels=labels_M, ignore_index=options.ignore_index, z_loss=options.z_loss)
    if head.scale == 1 and head.cap is None:
        return loss_with_grad_(outputs_MV, scale=scale)
    logits_MV = outputs_MV.to(scale.dtype).mul_(head.scale)
    slope_MV = None
    if head.cap is not None:
        logits_MV.div_(head.cap).tanh_()
        slope_MV = logits_MV.square().neg_().add_(1)
        logits_MV.mul_(head.cap)
    loss = loss_with_grad_(logits_MV, scale=scale * head.scale)
    if slope_MV is not None:
        logits_MV.mul_(slope_MV)
    if logits_MV is not outputs_MV:
        outputs_MV.copy_(logits_MV)
    return loss


def _require_upstream(d_loss: Tensor, expected: float) -> None:
    """Raise ValueError unless the loss gets the gradient that the weight gradient was computed for.

    On a GPU the comparison stays on the device, as an assertion: the host does not wait.
    """
    if d_loss.is_meta:
        return
    is_equal = torch.isclose(d_loss, torch.full_like(d_loss, expected), rtol=1e-4, atol=0)
    message = (f"the loss of a head in parts gets another gradient than {expected}, which its weight's gradient was "
               "computed for; pass cross_entropy_loss(upstream=...) its factor in the result of the criterion")
    if not d_loss.is_cpu:
        torch._assert_async(is_equal, message)
    elif not is_equal:
        raise ValueError(message)
