"""The state of one micro-batch in one stage, from its arrival to its last gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dualpipe.nn.segments import Names
from dualpipe.runtime.device import RandomState

Slot = tuple[int, int]  # stage and micro-batch


class SegmentRun(NamedTuple):
    """One run of a segment, as traces and observers name it.

    kind: "F" for a forward, "R" for a recomputation, "B" or "I" for a backward. inside: it computes what came from
    other ranks, as experts do.
    """

    kind: str
    stage: int
    microbatch: int
    number: int
    inside: bool = False

    def __str__(self) -> str:
        return f"segment {self.number} of {self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


class RandomStates(NamedTuple):
    """States of the random number generators that a recomputation starts from; device: None for the CPU alone."""

    device: torch.device | None
    states: RandomState


class SegmentRecord:
    """The record of a segment's forward that its backward needs.

    leaves: what a compute segment read and needs a gradient; roots: where its autograd graph ends; kept: what it needs
    to run again; context: of a communication; differentiable: which of a communication's inputs have a gradient;
    results: kept, with their graphs, for DeepSeek's hook alone.
    """

    __slots__ = ("context", "differentiable", "kept", "leaves", "random", "results", "roots")

    def __init__(self) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.roots: dict[str, GradientEdge] = {}
        self.kept: dict[str, Any] = {}
        self.random: RandomStates | None = None
        self.context: Any = None
        self.differentiable: tuple[bool, ...] = ()
        self.results: dict[str, Tensor] = {}


class TensorLike(NamedTuple):
    """Shape, dtype and device of zeros in place of a gradient."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """Make the zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class MicrobatchState:
    """One micro-batch in one stage.

    inputs: the activation that has arrived, until the forward takes it. side: the side inputs beside it, until they
    go on with the result. carry: named values between the segments of a forward. records: one for each segment, from a
    forward that needs a backward. gradients: by name, between the segments of a backward. results: the names of the
    outputs that need a gradient, which will arrive. from_caller: inputs of a caller's that need gradients.
    """

    __slots__ = ("_from_stage", "carry", "deferred", "from_caller", "gradients", "inputs", "records", "results",
                 "side", "slot")

    def __init__(
        self, inputs: tuple[Tensor, ...] = (), side: tuple[Tensor, ...] = (), slot: Slot = (0, 0)
    ) -> None:
        self.inputs = inputs
        self.side = side
        self.slot = slot
        self.carry: dict[str, Any] = {}
        self.records: list[SegmentRecord] = []
        self.gradients: dict[str, Tensor] = {}
        self.results: Names = ()
        self.deferred: Callable[[], None] | None = None
        self._from_stage: dict[str, TensorLike] = {}
        self.from_caller: dict[str, Tensor] = {}

    def begin(self, carry: dict[str, Any], inputs: Names = ()) -> None:
        """Start a forward with `carry`.

        inputs: the names in it that came from another stage, which expects their gradients. Gradients of others, of a
        caller's inputs to the first stage, flow on in the caller's own graph.
        """
        self.inputs = ()
        self.carry = carry
        for name, value in carry.items():
            if not isinstance(value, Tensor) or not value.requires_grad:
                continue
            if name in inputs:
                self._from_stage[name] = TensorLike(value.shape, value.dtype, value.device)
            else:
                self.from_caller[name] = value
                carry[name] = value.detach().requires_grad_()

    def arrive(self, gradients: Sequence[Tensor]) -> None:
        """Take the gradients of the results, in their order."""
        self.gradients = dict(zip(self.results, gradients))

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Add a gradient to that of the same name: a tensor may have been read more than once."""
        earlier = self.gradients.get(name)
        self.gradients[name] = gradient if earlier is None else earlier + gradient

    def compute_deferred(self) -> None:
        """Compute the weight gradients that a full backward has deferred until now."""
        if self.deferred is not None:
            self.deferred()

    def return_to_caller(self) -> None:
        """Have gradients of a caller's inputs flow on in the caller's own graph."""
        for name, tensor in self.from_caller.items():
            gradient = self.gradients.get(name)
            if gradient is not None:
                torch.autograd.backward(tensor, gradient)

    def input_gradients(self) -> list[Tensor]:
        """Return the gradients for the stage before, zeros where nothing depends on an input."""
        gradients = self.gradients
        self.gradients = {}
        results: list[Tensor] = []
        for name, like in self._from_stage.items():
            gradient = gradients.get(name)
            results.append(like.zeros() if gradient is None else gradient)
        return results


def arrived(message: tuple[Tensor, ...], num_side: int, slot: Slot) -> MicrobatchState:
    """Return the state of a micro-batch whose activation and side inputs, the last `num_side`, have arrived."""
    end = len(message) - num_side
    return MicrobatchState(message[:end], message[end:], slot)
