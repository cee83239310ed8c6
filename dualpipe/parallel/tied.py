"""Tied parameters: parameters that both ends of a pipeline hold, such as an embedding that is also the head.

In a V-shaped placement both ends are on one rank and share the Parameter. In other placements each end has a copy;
after a step the two ranks exchange their gradients and both keep the sum, so that the copies stay equal. Sharded
parameters exchange their shards, after the reductions. A stage declares these parameters by a method
`tied_parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dualpipe.nn.deferral import local


def tied_parameters(stage: nn.Module | None) -> list[nn.Parameter]:
    """Return the trainable parameters of a stage that the other end of the pipeline holds too."""
    method = getattr(stage, "tied_parameters", None)
    if method is None:
        return []
    return [parameter for parameter in method() if parameter.requires_grad]


class TiedGradients:
    """Sums the gradients of tied parameters over both ends of the pipeline; one object for each end.

    exchange: sends a contiguous tensor to the other end and returns the tensor of the other end, with the same shape
    and dtype.
    """

    def __init__(self, stage: nn.Module, exchange: Callable[[Tensor], Tensor]) -> None:
        self._stage = stage
        self._exchange = exchange
        self._earlier_sums: list[Tensor | None] = []  # gradients of the steps before the current one
        self._is_summed = False  # the gradients are sums over both ends

    def begin(self) -> None:
        """Set aside gradients that are sums already; called before a training step."""
        if not self._is_summed:
            return
        self._is_summed = False
        self._earlier_sums = []
        for parameter in tied_parameters(self._stage):
            self._earlier_sums.append(parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """Sum the gradients over both ends; called after a step that has reduced them. Collective over both ends.

        The sums include the gradients that earlier steps kept without reducing them (`sync=False`).
        """
        parameters = tied_parameters(self._stage)
        earlier_sums = self._earlier_sums or [None] * len(parameters)
        for parameter, earlier in zip(parameters, earlier_sums, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            grad = local(parameter.grad)
            # Before `earlier` is added: the sum of two tensors is bitwise equal at both ends, in either order.
            grad += self._exchange(grad.contiguous())
            if earlier is not None:
                grad += local(earlier)
        self.discard()
        self._is_summed = True

    def discard(self) -> None:
        """Forget the sums of earlier steps: they have been added, or the gradients are dropped."""
        self._earlier_sums = []
        self._is_summed = False
