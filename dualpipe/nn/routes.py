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

from dualpipe.pipeline.weight_grad_store import WeightGradStore

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
