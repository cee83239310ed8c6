"""Running stages that are made of segments: one micro-batch, or several in turn so that communication is hidden.

Each action (a forward, a backward, weight gradients) is a generator that computes until it has a communication in
flight, yields, and waits for it when it is resumed. `walk` resumes those of a step in turn:

    F   attend 0   [dispatch 0]   experts 0   [combine 0]   finish 0, attend 1   ...
    B              finish 3       [combine 3] experts 3     [dispatch 3]         ...

While [dispatch 0] is in flight the backward computes `finish 3`, while [combine 3] is in flight the forward computes
`experts 0`, and so on, for any number of segments on either side and any kinds of actions. A full backward defers its
weight gradients and computes them when its own next communication has started: alone, it hides that behind them. All
ranks walk the same actions in the same order, so their communications match.

An action that fails goes on without computing and takes part in its communications, so that no other rank waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe.device import random_state, set_random_state
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import (
    Communicate,
    Compute,
    Names,
    Pending,
    Segment,
    as_results,
    merged,
    needed_after,
    regions,
)

Task = Generator[None, None, None]
_DONE = object()


def walk(tasks: Iterable[Task]) -> None:
    """Run tasks in turn, each until it has a communication in flight, or nothing for the others to hide."""
    running = deque(tasks)
    while running:
        task = running.popleft()
        if next(task, _DONE) is not _DONE:
            running.append(task)


@dataclass
class SegmentRecord:
    """What the backward of a segment needs: of a compute segment the leaves that it read and where its graph ends."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # to run it again, but for what is made again before it
    rng: Any = None  # the `Rng` of one that is run again
    context: Any = None  # of a communication
    differentiable: tuple[bool, ...] = ()  # which of a communication's inputs have a gradient


class MicrobatchState:
    """One micro-batch in one stage, from its arrival to its last gradient.

    inputs: what has arrived, until the forward takes it; side: the side inputs beside it, until they go on with the
    result. After a failure `error` is set, and only communications go on; none, once one has failed (`broken`).
    """

    error: BaseException | None = None
    broken = False
    results: Names = ()  # the names of the results that need a gradient, once the forward is through
    arrived: Sequence[Tensor] = ()  # their gradients, as they came

    # Of a stage that is one compute segment:
    leaves: tuple[Tensor, ...] = ()  # the inputs whose gradients the stage before expects
    roots: tuple[GradientEdge, ...] = ()
    outputs: tuple[Tensor, ...] = ()  # these and the loss are kept only for modules that overlap by themselves
    loss: Tensor | None = None

    def __init__(self, inputs: tuple[Tensor, ...] = (), side: tuple[Tensor, ...] = ()) -> None:
        self.inputs, self.side = inputs, side
        self.carry: dict[str, Any] = {}
        self.records: list[SegmentRecord] = []
        self.gradients: dict[str, Tensor] = {}
        self._expected: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self._outside: dict[str, Tensor] = {}

    def begin(self, carry: dict[str, Any], inputs: Names = ()) -> None:
        """Start a forward in segments. inputs: the names in the carry whose gradients the stage before expects; those
        of others go where they came from."""
        self.inputs, self.carry = (), carry
        wanted = {name: t for name, t in carry.items() if needs_grad(t)}
        self._expected = {name: (t.shape, t.dtype, t.device) for name, t in wanted.items() if name in inputs}
        self._outside = {name: t for name, t in wanted.items() if name not in inputs}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Keep an error of what is done inside, instead of raising it."""
        try:
            yield
        except BaseException as error:
            self.error = error

    def start(self, communication: Callable[..., Pending], *arguments: Any) -> Pending | None:
        """Start a communication; with nothing where it cannot be started with what there is. None: it failed."""
        if self.broken:
            return None
        if self.error is None and arguments[-1] is not None:
            with self.attempt():
                return communication(*arguments)
        try:
            return communication(*arguments[:-1], None)
        except BaseException as error:
            self._fail(error)
            return None

    def finish(self, pending: Pending | None) -> tuple[tuple[Any, ...], Any] | None:
        """What was received, and the context for the backward; None where it failed.

        After one that fails on its way with the backend's error, a RuntimeError, no other is started: they could only
        end by its timeout.
        """
        if pending is None:
            return None
        try:
            pending.advance()
            return pending.wait()
        except BaseException as error:
            self._fail(error)
            return None

    def _fail(self, error: BaseException) -> None:
        self.error, self.broken = self.error or error, isinstance(error, RuntimeError)

    def add_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Gradients of a tensor that was read more than once add up, in the order of the backward."""
        if gradient is not None:
            earlier = self.gradients.get(name)
            self.gradients[name] = gradient if earlier is None else earlier + gradient

    def input_gradients(self) -> list[Tensor]:
        """The gradients of the inputs that need one, in their order; zeros where nothing depends on them."""
        found = [(self.gradients.pop(name, None), like) for name, like in self._expected.items()]
        for name, tensor in self._outside.items():  # of the caller: inputs of the first stage, labels
            if (gradient := self.gradients.get(name)) is not None:
                torch.autograd.backward(tensor, gradient)
        self.gradients.clear()
        return [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in found
        ]


class SegmentedStage:
    """The segments of a stage, and the forward and backward of a micro-batch through them.

    outputs: the names of what goes to the next stage; results: those that must be left in the carry. `ready` is called
    before a forward. autocast: the device type for which the caller enabled it; it is meant for forwards, those that
    are run again included.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        outputs: Names,
        results: Names,
        *,
        store: WeightGradStore,
        ready: Callable[[], None] | None = None,
        autocast: str | None = None,
    ) -> None:
        self._segments, self.outputs, self._results = merged(segments, results), outputs, results
        self._store, self._ready, self._autocast = store, ready, autocast
        self.communications = sum(isinstance(segment, Communicate) for segment in segments)
        self._needed = needed_after(self._segments, results)
        self._regions = {max(region): region for region in regions(self._segments)}
        self._kept = {number: names for region in self._regions.values() for number, names in region.items()}

    # -- forward

    def forward(self, state: MicrobatchState) -> Task:
        """Fill `state.carry` with the results, and its records where gradients are wanted."""
        if self._ready is not None and state.error is None:
            with state.attempt():
                self._ready()
        keep, carry = torch.is_grad_enabled(), state.carry
        for number, (segment, needed) in enumerate(zip(self._segments, self._needed)):
            record = SegmentRecord()
            if keep:
                state.records.append(record)
                if state.error is None:
                    record.kept = {name: detached(carry[name]) for name in self._kept.get(number, ())}
            if isinstance(segment, Communicate):
                record.differentiable = tuple(needs_grad(carry.get(name)) for name in segment.reads)
                yield from self._communicate(segment, carry, record, state)
            elif state.error is None:
                with state.attempt():
                    self._compute(segment, carry, record)
            for name in carry.keys() - needed:
                del carry[name]
        state.results = tuple(name for name in self._results if needs_grad(carry.get(name)))

    def _communicate(
        self, segment: Communicate, carry: dict[str, Any], record: SegmentRecord, state: MicrobatchState
    ) -> Task:
        pending = state.start(segment.communication.forward, _to_send(segment, carry, state))
        if pending is not None:
            yield
        received = state.finish(pending)
        if received is not None:
            record.context = received[1]
        _take(segment, carry, received, record, state)

    def _compute(self, segment: Compute, carry: dict[str, Any], record: SegmentRecord) -> None:
        leaves = {name: detached(carry[name]) for name in segment.reads}  # one, however often it is read
        inputs = tuple(leaves[name] for name in segment.reads)
        grad = torch.is_grad_enabled()
        if grad and segment.recompute:
            record.rng = Rng.now(inputs)
            with torch.no_grad():
                results = as_results(segment, segment.fn(*inputs))
            # Whether they really depend on a parameter or an input shows when they are computed again.
            results = [as_leaf(r, True) for r in results]
        else:
            results = as_results(segment, segment.fn(*inputs))
            if grad:
                _record(segment, inputs, results, record)
        carry.update({name: detached(value) for name, value in zip(segment.writes, results)})

    # -- backward

    def backward(self, state: MicrobatchState, kind: str, key: Hashable) -> Task:
        """From `state.gradients` of the results to those of the inputs. Weight gradients are queued under `key`, where
        an "I" leaves them; a "B" computes them when a communication has started, and at the end."""
        for number, segment in reversed(list(enumerate(self._segments))):
            if number in self._regions:
                yield from self._run_again(self._regions[number], state, kind, key)
            if isinstance(segment, Communicate):
                yield from self._communicate_backward(segment, state, kind, key)
            else:
                record = state.records.pop() if state.records else SegmentRecord()
                if state.error is None:
                    with state.attempt():
                        self._compute_backward(segment, record, state, key)
                del record  # and with it what the segment read, before anything else is made
        self._weight_gradients(state, kind, key)

    def _communicate_backward(self, segment: Communicate, state: MicrobatchState, kind: str, key: Hashable) -> Task:
        record = state.records.pop() if state.records else SegmentRecord()
        gradients = tuple(state.gradients.pop(name, None) for name in segment.writes) if state.error is None else None
        pending = state.start(segment.communication.backward, record.context, gradients)
        self._weight_gradients(state, kind, key)  # what it can be hidden behind
        if pending is not None:
            yield
        received = state.finish(pending)
        if received is not None and state.error is None:
            with state.attempt():
                _give_back(segment, record, state, received[0])

    def _compute_backward(
        self, segment: Compute, record: SegmentRecord, state: MicrobatchState, key: Hashable
    ) -> None:
        gradients = {name: state.gradients.pop(name, None) for name in segment.writes}
        given = [(edge, gradients[name]) for name, edge in record.roots.items() if gradients[name] is not None]
        if given:
            roots, values = zip(*given)
            with self._store.defer(key), no_autocast(self._autocast):
                run_backward(roots, values)
        for name, leaf in record.leaves.items():
            state.add_gradient(name, leaf.grad)

    def _weight_gradients(self, state: MicrobatchState, kind: str, key: Hashable) -> None:
        if kind == "B" and state.error is None:
            with state.attempt():
                self._store.run(key)

    def weight_gradients(self, state: MicrobatchState, key: Hashable, *, turns: int) -> Task:
        """The deferred ones, in `turns` parts, to hide others' communications behind."""
        pieces = self._store.take(key)
        for i, piece in enumerate(pieces):
            if state.error is None:
                with state.attempt(), torch.no_grad():
                    piece()
            if (i + 1) * turns // len(pieces) > i * turns // len(pieces):
                yield

    # -- again

    def _run_again(self, region: Mapping[int, Names], state: MicrobatchState, kind: str, key: Hashable) -> Task:
        """The forward of neighbouring segments from what was kept of them, now with the graphs for their backward."""
        carry: dict[str, Any] = {}
        for number in region:
            segment, record = self._segments[number], state.records[number] if state.records else SegmentRecord()
            carry |= record.kept
            record.kept = {}
            if isinstance(segment, Communicate):
                yield from self._communicate_again(segment, carry, record, state, kind, key)
            elif state.error is None:
                with state.attempt():
                    self._compute_again(segment, carry, record)

    def _communicate_again(
        self, segment: Communicate, carry: dict[str, Any], record: SegmentRecord, state: MicrobatchState, kind: str,
        key: Hashable,
    ) -> Task:
        pending = state.start(segment.communication.again, record.context, _to_send(segment, carry, state))
        self._weight_gradients(state, kind, key)
        if pending is not None:
            yield
        _take(segment, carry, state.finish(pending), record, state)

    def _compute_again(self, segment: Compute, carry: dict[str, Any], record: SegmentRecord) -> None:
        leaves = {name: detached(carry[name]) for name in segment.reads}  # its own, as in its forward
        inputs = tuple(leaves[name] for name in segment.reads)
        autocast = nullcontext() if self._autocast is None else torch.autocast(self._autocast)
        with autocast, self._store.recompute(), record.rng.replay():
            results = as_results(segment, segment.fn(*inputs))
        _record(segment, inputs, results, record)
        carry.update({name: detached(value) for name, value in zip(segment.writes, results)})


# -- what goes into segments and comes out of them


def _record(segment: Compute, inputs: Sequence[Any], results: Sequence[Any], record: SegmentRecord) -> None:
    record.leaves = {name: t for name, t in zip(segment.reads, inputs) if needs_grad(t)}
    record.roots = {name: get_gradient_edge(t) for name, t in zip(segment.writes, results) if needs_grad(t)}


def _to_send(segment: Communicate, carry: Mapping[str, Any], state: MicrobatchState) -> tuple[Any, ...] | None:
    """What a communication reads, without gradients; None after a failure."""
    if state.error is None:
        with state.attempt():
            found = [carry[name] for name in segment.reads]
            return tuple(value.detach() if isinstance(value, Tensor) else value for value in found)
    return None


def _take(
    segment: Communicate, carry: dict[str, Any], received: tuple[tuple[Any, ...], Any] | None, record: SegmentRecord,
    state: MicrobatchState,
) -> None:
    """Put what was received into the carry."""
    if received is not None and state.error is None:
        with state.attempt():
            wanted = any(record.differentiable) and torch.is_grad_enabled()
            for name, value in zip(segment.writes, as_results(segment, received[0])):
                carry[name] = as_leaf(value, wanted)


def _give_back(
    segment: Communicate, record: SegmentRecord, state: MicrobatchState, gradients: Sequence[Any]
) -> None:
    if len(gradients) != len(segment.reads):
        raise ValueError(f"the backward of a communication gave {len(gradients)} gradients for what it reads, "
                         f"{segment.reads}; None stands for one that is not needed")
    for name, needed, gradient in zip(segment.reads, record.differentiable, gradients):
        if needed:
            state.add_gradient(name, gradient)


def run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """What torch.autograd.backward calls after checks that cost 7 of 24 us and hold here by construction."""
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def no_autocast(device_type: str | None) -> AbstractContextManager:
    """Autocast around a step is meant for the forwards."""
    return nullcontext() if device_type is None else torch.autocast(device_type, enabled=False)


def needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def detached(value: Any) -> Any:
    """A leaf that shares the memory."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def as_leaf(value: Any, wanted: bool) -> Any:
    """A tensor as a leaf; where `wanted` and possible, one that gets a gradient."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(wanted and (value.is_floating_point() or value.is_complex()))


@dataclass(frozen=True)
class Rng:
    """The state of the random number generators that a segment may use."""

    cpu: Tensor
    device: torch.device | None
    state: Any  # that of the device

    @staticmethod
    def now(inputs: Iterable[Any]) -> Rng:
        """On the CPU, and on the CUDA device of the inputs."""
        device = next((t.device for t in inputs if isinstance(t, Tensor) and t.is_cuda), None)
        return Rng(torch.get_rng_state(), device, None if device is None else random_state(device))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Draw the same numbers again inside; afterwards everything goes on as if nothing had been drawn."""
        with torch.random.fork_rng([] if self.device is None else [self.device]):
            torch.set_rng_state(self.cpu)
            if self.device is not None:
                set_random_state(self.state, self.device)
            yield
