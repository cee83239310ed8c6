"""Losses that keep the loads of experts even, added where their operands are; and counts of those loads.

**Losses** are those of `LOSSES`, any number at once. A stage in the middle of a pipeline has no loss to add to: the
terms are computed where their operands are, and `_AddLosses` starts their backward when that of the routing weights
passes by (as DeepSeek's and Megatron's "auxiliary loss scaler" does). Each term is divided by the number of
micro-batches, as the main loss is, and FSDP2 averages over ranks. With micro-batches of one size, and ranks that have
equally many, these add up to the same gradient however the batch is cut: the z-loss, a mean over tokens; the balance
loss of level "sequence", a mean over sequences; that of level "global", which is linear in the probabilities once the
loads are known. Those of a step are complete only after its last forward, when a pipeline has run most backwards. Hence
the caller gives those of the step before: one all-reduce a step and none on the path (zeros in the first step: no
loss). Qiu et al. (arXiv:2501.11873), who propose the loss, all-reduce the loads of every micro-batch and add up those
of the step so far, which depends on the cut, as level "microbatch" does by definition.

**Loads** are counted in the backward, which runs once for each micro-batch also where its forward is run twice
(recomputation) and not at all in an evaluation.

Dimension letters: T tokens, E experts, K experts per token, N parts that a balance loss is computed on (sequences, or
1), M choices of a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Level = Literal["microbatch", "sequence", "global"]


def balance_loss(probs_TE: Tensor, load_NE: Tensor) -> Tensor:
    """E * sum_e f_e P_e, the mean over N equal parts of the tokens: f_e an expert's share of the load, P_e its mean
    probability.

    It is 1 where loads are even. With one row of `load_NE`, f may be of more tokens than these. Switch Transformer
    (arXiv:2101.03961, equation 4) with f as in DeepSeek-V3 (arXiv:2412.19437, equation 18), sum_e f_e = 1;
    transformers' `load_balancing_loss_func` has sum_e f_e = K, and so K times this loss.
    """
    return _balance_loss(probs_TE, balance_factors(load_NE, probs_TE.dtype))


def balance_factors(load_NE: Tensor, dtype: torch.dtype) -> Tensor:
    """E f_e / N (N, E): what the mean probabilities are multiplied by in the balance loss."""
    parts, experts = load_NE.shape
    return load_NE.to(dtype) * (experts / max(parts, 1)) / load_NE.sum(-1, keepdim=True).clamp(min=1)


def _balance_loss(probs_TE: Tensor, factors_NE: Tensor) -> Tensor:
    if not probs_TE.numel():
        return probs_TE.sum()
    mean_NE = probs_TE.view(len(factors_NE), -1, probs_TE.shape[1]).mean(1)
    return (factors_NE * mean_NE).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """The mean square of logsumexp over the tokens, which keeps logits small (ST-MoE, arXiv:2202.08906, equation 5)."""
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return wide_TE.logsumexp(-1).square().sum() / max(len(logits_TE), 1)


def count_load(experts_NM: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen: (N, M) -> (N, E) int64. Unlike `torch.bincount` it does not wait for a GPU."""
    load_NE = experts_NM.new_zeros(len(experts_NM), num_experts)
    return load_NE.scatter_add_(1, experts_NM, torch.ones_like(experts_NM))


def make_totals(num_experts: int, device: torch.device | str | None = None) -> Tensor:
    """Zeros to count a router's loads and losses in, (E + number of `LOSSES`,): the `totals` of `RouterStep`."""
    return torch.zeros(num_experts + len(LOSSES), dtype=torch.float64, device=device)


def load_of(totals: Tensor) -> Tensor:
    """The loads (E,) among a router's totals, which share its memory."""
    return totals[: len(totals) - len(LOSSES)]


def losses_of(totals: Tensor) -> Tensor:
    """The losses among a router's totals, in the order of `LOSSES`, sharing its memory."""
    return totals[len(totals) - len(LOSSES) :]


def max_over_mean(load_E: Tensor) -> Tensor:
    """The largest load over the mean one, a scalar: 1 is even, E all to one. 0 where nothing was counted."""
    return load_E.max() / load_E.mean().clamp(min=1 / len(load_E))


class Routed(NamedTuple):
    """A routed micro-batch: what losses are computed from."""

    logits_TE: Tensor
    experts_TK: Tensor
    probs: Callable[[], Tensor]  # computes the probabilities (T, E)
    sequences: int | None  # number of sequences in the tokens; None: unknown


@dataclass(frozen=True)
class RouterStep:
    """What a router does in one step besides routing.

    num_microbatches: the number of micro-batches on a rank, by which losses are divided.
    balance, z: coefficients of the balance loss, which is computed over what `level` says, and of the z-loss.
    load_E: for level "global", the loads of the global batch, all ranks' together: of the step before (zeros in the
        first), or of this one where they are known.
    weight: of means over the tokens here, where ranks that share sequences have different numbers of them: how many
        those here are, relative to the mean over these ranks.
    totals: where to count, of `make_totals`: how many tokens each expert got, then the losses without their
        coefficients, in the order of `LOSSES`, means over the micro-batches. One tensor, so that one addition counts a
        micro-batch; counts are exact to 2^53.
    """

    num_microbatches: int = 1
    balance: float = 0.0
    level: Level = "sequence"
    load_E: Tensor | None = None
    z: float = 0.0
    weight: float = 1.0
    totals: Tensor | None = None
    _factors: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """`balance_factors` of `load_E`, which are the same for all micro-batches"""

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1; got {self.num_microbatches}")
        if self.level not in ("microbatch", "sequence", "global"):
            raise ValueError(f"level must be 'microbatch', 'sequence' or 'global'; got {self.level!r}")
        if self.balance and self.level == "global" and self.load_E is None:
            raise ValueError("level 'global' needs load_E, the loads of the last global batch; "
                             "give torch.zeros(num_experts) in the first step")

    @property
    def coefficients(self) -> dict[str, float]:
        """The coefficients of the losses that are wanted, by their names in `LOSSES`."""
        found = {name: getattr(self, loss.coefficient) for name, loss in LOSSES.items()}
        return {name: coefficient for name, coefficient in found.items() if coefficient}

    def add_losses(
        self, weights_TK: Tensor, experts_TK: Tensor, logits_TE: Tensor, probs: Callable[[], Tensor],
        sequences: int | None, whole_load: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """`weights_TK`, whose backward starts that of the losses and counts. probs: gives the probabilities (T, E);
        sequences: in the tokens, None where nobody knows. whole_load: gives in the backward, where other ranks have
        tokens of the same sequences, the loads of all of these (N, E). ValueError for a level or loads that do not
        fit."""
        if not (torch.is_grad_enabled() and weights_TK.requires_grad):
            return weights_TK
        routed = Routed(logits_TE, experts_TK, probs, sequences)
        coefficients = self.coefficients
        share = self.weight / self.num_microbatches
        if whole_load is not None and "balance_loss" in coefficients and self.level != "global":
            parts = len(self._experts_of_parts(routed))
            balance = coefficients.pop("balance_loss")
            weights_TK = _AddSharedLoss.apply(weights_TK, probs(), whole_load, self.totals, parts, share, balance)
        # Launches for losses that there are: without any, the two that count the loads are all that a step costs.
        values = {name: LOSSES[name].compute(self, routed) for name in coefficients}
        if not values and self.totals is None:
            return weights_TK
        terms = [value * (coefficients[name] * share) for name, value in values.items()]
        loss = reduce(torch.add, terms) if terms else None
        found = {name: value.detach() for name, value in values.items()}
        return _AddLosses.apply(weights_TK, loss, self.totals, experts_TK, found, share)

    def _experts_of_parts(self, routed: Routed) -> Tensor:
        """The choices (N, M) of the parts that the balance loss is computed on."""
        experts_TK, sequences = routed.experts_TK, routed.sequences
        if self.level != "sequence":
            return experts_TK.reshape(1, -1)
        if sequences is None:
            raise ValueError("level 'sequence' needs x as (B, S, H), to know the sequences; got (T, H) with "
                             f"T = {len(experts_TK)}")
        return experts_TK.reshape(sequences, experts_TK.numel() // max(sequences, 1))

    def _balance(self, routed: Routed) -> Tensor:
        """The balance loss on what `level` says."""
        experts_NM, probs_TE = self._experts_of_parts(routed), routed.probs()
        dtype, experts = probs_TE.dtype, probs_TE.shape[1]
        if self.level != "global" or self.load_E is None:
            return balance_loss(probs_TE, count_load(experts_NM, experts))
        if self.load_E.shape != (experts,):
            raise ValueError(f"load_E must have the shape {(experts,)}; got {tuple(self.load_E.shape)}")
        if dtype not in self._factors:
            self._factors[dtype] = balance_factors(self.load_E[None], dtype)
        return _balance_loss(probs_TE, self._factors[dtype])


class RouterLoss(NamedTuple):
    """A loss that routers add: the field of `RouterStep` that holds its coefficient, and its value of a micro-batch."""

    coefficient: str
    compute: Callable[[RouterStep, Routed], Tensor]


LOSSES: dict[str, RouterLoss] = {
    "balance_loss": RouterLoss("balance", RouterStep._balance),
    "z_loss": RouterLoss("z", lambda step, routed: z_loss(routed.logits_TE)),
}
"""The losses, by the names of their metrics, in the order of `RouterStep.totals`."""


class _AddLosses(torch.autograd.Function):
    """The weights as they are; in the backward, the loss gets a gradient of 1, and `totals` what it counts."""

    @staticmethod
    def forward(
        ctx: Any, weights_TK: Tensor, loss: Tensor | None, totals: Tensor | None, experts_TK: Tensor,
        found: dict[str, Tensor], share: float,
    ) -> Tensor:
        ctx.totals, ctx.experts_TK, ctx.found, ctx.share = totals, experts_TK, found, share
        ctx.seed = None if loss is None else loss.new_ones(())
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, dweights_TK: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.totals is not None:
            chosen_M = ctx.experts_TK.flatten()
            ctx.totals.scatter_add_(0, chosen_M, ctx.totals.new_ones(()).expand(chosen_M.shape))
            for name, value in ctx.found.items():
                _count_loss(ctx.totals, name, value, ctx.share)
        return dweights_TK, ctx.seed, None, None, None, None


class _AddSharedLoss(torch.autograd.Function):
    """The weights as they are; in the backward, the balance loss of N parts of which other ranks have tokens too:
    `probs_TE` get its gradient, which their loads make up, and `totals` what it is."""

    @staticmethod
    def forward(
        ctx: Any, weights_TK: Tensor, probs_TE: Tensor, whole_load: Callable[[], Tensor], totals: Tensor | None,
        parts: int, share: float, balance: float,
    ) -> Tensor:
        ctx.mean_NE = probs_TE.unflatten(0, (parts, -1)).mean(1)
        ctx.whole_load, ctx.totals, ctx.rest = whole_load, totals, (len(probs_TE) // max(parts, 1), share, balance)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_TK: Tensor) -> tuple[Tensor | None, ...]:
        length, share, balance = ctx.rest
        factors_NE = balance_factors(ctx.whole_load(), ctx.mean_NE.dtype)
        if ctx.totals is not None:
            _count_loss(ctx.totals, "balance_loss", (factors_NE * ctx.mean_NE).sum(), share)
        dprobs_TE = (factors_NE * (balance * share / max(length, 1))).repeat_interleave(length, 0)
        return dweights_TK, dprobs_TE, None, None, None, None, None


def _count_loss(totals: Tensor, name: str, value: Tensor, share: float) -> None:
    losses_of(totals)[list(LOSSES).index(name)].add_(value, alpha=share)
