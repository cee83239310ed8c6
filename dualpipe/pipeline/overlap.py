"""Running stages that are made of segments: one micro-batch, or several in turn so that communication is hidden.

Each action (a forward, a backward, weight gradients) is a generator that computes until its next communication, yields
it to be started, and waits for it when it is resumed. `walk` resumes those of a step in turn:

    F   attend 0   [dispatch 0]   experts 0   [combine 0]   finish 0, attend 1   ...
    B              finish 3       [combine 3] experts 3     [dispatch 3]         ...

While [dispatch 0] is in flight the backward computes `finish 3`, while [combine 3] is in flight the forward computes
`experts 0`, and so on, for any number of segments on either side and any kinds of actions. A full backward defers its
weight gradients and computes them when its own next communication has started: alone, it hides that behind them.

A communication may start in two parts: [dispatch 0] sends the numbers of rows, and the rows when the host knows them.
Communications run one behind the other, so the rows must be on their way before the backward starts [dispatch 3], which
waits for `experts 3`: before one action starts a communication, those of the others are advanced. On a device:

    computing       finish 3    attend 0    experts 3           experts 0    attend 3    finish 0
    communicating               combine 3   counts 0, rows 0    dispatch 3   combine 0

A communication whose result the next compute segments do not read is waited for when one does, or when its action has
another one to start: so the keys and values of a part of the sequence travel while those before are attended to.

All ranks walk the same actions in the same order, whatever has arrived, so their communications match.

An action that fails goes on without computing and takes part in its communications, so that no other rank waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import (
    Communicate,
    Compute,
    Names,
    Pending,
    as_results,
    backward_order,
    merged,
    needed_after,
    regions,
)
from dualpipe.runtime.device import RandomState
from dualpipe.runtime.recorder import Recorder


@dataclass
class SegmentRecord:
    """What the backward of a segment needs: of a compute segment the leaves that it read and where its graph ends."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # to run it again, but for what is made again before it
    rng: Any = None  # the state of the random number generators, for one that is run again
    context: Any = None  # of a communication
    differentiable: tuple[bool, ...] = ()  # which of a communication's inputs have a gradient


class Part(NamedTuple):
    """A segment of a stage as it runs: in a forward ("F"), one that is run again ("R"), or a backward.

    inside: whether it is between a communication and its return, as what experts compute is; not those of attention.
    """

    kind: str
    stage: int
    microbatch: int
    number: int
    inside: bool = False

    def __str__(self) -> str:
        return f"segment {self.number} of {self.kind}(stage {self.stage}, micro-batch {self.microbatch})"


class MicrobatchState:
    """One micro-batch in one stage, from its arrival to its last gradient.

    inputs: what has arrived, until the forward takes it; side: the side inputs beside it, until they go on with the
    result. After a failure `error` is set, and only communications go on; none, once one has failed (`broken`).
    """

    slot = (0, 0)  # stage and micro-batch
    error: BaseException | None = None
    broken = False
    arrived: Sequence[Tensor] = ()  # the gradients of the results, as they came
    result: Sequence[Tensor] = ()  # of an action that is walked, until it is handed on

    # Of a stage that is one compute segment:
    leaves: tuple[Tensor, ...] = ()  # the inputs whose gradients the stage before expects
    roots: tuple[GradientEdge, ...] = ()
    outputs: tuple[Tensor, ...] = ()  # these and the loss are kept only for modules that overlap by themselves
    loss: Tensor | None = None

    # Of one that is made of several:
    results: Names = ()  # the names of the results that need a gradient, once the forward is through
    deferred: Callable[[], None] | None = None  # a full backward's weight gradients, to hide its communications behind

    def __init__(self, inputs: tuple[Tensor, ...] = (), side: tuple[Tensor, ...] = ()) -> None:
        self.inputs, self.side = inputs, side
        self.carry: dict[str, Any] = {}
        self.records: list[SegmentRecord] = []
        self.gradients: dict[str, Tensor] = {}
        self._expected: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self._outside: dict[str, Tensor] = {}

    def begin(self, carry: dict[str, Any], inputs: Names = ()) -> None:
        """Start a forward in segments. inputs: the names in the carry whose gradients the stage before expects; those
        of others, inputs of the first stage and labels, go to the caller."""
        self.inputs, self.carry = (), carry
        wanted = {name: t for name, t in carry.items() if needs_grad(t)}
        self._expected = {name: (t.shape, t.dtype, t.device) for name, t in wanted.items() if name in inputs}
        self._outside = {name: t for name, t in wanted.items() if name not in inputs}

    @contextmanager
    def attempt(self, *, on_its_way: bool = False) -> Iterator[None]:
        """Keep an error of what is done inside, instead of raising it. After a communication that fails on its way with
        the backend's error, a RuntimeError, no other is started: they could only end by its timeout."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            self.broken = self.broken or (on_its_way and isinstance(error, RuntimeError))

    def weight_gradients(self) -> None:
        """Compute those of a full backward that have been deferred until now."""
        if self.deferred is not None and self.error is None:
            with self.attempt():
                self.deferred()

    def add_gradients(self, found: Iterable[tuple[str, Tensor | None]]) -> None:
        """Gradients of a tensor that was read more than once add up, in the order of the backward."""
        for name, gradient in found:
            if gradient is not None:
                earlier = self.gradients.get(name)
                self.gradients[name] = gradient if earlier is None else earlier + gradient

    def input_gradients(self) -> list[Tensor]:
        """The gradients of the inputs that need one, in their order; zeros where nothing depends on them."""
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.leaves]
        for name, tensor in self._outside.items():
            if (gradient := self.gradients.get(name)) is not None:
                torch.autograd.backward(tensor, gradient)
        gradients, self.gradients = self.gradients, {}
        return found + [
            gradients[name] if name in gradients else torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype, device) in self._expected.items()
        ]


class Flight:
    """One communication of an action, from what is to be sent to what has arrived; its errors are the action's."""

    _pending: Pending | None = None  # None before the start, at the end, and when it has failed
    _advanced = False
    _sent: tuple[Any, ...] = ()  # stays until the end, as other streams read it

    def __init__(
        self, state: MicrobatchState, start: Callable[[Any], Pending], values: Mapping[str, Any], names: Iterable[str]
    ) -> None:
        self._state, self._given = state, [(start, values, names)]  # until it starts, so as to keep nothing alive

    def start(self) -> None:
        """Start it, with nothing where it cannot be started with the values; then compute what it can hide behind."""
        state, (start, values, names) = self._state, self._given.pop()
        if state.error is None:
            with state.attempt():
                found = [values[name] for name in names]
                self._sent = tuple(v.detach() if isinstance(v, Tensor) else v for v in found)
                self._pending = start(self._sent)
        state.weight_gradients()

    def advance(self) -> None:
        """Do what could not be done at the start, once."""
        if self._pending is not None and not self._advanced:
            self._advanced = True
            with self._state.attempt(on_its_way=True):
                self._pending.advance()
                return
            self._pending = None

    def finish(self) -> tuple[tuple[Any, ...], Any] | None:
        """What was received, and the context for the backward; None where it failed."""
        self.advance()
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                with self._state.attempt(on_its_way=True):
                    return pending.wait()
            return None
        finally:
            self._sent = ()


Task = Generator[Flight | None, None, None]  # None: it has computed something to hide the others' behind


def walk(tasks: Iterable[Task]) -> None:
    """Run tasks in turn, each until its next communication, and start that once those of the others are advanced."""
    running: deque[tuple[Task, Flight | None]] = deque((task, None) for task in tasks)
    while running:
        task, _ = running.popleft()
        try:
            flight = next(task)
        except StopIteration:
            continue
        for _, other in running:
            if other is not None:
                other.advance()
        if flight is not None:
            flight.start()
        running.append((task, flight))


class SegmentedStage:
    """The segments of a stage, and the forward and backward of a micro-batch through them.

    outputs: the names of what goes to the next stage; results: those that must be left in the carry. `ready` is called
    before a forward. autocast: the device type for which the caller enabled it; it is meant for forwards, those that
    are run again included.
    """

    def __init__(
        self, segments: Sequence[Compute | Communicate], outputs: Names, results: Names, *, store: WeightGradStore,
        ready: Callable[[], None] | None = None, autocast: str | None = None,
    ) -> None:
        self._segments, self.outputs = merged(segments, results), outputs
        self._store, self._ready, self._autocast = store, ready, autocast
        self._recorder = Recorder.current()
        self.communications = sum(isinstance(segment, Communicate) for segment in segments)
        of_experts = (isinstance(segment, Communicate) and not segment.of_attention for segment in self._segments)
        before = accumulate(of_experts)
        self._inside = {number for number, communications in enumerate(before) if communications % 2}
        self._needed = needed_after(self._segments, results)
        self._backwards = backward_order(self._segments)
        self._regions = {max(region): region for region in regions(self._segments)}
        self._kept = {number: names for region in self._regions.values() for number, names in region.items()}

    def forward(self, state: MicrobatchState) -> Task:
        """Leave the results in `state.carry`; in its records, where gradients are wanted, what the backward needs."""
        if torch.is_grad_enabled():
            state.records = [SegmentRecord() for _ in self._segments]
        return self._through(range(len(self._segments)), state, state.carry)

    def _through(
        self, numbers: Iterable[int], state: MicrobatchState, carry: dict[str, Any], *, again: bool = False
    ) -> Task:
        """Segments forward; `again` from what was kept of them, now with the graphs for their backward."""
        if self._ready is not None and not again and state.error is None:
            with state.attempt():
                self._ready()
        under_way: tuple[Flight, Communicate, SegmentRecord] | None = None
        for number in numbers:
            segment, record = self._segments[number], state.records[number] if state.records else SegmentRecord()
            if under_way is not None and _meet(segment, (*segment.reads, *segment.writes), under_way[1].writes):
                self._arrive(*under_way, state, carry, again)
                under_way = None
            if again:
                carry |= record.kept
                record.kept = {}
            elif state.records and state.error is None:
                record.kept = {name: detached(carry[name]) for name in self._kept.get(number, ())}
            if isinstance(segment, Communicate):
                if not again:
                    record.differentiable = tuple(needs_grad(carry.get(name)) for name in segment.reads)
                start = partial(segment.communication.again, record.context) if again else segment.communication.forward
                flight = Flight(state, start, carry, segment.reads)
                yield flight
                under_way = flight, segment, record
            elif state.error is None:
                part = Part("R" if again else "F", *state.slot, number, number in self._inside)
                self._recorder.begin("segment", part)
                with state.attempt():
                    self._compute(segment, carry, record, again, part)
                self._recorder.end()
            for name in carry.keys() - self._needed[number]:
                del carry[name]
        if under_way is not None:
            self._arrive(*under_way, state, carry, again)

    @staticmethod
    def _arrive(
        flight: Flight, segment: Communicate, record: SegmentRecord, state: MicrobatchState, carry: dict[str, Any],
        again: bool,
    ) -> None:
        """Wait for what a communication brings, into the carry."""
        received = flight.finish()
        if received is not None and not again:
            record.context = received[1]
        if received is not None and state.error is None:
            with state.attempt():
                wanted = any(record.differentiable) and torch.is_grad_enabled()
                carry.update({
                    name: as_leaf(value, wanted)
                    for name, value in zip(segment.writes, as_results(segment, received[0]))
                })

    def _compute(
        self, segment: Compute, carry: dict[str, Any], record: SegmentRecord, again: bool, part: Part
    ) -> None:
        leaves = {name: detached(carry[name]) for name in segment.reads}  # one, however often it is read
        inputs = [leaves[name] for name in segment.reads]
        grad = torch.is_grad_enabled()
        if grad and segment.recompute and not again:
            device = next((t.device for t in inputs if isinstance(t, Tensor) and t.is_cuda), None)
            record.rng = device, RandomState.capture(device or torch.device("cpu"))
            with torch.no_grad():
                results = as_results(segment, segment.fn(*inputs))
            # Whether they really depend on a parameter or an input shows when they are computed again.
            results = [as_leaf(result, True) for result in results]
        else:
            with self._as_before(record.rng) if again else nullcontext():
                results = as_results(segment, segment.fn(*inputs))
            if grad:
                record.leaves = {name: t for name, t in leaves.items() if needs_grad(t)}
                record.roots = {name: get_gradient_edge(t) for name, t in zip(segment.writes, results) if needs_grad(t)}
        self._recorder.made(part, *results)
        carry.update({name: detached(value) for name, value in zip(segment.writes, results)})

    @contextmanager
    def _as_before(self, rng: tuple[torch.device | None, RandomState]) -> Iterator[None]:
        """Draw the numbers that a forward has drawn; afterwards everything goes on as if nothing had been drawn."""
        device, state = rng
        autocast = nullcontext() if self._autocast is None else torch.autocast(self._autocast)
        with autocast, self._store.recompute(), torch.random.fork_rng([] if device is None else [device]):
            state.restore(device)
            yield

    def backward(self, state: MicrobatchState, kind: str, key: Hashable) -> Task:
        """From `state.gradients` of the results to those of the inputs. Weight gradients are queued under `key`, where
        an "I" leaves them; a "B" computes them when a communication has started, and at the end."""
        deferred = partial(self._run_traced if self._recorder.whole else self._store.run, key)
        state.deferred = deferred if kind == "B" else None
        under_way: tuple[Flight, Communicate, SegmentRecord] | None = None
        for number in self._backwards:
            segment, record = self._segments[number], SegmentRecord()
            if under_way is not None and (number in self._regions or _meet(
                    segment, segment.writes, _differentiable(*under_way[1:]))):
                self._return(*under_way, state)
                under_way = None
            if number in self._regions:
                yield from self._through(self._regions[number], state, {}, again=True)
            if state.records:
                record, state.records[number] = state.records[number], record
            given = {name: state.gradients.pop(name, None) for name in segment.writes}
            if isinstance(segment, Communicate):
                flight = Flight(state, partial(segment.communication.backward, record.context), given, segment.writes)
                yield flight
                under_way = flight, segment, record
            elif state.error is None:
                self._recorder.begin("segment", part := Part(kind, *state.slot, number, number in self._inside))
                with state.attempt():
                    self._compute_backward(record, given, state, key)
                    self._recorder.made(part, *(leaf.grad for leaf in record.leaves.values() if leaf.grad is not None))
                self._recorder.end()
            del record, given  # and with them what the segment read, before anything else is made
        if under_way is not None:
            self._return(*under_way, state)
        state.weight_gradients()

    @staticmethod
    def _return(flight: Flight, segment: Communicate, record: SegmentRecord, state: MicrobatchState) -> None:
        """Wait for the gradients that a communication brings back."""
        received = flight.finish()
        if received is None or state.error is not None:
            return
        with state.attempt():
            if len(received[0]) != len(segment.reads):
                raise ValueError(f"the backward of a communication gave {len(received[0])} gradients for what it "
                                 f"reads, {segment.reads}; None stands for one that is not needed")
            wanted = _differentiable(segment, record)
            state.add_gradients(pair for pair in zip(segment.reads, received[0]) if pair[0] in wanted)

    def _run_traced(self, key: Hashable) -> None:
        """Run deferred weight gradients as an entry, which at other times is part of its action."""
        with self._recorder.doing("wgrad", key):
            self._store.run(key)

    def _compute_backward(
        self, record: SegmentRecord, gradients: Mapping[str, Tensor | None], state: MicrobatchState, key: Hashable
    ) -> None:
        given = [(edge, gradients[name]) for name, edge in record.roots.items() if gradients[name] is not None]
        if given:
            roots, values = zip(*given)
            with self._store.defer(key), no_autocast(self._autocast):
                run_backward(roots, values)
        state.add_gradients((name, leaf.grad) for name, leaf in record.leaves.items())

    def weight_gradients(self, state: MicrobatchState, key: Hashable, *, turns: int) -> Task:
        """The deferred ones, in `turns` parts, to hide others' communications behind."""
        pieces = self._store.take(key)
        for i, piece in enumerate(pieces):
            if state.error is None:
                with state.attempt(), torch.no_grad():
                    piece()
            if (i + 1) * turns // len(pieces) > i * turns // len(pieces):
                yield None


def _differentiable(segment: Communicate, record: SegmentRecord) -> Names:
    """What a communication reads that has a gradient."""
    return tuple(name for name, needed in zip(segment.reads, record.differentiable) if needed)


def _meet(segment: Compute | Communicate, needed: Iterable[str], coming: Iterable[str]) -> bool:
    """Whether a segment cannot run while a communication is under way: it is one too, or it needs what is coming."""
    return isinstance(segment, Communicate) or not set(needed).isdisjoint(coming)


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
