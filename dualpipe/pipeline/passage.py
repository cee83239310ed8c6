"""One micro-batch on its way through a stage that is made of segments: what it carries, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dualpipe.device import random_state, set_random_state
from dualpipe.nn.segments import Names, Pending


@dataclass
class Record:
    """What the backward of a segment needs: of a compute segment the leaves that it read and where its graph ends."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # to run it again, but for what is made again before it
    rng: Rng | None = None
    context: Any = None  # of a communication
    differentiable: tuple[bool, ...] = ()  # which of a communication's inputs have a gradient


class Passage:
    """One micro-batch on its way through a stage. After a failure `error` is set and only communications go on.

    inputs: the names in the carry whose gradients the stage before expects; those of others go where they came from.
    """

    def __init__(
        self,
        carry: Mapping[str, Any],
        *,
        inputs: Names = (),
        error: BaseException | None = None,
        broken: bool = False,
    ) -> None:
        self.carry = dict(carry)
        wanted = {name: t for name, t in carry.items() if needs_grad(t)}
        self.inputs = {name: (t.shape, t.dtype, t.device) for name, t in wanted.items() if name in inputs}
        self.outside = {name: t for name, t in wanted.items() if name not in inputs}
        self.results: Names = ()  # those that need a gradient, once the forward is through
        self.records: list[Record] = []
        self.gradients: dict[str, Tensor] = {}
        self.error = error
        self.broken = broken  # whether a communication failed, so that the others cannot be met any more

    def attempt(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, or None once anything has failed."""
        if self.error is not None:
            return None
        try:
            return work()
        except BaseException as error:
            self.error = error
            return None

    def communicate(self, start: Callable[..., Pending], *arguments: Any) -> Generator[Pending, None, tuple | None]:
        """Start a communication, let others compute, and return what was received; None if it failed.

        One that cannot be started with what there is, is started with nothing. After one that fails on its way with the
        backend's error, a RuntimeError, no other is started: they could only end by its timeout.
        """
        if self.broken:
            return None
        pending = self.attempt(lambda: start(*arguments)) if arguments[-1] is not None else None
        try:
            if pending is None:
                pending = start(*arguments[:-1], None)
            yield pending
            pending.advance()
            return pending.wait()
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error, self.broken = self.error or error, isinstance(error, RuntimeError)
            return None

    def add_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Gradients of a tensor that was read more than once add up, in the order of the backward."""
        if gradient is not None:
            earlier = self.gradients.get(name)
            self.gradients[name] = gradient if earlier is None else earlier + gradient

    def input_gradients(self) -> list[Tensor]:
        """Of the stage's inputs that need one, in their order; zeros where nothing depends on them."""
        found = [(self.gradients.pop(name, None), like) for name, like in self.inputs.items()]
        for name, tensor in self.outside.items():  # of the caller: inputs of the first stage, labels
            if (gradient := self.gradients.get(name)) is not None:
                torch.autograd.backward(tensor, gradient)
        self.gradients.clear()
        return [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in found
        ]


@dataclass(frozen=True)
class Rng:
    """The state of the random number generators that a segment may use."""

    cpu: Tensor
    device: torch.device | None
    state: Tensor | None

    @staticmethod
    def now(inputs: Iterable[Any]) -> Rng:
        """On the CPU, and on the CUDA device of the inputs."""
        device = next((t.device for t in inputs if is_tensor(t) and t.is_cuda), None)
        return Rng(torch.get_rng_state(), device, None if device is None else random_state(device))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draw the same numbers again inside; afterwards everything goes on as if nothing had been drawn."""
        with torch.random.fork_rng([] if self.device is None else [self.device]):
            torch.set_rng_state(self.cpu)
            if self.device is not None:
                set_random_state(self.state, self.device)
            yield


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def needs_grad(value: Any) -> bool:
    return is_tensor(value) and value.requires_grad


def without_grad(value: Any) -> Any:
    return value.detach() if is_tensor(value) else value


def detached(value: Any) -> Any:
    """A leaf that shares the memory."""
    return value.detach().requires_grad_(value.requires_grad) if is_tensor(value) else value


def as_leaf(value: Any, wanted: bool) -> Any:
    if not is_tensor(value):
        return value
    return value.detach().requires_grad_(wanted and (value.is_floating_point() or value.is_complex()))
