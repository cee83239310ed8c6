"""The loss of a micro-batch, and of layers for multi-token prediction (MTP) where there are any; how good drafts are.

With D such layers there are, at each token i, besides the logits of token i + 1 those of token i + 1 + k for each depth
k = 1 ... D, from the text up to token i + k (DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 24 and 25):

    loss = L_0 + weight / D * (L_1 + ... + L_D)        L_k: sum of the cross-entropies at depth k / number of tokens

Dimension letters: B sequences, T tokens of one, C those of them that are here, D depths, V words.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.train.data.token_stream import NO_TARGET


class MicroBatchLoss:
    """A criterion whose sum over a step's micro-batches is the mean over the global batch. Ranks that share sequences
    give the number of micro-batches over their `token_weight`. mtp_weight: that of the formula above.

    denominator: of every micro-batch's sum instead of its number of targets times that of micro-batches: where batches
        have different numbers of targets. A tensor with one element.

    noted: of each micro-batch that was seen the losses of each depth (1 + D,), detached, whose sum is their mean; none
        of a model without MTP. greedy: where no gradients are wanted, of these micro-batches the likeliest token of
        each depth, and the targets, both (B, C, 1 + D).
    """

    def __init__(
        self, num_microbatches: float, mtp_weight: float = 0.0, *, denominator: Tensor | None = None
    ) -> None:
        self._num_microbatches = num_microbatches
        self._denominator = denominator
        self._mtp_weight = mtp_weight
        self.noted: list[Tensor] = []
        self.greedy: list[tuple[Tensor, Tensor]] = []

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Logits (B, C, V) and targets (B, C) of a model without MTP; else logits of each depth and (B, C, 1 + D)."""
        *logits, targets = tensors
        if self._denominator is not None:
            assert len(logits) == 1, "multi-token prediction has a denominator of its own"
            return cross_entropy_loss(logits[0], targets, ignore_index=NO_TARGET, denominator=self._denominator)
        if len(logits) == 1:
            return cross_entropy_loss(logits[0], targets) / self._num_microbatches
        # By all tokens, also those without a target: else the others would count more where there are many documents.
        of_depth = partial(cross_entropy_loss, ignore_index=NO_TARGET, denominator=targets[..., 0].numel())
        losses = torch.stack([of_depth(each, targets[..., k]) for k, each in enumerate(logits)])
        losses = losses / self._num_microbatches
        self.noted.append(losses.detach())
        if not torch.is_grad_enabled():
            self.greedy.append((torch.stack([each.argmax(-1) for each in logits], -1), targets))
        return losses[0] + self._mtp_weight * losses[1:].mean()


def tokens_ahead(targets: Tensor) -> Tensor | None:
    """What a model with MTP is told of the tokens behind each (B, C, D), below 0 where it has nothing to predict from
    them; None for targets (B, C) of a model without. targets: from `dualpipe.train.data.token_stream.shift_targets`."""
    return None if targets.dim() == 2 else targets[..., :-1].where(targets[..., 1:] >= 0, NO_TARGET)


def accepted(greedy: Tensor, targets: Tensor, main: Tensor, columns: Tensor) -> Tensor:
    """Count the drafts that a greedy verification would accept, and the tokens that they were made of, float64 (2,).

    greedy, targets: (B, C, 1 + D) of the tokens with the numbers `columns` (C,); main: the likeliest next token behind
    each of all tokens (B, T). At token i the draft of depth k, made with the text's tokens up to i + k, is accepted if
    those before it are and it is the main model's likeliest token behind token i + k. Tokens count where every depth
    has a target.
    """
    depth = greedy.shape[-1] - 1
    behind = columns.unsqueeze(-1) + torch.arange(1, 1 + depth, device=columns.device)  # (C, D)
    same = greedy[..., 1:] == main[:, behind.clamp(max=main.shape[1] - 1)]
    counts = (targets[..., -1] >= 0).double()
    return torch.stack([(same.cumprod(-1).sum(-1) * counts).sum(), counts.sum()])


def token_weight(split: SequenceSplit, length: int) -> float:
    """What a mean over this rank's tokens counts in the mean over ranks, for that to be the mean over all tokens: ranks
    that share sequences of `length` tokens may have one or two of each more than others."""
    if split.size == 1:
        return 1.0
    return split.counts(length)[split.rank] * split.size / length
