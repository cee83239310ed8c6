"""Router: chooses the experts of every token and their weights, and balances the loads of the experts.

    router = Router(2048, 128, 8, scoring=Scoring(norm_topk_prob=True))                  # Qwen3-MoE
    router = Router(7168, 256, 8, scoring=Scoring("sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5),
                    groups=ExpertGroups(8, 4, 2), correction_bias=True, wide_logits=True)  # DeepSeek-V3
    router = Router(2880, 128, 4, scoring=Scoring("softmax_topk"), bias=True)            # gpt-oss
    weights_TK, experts_TK = router(x_BSH)

See `losses` and `router_set` for its losses and load counts in a training step. The host never waits for the device.

Dimension letters: B batch, S sequence, T tokens (B * S), H hidden, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe.kernels.top_k import softmax_top_k, softmax_top_k_backward
from dualpipe.nn.deferral import needs_plain_autograd
from dualpipe.nn.linear import Linear
from dualpipe.nn.routing.losses import RouterStep

Score = Literal["softmax", "sigmoid", "softmax_topk"]
Choice = Callable[[Tensor, int], Tensor]
"""Override of the choice: (the router's experts_TK, E) -> experts_TK to use."""


@dataclass(frozen=True)
class Scoring:
    """Conversion of logits to the weights of the chosen experts.

    score: "softmax" or "sigmoid" of the logits, or "softmax_topk", a softmax over the K chosen logits (gpt-oss).
    norm_topk_prob: normalize the weights of a token to a sum of 1.
    routed_scaling_factor: factor of the weights, applied last.
    """

    score: Score = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True)
class ExpertGroups:
    """Restriction of every token to some groups of experts.

    n_group: number of groups G.
    topk_group: number of groups that a token's experts are chosen from, those with the best group scores.
    group_best: number of experts whose scores are summed to a group score: the best 1 in DeepSeek-V2
        (arXiv:2405.04434), the best 2 in DeepSeek-V3 (arXiv:2412.19437).
    """

    n_group: int = 1
    topk_group: int = 1
    group_best: int = 1


class Router(Linear):
    """Linear layer that chooses K of E experts for each token, and their weights.

    Args:
        scoring: conversion of logits to weights.
        groups: restriction to groups of experts.
        correction_bias: add a float32 buffer `e_score_correction_bias` (E,) to the scores for the choice, but not for
            the weights; it follows the loads, see `update_bias`.
        wide_logits: compute logits, and return weights, in at least float32 (DeepSeek) instead of the dtype of x.

    Attributes:
        step: losses and load counts of a training step, set by the caller; None, the initial value: there are none.
        choice: override of the chosen experts, set by the caller; None, the initial value: there is none.

    Raises:
        ValueError: the sizes do not match.
    """

    keep_fp32 = ("e_score_correction_bias",)  # a dtype plan does not cast it
    quantizable = False  # an error in a logit sends tokens to other experts
    e_score_correction_bias: Tensor | None

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, *, bias: bool = False, scoring: Scoring = Scoring(),
        groups: ExpertGroups = ExpertGroups(), correction_bias: bool = False, wide_logits: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        score = scoring.score
        n_group = groups.n_group
        topk_group = groups.topk_group
        group_best = groups.group_best
        if score not in ("softmax", "sigmoid", "softmax_topk"):
            raise ValueError(f"score must be 'softmax', 'sigmoid' or 'softmax_topk'; got {score!r}")
        if n_group < 1 or num_experts % n_group:
            raise ValueError(f"n_group must divide the number of experts ({num_experts}); got {n_group}")
        if not 1 <= topk_group <= n_group:
            raise ValueError(f"topk_group must be 1 to n_group ({n_group}); got {topk_group}")
        size = num_experts // n_group
        if not 1 <= group_best <= size:
            raise ValueError(f"group_best must be 1 to the size of a group ({size}); got {group_best}")
        if not 1 <= top_k <= topk_group * size:
            raise ValueError(f"top_k must be 1 to the {topk_group * size} experts of topk_group ({topk_group}) groups "
                             f"of {size}; got {top_k}")
        super().__init__(hidden_size, num_experts, bias, device, dtype)
        self.top_k = top_k
        self.score: Score = score
        self.norm_topk_prob = scoring.norm_topk_prob
        self.routed_scaling_factor = scoring.routed_scaling_factor
        self.wide_logits = wide_logits
        self.n_group = n_group
        self.topk_group = topk_group
        self.group_best = group_best
        zeros_E = torch.zeros(num_experts, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("e_score_correction_bias", zeros_E)
        self.step: RouterStep | None = None
        self.choice: Choice | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Route tokens: (T, H), or (B, S, H) with one sequence per row -> weights (T, K), experts (T, K) int64.

        Scores are computed in `promote_types(dtype, float32)`; weights have the dtype of the logits. With the score
        "softmax" and neither groups nor correction bias, the backward of the weights cannot be differentiated again.
        """
        x_TH = x.flatten(0, -2)
        wide = torch.promote_types(x_TH.dtype, torch.float32) if self.wide_logits else None
        logits_TE = super().forward(x_TH, wide)
        if self.score == "softmax" and self.choice is None and self.topk_group == self.n_group and (
            self.e_score_correction_bias is None and not needs_plain_autograd()):
            weights_TK, experts_TK, scores_TE = _TopK.apply(
                logits_TE, self.top_k, self.norm_topk_prob, self.routed_scaling_factor
            )
        else:
            weights_TK, experts_TK, scores_TE = self._weigh(logits_TE)
        if self.step is not None:
            self.step.require_loss_scale(x)
            sequences = len(x) if x.dim() == 3 else None
            probs = partial(self._probs, scores_TE)
            weights_TK = self.step.add_losses(weights_TK, experts_TK, logits_TE, probs, sequences)
        return weights_TK, experts_TK

    def _weigh(self, logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (weights_TK, experts_TK, scores_TE), for every kind of scoring and choice."""
        scores_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        if self.score != "softmax_topk":  # that softmax is over the chosen logits, below
            scores_TE = scores_TE.softmax(-1) if self.score == "softmax" else scores_TE.sigmoid()
        experts_TK = self._choose(scores_TE.detach())
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.score == "softmax_topk":
            weights_TK = weights_TK.softmax(-1)
        if self.norm_topk_prob:  # 1e-20 matters only if all K scores underflow
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if self.routed_scaling_factor != 1:
            weights_TK = weights_TK * self.routed_scaling_factor
        return weights_TK.to(logits_TE.dtype), experts_TK, scores_TE

    @torch.no_grad()
    def update_bias(self, load_E: Tensor, rate: float) -> None:
        """Raise the bias of experts below the mean load by `rate`, and lower that of experts above it.

        Call it once per step, with the loads of the global batch. Method: Wang et al. (arXiv:2408.15664); DeepSeek-V3
        uses a rate of 0.001.

        load_E: number of tokens of every expert (E,).

        Raises:
            ValueError: the router has no bias, or its shape or dtype does not fit.
        """
        bias_E = self.e_score_correction_bias
        if bias_E is None:
            raise ValueError("the router has no bias to update; build it with correction_bias=True")
        if load_E.shape != bias_E.shape:
            raise ValueError(f"load_E has the shape {tuple(load_E.shape)}, expected {tuple(bias_E.shape)}, one "
                             "per expert")
        if bias_E.dtype.itemsize < 4:
            raise ValueError(f"e_score_correction_bias is {bias_E.dtype}, which loses updates of {rate}; keep it in "
                             "float32 when casting the model, as a dtype plan does")
        bias_E.add_((load_E.sum() - load_E * len(load_E)).sign(), alpha=rate)  # exact: no mean is rounded

    def extra_repr(self) -> str:
        groups = f", groups={self.topk_group}/{self.n_group}" if self.n_group > 1 else ""
        return f"{super().extra_repr()}, top_k={self.top_k}, score={self.score}{groups}"

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the experts (T, K) of every token."""
        if self.e_score_correction_bias is not None:
            scores_TE = scores_TE + self.e_score_correction_bias
        if self.topk_group < self.n_group:
            size = self.out_features // self.n_group
            best_TG = scores_TE.unflatten(-1, (self.n_group, size)).topk(self.group_best, dim=-1).values.sum(-1)
            chosen = best_TG.topk(self.topk_group, dim=-1).indices
            outside_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, chosen, False)
            scores_TE = scores_TE.masked_fill(outside_TG.repeat_interleave(size, dim=1), -torch.inf)
        best_TK = scores_TE.topk(self.top_k, dim=-1).indices
        if self.choice is None:
            return best_TK
        experts_TK = self.choice(best_TK, self.out_features)
        if experts_TK.shape != best_TK.shape:
            raise ValueError(f"the router's choice returned experts of shape {tuple(experts_TK.shape)}, expected "
                             f"{tuple(best_TK.shape)}, K experts per token; a replay needs the micro-batches of "
                             "its recording")
        return experts_TK

    def _probs(self, scores_TE: Tensor) -> Tensor:
        """Normalize scores to probabilities (sigmoids: DeepSeek-V3, arXiv:2412.19437, equation 19)."""
        if self.score == "softmax_topk":
            return scores_TE.softmax(-1)
        if self.score == "sigmoid":
            return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
        return scores_TE


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, top_k: int, norm: bool, factor: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights_TK, experts_TK, probs_TE = softmax_top_k(logits_TE, top_k, norm, factor)
        ctx.mark_non_differentiable(experts_TK)
        ctx.set_materialize_grads(False)  # the probabilities have none without a balance loss
        ctx.form = norm, factor
        ctx.save_for_backward(weights_TK, experts_TK, probs_TE)
        return weights_TK, experts_TK, probs_TE

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_weights_TK: Tensor | None, _: None, d_probs_TE: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        weights_TK, experts_TK, probs_TE = ctx.saved_tensors
        if d_weights_TK is None:
            d_weights_TK = torch.zeros_like(weights_TK)
        return softmax_top_k_backward(d_weights_TK, d_probs_TE, experts_TK, probs_TE, *ctx.form), None, None, None
