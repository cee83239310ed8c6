"""Which experts a token goes to, and what keeps their loads even.

    router = Router(2048, 128, 8, norm_topk_prob=True)                                  # Qwen3-MoE
    router = Router(7168, 256, 8, score="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5, n_group=8,
                    topk_group=4, group_best=2, correction_bias=True, wide_logits=True)  # DeepSeek-V3
    router = Router(2880, 128, 4, score="softmax_topk", bias=True)                      # gpt-oss
    weights_TK, experts_TK = router(x_BSH)

A router only routes, until it is given a `RouterStep`: what else it does in a training step, its losses and statistics.

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

Dimension letters: B batch, S sequence, T tokens (B * S), H hidden, E experts, K experts per token, G groups of experts,
N parts that a balance loss is computed on (sequences, or 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe.nn.linear import Linear, _add_grads, _bias_grad, _refuse_create_graph, _weight_grad
from dualpipe.pipeline.weight_grad_store import WeightGradStore

Score = Literal["softmax", "sigmoid", "softmax_topk"]
Level = Literal["microbatch", "sequence", "global"]
Choice = Callable[[Tensor, int], Tensor]
"""(experts_TK that the router would choose, E) -> experts_TK that it is to use"""


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
        """As `balance_loss`."""
        return self.totals[-1].clone()

    def reset(self) -> None:
        """Start again from nothing."""
        self.totals.zero_()


def reduce_statistics(statistics: Sequence[RouterStatistics], group: dist.ProcessGroup) -> None:
    """Loads summed, losses averaged over `group` (data- and expert-parallel ranks), in place, in one all-reduce.

    Every rank gives those of the same routers in the same order. The host does not wait for the result on CUDA.
    """
    if not statistics:
        return
    packed = torch.cat([each.totals for each in statistics])
    dist.all_reduce(packed, group=group)
    for each, totals in zip(statistics, packed.split([len(each.totals) for each in statistics])):
        each.totals.copy_(totals)
        each.totals[-2:] /= group.size()


# -- what the caller asks of a router


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
                             "give torch.zeros(num_experts) in the first step")  # fmt: skip


@dataclass(frozen=True)
class BalancedRoutes:
    """A `Choice` for benchmarks: the T * K choices go round the experts, so that loads differ by one at most.

    stride: between the experts of one token. It decides how many ranks a token is sent to: 1 takes neighbours, mostly
    on one rank; E / K + 1 spreads the token widely. It must have no divisor in common with E.

    Example: K = 2 of E = 4, stride 1: tokens go to (0, 1), (2, 3), (0, 1), ...; stride 3: (0, 3), (2, 1), (0, 3), ...
    """

    stride: int = 1

    def __call__(self, experts_TK: Tensor, num_experts: int) -> Tensor:
        if math.gcd(self.stride, num_experts) != 1:
            raise ValueError(f"stride {self.stride} and the number of experts {num_experts} have a divisor in common, "
                             "so some experts would get nothing; take 1, or another odd number")  # fmt: skip
        places = torch.arange(experts_TK.numel(), device=experts_TK.device)
        return (places * self.stride % num_experts).view_as(experts_TK)


class Routes:
    """The experts chosen per layer and micro-batch, recorded in one step and replayed in another.

        router.choice = routes.record(layer)
        router.choice = routes.replay(layer)     the weights are those of the current scores at the recorded experts

    Make a new choice for each step. Its calls are taken as micro-batches 0, 1, ... in turn: forwards, and those that a
    pipeline runs again before a backward, each in their order. `with routes.at(number):` says it otherwise. A call too
    many is refused: a repeated forward that nobody announced, such as torch.utils.checkpoint's.

    experts: by (layer, micro-batch), (T, K) int32, to be kept and filled in by whoever wants to store them.
    """

    def __init__(self, num_microbatches: int) -> None:
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1; got {num_microbatches}")
        self.num_microbatches = num_microbatches
        self.experts: dict[tuple[Hashable, int], Tensor] = {}
        self._at: int | None = None

    def record(self, layer: Hashable) -> Choice:
        """Keep what the router chooses, and leave it."""
        number = self._numbers(layer)

        def choose(experts_TK: Tensor, num_experts: int) -> Tensor:
            self.experts[layer, number()] = experts_TK.to(torch.int32)
            return experts_TK

        return choose

    def replay(self, layer: Hashable) -> Choice:
        """Use what was recorded instead of what the router chooses."""
        number = self._numbers(layer)

        def choose(experts_TK: Tensor, num_experts: int) -> Tensor:
            key = layer, number()
            if key not in self.experts:
                raise ValueError(f"no route of (layer, micro-batch) {key} was recorded; there are {list(self.experts)}")
            return self.experts[key].to(experts_TK)

        return choose

    @contextmanager
    def at(self, microbatch: int) -> Iterator[None]:
        """What is routed inside belongs to this micro-batch."""
        if not 0 <= microbatch < self.num_microbatches:
            raise ValueError(f"microbatch must be 0 to {self.num_microbatches - 1}; got {microbatch}")
        outer, self._at = self._at, microbatch
        try:
            yield
        finally:
            self._at = outer

    def _numbers(self, layer: Hashable) -> Callable[[], int]:
        forwards, repeated = count(), count()

        def number() -> int:
            if self._at is not None:
                return self._at
            found = next(repeated if WeightGradStore.current().recomputing else forwards)
            if found >= self.num_microbatches:
                raise ValueError(f"layer {layer!r} was run more than num_microbatches = {self.num_microbatches} times; "
                                 "make a new choice for each step, or say which micro-batch it is by "
                                 "`with routes.at(number):`")  # fmt: skip
            return found

        return number


# -- the router


class Router(Linear):
    """Chooses K of E experts for each token, and their weights.

    score: "softmax" or "sigmoid" of the logits, or "softmax_topk", a softmax over the K chosen logits (gpt-oss).
    norm_topk_prob: weights of a token sum to 1; routed_scaling_factor: they are multiplied by this at the end.
    n_group, topk_group: experts are taken from the best `topk_group` of G groups only, whose score is the sum of their
        `group_best` best experts' (1 in DeepSeek-V2, arXiv:2405.04434; 2 in DeepSeek-V3, arXiv:2412.19437).
    correction_bias: a float32 buffer `e_score_correction_bias` (E,) is added to the scores for the choice, not for the
        weights, and follows the loads: see `update_bias`.
    wide_logits: compute logits, and so return weights, in at least float32 (DeepSeek) instead of the dtype of x.

    `step` and `choice` are the caller's to set; None, as they are at first, only routes.

    Raises `ValueError` for sizes that do not fit together.
    """

    keep_fp32 = ("e_score_correction_bias",)

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        score: Score = "softmax",
        norm_topk_prob: bool = False,
        routed_scaling_factor: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
        group_best: int = 1,
        correction_bias: bool = False,
        wide_logits: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_sizes(num_experts, top_k, score, n_group, topk_group, group_best)
        super().__init__(hidden_size, num_experts, bias, device, dtype)
        self.top_k, self.score, self.norm_topk_prob = top_k, score, norm_topk_prob
        self.routed_scaling_factor, self.wide_logits = routed_scaling_factor, wide_logits
        self.n_group, self.topk_group, self.group_best = n_group, topk_group, group_best
        zeros_E = torch.zeros(num_experts, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("e_score_correction_bias", zeros_E)
        self.step: RouterStep | None = None
        self.choice: Choice | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, H), or (B, S, H) with a sequence in each row -> weights (T, K), experts (T, K) int64.

        Scores are computed in `promote_types(dtype, float32)`; weights are returned in the dtype of the logits.
        """
        logits_TE = self._logits(x.flatten(0, -2))
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        scores_TE = self._scores(wide_TE)
        experts_TK = self._choose(scores_TE.detach())
        weights_TK = self._weights(scores_TE, experts_TK).to(logits_TE.dtype)
        if self.step is not None:
            sequences = len(x) if x.dim() == 3 else None
            weights_TK = self._add_losses(self.step, weights_TK, wide_TE, scores_TE, experts_TK, sequences)
        return weights_TK, experts_TK

    @torch.no_grad()
    def update_bias(self, load_E: Tensor, rate: float) -> None:
        """Make experts with less than the mean load likelier to be chosen, by `rate`, and the others less.

        Once a step, with the loads of the global batch, so that all ranks make the same update. Wang et al.
        (arXiv:2408.15664); DeepSeek-V3 takes a rate of 0.001.
        """
        bias_E = self.e_score_correction_bias
        if bias_E is None:
            raise ValueError("the router has no bias to update; build it with correction_bias=True")
        if load_E.shape != bias_E.shape:
            raise ValueError(f"load_E must have the shape {tuple(bias_E.shape)}; got {tuple(load_E.shape)}")
        if bias_E.dtype.itemsize < 4:
            raise ValueError(f"e_score_correction_bias is {bias_E.dtype}, which loses updates of {rate}; keep it in "
                             "float32 when casting the model, as a dtype plan does")  # fmt: skip
        bias_E.add_((load_E.sum() - load_E * len(load_E)).sign(), alpha=rate)  # exact: no mean is rounded

    def extra_repr(self) -> str:
        groups = f", groups={self.topk_group}/{self.n_group}" if self.n_group > 1 else ""
        return f"{super().extra_repr()}, top_k={self.top_k}, score={self.score}{groups}"

    # -- routing

    def _logits(self, x_TH: Tensor) -> Tensor:
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        if not self.wide_logits:
            return super().forward(x_TH)
        if not self.weight.is_leaf:  # computed from others, as in Linear
            return _wide_linear(x_TH, self.weight, self.bias, wide)
        return _WideLinear.apply(x_TH, self.weight, self.bias, wide)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.score == "softmax":
            return logits_TE.softmax(-1)
        return logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE

    def _choose(self, scores_TE: Tensor) -> Tensor:
        if self.e_score_correction_bias is not None:
            scores_TE = scores_TE + self.e_score_correction_bias
        if self.topk_group < self.n_group:
            scores_TE = self._within_best_groups(scores_TE)
        own_TK = scores_TE.topk(self.top_k, dim=-1).indices
        if self.choice is None:
            return own_TK
        experts_TK = self.choice(own_TK, self.out_features)
        if experts_TK.shape != own_TK.shape:
            raise ValueError(f"the router's choice gave experts of shape {tuple(experts_TK.shape)} for (T, K) = "
                             f"{tuple(own_TK.shape)}; replay the batch, cut as it was recorded")  # fmt: skip
        return experts_TK

    def _within_best_groups(self, scores_TE: Tensor) -> Tensor:
        """Scores with -inf outside of each token's best groups."""
        size = self.out_features // self.n_group
        best_TG = scores_TE.unflatten(-1, (self.n_group, size)).topk(self.group_best, dim=-1).values.sum(-1)
        chosen = best_TG.topk(self.topk_group, dim=-1).indices
        outside_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, chosen, False)
        return scores_TE.masked_fill(outside_TG.repeat_interleave(size, dim=1), -torch.inf)

    def _weights(self, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.score == "softmax_topk":
            weights_TK = weights_TK.softmax(-1)
        if self.norm_topk_prob:  # the small number matters only where all K scores underflow
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK if self.routed_scaling_factor == 1 else weights_TK * self.routed_scaling_factor

    # -- losses

    def _add_losses(
        self, step: RouterStep, weights_TK: Tensor, logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor,
        sequences: int | None,
    ) -> Tensor:  # fmt: skip
        """`weights_TK`, whose backward starts that of the losses and counts."""
        forward = step.statistics is not None and step.statistics.when == "forward"
        training = torch.is_grad_enabled() and weights_TK.requires_grad
        if not training and not forward:
            return weights_TK
        by_sequence = bool(step.balance) and step.level == "sequence"
        if by_sequence and sequences is None:
            raise ValueError("level 'sequence' needs x as (B, S, H), to know the sequences; got (T, H) with "
                             f"T = {len(experts_TK)}")  # fmt: skip
        parts = sequences if by_sequence else 1
        load_NE = count_load(experts_TK.reshape(parts, experts_TK.numel() // max(parts, 1)), self.out_features)
        zero = logits_TE.new_zeros(())
        balance = balance_loss(self._probs(scores_TE), self._given_load(step, load_NE)) if step.balance else zero
        z = z_loss(logits_TE) if step.z else zero
        counts = None
        if step.statistics is not None:
            losses = torch.stack((balance, z)).detach() / step.num_chunks
            counts = torch.cat((load_NE.sum(0), losses.double()))
        if forward and not WeightGradStore.current().recomputing:
            step.statistics.totals.add_(counts)
        if not training:
            return weights_TK
        loss = (step.balance * balance + step.z * z) / step.num_chunks
        return _AddLosses.apply(weights_TK, loss, None if forward else step.statistics, counts)

    def _probs(self, scores_TE: Tensor) -> Tensor:
        """Scores of each token as probabilities (of sigmoids: DeepSeek-V3, arXiv:2412.19437, equation 19)."""
        if self.score == "softmax_topk":
            return scores_TE.softmax(-1)
        return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20) if self.score == "sigmoid" else scores_TE

    def _given_load(self, step: RouterStep, load_NE: Tensor) -> Tensor:
        if step.level != "global":
            return load_NE
        if step.load_E.shape != load_NE.shape[1:]:
            raise ValueError(f"load_E must have the shape {tuple(load_NE.shape[1:])}; got {tuple(step.load_E.shape)}")
        return step.load_E[None]


def _check_sizes(experts: int, top_k: int, score: str, n_group: int, topk_group: int, group_best: int) -> None:
    if score not in ("softmax", "sigmoid", "softmax_topk"):
        raise ValueError(f"score must be 'softmax', 'sigmoid' or 'softmax_topk'; got {score!r}")
    if n_group < 1 or experts % n_group:
        raise ValueError(f"n_group must divide the number of experts ({experts}); got {n_group}")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group must be 1 to n_group ({n_group}); got {topk_group}")
    size = experts // n_group
    if not 1 <= group_best <= size:
        raise ValueError(f"group_best must be 1 to the size of a group ({size}); got {group_best}")
    if not 1 <= top_k <= topk_group * size:
        raise ValueError(f"top_k must be 1 to the {topk_group * size} experts of topk_group ({topk_group}) groups of "
                         f"{size}; got {top_k}")  # fmt: skip


class _AddLosses(torch.autograd.Function):
    """The weights as they are; in the backward, the loss gets a gradient of 1, and the counts go to the statistics."""

    @staticmethod
    def forward(
        ctx: Any, weights_TK: Tensor, loss: Tensor, statistics: RouterStatistics | None, counts: Tensor | None
    ) -> Tensor:  # fmt: skip
        ctx.statistics, ctx.counts, ctx.seed = statistics, counts, loss.new_ones(())
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, dweights_TK: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if ctx.statistics is not None:
            ctx.statistics.totals.add_(ctx.counts)
        return dweights_TK, ctx.seed, None, None


class _WideLinear(torch.autograd.Function):
    """`Linear` in a wider dtype, which keeps x as it came: half of what it multiplies, for bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves, as in Linear
        ctx.save_for_backward(x, weight)
        return _wide_linear(x, weight, bias, wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx = dy.mm(weight.to(dy.dtype)).to(x.dtype) if need_x else None
        store = WeightGradStore.current()
        if not store.deferring:
            dw = _weight_grad(ctx.weight, dy, x.to(dy.dtype)) if need_weight else None
            return dx, dw, _bias_grad(ctx.bias, dy) if need_bias else None, None
        _refuse_create_graph()
        params = ctx.weight if need_weight else None, ctx.bias if need_bias else None
        store.put(partial(_add_wide_grads, *params, dy, x.detach()), folded=True)
        return dx, None, None, None


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    kind = x.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def _add_wide_grads(weight: Tensor | None, bias: Tensor | None, dy: Tensor, x: Tensor) -> None:
    _add_grads(weight, bias, dy, x.to(dy.dtype))
