"""Shapes of the expert layers that the benchmarks measure, and the routing of tokens to their experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """Sizes of an expert layer. clamped: with the activation and the biases of gpt-oss."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    clamped: bool = False


MODELS = {
    "deepseek-v2-lite": Model(2048, 1408, 64, 6),
    "qwen3-30b-a3b": Model(2048, 768, 128, 8),
    "gpt-oss-20b": Model(2880, 2880, 32, 4, clamped=True),
}
# All models by name: MODELS, which every benchmark measures, and further ones that `make gpu` asks for.
SIZES = MODELS | {
    "deepseek-v3": Model(7168, 2048, 256, 8),
    "tiny": Model(64, 32, 8, 2),
    "tiny clamped": Model(64, 32, 8, 2, clamped=True),
}
TOKENS = (4096, 16384, 65536)
ROUTINGS = ("balanced", "skewed")


@dataclass(frozen=True)
class Layer:
    """Row counts and row offsets of the experts on one rank."""

    experts: int
    counts: list[int]
    offs: Tensor  # (E,) int32: the end of each expert's rows

    @cached_property
    def bounds(self) -> Tensor:
        """Offsets (E + 1,) int32: the start of each expert's rows, then the end of the last expert's."""
        return torch.cat([self.offs.new_zeros(1), self.offs])

    @cached_property
    def slices(self) -> list[tuple[int, slice]]:
        """Pairs of (expert, slice of its rows), with the sizes on the host."""
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        return [(e, slice(end - count, end)) for e, (count, end) in enumerate(zip(self.counts, ends))]


def route(model: Model, tokens: int, experts: int, skewed: bool, device: torch.device) -> Layer:
    """Distribute rows over experts: equally up to one row, or skewed in proportion to 1 / (1 + r / 4).

    r is an expert's place in a random order. experts: the number on this rank, which get their share of all rows.
    """
    share = torch.ones(experts, dtype=torch.float64)
    if skewed:
        share /= 1 + torch.randperm(experts, generator=torch.Generator().manual_seed(0)) / 4
    rows = tokens * model.top_k * experts // model.experts
    ends = (share.cumsum(0) / share.sum() * rows).round()
    return Layer(experts, ends.diff(prepend=ends.new_zeros(1)).long().tolist(), ends.to(device, torch.int32))


def choices(tokens: int, experts: int, top_k: int, skewed: bool, device: torch.device) -> Tensor:
    """Choose (T, K) distinct experts per token; skewed: the first experts far more often."""
    scores = torch.rand(tokens, experts, device=device)
    if skewed:
        scores += 2.0 / torch.arange(1, experts + 1, device=device)
    return scores.topk(top_k).indices


@dataclass(frozen=True)
class BalancedRoutes:
    """A router's `Choice` that assigns the T * K choices to the experts in turn, so that loads differ by one at most.

    Expert loads then do not change from run to run.

    stride: the distance between the experts of one token, coprime to E. It decides how many ranks a token is sent to:
    1 picks neighbours, mostly on one rank; E / K + 1 spreads the token widely. Example: K = 2 of E = 4. With stride 1,
    tokens go to (0, 1), (2, 3), (0, 1), ...; with stride 3, to (0, 3), (2, 1), (0, 3), ...

    Raises `ValueError` for a stride that leaves experts out.
    """

    stride: int = 1

    def __call__(self, experts_TK: Tensor, num_experts: int) -> Tensor:
        if math.gcd(self.stride, num_experts) != 1:
            raise ValueError(f"stride {self.stride} and the number of experts {num_experts} have a divisor in common, "
                             "so some experts would get nothing; take 1, or another odd number")
        places = torch.arange(experts_TK.numel(), device=experts_TK.device).view_as(experts_TK)
        return places * self.stride % num_experts


def random_like_stride(num_experts: int, top_k: int, ranks: int) -> int:
    """Return the stride whose routes reach about as many of `ranks` per token as random experts would.

    Example: 5 for 8 of 64 experts over 8 ranks. Random experts are on 5.4 ranks; stride 1 reaches 1 rank, stride 5
    reaches 5, stride 9 reaches 8.
    """
    each = num_experts // ranks
    random = ranks * (1 - math.comb(num_experts - each, top_k) / math.comb(num_experts, top_k))

    def reached(stride: int) -> float:
        starts = range(0, num_experts * top_k, top_k)
        return sum(len({n * stride % num_experts // each for n in range(s, s + top_k)}) for s in starts) / num_experts

    strides = [s for s in range(1, max(num_experts, 2)) if math.gcd(s, num_experts) == 1]
    return min(strides, key=lambda stride: abs(reached(stride) - random))


def every(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return every combination of the values by name; the last name varies fastest."""
    return [dict(zip(values, combination)) for combination in product(*values.values())]
