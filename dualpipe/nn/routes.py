"""Experts that are chosen from outside instead of by a router's scores: evenly, or as they were recorded.

Dimension letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from dualpipe.nn.deferral import WeightGradStore

Choice = Callable[[Tensor, int], Tensor]
"""(experts_TK that the router would choose, E) -> experts_TK that it is to use"""


@dataclass(frozen=True)
class BalancedRoutes:
    """A `Choice` for benchmarks: the T * K choices go round the experts, so that loads differ by one at most.

    stride: between the experts of one token. It decides how many ranks a token is sent to: 1 takes neighbours, mostly
    on one rank; E / K + 1 spreads the token widely. It must have no divisor in common with E.

    Example: K = 2 of E = 4, stride 1: tokens go to (0, 1), (2, 3), (0, 1), ...; stride 3: (0, 3), (2, 1), (0, 3), ...
    """

    stride: int = 1

    def check(self, num_experts: int) -> None:
        """ValueError for a stride that leaves experts out."""
        if math.gcd(self.stride, num_experts) != 1:
            raise ValueError(f"stride {self.stride} and the number of experts {num_experts} have a divisor in common, "
                             "so some experts would get nothing; take 1, or another odd number")

    def __call__(self, experts_TK: Tensor, num_experts: int) -> Tensor:
        self.check(num_experts)
        places = torch.arange(experts_TK.numel(), device=experts_TK.device)
        return (places * self.stride % num_experts).view_as(experts_TK)


def random_like_stride(num_experts: int, top_k: int, ranks: int) -> int:
    """The stride at which `BalancedRoutes` sends a token to as many of `ranks` as random experts would, or nearly.

    Example: 8 of 64 experts over 8 ranks: 5, for 5 ranks. Random experts are on 5.4, those of stride 1 on one, those of
    stride 9 on 8.
    """
    each = num_experts // ranks
    random = ranks * (1 - math.comb(num_experts - each, top_k) / math.comb(num_experts, top_k))

    def reached(stride: int) -> float:
        starts = range(0, num_experts * top_k, top_k)
        return sum(len({n * stride % num_experts // each for n in range(s, s + top_k)}) for s in starts) / num_experts

    strides = [s for s in range(1, max(num_experts, 2)) if math.gcd(s, num_experts) == 1]
    return min(strides, key=lambda stride: abs(reached(stride) - random))


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
                                 "`with routes.at(number):`")
            return found

        return number
