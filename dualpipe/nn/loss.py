"""The loss of a language model.

Dimension letters: V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_loss(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean cross-entropy over the labels that are not `ignore_index`, a scalar in at least float32.

    `logits` (..., V), `labels` (...) the next token at each position, already shifted. Where every label is ignored the
    loss and its gradient are 0 instead of NaN, so that an empty micro-batch leaves the others alone.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"labels must have the shape {tuple(logits.shape[:-1])} of logits without the vocabulary; "
                         f"got {tuple(labels.shape)}")  # fmt: skip
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=ignore_index, reduction="sum")
    return total / (labels != ignore_index).sum().clamp(min=1)
