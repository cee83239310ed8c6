"""Auxiliary losses that balance the loads of experts, and counts of these loads.

**Losses.** A router can have several of the `LOSSES`. A stage in the middle of a pipeline has no loss to add them to.
So the router computes them in its forward, and `_AddLosses`, an identity on the routing weights, starts their backward
when the gradient of these weights passes through it (like the "auxiliary loss scaler" of DeepSeek and Megatron).

Each loss is divided by the number of micro-batches, like the main loss, and FSDP2 averages over ranks. With
micro-batches of equal size, and equally many on every rank, the gradient does not depend on the split of the batch: the
z-loss is a mean over tokens, the balance loss of level "sequence" a mean over sequences, and that of level "global" is
linear in the probabilities, because the loads are given. Level "microbatch" depends on the split by definition.

**Loss scale.** A loss scale for float16 multiplies the main loss in the criterion, which nobody else sees, so that the
caller passes it to the routers too. In float16, losses without a given scale are refused.

**Level "global".** The loads of a step are known only after its last forward, when a pipeline has run most backwards.
So the caller passes the loads of the previous step, which take one all-reduce per step, off the critical path. In the
first step they are zeros, and so is the loss. Qiu et al. (arXiv:2501.11873), who propose the loss, all-reduce the loads
of every micro-batch instead and sum those of the step so far; the result depends on the split.

**Loads** are counted in the backward, which runs once per micro-batch also if its forward is recomputed, and never in
an evaluation.

Dimension letters: T tokens, E experts, K experts per token, N parts that a balance loss is computed on (sequences, or
1), M assignments of tokens to experts in a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe.runtime.recorder import Recorder

Level = Literal["microbatch", "sequence", "global"]


def balance_loss(probs_TE: Tensor, load_NE: Tensor) -> Tensor:
    """Compute the balance loss E * sum_e f_e P_e, the mean over N equal parts of the tokens.

    f_e is an expert's share of the load, P_e its mean probability. The loss is 1 for even loads. If `load_NE` has one
    row, it may also count tokens that are not in `probs_TE`.

    Source: Switch Transformer (arXiv:2101.03961, equation 4) with f of DeepSeek-V3 (arXiv:2412.19437, equation 18),
    sum_e f_e = 1; transformers' `load_balancing_loss_func` has sum_e f_e = K, and so K times this loss.
    """
    return _balance_loss(probs_TE, balance_factors(load_NE, probs_TE.dtype))


def balance_factors(load_NE: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors of the mean probabilities in the balance loss: E f_e / N, (N, E)."""
    parts, experts = load_NE.shape
    return load_NE.to(dtype) * (experts / max(parts, 1)) / load_NE.sum(-1, keepdim=True).clamp(min=1)


def _balance_loss(probs_TE: Tensor, factors_NE: Tensor) -> Tensor:
    if not probs_TE.numel():
        return probs_TE.sum()
    mean_NE = probs_TE.view(len(factors_NE), -1, probs_TE.shape[1]).mean(1)
    return (factors_NE * mean_NE).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Compute the mean square of logsumexp over tokens; keeps logits small (ST-MoE, arXiv:2202.08906, equation 5)."""
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return wide_TE.logsumexp(-1).square().sum() / max(len(logits_TE), 1)


def count_load(experts_NM: Tensor, num_experts: int) -> Tensor:
    """Count the tokens of every expert: (N, M) -> (N, E) int64. Unlike `torch.bincount`, does not wait for a GPU."""
    load_NE = experts_NM.new_zeros(len(experts_NM), num_experts)
    return load_NE.scatter_add_(1, experts_NM, torch.ones_like(experts_NM))


def make_totals(num_experts: int, device: torch.device | str | None = None) -> Tensor:
    """Allocate zeroed `RouterStep.totals` for the loads and losses of a router, (E + number of `LOSSES`,)."""
    return torch.zeros(num_experts + len(LOSSES), dtype=torch.float64, device=device)


def load_of(totals: Tensor) -> Tensor:
    """Return the loads (E,) in a router's totals, sharing memory."""
    return totals[: len(totals) - len(LOSSES)]


def losses_of(totals: Tensor) -> Tensor:
    """Return the losses in a router's totals, in the order of `LOSSES`, sharing memory."""
    return totals[len(totals) - len(LOSSES) :]


def max_over_mean(load_E: Tensor) -> Tensor:
    """Return the largest load divided by the mean load, a scalar.

    It is 1 for even loads, E / K if one expert gets every token, and 0 if there are no counts.
    """
    return load_E.max() / load_E.mean().clamp(min=1 / len(load_E))


class Routed(NamedTuple):
    """Routed micro-batch, the input of the losses."""

    logits_TE: Tensor
    experts_TK: Tensor
    probs: Callable[[], Tensor]  # computes the probabilities (T, E)
    sequences: int | None  # number of sequences in the tokens; None: unknown


@dataclass(frozen=True)
class RouterStep:
    """Losses and load counts of a router in one step.

    num_microbatches: number of micro-batches on a rank, the divisor of the losses.
    balance, z: coefficients of the balance loss and the z-loss.
    level: part of the batch that the balance loss is computed over.
    load_E: for level "global", the loads of the global batch, summed over all ranks. They are those of the previous
        step (zeros in the first step), or of this step if they are known.
    weight: factor of the losses, which are means over this rank's tokens. If ranks share sequences unevenly: the
        number of tokens of this rank, divided by the mean over these ranks.
    sequence_group: ranks that share every sequence, whose tokens count together for a balance loss on a sequence or a
        micro-batch; None: this rank has whole sequences.
    loss_scale: factor by which the criterion scales the main loss for float16, and which scales the gradients of the
        losses too; 1 if it scales nothing. None means 1 and is refused in float16.
    totals: counts, from `make_totals`: the number of tokens of every expert, then the losses without coefficients in
        the order of `LOSSES`, as means over micro-batches. One tensor, so that one addition counts a micro-batch;
        counts are exact to 2^53.
    """

    num_microbatches: int = 1
    balance: float = 0.0
    level: Level = "sequence"
    load_E: Tensor | None = None
    z: float = 0.0
    weight: float = 1.0
    sequence_group: dist.ProcessGroup | None = None
    totals: Tensor | None = None
    loss_scale: float | Tensor | None = None
    _factors: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """`balance_factors` of `load_E` by dtype, the same for all micro-batches."""

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1; got {self.num_microbatches}")
        if self.level not in ("microbatch", "sequence", "global"):
            raise ValueError(f"level must be 'microbatch', 'sequence' or 'global'; got {self.level!r}")
        if self.balance and self.level == "global" and self.load_E is None:
            raise ValueError("level 'global' needs load_E, the loads of the last global batch; "
                             "give torch.zeros(num_experts) in the first step")
        scale = self.loss_scale
        if isinstance(scale, Tensor):
            if scale.dim() or scale.requires_grad:
                raise ValueError(f"loss_scale must be a number or a scalar without a gradient; got {scale}")
        elif scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
            raise ValueError(f"loss_scale must be above 0 and finite; got {scale}")

    @property
    def coefficients(self) -> dict[str, float]:
        """Return the coefficients that are not zero, by the names of their losses in `LOSSES`."""
        coefficients = {name: getattr(self, loss.coefficient) for name, loss in LOSSES.items()}
        return {name: coefficient for name, coefficient in coefficients.items() if coefficient}

    def require_loss_scale(self, x: Tensor) -> None:
        """Raise ValueError if losses are computed from `x` in float16 without a `loss_scale`."""
        if self.loss_scale is not None or not torch.is_grad_enabled():
            return
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if dtype == torch.float16 and self.coefficients:
            raise ValueError("got no loss_scale for router losses in float16, which need the scale of the main loss; "
                             "pass it to RouterSet.step(loss_scale=...), or 1 if the criterion scales nothing")

    def add_losses(
        self, weights_TK: Tensor, experts_TK: Tensor, logits_TE: Tensor, probs: Callable[[], Tensor],
        sequences: int | None,
    ) -> Tensor:
        """Return `weights_TK` with the losses attached.

        The backward of the result starts the backward of the losses, and counts loads and losses in `totals`.

        Args:
            probs: computes the probabilities (T, E).
            sequences: number of sequences in the tokens; None: unknown.

        Raises:
            ValueError: the level needs the number of sequences, or the loads have another shape.
        """
        if not (torch.is_grad_enabled() and weights_TK.requires_grad):
            return weights_TK
        routed = Routed(logits_TE, experts_TK, probs, sequences)
        coefficients = self.coefficients
        share = self.weight / self.num_microbatches
        loss_scale = 1.0 if self.loss_scale is None else self.loss_scale
        if self.sequence_group is not None and "balance_loss" in coefficients and self.level != "global":
            load_NE = count_load(self._experts_of_parts(routed), logits_TE.shape[1])
            load_sum = _LoadSum(load_NE, self.sequence_group)
            balance = coefficients.pop("balance_loss") * loss_scale
            weights_TK = _AddSharedLoss.apply(weights_TK, probs(), load_sum, self.totals, share, balance)
        # Without losses, a step costs only the two launches that count the loads.
        values = {name: LOSSES[name].compute(self, routed) for name in coefficients}
        if not values and self.totals is None:
            return weights_TK
        terms = [value * (coefficients[name] * share * loss_scale) for name, value in values.items()]
        loss = reduce(torch.add, terms) if terms else None
        loss_values = {name: value.detach() for name, value in values.items()}
        return _AddLosses.apply(weights_TK, loss, self.totals, experts_TK, loss_values, share)

    def _experts_of_parts(self, routed: Routed) -> Tensor:
        """Return the chosen experts (N, M) of the N parts that the balance loss is computed on."""
        experts_TK, sequences = routed.experts_TK, routed.sequences
        if self.level != "sequence":
            return experts_TK.reshape(1, -1)
        if sequences is None:
            raise ValueError("level 'sequence' needs x as (B, S, H), to know the sequences; got (T, H) with "
                             f"T = {len(experts_TK)}")
        return experts_TK.reshape(sequences, experts_TK.numel() // max(sequences, 1))

    def _balance(self, routed: Routed) -> Tensor:
        """Compute the balance loss over the parts of `level`."""
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
    """Loss of a router: the field of `RouterStep` with its coefficient, and its value for a micro-batch."""

    coefficient: str
    compute: Callable[[RouterStep, Routed], Tensor]


LOSSES: dict[str, RouterLoss] = {
    "balance_loss": RouterLoss("balance", RouterStep._balance),
    "z_loss": RouterLoss("z", lambda step, routed: z_loss(routed.logits_TE)),
}
"""Losses by the names of their metrics, in the order of `RouterStep.totals`."""


class _AddLosses(torch.autograd.Function):
    """Identity on the weights; its backward gives the loss a gradient of 1, and counts in `totals`."""

    @staticmethod
    def forward(
        ctx: Any, weights_TK: Tensor, loss: Tensor | None, totals: Tensor | None, experts_TK: Tensor,
        loss_values: dict[str, Tensor], share: float,
    ) -> Tensor:
        ctx.totals = totals
        ctx.experts_TK = experts_TK
        ctx.loss_values = loss_values
        ctx.share = share
        ctx.seed = None if loss is None else loss.new_ones(())
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, dweights_TK: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.totals is not None:
            chosen_M = ctx.experts_TK.flatten()
            ctx.totals.scatter_add_(0, chosen_M, ctx.totals.new_ones(()).expand(chosen_M.shape))
            for name, value in ctx.loss_values.items():
                _count_loss(ctx.totals, name, value, ctx.share)
        return dweights_TK, ctx.seed, None, None, None, None


class _LoadSum:
    """Sum of the loads of a micro-batch over the ranks that share its sequences, from the forward to the backward.

    The loss on a sequence is linear in the probabilities of its tokens, given the loads of the whole sequence. Only the
    backward needs these, so the sum takes its time while the experts and the layers above compute. All ranks run the
    same actions in the same order, so that their sums match, also beside other communications of the group.

    load_NE: counts of this rank, replaced by their sum.
    """

    def __init__(self, load_NE: Tensor, group: dist.ProcessGroup) -> None:
        self.load_NE = load_NE
        self._group = group
        self._recorder = Recorder.current()  # the backward may run on a thread of autograd
        self._work = dist.all_reduce(load_NE, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the sum. The current stream waits; on the CPU, the host."""
        recorder = self._recorder
        with recorder.collective("routers", "the loads of a sequence", recorder.members(self._group)):
            self._work.wait()
        return self.load_NE


class _AddSharedLoss(torch.autograd.Function):
    """Identity on the weights; its backward adds the balance loss of N parts whose tokens are split over ranks.

    The gradient of `probs_TE` depends on the loads of all these ranks; the loss is counted in `totals`.
    """

    @staticmethod
    def forward(
        ctx: Any, weights_TK: Tensor, probs_TE: Tensor, load_sum: _LoadSum, totals: Tensor | None, share: float,
        balance: float | Tensor,
    ) -> Tensor:
        parts = len(load_sum.load_NE)
        ctx.mean_NE = probs_TE.unflatten(0, (parts, -1)).mean(1)
        ctx.load_sum = load_sum
        ctx.totals = totals
        ctx.length = len(probs_TE) // max(parts, 1)
        ctx.share = share
        ctx.balance = balance
        return weights_TK.view_as(weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_TK: Tensor) -> tuple[Tensor | None, ...]:
        factors_NE = balance_factors(ctx.load_sum.wait(), ctx.mean_NE.dtype)
        if ctx.totals is not None:
            _count_loss(ctx.totals, "balance_loss", (factors_NE * ctx.mean_NE).sum(), ctx.share)
        scale = ctx.balance * ctx.share / max(ctx.length, 1)
        dprobs_TE = (factors_NE * scale).repeat_interleave(ctx.length, 0)
        return dweights_TK, dprobs_TE, None, None, None, None


def _count_loss(totals: Tensor, name: str, value: Tensor, share: float) -> None:
    losses_of(totals)[list(LOSSES).index(name)].add_(value, alpha=share)
