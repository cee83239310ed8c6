"""Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467), and the loss of a language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualpipe.kernels import cross_entropy


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    The normalisation runs in `promote_types(dtype, float32)` and is rounded to the dtype of `x` before the weight is
    applied, as in transformers' Qwen3: bfloat16 gains precision, and float64 stays float64.
    """

    def __init__(
        self, size: int, eps: float = 1e-6, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> the same shape and dtype."""
        # A node of its own in every dtype: the norm's two gradients of x are added before those of other readers, so
        # that the bits do not depend on where a graph is cut.
        wide = x.view_as(x).to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


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
