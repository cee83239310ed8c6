"""Loss of a language model: mean cross-entropy over the labels that are not ignored.

Dimension letters: V vocabulary size.
"""

from __future__ import annotations

from torch import Tensor

from dualpipe.kernels import cross_entropy


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, *, in_place: bool = False,
    denominator: Tensor | float | None = None,
) -> Tensor:
    """Compute the mean cross-entropy over the labels that differ from `ignore_index`.

    If every label is ignored, the loss and its gradient are 0 instead of NaN, so that an empty micro-batch does not
    affect the others.

    Args:
        logits: (..., V).
        labels: (...), the next token at each position, already shifted.
        ignore_index: the label of positions that do not count.
        in_place: write the gradient over the logits, which must not be used afterwards.
        denominator: divisor of the summed loss, such as the number of labels in all micro-batches; None: the number of
            labels that count.

    Returns a scalar in at least float32.

    Raises:
        ValueError: the shapes do not match.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels have the shape {tuple(labels.shape)}, expected {tuple(logits.shape[:-1])}: labels "
                         "must have the shape of logits without the vocabulary dimension")
    return cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, in_place=in_place, denominator=denominator
    )
