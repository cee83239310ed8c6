"""What keeps the loads of a router's experts even: losses, and statistics of what it did.

**Losses.** A stage in the middle of a pipeline has no loss to add to. The terms are computed where their operands are,
and `_AddLosses` starts their backward when the backward of the routing weights passes by (as DeepSeek's and Megatron's
"auxiliary loss scaler" does): no output is added to a stage. Each term is divided by the number of micro-batches, as
the main loss is, and FSDP2 averages over ranks. With micro-batches of one size, and ranks that have equally many,

- z-loss, a mean over tokens, and the balance loss of level "sequence", a mean over sequences, add up to the same
  gradient however the batch is cut.
- Level "global" is linear in the probabilities once the loads are known, so with `load_E` given, it does too. The loads
  of a step are complete only after its last forward, when a pipeline has run most backwards. Hence the caller gives
  them: those of the previous step, one all-reduce a step and none on the path (zeros in the first step: no loss). For
  the loads of the very same batch, run it under `torch.no_grad()` before, with statistics that count in the forward.
  Qiu et al. (arXiv:2501.11873) propose the loss; they all-reduce the loads of every micro-batch and add up those of the
  step so far, which depends on how the batch is cut.
- Level "microbatch" depends on the cut by definition.

**Statistics** are counted by the same function in the backward, which runs once for each micro-batch also where its
forward is run twice (recomputation) and not at all in an evaluation; nor where the routing weights get no gradient.
Nothing here waits for the device.

Dimension letters: T tokens, E experts, K experts per token, N parts that a balance loss is computed on (sequences, or
1), M choices of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dualpipe.nn.deferral import WeightGradStore

Level = Literal["microbatch", "sequence", "global"]


# -- losses


def balance_loss(probs_TE: Tensor, load_NE: Tensor) -> Tensor:
    """E * sum_e f_e P_e, the mean over N equal parts of the tokens: f_e an expert's share of the load, P_e its mean
    probability.

    It is 1 where loads are even. With one row of `load_NE`, f may be of more tokens than these. Switch Transformer
    (arXiv:2101.03961, equation 4) with f as in DeepSeek-V3 (arXiv:2412.19437, equation 18), sum_e f_e = 1;
    transformers' `load_balancing_loss_func` has sum_e f_e = K, and so K times this loss.
    """
    if not probs_TE.numel():
        return probs_TE.sum()
    (parts, experts), tokens = load_NE.shape, len(probs_TE)
    share_NE = load_NE.to(probs_TE.dtype) / load_NE.sum(-1, keepdim=True).clamp(min=1)
    mean_NE = probs_TE.view(parts, tokens // parts, experts).mean(1)
    return experts * (share_NE * mean_NE).sum(-1).mean()


def z_loss(logits_TE: Tensor) -> Tensor:
    """The mean square of logsumexp over the tokens, which keeps logits small (ST-MoE, arXiv:2202.08906, equation 5)."""
    return logits_TE.logsumexp(-1).square().sum() / max(len(logits_TE), 1)


def count_load(experts_NM: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen: (N, M) -> (N, E) int64. Unlike `torch.bincount` it does not wait for a GPU."""
    load_NE = experts_NM.new_zeros(len(experts_NM), num_experts)
    return load_NE.scatter_add_(1, experts_NM, torch.ones_like(experts_NM))


# -- statistics


class RouterStatistics:
    """What one router did since `reset`: plain tensors on its device.

    when: "backward" counts what is trained on, once, whether or not it is recomputed; "forward" is for evaluation and
    other passes without gradients.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        device: torch.device | str | None = None,
        when: Literal["backward", "forward"] = "backward",
    ) -> None:
        if when not in ("backward", "forward"):
            raise ValueError(f"when must be 'backward' or 'forward'; got {when!r}")
        self.when = when
        # Loads, then the losses; one tensor, so that one addition counts a micro-batch. Counts are exact to 2^53.
        self.totals = torch.zeros(num_experts + 2, dtype=torch.float64, device=device)

    @property
    def load_E(self) -> Tensor:
        """(E,) int64, tokens that each expert was given; a copy."""
        return self.totals[:-2].long()

    @property
    def max_over_mean(self) -> Tensor:
        """The largest load over the mean one, a scalar: 1 is even, E all to one. 0 where nothing was counted."""
        load_E = self.totals[:-2]
        return load_E.max() / load_E.mean().clamp(min=1 / len(load_E))

    @property
    def dropped(self) -> Tensor:
        """Tokens without a place at their expert: zero, because no expert has a capacity here."""
        return self.totals.new_zeros((), dtype=torch.int64)

    @property
    def balance_loss(self) -> Tensor:
        """The mean over the counted batch, without its coefficient; zero where that was zero. A copy."""
        return self.totals[-2].clone()

    @property
    def z_loss(self) -> Tensor:
        """The mean over the counted batch, as `balance_loss`."""
        return self.totals[-1].clone()

    def reset(self) -> None:
        """Start again from nothing."""
        self.totals.zero_()


def reduce_statistics(
    statistics: Sequence[RouterStatistics], group: dist.ProcessGroup, *, replicas: int | None = None
) -> None:
    """Loads summed, losses averaged over the ranks of `group`, in place, in one all-reduce.

    Every rank gives those of the same routers in the same order. replicas: on how many of the ranks each router ran (on
    the others its statistics are zero); None: on all. The host does not wait for the result on CUDA.
    """
    if not statistics:
        return
    packed = torch.cat([each.totals for each in statistics])
    dist.all_reduce(packed, group=group)
    for each, totals in zip(statistics, packed.split([len(each.totals) for each in statistics])):
        each.totals.copy_(totals)
        each.totals[-2:] /= replicas or group.size()


# -- what a router does in a step besides routing


@dataclass(frozen=True)
class RouterStep:
    """What a router does in one step besides routing.

    num_chunks: what the main loss of a micro-batch is divided by (the number of micro-batches on a rank).
    balance, z: coefficients of the balance loss and the z-loss.
    level: over what the balance loss is computed.
    load_E: for level "global", the loads of the global batch, all ranks' together: of the step before (zeros in the
        first), or of this one where they are known.
    statistics: where to count.
    """

    num_chunks: int = 1
    balance: float = 0.0
    level: Level = "sequence"
    load_E: Tensor | None = None
    z: float = 0.0
    statistics: RouterStatistics | None = None

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise ValueError(f"num_chunks must be at least 1; got {self.num_chunks}")
        if self.level not in ("microbatch", "sequence", "global"):
            raise ValueError(f"level must be 'microbatch', 'sequence' or 'global'; got {self.level!r}")
        if self.balance and self.level == "global" and self.load_E is None:
            raise ValueError("level 'global' needs load_E, the loads of the last global batch; "
                             "give torch.zeros(num_experts) in the first step")


def add_losses(
    step: RouterStep, weights_TK: Tensor, experts_TK: Tensor, logits_TE: Tensor, probs: Callable[[], Tensor],
    sequences: int | None,
) -> Tensor:
    """`weights_TK`, whose backward starts that of the losses and counts.

    probs: gives the probabilities (T, E), where they are needed; sequences: in the tokens, None where nobody knows.
    Raises `ValueError` for a level or loads that do not fit.
    """
    statistics = step.statistics
    forward = statistics is not None and statistics.when == "forward"
    training = torch.is_grad_enabled() and weights_TK.requires_grad
    if not (training or forward):
        return weights_TK
    experts_NM = experts_TK.reshape(1, -1)
    if step.balance and step.level == "sequence":
        if sequences is None:
            raise ValueError("level 'sequence' needs x as (B, S, H), to know the sequences; got (T, H) with "
                             f"T = {len(experts_TK)}")
        experts_NM = experts_TK.reshape(sequences, experts_TK.numel() // max(sequences, 1))
    load_NE = given_NE = count_load(experts_NM, logits_TE.shape[1])
    if step.balance and step.level == "global" and step.load_E is not None:
        given_NE = step.load_E[None]
        if given_NE.shape != load_NE.shape:
            raise ValueError(f"load_E must have the shape {tuple(load_NE.shape[1:])}; got {tuple(step.load_E.shape)}")
    zero = logits_TE.new_zeros(())
    balance = balance_loss(probs(), given_NE) if step.balance else zero
    z = z_loss(logits_TE) if step.z else zero
    counts = None
    if statistics is not None:
        losses = torch.stack((balance, z)).detach() / step.num_chunks
        counts = torch.cat((load_NE.sum(0), losses.double()))
        if forward and not WeightGradStore.current().recomputing:
            statistics.totals.add_(counts)
    if not training:
        return weights_TK
    loss = (step.balance * balance + step.z * z) / step.num_chunks
    return _AddLosses.apply(weights_TK, loss, None if forward else statistics, counts)


class _AddLosses(torch.autograd.Function):
    """The weights as they are; in the backward, the loss gets a gradient of 1, and the counts go to the statistics."""

    @staticmethod
    def forward(
        ctx: Any, weights_TK: Tensor, loss: Tensor, statistics: RouterStatistics | None, counts: Tensor | None
    ) -> Tensor:
        ctx.statistics, ctx.counts, ctx.seed = statistics, counts, loss.new_ones(())
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, dweights_TK: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.statistics is not None:
            ctx.statistics.totals.add_(ctx.counts)
        return dweights_TK, ctx.seed, None, None
