"""Choices of experts that replace routers' own: even ones, and choices recorded in one step for another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from types import ModuleType

import torch
from torch import Tensor

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.routing.router import Choice
from scripts import BENCHMARKS


def _benchmark_module(name: str) -> ModuleType:
    """Import a module of benchmarks/, whose folder is not on `sys.path`."""
    if name not in sys.modules:
        spec = spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


BalancedRoutes = _benchmark_module("expert_shapes").BalancedRoutes
random_like_stride = _benchmark_module("expert_shapes").random_like_stride


class Routes:
    """The experts chosen per layer and micro-batch.

        router.choice = routes.record(layer)
        router.choice = routes.replay(layer)     the weights are those of the current scores at the recorded experts

    Make a new choice for each step. Its calls are taken as micro-batches 0, 1, ... in turn: forwards, and the
    recomputes of a pipeline before its backwards, each in their order. `with routes.at(number):` sets the number
    instead. One call too many is refused: a repeated forward that was not announced, such as torch.utils.checkpoint's.

    experts: by (layer, micro-batch), (T, K) int32, to be kept and filled in by callers that store them.
    """

    def __init__(self, num_microbatches: int) -> None:
        if num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1; got {num_microbatches}")
        self.num_microbatches = num_microbatches
        self.experts: dict[tuple[Hashable, int], Tensor] = {}
        self._at: int | None = None

    def record(self, layer: Hashable) -> Choice:
        """Return a choice that records the router's experts and leaves them."""
        number = self._numbers(layer)

        def choose(experts_TK: Tensor, num_experts: int) -> Tensor:
            self.experts[layer, number()] = experts_TK.to(torch.int32)
            return experts_TK

        return choose

    def replay(self, layer: Hashable) -> Choice:
        """Return a choice that uses the recorded experts instead of the router's."""
        number = self._numbers(layer)

        def choose(experts_TK: Tensor, num_experts: int) -> Tensor:
            key = layer, number()
            if key not in self.experts:
                raise ValueError(f"no route of (layer, micro-batch) {key} was recorded; there are {list(self.experts)}")
            return self.experts[key].to(experts_TK)

        return choose

    @contextmanager
    def at(self, microbatch: int) -> Iterator[None]:
        """Route the calls inside as this micro-batch."""
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
