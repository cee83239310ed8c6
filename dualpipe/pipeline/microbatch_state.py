"""State of one micro-batch in one stage, from its arrival to its last gradient."""

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
    """Name of one run of a segment in traces and for observers.

    kind: "F" for a forward, "R" for a recomputation, "B" or "I" for a backward. between_ranks: the segment computes
    data of other ranks, like experts between dispatch and combine.
    """

    kind: str
    stage: int
    microbatch: int
    number: int
    between_ranks: bool = False

    def __str__(self) -> str:
        return f"segment {self.number} of {self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


class RandomStates(NamedTuple):
    """Random states at which a recomputation starts. device: the CUDA device; None for the CPU alone."""

    device: torch.device | None
    states: RandomState


class SegmentRecord:
    """Data of a segment's forward that its backward needs.

    Attributes:
        leaves: arguments of a compute segment that need a gradient.
        roots: gradient edges of its results.
        saved_inputs: arguments for its recomputation.
        saved_versions: the number of in-place operations on each of them by then.
        random: random states for its recomputation.
        context: context of a communication.
        differentiable: for each argument of a communication, True if it needs a gradient.
        results: results with their graphs; only for DeepSeek's method.
    """

    __slots__ = ("context", "differentiable", "leaves", "random", "results", "roots", "saved_inputs", "saved_versions")

    def __init__(self) -> None:
        self.leaves: dict[str, Tensor] = {}
        self.roots: dict[str, GradientEdge] = {}
        self.saved_inputs: dict[str, Any] = {}
        self.saved_versions: list[int] = []
        self.random: RandomStates | None = None
        self.context: Any = None
        self.differentiable: tuple[bool, ...] = ()
        self.results: dict[str, Tensor] = {}


class MicrobatchState:
    """State of one micro-batch in one stage.

    Attributes:
        inputs: the received activation, until the forward begins.
        side: the received side inputs, until they are sent on with the result.
        slot: stage and micro-batch.
        carry: named values between the segments of a forward.
        records: one per segment, of a forward that needs a backward.
        gradients: by name, between the segments of a backward.
        results: names (not tensors, as in a `SegmentRecord`) of the outputs that will receive a gradient.
        deferred: computes the weight gradients that a full backward has deferred.
        from_caller: inputs to the first stage, by name, whose gradients the caller's graph needs.
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
        # Shapes, dtypes and devices of the inputs whose gradients the previous stage expects.
        self._from_stage: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self.from_caller: dict[str, Tensor] = {}

    def begin(self, carry: dict[str, Any], inputs: Names = ()) -> None:
        """Start a forward with `carry`.

        inputs: names of the values in `carry` that come from the previous stage, which expects their gradients. Any
        other value that requires a gradient is a `CallerTensor`'s part, in the first stage.
        """
        self.inputs = ()
        self.carry = carry
        for name, value in carry.items():
            if not isinstance(value, Tensor) or not value.requires_grad:
                continue
            if name in inputs:
                self._from_stage[name] = (value.shape, value.dtype, value.device)
            else:
                self.from_caller[name] = value

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Set the gradients of the results, in their order."""
        self.gradients = dict(zip(self.results, gradients))

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Accumulate a gradient by name: a tensor may have been read more than once."""
        earlier = self.gradients.get(name)
        self.gradients[name] = gradient if earlier is None else earlier + gradient

    def compute_deferred(self) -> None:
        """Compute the weight gradients that a full backward has deferred."""
        if self.deferred is not None:
            self.deferred()

    def keep_caller_gradients(self) -> None:
        """Keep the gradients of the caller's inputs, in their `.grad`, for the end of the step."""
        for name, leaf in self.from_caller.items():
            leaf.grad = self.gradients.get(name)

    def input_gradients(self) -> list[Tensor]:
        """Return the gradients for the previous stage: zeros for an input on which nothing depends."""
        gradients = self.gradients
        self.gradients = {}
        results: list[Tensor] = []
        for name, (shape, dtype, device) in self._from_stage.items():
            gradient = gradients.get(name)
            results.append(torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient)
        return results


def received_state(message: tuple[Tensor, ...], num_side: int, slot: Slot) -> MicrobatchState:
    """Return the state of a micro-batch whose message has arrived: the activation, then `num_side` side inputs."""
    end = len(message) - num_side
    return MicrobatchState(message[:end], message[end:], slot)
