"""Parameters that both ends of a pipeline have, such as the embedding that is also the head.

In a V both ends are on one rank and share the Parameter. Elsewhere each has a copy; after a step the two ranks exchange
what they have of its gradient, and both have the sum, so that the copies stay the same. What is sharded is exchanged in
shards, after the reductions. A stage says which of its parameters these are by a method `tied_parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dualpipe.nn.deferral import local


def tied_parameters(stage: nn.Module | None) -> list[nn.Parameter]:
    """Those trainable ones of a stage that the other end has as well."""
    says = getattr(stage, "tied_parameters", None)
    return [] if says is None else [parameter for parameter in says() if parameter.requires_grad]


class TiedGradients:
    """The gradients of one end's copies, and how they become the sums over both ends.

    exchange: what the other end gives for a contiguous tensor, which gets this one; of the same shape and dtype.
    """

    def __init__(self, stage: nn.Module, exchange: Callable[[Tensor], Tensor]) -> None:
        self._stage, self._exchange = stage, exchange
        self._sums: list[Tensor | None] = []  # of the steps before the one that is under way
        self._is_summed = False  # whether gradients are sums already

    def begin(self) -> None:
        """Before a training step: put aside what is a sum already."""
        if self._is_summed:
            self._sums, self._is_summed = [], False
            for parameter in tied_parameters(self._stage):
                self._sums.append(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """After a step that has reduced gradients: make them the sums, of steps that have not as well. Collective over
        both ends."""
        parameters = tied_parameters(self._stage)
        for parameter in parameters:  # before anything is exchanged, as this may fail
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        for parameter, before in zip(parameters, self._sums or [None] * len(parameters), strict=True):
            assert parameter.grad is not None, "it has just been made"
            own = local(parameter.grad)
            own += self._exchange(own.contiguous())  # first, as the sum of two is the same bits at both ends
            if before is not None:
                own += local(before)
        self.discard()
        self._is_summed = True

    def discard(self) -> None:
        """Forget the steps before, whose gradients are dropped."""
        self._sums, self._is_summed = [], False
