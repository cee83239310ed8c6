"""Runs micro-batches through a stage: the forward, the backward and the weight gradients of a `StageProgram`.

Autograd runs inside a compute segment: what it reads is a leaf, and what is kept of its results is their gradient
edges, not their storage. So each segment's backward runs on its own. Gradients flow back by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Names, as_results
from dualpipe.pipeline.microbatch import MicrobatchState, RandomStates, SegmentRecord, SegmentRun
from dualpipe.pipeline.overlap import InFlight, Task
from dualpipe.pipeline.stage_program import ProgramSegment, StageProgram
from dualpipe.runtime.device import RandomState
from dualpipe.runtime.recorder import Recorder


class Arriving:
    """A communication that a forward or a backward has started and not waited for."""

    __slots__ = ("in_flight", "names", "record", "segment")

    def __init__(
        self, in_flight: InFlight, segment: ProgramSegment, record: SegmentRecord, names: Names | None = None
    ) -> None:
        self.in_flight = in_flight
        self.segment = segment
        self.record = record
        self.names = (segment.writes or ()) if names is None else names  # of what it brings

    def is_needed_by(self, segment: ProgramSegment, names: Iterable[str]) -> bool:
        """Return True if `segment`, which uses `names`, cannot run before this has arrived."""
        return segment.communication is not None or not set(names).isdisjoint(self.names)


class StageRunner:
    """One stage during one step.

    wait_for_parameters: called before a forward, where they are gathered. autocast: the device type for which the
    caller enabled autocast, which is meant for forwards, recomputed ones included. keep_results: keep results with
    their graphs in the records, for DeepSeek's hook.
    """

    def __init__(
        self, program: StageProgram, store: WeightGradStore, *,
        wait_for_parameters: Callable[[], None] | None = None, autocast: str | None = None, keep_results: bool = False,
    ) -> None:
        self.program = program
        self._store = store
        self._accumulation = store.accumulate()
        self.wait_for_parameters = wait_for_parameters
        self._autocast = autocast
        self._keep_results = keep_results
        self._recorder = Recorder.current()
        # An action's own entry says all of a stage that is one segment and runs once.
        self._records_segments = len(program.segments) > 1 or program.segments[0].recompute

    # -- forward

    def forward(self, state: MicrobatchState) -> Task:
        """Leave the results in `state.carry`, and in its records what the backward needs."""
        if self.wait_for_parameters is not None:
            self.wait_for_parameters()
        segments = self.program.segments
        needs_backward = torch.is_grad_enabled()
        state.records = []
        arriving: Arriving | None = None
        for segment in segments:
            record = SegmentRecord()
            if needs_backward:
                state.records.append(record)
            if arriving is not None and arriving.is_needed_by(segment, _used(segment)):
                self._arrive(arriving, state.carry)
                arriving = None
            if needs_backward and segment.kept:
                record.kept = {name: detached(state.carry[name]) for name in segment.kept}
            if segment.communication is not None:
                values = _values(segment, state.carry)
                record.differentiable = tuple(map(needs_grad, values))
                in_flight = InFlight(segment.communication.forward, values, state.compute_deferred)
                del values
                yield in_flight
                arriving = Arriving(in_flight, segment, record)
            elif needs_backward and segment.recompute:
                self._compute_without_graph(segment, state, record)
            else:
                state.carry = self._compute(segment, state, state.carry, record, "F")
            if segment.writes is not None:
                _drop(state.carry, segment)
        if arriving is not None:
            self._arrive(arriving, state.carry)

    def _recompute(self, region: Sequence[int], state: MicrobatchState) -> Task:
        """Run segments forward again from what was kept of them, now with the graphs for their backward."""
        carry: dict[str, Any] = {}
        arriving: Arriving | None = None
        for number in region:
            segment = self.program.segments[number]
            record = state.records[number]
            if arriving is not None and arriving.is_needed_by(segment, _used(segment)):
                self._arrive(arriving, carry, keep_context=True)
                arriving = None
            carry |= record.kept
            record.kept = {}
            if segment.communication is not None:
                again = partial(segment.communication.again, record.context)
                in_flight = InFlight(again, _values(segment, carry), state.compute_deferred)
                yield in_flight
                arriving = Arriving(in_flight, segment, record)
            else:
                with self._as_before(record.random):
                    carry = self._compute(segment, state, carry, record, "R")
            _drop(carry, segment)
        if arriving is not None:
            self._arrive(arriving, carry, keep_context=True)

    def _compute(
        self, segment: ProgramSegment, state: MicrobatchState, carry: dict[str, Any], record: SegmentRecord, kind: str
    ) -> dict[str, Any]:
        """Run a compute segment; return the carry with its results. The ends of its graph are in the record then."""
        assert segment.fn is not None, "a compute segment has a function"
        run = self._begin(kind, state, segment) if self._records_segments else None
        leaves = carry
        if segment.reads is None:  # the only segment: what is in the carry are leaves, and nobody else's
            results = segment.fn(*carry.values())
        else:
            leaves = {name: detached(carry[name]) for name in segment.reads}  # one, however often it is read
            results = segment.named(segment.fn(*[leaves[name] for name in segment.reads]))
        self.keep(record, leaves, results)
        if run is not None:
            self._end(run, results.values())
        if segment.writes is None:  # the last one: its results are detached where they go
            return results
        for name, value in results.items():
            carry[name] = detached(value)
        return carry

    def keep(self, record: SegmentRecord, leaves: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Keep what the backward of a compute segment needs: the leaves that it read, the edges of its results."""
        if not torch.is_grad_enabled():
            return
        for name, leaf in leaves.items():
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                record.leaves[name] = leaf
        for name, value in results.items():
            if isinstance(value, Tensor) and value.requires_grad:
                record.roots[name] = gradient_edge(value)
        if self._keep_results:
            record.results = dict(results)
        if self._store.observer is not None:
            self._store.observer.saw_graph(record.roots.values())

    def _compute_without_graph(self, segment: ProgramSegment, state: MicrobatchState, record: SegmentRecord) -> None:
        """Run a compute segment that is recomputed before its backward."""
        run = self._begin("F", state, segment)
        values = [detached(value) for _, value in _reads(segment, state.carry)]
        device = next((v.device for v in values if isinstance(v, Tensor) and v.is_cuda), None)
        record.random = RandomStates(device, RandomState.capture(device or torch.device("cpu")))
        assert segment.fn is not None, "a compute segment has a function"
        with torch.no_grad():
            results = segment.named(segment.fn(*values))
        # Whether they depend on a parameter or an input shows when they are computed again.
        results = {name: as_leaf(value, True) for name, value in results.items()}
        self._end(run, results.values())
        state.carry.update(results)

    def _arrive(self, arriving: Arriving, carry: dict[str, Any], *, keep_context: bool = False) -> None:
        """Wait for what a communication brings, into the carry."""
        received, context = arriving.in_flight.finish()
        record = arriving.record
        if not keep_context:
            record.context = context
        writes = arriving.segment.writes
        assert writes is not None, "communications have names"
        wants_grad = any(record.differentiable) and torch.is_grad_enabled()
        for name, value in zip(writes, as_results(writes, received)):
            carry[name] = as_leaf(value, wants_grad)

    @contextmanager
    def _as_before(self, random: RandomStates | None) -> Iterator[None]:
        """Draw the numbers that a forward has drawn; afterwards everything goes on as if nothing had been drawn."""
        assert random is not None, "a recomputed segment has run once"
        autocast = nullcontext() if self._autocast is None else torch.autocast(self._autocast)
        devices = [] if random.device is None else [random.device]
        with autocast, self._store.recompute(), torch.random.fork_rng(devices):
            random.states.restore(random.device)
            yield

    # -- backward

    def backward(self, state: MicrobatchState, kind: str, key: Hashable) -> Task:
        """Compute from `state.gradients` of the results those of the inputs.

        Weight gradients are queued under `key`, where an "I" leaves them. A "B" of a whole module computes them at
        once; a "B" of segments when a communication has started, and at the end.
        """
        if kind == "B" and self.program.is_module:
            collecting = self._accumulation
        else:
            collecting = self._store.defer(key)
            if kind == "B":
                state.deferred = partial(self._compute_deferred, key)
        arriving: Arriving | None = None
        for number in self.program.backward_order:
            segment = self.program.segments[number]
            if arriving is not None and (segment.region or arriving.is_needed_by(segment, segment.writes or ())):
                self._return(arriving, state)
                arriving = None
            if segment.region:
                yield from self._recompute(segment.region, state)
            record = state.records[number]
            state.records[number] = _SPENT
            if segment.communication is not None:
                gradients = tuple(state.gradients.pop(name, None) for name in segment.writes or ())
                back = partial(segment.communication.backward, record.context)
                in_flight = InFlight(back, gradients, state.compute_deferred)
                del gradients
                yield in_flight
                arriving = Arriving(in_flight, segment, record, _differentiable(segment, record))
            else:
                run = self._begin(kind, state, segment) if self._records_segments else None
                self._compute_backward(segment, record, state, collecting)
                if run is not None:
                    self._end(run, [leaf.grad for leaf in record.leaves.values() if leaf.grad is not None])
            del record  # and with it what the segment read, before anything else is made
        if arriving is not None:
            self._return(arriving, state)
        if state.deferred is not None:
            state.deferred()
        if state.from_caller:
            with no_autocast(self._autocast):
                state.return_to_caller()

    def _compute_backward(
        self, segment: ProgramSegment, record: SegmentRecord, state: MicrobatchState,
        collecting: AbstractContextManager[None],
    ) -> None:
        """Run the backward of a compute segment."""
        gradients = state.gradients
        roots: list[GradientEdge] = []
        values: list[Tensor] = []
        for name, edge in record.roots.items():
            gradient = gradients.pop(name, None)
            if gradient is not None:
                roots.append(edge)
                values.append(gradient)
        for name in segment.writes or ():
            gradients.pop(name, None)
        del gradients
        if roots and self._autocast is None:
            with collecting:
                run_backward(roots, values)
        elif roots:
            with collecting, no_autocast(self._autocast):
                run_backward(roots, values)
        for name, leaf in record.leaves.items():
            if leaf.grad is not None:
                state.add_gradient(name, leaf.grad)

    def _return(self, arriving: Arriving, state: MicrobatchState) -> None:
        """Wait for the gradients that a communication brings back."""
        received, _ = arriving.in_flight.finish()
        reads = arriving.segment.reads or ()
        if len(received) != len(reads):
            raise ValueError(f"the backward of a communication gave {len(received)} gradients for what it reads, "
                             f"{reads}; None stands for one that is not needed")
        for name, gradient in zip(reads, received):
            if gradient is not None and name in arriving.names:
                state.add_gradient(name, gradient)

    # -- weight gradients

    def _compute_deferred(self, key: Hashable) -> None:
        """Compute what is queued under `key`; in a trace as an entry of its own."""
        entry = self._recorder.doing("wgrad", key) if self._recorder.keeps_all else nullcontext()
        with entry, no_autocast(self._autocast):
            self._store.run(key)

    def weight_gradients(self, key: Hashable, *, turns: int) -> Task:
        """Compute deferred weight gradients in `turns` parts, to hide others' communications behind."""
        if turns == 1:
            with no_autocast(self._autocast):
                self._store.run(key)
            return
        pieces = self._store.take(key)
        for i, piece in enumerate(pieces):
            with torch.no_grad(), no_autocast(self._autocast):
                piece()
            if (i + 1) * turns // len(pieces) > i * turns // len(pieces):
                yield None

    # -- the record

    def _begin(self, kind: str, state: MicrobatchState, segment: ProgramSegment) -> SegmentRun:
        """Open a segment's entry in the record."""
        run = SegmentRun(kind, *state.slot, segment.number, segment.between_ranks)
        self._recorder.begin("segment", run)
        return run

    def _end(self, run: SegmentRun, results: Iterable[object]) -> None:
        """Close it, when its results are made."""
        self._recorder.made(run, *results)
        self._recorder.end()


_SPENT = SegmentRecord()  # in place of a record whose backward has begun


def _used(segment: ProgramSegment) -> tuple[str, ...]:
    """Return the names that a forward of a segment reads or writes."""
    return (*(segment.reads or ()), *(segment.writes or ()))


def _values(segment: ProgramSegment, carry: dict[str, Any]) -> list[Any]:
    return [value for _, value in _reads(segment, carry)]


def _reads(segment: ProgramSegment, carry: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return the arguments of a segment by name."""
    if segment.reads is None:
        return carry.items()
    return [(name, carry[name]) for name in segment.reads]


def _drop(carry: dict[str, Any], segment: ProgramSegment) -> None:
    """Drop from the carry what no later segment needs."""
    for name in carry.keys() - segment.needed:
        del carry[name]


def _differentiable(segment: ProgramSegment, record: SegmentRecord) -> Names:
    """Return the names that a communication reads and that need a gradient."""
    return tuple(name for name, needed in zip(segment.reads or (), record.differentiable) if needed)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the edge at which a tensor's gradient enters its graph.

    The same as `torch.autograd.graph.get_gradient_edge`, which takes 1.5 us more. That is left to do what is needed
    for a leaf and for a node that is written in Python, which does not keep its graph alive.
    """
    node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def run_backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Run autograd, without the checks of torch.autograd.backward, which cost 7 of 24 us and hold by construction."""
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def no_autocast(device_type: str | None) -> AbstractContextManager:
    """Switch autocast off: around a step it is meant for the forwards."""
    return nullcontext() if device_type is None else torch.autocast(device_type, enabled=False)


def needs_grad(value: Any) -> bool:
    """Return True for a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def detached(value: Any) -> Any:
    """Return a tensor that needs a gradient as a leaf that shares its memory; anything else as it is."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


def as_leaf(value: Any, wants_grad: bool) -> Any:
    """Return a tensor as a leaf; where `wants_grad`, and its dtype can have one, as one that gets a gradient."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(wants_grad and (value.is_floating_point() or value.is_complex()))
