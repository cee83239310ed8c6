"""The loss of a language model: mean cross-entropy over the labels that count.

Dimension letters: V words.
"""

from __future__ import annotations

from torch import Tensor

from dualpipe.kernels import cross_entropy


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
