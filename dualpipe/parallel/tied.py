"""Parameters that both ends of a pipeline have, such as the embedding that is also the head.

In a V both ends are on one rank and share the Parameter. Elsewhere each rank has a copy; after a step the two ranks
exchange their gradients of it, and both keep the sum, so that the copies stay the same. Sharded parameters exchange
their shards, after the reductions. A stage names these parameters by a method `tied_parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dualpipe.nn.deferral import local


def tied_parameters(stage: nn.Module | None) -> list[nn.Parameter]:
    """Return the trainable parameters of a stage that the other end has as well."""
    method = getattr(stage, "tied_parameters", None)
    if method is None:
        return []
    return [parameter for parameter in method() if parameter.requires_grad]


class TiedGradients:
    """The gradients of one end's copies, which become the sums over both ends.

    exchange: sends a contiguous tensor to the other end and returns the other end's, of the same shape and dtype.
    """

    def __init__(self, stage: nn.Module, exchange: Callable[[Tensor], Tensor]) -> None:
        self._stage = stage
        self._exchange = exchange
        self._earlier_sums: list[Tensor | None] = []  # of the steps before the one under way
        self._is_summed = False  # whether gradients are sums already

    def begin(self) -> None:
        """Put aside gradients that are sums already, before a training step."""
        if not self._is_summed:
            return
        self._is_summed = False
        self._earlier_sums = []
        for parameter in tied_parameters(self._stage):
            self._earlier_sums.append(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """Make gradients the sums over both ends, after a step that has reduced them. Collective over both ends.

        Gradients of earlier steps that were not reduced are part of them.
        """
        parameters = tied_parameters(self._stage)
        earlier_sums = self._earlier_sums or [None] * len(parameters)
        for parameter, earlier in zip(parameters, earlier_sums, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            grad = local(parameter.grad)
            grad += self._exchange(grad.contiguous())  # first, as the sum of two is the same bits at both ends
            if earlier is not None:
                grad += local(earlier)
        self.discard()
        self._is_summed = True

    def discard(self) -> None:
        """Forget the sums of earlier steps, whose gradients are dropped."""
        self._earlier_sums = []
        self._is_summed = False
