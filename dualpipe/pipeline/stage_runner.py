"""Execution of a `CompiledStage` for micro-batches: forward, backward and weight gradients.

Autograd runs inside of a compute segment: its arguments are leaves, and of its results only the gradient edges are
saved, not the storage. So the backward of every segment runs on its own. Gradients flow back by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Names, as_results
from dualpipe.pipeline.compiled_stage import CompiledSegment, CompiledStage
from dualpipe.pipeline.microbatch_state import MicrobatchState, RandomStates, SegmentRecord, SegmentRun
from dualpipe.pipeline.overlap import InFlight, Task
from dualpipe.runtime.device import RandomState
from dualpipe.runtime.recorder import Recorder


class OpenCommunication:
    """Communication that a forward or a backward has started and not waited for, with its segment and record."""

    __slots__ = ("in_flight", "names", "record", "segment")

    def __init__(
        self, in_flight: InFlight, segment: CompiledSegment, record: SegmentRecord, names: Names | None = None
    ) -> None:
        self.in_flight = in_flight
        self.segment = segment
        self.record = record
        self.names = segment.writes if names is None else names  # of the received values

    def is_needed_by(self, segment: CompiledSegment, names: Iterable[str]) -> bool:
        """Return True if `segment`, which uses `names`, must wait for this communication."""
        return segment.communication is not None or not set(names).isdisjoint(self.names)


class StageRunner:
    """Runs the actions of one stage during one step.

    Args:
        compiled: the compiled stage.
        store: collects weight gradients.
        wait_for_parameters: called before a forward; None if no parameters are gathered.
        autocast: device type for which the caller has enabled autocast, which applies to forwards and recomputations.
        keep_results: save results with their graphs, for DeepSeek's `overlapped_forward_backward`.
    """

    def __init__(
        self, compiled: CompiledStage, store: WeightGradStore, *,
        wait_for_parameters: Callable[[], None] | None = None, autocast: str | None = None, keep_results: bool = False,
    ) -> None:
        self.compiled = compiled
        self._store = store
        self._accumulation = store.accumulate()
        self.wait_for_parameters = wait_for_parameters
        self._autocast = autocast
        self._no_autocast = no_autocast(autocast)
        self._keep_results = keep_results
        self._recorder = Recorder.current()
        # If a stage has one segment, which runs once, the recorder's entry of the action is enough.
        self._records_segments = len(compiled.segments) > 1 or compiled.segments[0].recompute

    # -- forward

    def forward(self, state: MicrobatchState) -> Task:
        """Run a forward: leave the results in `state.carry`, and data for the backward in `state.records`."""
        if self.wait_for_parameters is not None:
            self.wait_for_parameters()
        segments = self.compiled.segments
        needs_backward = torch.is_grad_enabled()
        state.records = []
        communication: OpenCommunication | None = None
        for segment in segments:
            record = SegmentRecord()
            if needs_backward:
                state.records.append(record)
            if communication is not None and communication.is_needed_by(segment, segment.reads + segment.writes):
                self._finish_communication(communication, state.carry)
                communication = None
            if needs_backward and segment.saved:
                record.saved_inputs = {name: detached(state.carry[name]) for name in segment.saved}
                record.saved_versions = list(map(_version, record.saved_inputs.values()))
            if segment.communication is not None:
                values = [state.carry[name] for name in segment.reads]
                record.differentiable = tuple(map(needs_grad, values))
                in_flight = InFlight(segment.communication.forward, values, state.compute_deferred)
                del values
                yield in_flight
                communication = OpenCommunication(in_flight, segment, record)
            elif needs_backward and segment.recompute:
                self._compute_without_graph(segment, state, record)
            else:
                state.carry = self._compute(segment, state, state.carry, record, "F")
            if not segment.is_open:
                _drop_unneeded(state.carry, segment)
        if communication is not None:
            self._finish_communication(communication, state.carry)

    def _recompute(self, region: Sequence[int], state: MicrobatchState) -> Task:
        """Run the forwards of segments again from their saved inputs, now with the graphs for their backwards."""
        carry: dict[str, Any] = {}
        communication: OpenCommunication | None = None
        for number in region:
            segment = self.compiled.segments[number]
            record = state.records[number]
            if communication is not None and communication.is_needed_by(segment, segment.reads + segment.writes):
                self._finish_communication(communication, carry, keep_context=True)
                communication = None
            if list(map(_version, record.saved_inputs.values())) != record.saved_versions:
                raise ValueError(f"one of {list(record.saved_inputs)} was changed in place after segment {number} had "
                                 "read it, but its recomputation needs the value before: write x = x / 2 instead of "
                                 "x /= 2, or set recompute=False")
            carry |= record.saved_inputs
            record.saved_inputs = {}
            if segment.communication is not None:
                start = partial(segment.communication.recompute, record.context)
                values = [carry[name] for name in segment.reads]
                in_flight = InFlight(start, values, state.compute_deferred)
                del values
                yield in_flight
                communication = OpenCommunication(in_flight, segment, record)
            else:
                with self._restore_forward(record.random):
                    carry = self._compute(segment, state, carry, record, "R")
            _drop_unneeded(carry, segment)
        if communication is not None:
            self._finish_communication(communication, carry, keep_context=True)

    def _compute(
        self, segment: CompiledSegment, state: MicrobatchState, carry: dict[str, Any], record: SegmentRecord, kind: str
    ) -> dict[str, Any]:
        """Run a compute segment, and save data for its backward in `record`; return the carry with its results."""
        assert segment.fn is not None, "a compute segment has a function"
        run = self._begin(kind, state, segment) if self._records_segments else None
        leaves = carry  # of an open segment, the last: no other segment reads them
        if not segment.is_open:
            leaves = {name: detached(carry[name]) for name in segment.reads}  # one leaf for a name that is read twice
        results = segment.fn(leaves)
        self.save_for_backward(record, leaves, results)
        if run is not None:
            self._end(run, results.values())
        if segment.is_open:  # its results are detached by their receivers
            return results
        for name, value in results.items():
            carry[name] = detached(value)
        return carry

    def save_for_backward(
        self, record: SegmentRecord, leaves: Mapping[str, Any], results: Mapping[str, Any]
    ) -> None:
        """Save the leaves and the gradient edges of a compute segment, from which its backward runs."""
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

    def _compute_without_graph(self, segment: CompiledSegment, state: MicrobatchState, record: SegmentRecord) -> None:
        """Run the first forward of a compute segment that is recomputed before its backward."""
        run = self._begin("F", state, segment)
        values = {name: detached(state.carry[name]) for name in segment.reads}
        device = next((v.device for v in values.values() if isinstance(v, Tensor) and v.is_cuda), None)
        record.random = RandomStates(device, RandomState.capture(device or torch.device("cpu")))
        assert segment.fn is not None, "a compute segment has a function"
        with torch.no_grad():
            results = segment.fn(values)
        # All results require a gradient for now: only the recomputation shows which depend on a parameter or an input.
        results = {name: as_leaf(value, True) for name, value in results.items()}
        self._end(run, results.values())
        state.carry.update(results)

    def _finish_communication(
        self, communication: OpenCommunication, carry: dict[str, Any], *, keep_context: bool = False
    ) -> None:
        """Wait for a communication of a forward, and put the received values that are needed into the carry.

        keep_context: keep the context of the first forward, in a recomputation.
        """
        received, context = communication.in_flight.finish()
        record = communication.record
        segment = communication.segment
        is_differentiable = any(record.differentiable)
        if not keep_context and (is_differentiable or segment.recompute):
            record.context = context
        requires_grad = is_differentiable and torch.is_grad_enabled()
        for name, value in zip(segment.writes, as_results(segment.writes, received)):
            if name in segment.needed:
                carry[name] = as_leaf(value, requires_grad)

    @contextmanager
    def _restore_forward(self, random: RandomStates | None) -> Iterator[None]:
        """Restore autocast and the random states of a forward; afterwards, those before the `with` are back."""
        assert random is not None, "a recomputed segment has run once"
        autocast = nullcontext() if self._autocast is None else torch.autocast(self._autocast)
        devices = [] if random.device is None else [random.device]
        with autocast, self._store.recompute(), torch.random.fork_rng(devices):
            random.states.restore(random.device)
            yield

    # -- backward

    def backward(self, state: MicrobatchState, kind: str, key: Hashable) -> Task:
        """Run a backward: replace the gradients of the results in `state.gradients` by those of the inputs.

        An "I" leaves weight gradients in the store under `key`. A "B" of a whole module computes them at once; a "B" of
        segments computes them whenever a communication has started, and at the end.
        """
        if kind == "B" and self.compiled.is_module:
            store_mode = self._accumulation
        else:
            store_mode = self._store.defer(key)
            if kind == "B":
                state.deferred = partial(self._compute_at_once, key)
        communication: OpenCommunication | None = None
        for number in self.compiled.backward_order:
            segment = self.compiled.segments[number]
            if communication is not None and (
                segment.region or communication.is_needed_by(segment, segment.writes)
            ):
                self._finish_backward_communication(communication, state)
                communication = None
            if segment.region:
                yield from self._recompute(segment.region, state)
            record = state.records[number]
            state.records[number] = _SPENT
            if segment.communication is not None and not any(record.differentiable):
                continue  # nothing before it needs a gradient, on any rank: all that it would send is zeros
            if segment.communication is not None:
                gradients = tuple(state.gradients.pop(name, None) for name in segment.writes)
                start = partial(segment.communication.backward, record.context)
                in_flight = InFlight(start, gradients, state.compute_deferred)
                del gradients
                yield in_flight
                communication = OpenCommunication(in_flight, segment, record, _differentiable(segment, record))
            else:
                run = self._begin(kind, state, segment) if self._records_segments else None
                self._compute_backward(segment, record, state, store_mode)
                if run is not None:
                    self._end(run, [leaf.grad for leaf in record.leaves.values() if leaf.grad is not None])
            del record  # frees the leaves of the segment before the next one allocates
        if communication is not None:
            self._finish_backward_communication(communication, state)
        if state.deferred is not None:
            state.deferred()
        if state.from_caller:
            state.keep_caller_gradients()

    def _compute_backward(
        self, segment: CompiledSegment, record: SegmentRecord, state: MicrobatchState,
        store_mode: AbstractContextManager[None],
    ) -> None:
        """Run the backward of a compute segment. store_mode: the handling of weight gradients."""
        gradients = state.gradients
        roots: list[GradientEdge] = []
        values: list[Tensor] = []
        for name, edge in record.roots.items():
            gradient = gradients.pop(name, None)
            if gradient is not None:
                roots.append(edge)
                values.append(gradient)
        # Drop the gradients of results without a graph: an earlier value of the same name must not get them.
        for name in segment.writes:
            gradients.pop(name, None)
        del gradients
        if roots:
            with store_mode, self._no_autocast:
                # Without the checks of torch.autograd.backward, which take 7 of 24 us and always pass.
                Variable._execution_engine.run_backward(
                    tuple(roots), tuple(values), False, False, (), allow_unreachable=True, accumulate_grad=True)
        for name, leaf in record.leaves.items():
            if leaf.grad is not None:
                state.add_gradient(name, leaf.grad)

    def _finish_backward_communication(self, communication: OpenCommunication, state: MicrobatchState) -> None:
        """Wait for a communication of a backward, and accumulate the received gradients."""
        received, _ = communication.in_flight.finish()
        reads = communication.segment.reads
        if len(received) != len(reads):
            raise ValueError(f"the backward of a communication returned {len(received)} gradients for its arguments "
                             f"{reads}; return one for each, None if it is not needed")
        for name, gradient in zip(reads, received):
            if gradient is not None and name in communication.names:
                state.add_gradient(name, gradient)

    # -- weight gradients

    def _compute_at_once(self, key: Hashable) -> None:
        """Compute the weight gradients under `key`; while a trace is recorded, with an entry."""
        entry = self._recorder.doing("wgrad", key) if self._recorder.keeps_all else nullcontext()
        with entry, self._no_autocast:
            self._store.run(key)

    def compute_deferred(self, key: Hashable, *, turns: int) -> Task:
        """Compute the weight gradients that an "I" has left under `key`.

        turns: number of parts, each of which hides a communication of another action.
        """
        functions = self._store.take(key)
        ends = [ceil(len(functions) * turn / turns) for turn in range(turns + 1)]
        for start, end in pairwise(ends):
            if start == end:
                continue
            with torch.no_grad(), self._no_autocast:
                for compute_and_add in functions[start:end]:
                    compute_and_add()
            yield None

    # -- recorder entries

    def _begin(self, kind: str, state: MicrobatchState, segment: CompiledSegment) -> SegmentRun:
        """Open the recorder entry of a segment."""
        run = SegmentRun(kind, *state.slot, segment.number, segment.between_ranks)
        self._recorder.begin("segment", run)
        return run

    def _end(self, run: SegmentRun, results: Iterable[object]) -> None:
        """Close the recorder entry of a segment, with its results."""
        self._recorder.made(run, *results)
        self._recorder.end()


_SPENT = SegmentRecord()  # replaces a record whose backward has begun


def _drop_unneeded(carry: dict[str, Any], segment: CompiledSegment) -> None:
    """Drop the values from the carry that no segment after this one needs."""
    for name in carry.keys() - segment.needed:
        del carry[name]


def _differentiable(segment: CompiledSegment, record: SegmentRecord) -> Names:
    """Return the names of a communication's arguments that need a gradient."""
    return tuple(name for name, needed in zip(segment.reads, record.differentiable) if needed)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """Return the edge at which the gradient of a tensor enters its graph.

    The result equals that of `torch.autograd.graph.get_gradient_edge`, which takes 1.5 us more. torch's function is
    still called for a leaf, and for a node that is written in Python, which does not keep its graph alive.
    """
    node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def no_autocast(device_type: str | None) -> AbstractContextManager:
    """Switch off autocast, which applies to the forwards of a step. device_type: None if it is off."""
    return nullcontext() if device_type is None else torch.autocast(device_type, enabled=False)


def needs_grad(value: Any) -> bool:
    """Return True for a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def _version(value: Any) -> int:
    """Return the number of in-place operations on a tensor; 0 for other values, and for tensors that do not count."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def detached(value: Any) -> Any:
    """Return a leaf with the memory of a tensor that needs a gradient; any other value as it is."""
    if isinstance(value, Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


def as_leaf(value: Any, requires_grad: bool) -> Any:
    """Return a tensor as a leaf, which requires a gradient if asked to and its dtype allows it; other values as is."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(requires_grad and (value.is_floating_point() or value.is_complex()))
