"""Segments of a stage: alternating compute and communication over named tensors.

A stage returns them as a list from `segments()`. The engine runs them in order, or interleaves those of two
micro-batches, so that the compute of one hides the communication of the other (`overlap`).

The carry is a dict of values by name that passes from segment to segment. It starts with the stage's inputs as "x"
(several inputs: "x0", "x1", ...); the last segment writes the outputs to names of the same form. Side inputs of the
step are in the carry if the stage's `forward` has parameters with their names.

    [Compute(self.attend, "x", ("residual", "rows", "weights", "plan")),
     Communicate(dispatch, ("rows", "weights", "plan"), ("rows", "weights", "plan")),
     Compute(self.experts, ("rows", "weights", "plan"), ("rows", "plan")),
     Communicate(combine, ("rows", "plan"), "rows"),
     Compute(self.finish, ("residual", "rows"), "x")]

A segment takes the values that it reads as arguments and returns the values that it writes; the rest of the carry is
unchanged. Inputs of a compute segment are detached, so that the backward of every segment runs separately. Gradients
flow back by name, and add up if a tensor is read more than once. The carry may also hold values that are not tensors,
such as "plan" above, the destinations of the rows; they have no gradient.
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
        """Start the second part of the communication, if it has one: for example rows, after their number is exchanged.

        Called once, after other work is queued on the device and before any other communication starts. All ranks call
        it at the same point, so it may start collectives.
        """

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        """Return (results, context for the backward). The current stream waits; the host waits only if it must."""


class Communication(Protocol):
    """A communication between ranks and its backward.

    All ranks of `group` start the same communications in the same order. Any method may raise, also after a message was
    sent: the engine then ends the step on all ranks. Once anything in a step has failed on a rank, no method is called
    there again. All waits for other ranks are in `group`, which ends them.
    """

    group: ProcessGroup | None

    def forward(self, inputs: tuple[Any, ...]) -> Pending:
        """Start the forward. `inputs` are detached; floating-point tensors among the results get gradients."""

    def backward(self, context: Any, gradients: tuple[Tensor | None, ...]) -> Pending:
        """Start the backward, from gradients of the results to gradients of the inputs.

        It is called if an input requires a gradient, which must be so on all of the communicating ranks or on none.

        None in `gradients` is a gradient of zero. Another rank may have one that is not zero, so the rows that it
        expects must be sent as zeros. None in the results means that the input has no gradient.
        """

    def recompute(self, context: Any, inputs: tuple[Any, ...]) -> Pending:
        """Repeat the forward before the backward, with the same inputs and results.

        `context` is that of the first run, and the backward gets it too. Required only if the segment has `recompute`.
        """


def can_recompute(communication: Communication) -> bool:
    """Return True if a communication has the method `recompute`."""
    return getattr(type(communication), "recompute", None) not in (None, Communication.recompute)


class _ReadsAndWrites:
    """Names that a segment reads and writes; a string is converted to a tuple of one name."""

    reads: Names | str
    writes: Names | str

    def __post_init__(self) -> None:
        for field in ("reads", "writes"):
            names = getattr(self, field)
            if isinstance(names, str):
                object.__setattr__(self, field, (names,))


@dataclass(frozen=True)
class Compute(_ReadsAndWrites):
    """Compute on the device: `fn(*reads) -> writes`.

    With `recompute`, only the inputs are saved, and `fn` runs a second time before its backward, with the same random
    numbers. It must not change its inputs in place. Statistics, such as those of batch norm, are counted twice, unless
    `fn` checks `WeightGradStore.current().recomputing`.

    Neighbours with the same `recompute` run as one segment. Gradients are bitwise equal with and without `recompute`,
    unless joining segments changes the order in which the gradients of a tensor are added. That is possible only for a
    tensor that is read at least three times.
    """

    fn: Callable[..., Any]
    reads: Names | str
    writes: Names | str
    recompute: bool = False


@dataclass(frozen=True)
class Communicate(_ReadsAndWrites):
    """Communication between two compute segments.

    The compute segments after it run while it is in flight, as long as they neither read nor write the names it writes.

    Attributes:
        recompute: do not save the received tensors; repeat the communication before the recompute of the next segment,
            which must have `recompute` too. The sent tensors are recomputed if the segment before has `recompute`, and
            saved otherwise.
        of_attention: True between ranks that share a sequence (context parallelism), False to and from experts.
    """

    communication: Communication
    reads: Names | str
    writes: Names | str
    recompute: bool = False
    of_attention: bool = False


Segment = Compute | Communicate

# A match for an input or output of a stage: "x", "x0", "x1", ... Cached, as every forward asks for every name.
is_boundary = cache(re.compile(r"x\d*").fullmatch)
_is_criterion_name = re.compile(r"loss|label\d+").fullmatch  # reserved for the pipeline


@cache
def input_names(count: int) -> Names:
    """Return the names of a stage's inputs in its carry."""
    return ("x",) if count == 1 else tuple(f"x{i}" for i in range(count))


def output_names(segments: Sequence[Segment]) -> Names:
    """Return the names of a stage's outputs, in order; raise ValueError if the last segment does not write them."""
    last_writes = segments[-1].writes if segments else ()
    outputs = [name for name in last_writes if is_boundary(name)]
    names = input_names(len(outputs))
    if not outputs or set(outputs) != set(names):
        raise ValueError(f'the last segment writes {last_writes}, but it must write the outputs of the stage, "x" or '
                         '"x0", "x1", ...; add them to its writes')
    return names


def is_reserved(name: str) -> bool:
    """Return True for a name that the pipeline itself uses in carries: inputs, outputs, labels, the loss."""
    return is_boundary(name) is not None or _is_criterion_name(name) is not None


def validate_segments(segments: Sequence[Segment], side: Iterable[str] = ()) -> list[Segment]:
    """Validate the names and the recompute of a stage's segments, and return them.

    side: names of the side inputs that the stage's `forward` takes; they are in its carry, with the value None if the
    step does not pass them.

    Raises:
        ValueError: a name is read and never written, or is reserved for the pipeline; or a communication cannot be
            recomputed.
    """
    output_names(segments)
    known_names = set(side)
    for number, segment in enumerate(segments):
        missing = [name for name in segment.reads if name not in known_names and not is_boundary(name)]
        if missing:
            raise ValueError(f"segment {number} reads {missing}, which no segment before it writes; expected inputs of "
                             f"the stage or names from {sorted(known_names)}; a side input must be a parameter of the "
                             "stage's forward")
        reserved = [name for name in segment.writes if _is_criterion_name(name)]
        if reserved:
            raise ValueError(f"segment {number} writes {reserved}, names that the pipeline uses; choose others")
        known_names |= set(segment.writes)
        if isinstance(segment, Communicate) and segment.recompute:
            is_last = number + 1 == len(segments)
            if is_last or not segments[number + 1].recompute or not can_recompute(segment.communication):
                raise ValueError(f"segment {number} is a communication with recompute: the segment after it must be "
                                 "recomputed too, and its communication must have the method `recompute`")
    return list(segments)


def run_segments(segments: Iterable[Segment], carry: Mapping[str, Any]) -> dict[str, Any]:
    """Run the segments by an ordinary forward that autograd records, and return the carry after them.

    For the `forward` of a layer outside of a pipeline. Every communication blocks, in the forward and in the backward;
    nothing is recomputed.
    """
    carry = dict(carry)
    for segment in segments:
        inputs = [carry[name] for name in segment.reads]
        if isinstance(segment, Compute):
            results = segment.fn(*inputs)
        else:
            results = _BlockingCommunication.apply(segment.communication, *inputs)
        writes = tuple(segment.writes)
        carry.update(zip(writes, as_results(writes, results)))
    return carry


class _BlockingCommunication(torch.autograd.Function):
    """A communication and its backward, which both block."""

    @staticmethod
    def forward(ctx: Any, communication: Communication, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.communication = communication
        results, ctx.context = _wait_for(communication.forward(inputs))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        input_gradients, _ = _wait_for(ctx.communication.backward(ctx.context, gradients))
        return None, *input_gradients


def _wait_for(pending: Pending) -> tuple[tuple[Any, ...], Any]:
    """Wait for a communication without overlapping it, and return (results, context)."""
    pending.advance()
    return pending.wait()


def as_results(writes: Names, results: Any) -> Sequence[Any]:
    """Return a segment's results, one per written name; raise ValueError if their number differs."""
    # A NamedTuple is one value. For a single name, a tuple of one element is unpacked, and a longer tuple is one value.
    is_several = type(results) is tuple and (len(writes) != 1 or len(results) == 1)
    values = results if is_several else (results,)
    if len(values) != len(writes):
        raise ValueError(f"a segment that writes {writes} returned {len(values)} values, expected {len(writes)}; it "
                         "must return one value for each name")
    return values
