"""Segments, which a stage is made of: compute and communication in turn, over a carry of named tensors.

A stage with `segments()` returns them as a list; the engine runs them one after the other, or those of two
micro-batches in turn, so that one's communication is hidden behind the other's computing (`overlap`). The carry starts
with the stage's inputs as "x" (several: "x0", "x1", ...); its outputs are what the last segment writes to such names.
Side inputs of the step are in the carry under those of their names that the stage's `forward` has as parameters.

    [Compute(self.attend, "x", ("residual", "rows", "weights", "plan")),
     Communicate(dispatch, ("rows", "weights", "plan"), ("rows", "weights", "plan")),
     Compute(self.experts, ("rows", "weights", "plan"), ("rows", "plan")),
     Communicate(combine, ("rows", "plan"), "rows"),
     Compute(self.finish, ("residual", "rows"), "x")]

A segment takes what it reads as arguments and returns what it writes; the rest of the carry passes by. What a compute
segment reads is detached, so that each one's backward runs on its own; gradients flow back by name, and add up where a
tensor was read more than once. The carry may hold what is not a tensor, such as a plan: it has no gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

Names = tuple[str, ...]


class Pending(Protocol):
    """A communication in flight."""

    def advance(self) -> None:
        """Start messages that had to wait for the device, such as rows whose number had to be exchanged first.

        It is called once, when other work has been given to the device and before any other communication starts. All
        ranks call it at the same place, so it may start collectives.
        """

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Return (results, context for the backward). The current stream waits, the host only where it must."""


class Communication(Protocol):
    """A communication between ranks and its backward. All ranks of `group` start the same ones in the same order.

    Any method may raise, also after a message was sent: the engine then ends the step on all ranks. No method is called
    again after an error, and none runs on a rank on which anything has failed.
    """

    group: ProcessGroup | None

    def forward(self, inputs: tuple[Any, ...]) -> Pending:
        """Start the forward. `inputs` are detached; floating-point tensors among the results get gradients."""

    def backward(self, context: Any, gradients: tuple[Tensor | None, ...]) -> Pending:
        """Start the backward, from gradients of the results to gradients of the inputs.

        None among `gradients` is a gradient of zero. Another rank may have one that is not zero, so rows that it counts
        on must be sent as zeros. None among the results is an input without a gradient.
        """

    def again(self, context: Any, inputs: tuple[Any, ...]) -> Pending:
        """Repeat the forward before the backward, with the same inputs. The results are the same; the context stays.

        Only a communication with `recompute` needs it.
        """


class _Named:
    """The names that a segment reads and writes; one name stands for a tuple of one."""

    reads: Names | str
    writes: Names | str

    def __post_init__(self) -> None:
        for field in ("reads", "writes"):
            name = getattr(self, field)
            if isinstance(name, str):
                object.__setattr__(self, field, (name,))


@dataclass(frozen=True)
class Compute(_Named):
    """`fn(*reads) -> writes` on the device.

    recompute: keep what it reads and nothing else, and run it again before its backward, with the same random numbers.
    Gradients are the same bit for bit where sums do not depend on how segments are joined: neighbours that are both
    recomputed, or both not, run as one, and a tensor between others that is read three times may be summed in another
    order. What it reads must not be changed in place, and what it counts it counts twice, as batch norm does, unless
    it asks `WeightGradStore.current().recomputing`.
    """

    fn: Callable[..., Any]
    reads: Names | str
    writes: Names | str
    recompute: bool = False


@dataclass(frozen=True)
class Communicate(_Named):
    """A communication between two compute segments.

    Compute segments that come next and neither read nor write what it writes run while it is under way.

    recompute: do not keep what arrives, for a compute segment that is recomputed, the next, but send it again. What is
    sent is computed again as well where the one before is recomputed, and kept where it is not.
    of_attention: whether it is between ranks that share a sequence, instead of to experts or back.
    """

    communication: Communication
    reads: Names | str
    writes: Names | str
    recompute: bool = False
    of_attention: bool = False


Segment = Compute | Communicate

_is_boundary = re.compile(r"x\d*").fullmatch  # inputs and outputs of a stage
_is_of_criterion = re.compile(r"loss|label\d+").fullmatch  # reserved for the pipeline


@cache
def input_names(count: int) -> Names:
    """The names of a stage's inputs in its carry."""
    return ("x",) if count == 1 else tuple(f"x{i}" for i in range(count))


def output_names(segments: Sequence[Segment]) -> Names:
    """Return the names of a stage's outputs, in order; ValueError if the last segment does not write them."""
    last = segments[-1].writes if segments else ()
    outputs = [name for name in last if is_boundary(name)]
    names = input_names(len(outputs))
    if not outputs or set(outputs) != set(names):
        raise ValueError(f'the last segment must write the outputs of the stage, "x" or "x0", "x1", ...; got {last}')
    return names


def is_boundary(name: str) -> bool:
    """Return True for the name of an input or output of a stage: "x", "x0", "x1", ..."""
    return _is_boundary(name) is not None


def is_reserved(name: str) -> bool:
    """Return True for a name that the pipeline uses itself in carries: inputs, outputs, labels, the loss."""
    return is_boundary(name) or _is_of_criterion(name) is not None


def checked(segments: Sequence[Segment], side: Iterable[str] = ()) -> list[Segment]:
    """The segments; ValueError for a name that is read and never written, or that is not a stage's to write.

    side: the side inputs that the stage's `forward` names, which are in its carry, None where they are not given.
    """
    output_names(segments)
    known = set(side)
    for number, segment in enumerate(segments):
        if missing := [n for n in segment.reads if n not in known and not is_boundary(n)]:
            raise ValueError(f"segment {number} reads {missing}, which no segment before it writes; known are "
                             f"{sorted(known)} and the inputs of the stage; a side input must be a parameter of "
                             "its forward")
        if reserved := [n for n in segment.writes if _is_of_criterion(n)]:
            raise ValueError(f"segment {number} writes {reserved}, names that the pipeline uses; choose others")
        known |= set(segment.writes)
        again = any(after.recompute for after in segments[number + 1 : number + 2])
        if isinstance(segment, Communicate) and segment.recompute and not (
                again and hasattr(segment.communication, "again")):
            raise ValueError(f"segment {number} is a communication with recompute: the segment after it must be "
                             "recomputed, and it must have an `again`")
    return list(segments)


def run_segments(segments: Iterable[Segment], carry: Mapping[str, Any]) -> dict[str, Any]:
    """The carry after the segments, by an ordinary forward that autograd records: a layer's `forward` outside of a
    pipeline. A communication is waited for at once, there and back; nothing is recomputed."""
    carry = dict(carry)
    for segment in segments:
        inputs = [carry[name] for name in segment.reads]
        if isinstance(segment, Compute):
            results = segment.fn(*inputs)
        else:
            results = _Communicated.apply(segment.communication, *inputs)
        writes = tuple(segment.writes)
        carry.update(zip(writes, as_results(writes, results)))
    return carry


class _Communicated(torch.autograd.Function):
    """A communication and its backward, each waited for at once."""

    @staticmethod
    def forward(ctx: Any, communication: Communication, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.communication = communication
        results, ctx.context = _waited_for(communication.forward(inputs))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found, _ = _waited_for(ctx.communication.backward(ctx.context, gradients))
        return None, *found


def _waited_for(pending: Pending) -> tuple[tuple[Any, ...], Any]:
    """Return (results, context) of a communication, which nothing hides."""
    pending.advance()
    return pending.wait()


def as_results(writes: Names, results: Any) -> Sequence[Any]:
    """Return the results of a segment, one for each name that it writes; ValueError where the number differs."""
    is_several = type(results) is tuple and (len(writes) != 1 or len(results) == 1)  # a plan may be a NamedTuple
    values = results if is_several else (results,)
    if len(values) != len(writes):
        raise ValueError(f"a segment that writes {writes} returned {len(values)} values")
    return values
