"""Loss of a language model: mean cross-entropy over the labels that are not ignored.

Dimension letters: V vocabulary size.
"""

from __future__ import annotations

from torch import Tensor

from dualpipe.kernels import cross_entropy
from dualpipe.nn.head import HeadRows, loss_divisor


def cross_entropy_loss(
    logits: Tensor | HeadRows, labels: Tensor, ignore_index: int = -100, *, in_place: bool = False,
    denominator: Tensor | float | None = None, z_loss: float = 0.0, upstream: float = 1.0,
) -> Tensor:
    """Compute the mean cross-entropy over the labels that differ from `ignore_index`.

    If every label is ignored, the loss and its gradient are 0 instead of NaN, so that an empty micro-batch does not
    affect the others.

    Args:
        logits: (..., V), or the rows of the head in place of its logits, from which the loss is computed in parts.
        labels: (...), the next token at each position, already shifted.
        ignore_index: the label of positions that do not count.
        in_place: write the gradient over the logits, which must not be used afterwards.
        denominator: divisor of the summed loss, such as the number of labels in all micro-batches; None: the number of
            labels that count.
        z_loss: coefficient of the squared logsumexp of the logits, which is added to the cross-entropy of each position
            that counts and keeps logits small (PaLM, arXiv:2204.02311, section 5).
        upstream: of `HeadRows`, the gradient that this loss will get: its factor in the result of the criterion.

    Returns a scalar in at least float32.

    Raises:
        ValueError: the shapes do not match.
    """
    if isinstance(logits, HeadRows):
        return logits.cross_entropy(labels, ignore_index, denominator=denominator, z_loss=z_loss, upstream=upstream)
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels have the shape {tuple(labels.shape)}, expected {tuple(logits.shape[:-1])}: labels "
                         "must have the shape of logits without the vocabulary dimension")
    if z_loss and in_place:
        raise ValueError("in_place=True overwrites the logits, which z_loss reads too; leave one of them out")
    loss = cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, in_place=in_place, denominator=denominator
    )
    if not z_loss:
        return loss
    is_counted = labels != ignore_index
    squares = logits.to(loss.dtype).logsumexp(-1).square().where(is_counted, 0)
    return loss + z_loss * squares.sum() / loss_divisor(is_counted, denominator, loss.dtype)
