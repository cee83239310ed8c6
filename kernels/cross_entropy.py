"""Cross-entropy of a large vocabulary without a float32 copy of the logits.

`F.cross_entropy(logits.float(), labels)` allocates a float32 copy, its log-softmax and a float32 gradient. With 4096
tokens and a vocabulary of 151936, these are 7.5 GB, in addition to 1.2 GB of bfloat16 logits. Here, the forward reads
the logits once and saves two numbers per row: the maximum and the sum of exponentials. The backward reads the logits
once more and writes the gradient in their dtype; with `in_place` it overwrites the logits.

    top[t]      = max_v x[t, v]
    total[t]    = sum_v exp(x[t, v] - top[t])          in the same pass: rescaled whenever the maximum rises
    loss        = sum_t (top[t] - x[t, label[t]] + log total[t]) / denominator       over rows that are not ignored
    d x[t, v]   = (exp(x[t, v] - top[t]) / total[t] - [v == label[t]]) * d loss / denominator       0 in ignored rows

Example: x = [5, 5], label 1: top = 5, total = 2, loss = log 2, d x = [0.5, -0.5]. Saving only the logarithm of the sum
of exponentials, 5.69, would be sufficient, but its rounding error is relative to the size of the logits.

Dimension letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from dualpipe.kernels.common import (
    RowTile,
    cdiv,
    compute_dtype,
    double_backward_error,
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
    logits_ptr,  # (T, V), rows `stride` apart
    labels_ptr,  # (T,) int32 or int64
    loss_ptr,  # (T,) COMPUTE
    stats_ptr,  # (T, 2) COMPUTE: top, total
    V, stride, ignore_index,
    COMPUTE: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Compute the loss and the statistics of one row per program. Ignored rows are not read: their loss is 0."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(stats_ptr + 2 * row, 0.0)
        tl.store(stats_ptr + 2 * row + 1, 1.0)
    else:
        valid = (label >= 0) & (label < V)
        tl.device_assert(valid, "cross_entropy: a label is neither ignore_index nor between 0 and V - 1")
        row_ptr = logits_ptr + row * stride
        top = tl.full((), float("-inf"), COMPUTE)
        total = tl.full((), 0.0, COMPUTE)
        for start in range(0, V, BLOCK_V):
            cols = start + tl.arange(0, BLOCK_V)
            x = tl.load(row_ptr + cols, mask=cols < V, other=float("-inf")).to(COMPUTE)
            new_top = tl.maximum(top, tl.max(x, 0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
            top = new_top
        top = tl.where(top == float("-inf"), 0.0, top)
        # A label out of range reads nothing outside of the row, and gives a NaN loss.
        chosen = tl.load(row_ptr + label, mask=valid, other=float("nan")).to(COMPUTE)
        tl.store(loss_ptr + row, top - chosen + tl.log(total))
        tl.store(stats_ptr + 2 * row, top)
        tl.store(stats_ptr + 2 * row + 1, total)


@triton.jit
def _backward_kernel(
    logits_ptr,  # (T, V), rows `stride` apart
    labels_ptr,  # (T,) int32 or int64
    stats_ptr,  # (T, 2) COMPUTE: top, total
    scale_ptr,  # () COMPUTE: d loss / denominator
    grad_ptr,  # (T, V), rows `grad_stride` apart; may be logits_ptr: the program that reads an element writes it
    V, stride, grad_stride, ignore_index,
    COMPUTE: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Write the gradient of BLOCK_V logits of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    label = tl.load(labels_ptr + row).to(tl.int64)
    counts = label != ignore_index
    read = cols < tl.where(counts, V, 0)
    x = tl.load(logits_ptr + row * stride + cols, mask=read, other=0.0).to(COMPUTE)
    softmax = tl.exp(x - tl.load(stats_ptr + 2 * row)) * (1.0 / tl.load(stats_ptr + 2 * row + 1))
    grad = tl.where(cols == label, softmax - 1.0, softmax) * tl.load(scale_ptr)
    grad = tl.where(counts, grad, 0.0).to(grad_ptr.dtype.element_ty)
    tl.store(grad_ptr + row * grad_stride + cols, grad, mask=cols < V)


# ---------------------------------------------------------------------------------------------------------- launchers

# By shape class, for every architecture: a thread has 16 elements, two accesses of 16 bytes in half precision. A wide
# tile reduces over 4096 columns at a time.
_TILES = {"wide": RowTile(1, 4096, 8), "narrow": RowTile(1, 512, 1)}


def _launch_forward(logits: Tensor, labels: Tensor, ignore_index: int, loss: Tensor, stats: Tensor) -> None:
    """Write the losses (T,) and the statistics (T, 2)."""
    tokens, vocabulary = logits.shape
    logits = with_dense_rows(logits)
    launch, _ = _launcher(True, vocabulary > 1024, loss.dtype)
    launch((tokens,), (logits, labels.contiguous(), loss, stats), (vocabulary, logits.stride(0), ignore_index))


@lru_cache(maxsize=MAX_LAUNCHERS)
def _launcher(is_forward: bool, is_wide: bool, dtype: torch.dtype) -> tuple[Launcher, RowTile]:
    """Return the launcher of the forward or backward kernel, and its tile."""
    kernel = _forward_kernel if is_forward else _backward_kernel
    tile = _TILES["wide" if is_wide else "narrow"]
    return Launcher(kernel, COMPUTE=tl_dtype(dtype), BLOCK_V=tile.cols, num_warps=tile.warps), tile


def _write_gradient(
    logits: Tensor, labels: Tensor, stats: Tensor, scale: Tensor, ignore_index: int, grad: Tensor
) -> None:
    """Write the gradient of the logits to `grad`, which may be the logits."""
    if not use_triton(logits):
        grad.copy_(cross_entropy_backward_reference(logits, labels, stats, scale, ignore_index))
        return
    if not grad.numel():
        return
    tokens, vocabulary = logits.shape
    logits = with_dense_rows(logits)
    launch, tile = _launcher(False, vocabulary > 1024, stats.dtype)
    launch((tokens, cdiv(vocabulary, tile.cols)), (logits, labels.contiguous(), stats, scale, grad),
           (vocabulary, logits.stride(0), grad.stride(0), ignore_index))


# ------------------------------------------------------------------------------------------------------------- public


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: Literal["mean", "sum"] = "mean",
    in_place: bool = False, denominator: Tensor | float | None = None,
) -> Tensor:
    """Compute the cross-entropy over the rows whose label is not `ignore_index` -> a scalar in at least float32.

    Differentiable once, with respect to the logits.

    Args:
        logits: (T, V).
        labels: (T,) int32 or int64.
        ignore_index: label of ignored rows.
        reduction: "mean" divides the sum by `denominator`, "sum" does not divide it.
        in_place: the backward overwrites `logits` with their gradient instead of allocating one. The logits must not be
            used afterwards, and torch refuses a second backward through the same graph. Ignored by `torch.compile`,
            which manages memory itself.
        denominator: divisor for "mean", such as the number of tokens in all micro-batches; None: the number of rows
            that are not ignored. It is not copied to the host. 0 counts as 1, so that without any row the loss and
            the gradients are 0 instead of NaN.

    Raises:
        ValueError: operands or options are invalid; on the CPU also for a label outside 0 to V - 1. On a GPU such a
            label gives a NaN loss, and a failed assertion with `TRITON_DEBUG=1`.
    """
    _check_arguments(logits, labels, reduction, in_place, denominator)
    if isinstance(denominator, int | float):  # filled on the device: no copy from the host to wait for
        denominator = torch.full((), denominator, dtype=compute_dtype(logits), device=logits.device)
    in_place = in_place and not torch.compiler.is_compiling()
    return _cross_entropy(logits, labels, denominator, ignore_index, reduction == "mean", in_place)[0]


def _check_arguments(
    logits: Tensor, labels: Tensor, reduction: str, in_place: bool, denominator: Tensor | float | None
) -> None:
    """Raise ValueError for invalid arguments of `cross_entropy`."""
    if logits.dim() != 2 or not logits.is_floating_point() or (logits.shape[1] == 0 and logits.shape[0] > 0):
        raise ValueError(f"logits are {logits.dtype} of shape {tuple(logits.shape)}, expected floating-point (T, V) "
                         "with V of at least 1: flatten other dimensions")
    if labels.shape != logits.shape[:1] or labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels are {labels.dtype} of shape {tuple(labels.shape)}, expected int32 or int64 of shape "
                         f"({logits.shape[0]},), one for each row of logits")
    if labels.device != logits.device:
        raise ValueError(f"logits are on {logits.device} and labels on {labels.device}, expected one device")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}, expected 'mean' or 'sum'")
    rows, columns = logits.shape
    row_stride, column_stride = logits.stride()
    if in_place and not ((column_stride == 1 or columns == 1) and (row_stride >= columns or rows < 2)):
        raise ValueError(f"logits have strides {logits.stride()}, but in_place requires contiguous rows that do not "
                         "overlap; pass logits.contiguous(), or in_place=False")
    if denominator is not None and reduction == "sum":
        raise ValueError(f"denominator is {denominator} with reduction='sum', which does not divide; use "
                         "reduction='mean'")
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1 or denominator.device != logits.device:
            raise ValueError(f"denominator has shape {tuple(denominator.shape)} on {denominator.device}, expected a "
                             f"number, or a tensor with one element on {logits.device}")
        if denominator.requires_grad:
            raise ValueError("denominator requires grad, but cross_entropy computes no gradient for it; pass "
                             "denominator.detach()")


def cross_entropy_with_grad_(
    logits: Tensor, labels: Tensor, scale: Tensor, *, ignore_index: int = -100, z_loss: float = 0.0
) -> Tensor:
    """Overwrite logits with the gradient of their scaled cross-entropy, and return the summed loss, a scalar.

    For a caller that computes logits part by part, and needs their gradient at once. It is not differentiable itself.

    Args:
        logits: (T, V), contiguous.
        labels: (T,) int32 or int64, between 0 and V - 1 or `ignore_index`.
        scale: factor of the gradients, a scalar in the dtype of the loss.
        ignore_index: label of ignored rows, whose losses and gradients are 0.
        z_loss: coefficient of the squared logsumexp that is added to the loss of every row that counts.

    The loss is in at least float32, and not scaled.
    """
    if z_loss or not (use_triton(logits) or logits.is_meta):
        return _write_gradient_reference(logits, labels, scale, ignore_index, z_loss)
    loss, stats, _ = _cross_entropy(logits, labels, None, ignore_index, False, False)
    _cross_entropy_backward_(logits, labels, stats, scale, ignore_index)
    return loss


def check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise ValueError for a label outside of the vocabulary, on the CPU only: elsewhere the host would wait."""
    if labels.is_cpu:
        invalid = labels[(labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))]
        if invalid.numel():
            raise ValueError(f"labels contain {invalid[0].item()}, expected numbers between 0 and {vocabulary - 1}, or "
                             f"ignore_index={ignore_index}")


@torch.library.custom_op("dualpipe::cross_entropy", mutates_args=())
def _cross_entropy(
    logits: Tensor, labels: Tensor, denominator: Tensor | None, ignore_index: int, mean: bool, in_place: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, stats (T, 2), divisor of the sum). Only the backward uses `in_place`."""
    dtype = compute_dtype(logits)
    losses = logits.new_empty(logits.shape[:1], dtype=dtype)
    stats = logits.new_empty((logits.shape[0], 2), dtype=dtype)
    if not use_triton(logits):
        check_labels(labels, logits.shape[1], ignore_index)
        reference_losses, reference_stats = cross_entropy_reference(logits, labels, ignore_index)
        losses.copy_(reference_losses)
        stats.copy_(reference_stats)
    elif losses.numel():
        _launch_forward(logits, labels, ignore_index, losses, stats)
    divisor = torch.ones((), dtype=dtype, device=logits.device)
    if denominator is not None:
        divisor = denominator.reshape(()).to(dtype)
        divisor = divisor.where(divisor != 0, 1)
    elif mean:
        divisor = (labels != ignore_index).sum().clamp(min=1).to(dtype)
    return losses.sum() / divisor, stats, divisor


@_cross_entropy.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(shape, dtype=compute_dtype(logits)) for shape in ((), (logits.shape[0], 2), ()))


@torch.library.custom_op("dualpipe::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(logits: Tensor, labels: Tensor, stats: Tensor, scale: Tensor, ignore_index: int) -> Tensor:
    """Return the gradient of the logits. `scale` is the gradient of the loss, divided by the forward's divisor."""
    grad = logits.new_empty(logits.shape)
    _write_gradient(logits, labels, stats, scale, ignore_index, grad)
    return grad


_cross_entropy_backward.register_fake(lambda logits, *_: logits.new_empty(logits.shape))


@torch.library.custom_op("dualpipe::cross_entropy_backward_", mutates_args=("logits",))
def _cross_entropy_backward_(logits: Tensor, labels: Tensor, stats: Tensor, scale: Tensor, ignore_index: int) -> None:
    """Overwrite the logits with their gradient; see `_cross_entropy_backward`."""
    _write_gradient(logits, labels, stats, scale, ignore_index, logits)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the logits, the labels, the statistics and the divisor."""
    logits, labels, _, ctx.ignore_index, _, ctx.in_place = inputs
    ctx.save_for_backward(logits, labels, *output[1:])  # stats and divisor


def _backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of the logits; with `in_place`, in their memory."""
    logits, labels, stats, divisor = ctx.saved_tensors
    operands = (logits, labels, stats, d_loss / divisor, ctx.ignore_index)
    if ctx.in_place:
        if torch.is_grad_enabled():  # create_graph=True: a second backward needs the logits, which are overwritten
            raise _double_backward_error()
        _cross_entropy_backward_(*operands)
        return logits, None, None, None, None, None
    return _cross_entropy_backward(*operands), None, None, None, None, None


def _double_backward_error() -> NotImplementedError:
    return double_backward_error("cross_entropy", "torch.nn.functional.cross_entropy")


def _raise_on_double_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    """Raise NotImplementedError: the backward has no backward."""
    raise _double_backward_error()


_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
_cross_entropy_backward.register_autograd(_raise_on_double_backward)

# ---------------------------------------------------------------------------------------------------------- reference


def cross_entropy_reference(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Compute in PyTorch the losses (T,) and the statistics (top, total) (T, 2); 0 and (0, 1) in ignored rows."""
    is_counted = labels != ignore_index
    x = logits.to(compute_dtype(logits)).where(is_counted.unsqueeze(1), 0)
    top = x.amax(1, keepdim=True)
    top = top.where(top != -torch.inf, 0)
    total = (x - top).exp_().sum(1, keepdim=True)
    label_logits = x.gather(1, labels.where(is_counted, 0).long().unsqueeze(1))
    losses = (top - label_logits + total.log()).squeeze(1).where(is_counted, 0)
    return losses, torch.cat((top, total), 1)


def cross_entropy_backward_reference(
    logits: Tensor, labels: Tensor, stats: Tensor, scale: Tensor, ignore_index: int
) -> Tensor:
    """Compute in PyTorch the gradient of the logits, in the compute dtype of the kernel."""
    is_counted = (labels != ignore_index).unsqueeze(1)
    top, total = stats.split(1, dim=1)
    grad = (logits.to(stats.dtype) - top).exp_().div_(total)
    grad.scatter_add_(1, labels.unsqueeze(1).where(is_counted, 0).long(), -is_counted.to(grad.dtype))
    return grad.mul_(scale).where(is_counted, 0)


def _write_gradient_reference(
    logits: Tensor, labels: Tensor, scale: Tensor, ignore_index: int, z_loss: float
) -> Tensor:
    """Compute `cross_entropy_with_grad_` in PyTorch, in place: on float32 logits without a tensor of their size."""
    is_counted = labels != ignore_index
    rows = labels.where(is_counted, 0).long().unsqueeze(1)
    x = logits.to(compute_dtype(logits))
    chosen = x.gather(1, rows)
    top = x.amax(1, keepdim=True)
    top = top.where(top != -torch.inf, 0)
    total = x.sub_(top).exp_().sum(1, keepdim=True)
    lse = top + total.log()
    losses = top - chosen + total.log()
    softmax_scale = scale * is_counted.unsqueeze(1)
    label_grad = -softmax_scale
    if z_loss:
        losses = losses + z_loss * lse.square()
        softmax_scale = softmax_scale * (1 + 2 * z_loss * lse)
    x.mul_(softmax_scale / total).scatter_add_(1, rows, label_grad)
    if not logits.is_cpu or not is_counted.all():  # rows that are ignored may hold infinities
        x.masked_fill_(~is_counted.unsqueeze(1), 0)
    if x is not logits:
        logits.copy_(x)
    return losses.squeeze(1).where(is_counted, 0).sum()
