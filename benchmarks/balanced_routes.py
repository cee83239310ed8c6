"""Balanced routes to replace a router's own choice, so that expert loads do not change from run to run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BalancedRoutes:
    """A router's `Choice` that assigns the T * K choices to the experts in turn, so that loads differ by one at most.

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
