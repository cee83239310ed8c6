"""Tied parameters: parameters that both ends of a pipeline hold, such as an embedding that is also the head.

In a V-shaped placement both ends are on one rank and share the Parameter. In other placements each end has a copy;
after a step the two ranks exchange their gradients and both keep the sum, so that the copies stay equal. Sharded
parameters exchange their shards, after the reductions. A stage declares these parameters by a method
`tied_parameters()`.

Modules that share a Parameter must be sharded together: sharding replaces it, in each call by another one. What is left
to see of the tie afterwards is the number of the original Parameter (`original_number`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_NUMBER = "_fsdp_orig_uid"  # attribute of parameters that have been sharded


def tied_parameters(stage: nn.Module | None) -> list[nn.Parameter]:
    """Return the trainable parameters of a stage that the other end of the pipeline holds too."""
    method = getattr(stage, "tied_parameters", None)
    if method is None:
        return []
    if not callable(method) or isinstance(method, nn.Module):
        raise ValueError(f"{type(stage).__name__}.tied_parameters is a {type(method).__name__}, but a stage's "
                         "tied_parameters is a method that the pipeline calls; rename the attribute")
    return [parameter for parameter in method() if parameter.requires_grad]


def original_number(tensor_or_record: Any) -> int | None:
    """Return FSDP2's number of a parameter that has been sharded, or of the one that a record was made from.

    None for a parameter that was never sharded. Before torch 2.13 only parameters that `shard` has sharded are
    numbered, and no records.
    """
    number: int | None = getattr(tensor_or_record, _NUMBER, getattr(tensor_or_record, "_orig_param_uid", None))
    return number


def mark_sharded(param: nn.Parameter) -> None:
    """Mark a parameter that shards have replaced in a module, as FSDP2 does from torch 2.13 on."""
    if original_number(param) is None:
        setattr(param, _NUMBER, id(param))


class TiedGradients:
    """Sums the gradients of tied parameters over both ends of the pipeline; one object for each end.

    exchange: sends a contiguous tensor to the other end and returns the tensor of the other end, with the same shape
    and dtype.
    """

    def __init__(self, stage: nn.Module, exchange: Callable[[Tensor], Tensor]) -> None:
        self.stage = stage
        self._exchange = exchange
        self._earlier_sums: list[Tensor | None] = []  # gradients of the steps before the current one
        self._is_summed = False  # the gradients are sums over both ends

    def begin(self) -> None:
        """Set aside gradients that are sums already; called before a training step."""
        if not self._is_summed:
            return
        self._is_summed = False
        from dualpipe.nn.accumulators import take  # imports all layers, which few importers of this file need

        self._earlier_sums = []
        for parameter in tied_parameters(self.stage):
            self._earlier_sums.append(take(parameter))

    @torch.no_grad()
    def add(self, unused: dict[Tensor, bool]) -> None:
        """Sum the gradients over both ends; called after a step that has reduced them. Collective over both ends.

        The sums include the gradients that earlier steps kept without reducing them (`sync=False`).

        unused: parameters with True for those without a gradient on this rank; set for the tied ones, with True only if
            neither end has a gradient.
        """
        from dualpipe.nn.accumulators import add_peer

        parameters = tied_parameters(self.stage)
        earlier_sums = self._earlier_sums or [None] * len(parameters)
        for parameter, earlier in zip(parameters, earlier_sums, strict=True):
            unused[parameter] = earlier is None and unused.get(parameter, parameter.grad is None)
        device = parameters[0].device if parameters else None
        flags = torch.zeros(len(parameters), device=device)
        for flag, parameter in zip(flags, parameters, strict=True):
            flag.fill_(unused[parameter])  # on the device: the host does not wait for a copy
        peer_flags = self._exchange(flags)
        for parameter, peer_flag, earlier in zip(parameters, peer_flags, earlier_sums, strict=True):
            unused[parameter] = unused[parameter] and bool(peer_flag)  # the host waits for the flag of unused ones only
            add_peer(parameter, self._exchange, earlier)
        self.discard()
        self._is_summed = True

    def discard(self) -> None:
        """Forget the sums of earlier steps: they have been added, or the gradients are dropped."""
        self._earlier_sums = []
        self._is_summed = False
