"""The loss of a micro-batch, with optional multi-token prediction (MTP), and the acceptance of its drafts.

An MTP model with D extra layers predicts at token i, besides the logits of token i + 1, those of token i + 1 + k for
each depth k = 1 ... D, from the text up to token i + k (DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 24, 25):

    loss = L_0 + weight / D * (L_1 + ... + L_D)        L_k: sum of the cross-entropies at depth k / number of tokens

If some tokens have no next token to predict, such as the last ones of documents, all L_k are divided by the number of
those that have one.

Dimension letters: B sequences, T tokens of a sequence, C of them on this context-parallel rank, D depths, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dualpipe.nn import cross_entropy_loss
from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.head import PART_BYTES, HeadRows
from dualpipe.train.data.token_stream import NO_TARGET


class MicroBatchLoss:
    """A criterion whose sum over the micro-batches of a step is the mean over the global batch.

    Args:
        num_microbatches: micro-batches in the step; context-parallel ranks divide it by their `token_weight`.
        mtp_weight: `weight` in the formula above.
        denominator: divisor of the sums over the tokens of every micro-batch, a tensor with one element. It replaces
            the number of tokens times `num_microbatches` if micro-batches have different numbers of targets.
        part_bytes: limit of the logits that exist at once, counted in float32; 0: those of all tokens do.

    Attributes:
        takes_head_rows: True if a pipeline may pass `HeadRows` in place of logits.
        part_bytes: limit of the logits of a part, which the pipeline gives these rows.
        depth_losses: for each micro-batch, the detached losses by depth (1 + D,); their sum over the step is the mean.
            Empty for a model without MTP.
        greedy: for each micro-batch that ran without gradients, the likeliest token of each depth and the targets, both
            (B, C, 1 + D). Empty for a model without MTP.
    """

    def __init__(
        self, num_microbatches: float, mtp_weight: float = 0.0, *, denominator: Tensor | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.takes_head_rows = part_bytes > 0
        self.part_bytes = part_bytes
        self._num_microbatches = num_microbatches
        self._denominator = denominator
        self._mtp_weight = mtp_weight
        self.depth_losses: list[Tensor] = []
        self.greedy: list[tuple[Tensor, Tensor]] = []

    def __call__(self, *tensors: Tensor | HeadRows) -> Tensor:
        """Return the loss of a micro-batch, a scalar.

        tensors: logits (B, C, V), or the rows of their head, and targets (B, C); with MTP the logits of each depth and
        targets (B, C, 1 + D).
        """
        *logits, targets = tensors
        assert isinstance(targets, Tensor), "the last argument is the labels"
        denominator: Tensor | int | None = self._denominator
        scale = 1.0
        if denominator is None:
            # The number of all tokens, also those without a target: otherwise tokens of micro-batches with many
            # documents would weigh more.
            denominator = logits[0].shape[:-1].numel()
            scale = self._num_microbatches
        depth_loss = partial(cross_entropy_loss, ignore_index=NO_TARGET, denominator=denominator)
        if len(logits) == 1:
            return depth_loss(logits[0], targets, upstream=1 / scale) / scale
        shares = [1.0, *[self._mtp_weight / (len(logits) - 1)] * (len(logits) - 1)]
        losses = torch.stack([
            depth_loss(logits_k, targets[..., k], upstream=share / scale)
            for k, (logits_k, share) in enumerate(zip(logits, shares))
        ]) / scale
        self.depth_losses.append(losses.detach())
        if not torch.is_grad_enabled():
            self.greedy.append((torch.stack([logits_k.argmax(-1) for logits_k in logits], -1), targets))
        return losses[0] + self._mtp_weight * losses[1:].mean()


def tokens_ahead(targets: Tensor) -> Tensor | None:
    """Return the D next tokens after each token (B, C, D), the inputs of the MTP layers; None without MTP.

    Tokens that have no target to predict are `NO_TARGET`. targets: (B, C, 1 + D), or (B, C) without MTP, from
    `dualpipe.train.data.token_stream.shift_targets`.
    """
    if targets.dim() == 2:
        return None
    return targets[..., :-1].where(targets[..., 1:] >= 0, NO_TARGET)


def count_accepted(greedy: Tensor, targets: Tensor, main: Tensor, columns: Tensor) -> Tensor:
    """Count the drafts that greedy verification accepts, and the tokens that they start from: float64 (2,).

    The draft of depth k at token i, made from the text up to token i + k, is accepted if the drafts of smaller depths
    are accepted and it equals the main model's likeliest token after token i + k. Only tokens that have a target at
    every depth count.

    Args:
        greedy: likeliest token of each depth (B, C, 1 + D).
        targets: (B, C, 1 + D).
        main: the main model's likeliest next token after each token of the whole sequences (B, T).
        columns: positions of the C tokens in their sequences (C,).
    """
    depth = greedy.shape[-1] - 1
    verified_at = columns.unsqueeze(-1) + torch.arange(1, 1 + depth, device=columns.device)  # (C, D)
    is_equal = greedy[..., 1:] == main[:, verified_at.clamp(max=main.shape[1] - 1)]
    counts = (targets[..., -1] >= 0).double()
    return torch.stack([(is_equal.cumprod(-1).sum(-1) * counts).sum(), counts.sum()])


def token_weight(split: SequenceSplit, length: int) -> float:
    """Return the weight of this rank's mean over tokens in the mean over context-parallel ranks.

    Sequences of `length` tokens may split unevenly: some ranks have one or two tokens more. With the weights, the mean
    over ranks is the mean over all tokens.
    """
    if split.size == 1:
        return 1.0
    return split.counts(length)[split.rank] * split.size / length
