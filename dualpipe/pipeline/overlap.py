"""Running stages that are made of segments: one micro-batch, or several in turn so that communication is hidden.

Each action (a forward, a backward, weight gradients) is a generator that computes until it has a communication in
flight, yields that, and waits for it when it is resumed. `walk` resumes those of a step in turn:

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
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

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
from dualpipe.pipeline.passage import Passage, Record, Rng, as_leaf, detached, needs_grad, without_grad

Task = Generator[Pending | None, None, None]
_DONE = object()


def walk(tasks: Iterable[Task]) -> None:
    """Run tasks in turn, each until it has a communication in flight, or nothing for the others to hide."""
    running = deque(tasks)
    while running:
        task = running.popleft()
        if next(task, _DONE) is not _DONE:
            running.append(task)


class SegmentedStage:
    """The segments of a stage, and the forward and backward of a micro-batch through them.

    outputs: the names of what goes to the next stage; results: those that must be left in the carry. autocast: the
    device type for which the caller enabled it, for forwards; recomputed ones run under it too.
    """

    def __init__(
        self, segments: Sequence[Segment], outputs: Names, results: Names, autocast: str | None = None
    ) -> None:
        self._segments, self._autocast, self.outputs = merged(segments, results), autocast, outputs
        self._results = results
        self.communications = sum(isinstance(segment, Communicate) for segment in segments)
        self._needed = needed_after(self._segments, results)
        self._regions = {max(region): region for region in regions(self._segments)}
        self._kept = {number: names for region in self._regions.values() for number, names in region.items()}

    # -- forward

    def forward(self, passage: Passage) -> Task:
        """Fill `passage.carry` with the results, and its records where gradients are wanted."""
        keep = torch.is_grad_enabled()
        for number, (segment, needed) in enumerate(zip(self._segments, self._needed)):
            record = Record()
            if keep:
                passage.records.append(record)
                passage.attempt(lambda n=number, r=record: self._keep(n, passage.carry, r))
            if isinstance(segment, Compute):
                passage.attempt(lambda s=segment, r=record: self._compute(s, passage.carry, r))
            else:
                yield from self._exchange(segment, passage, record)
            for name in passage.carry.keys() - needed:
                del passage.carry[name]
        passage.results = tuple(name for name in self._results if needs_grad(passage.carry.get(name)))

    def _keep(self, number: int, carry: Mapping[str, Any], record: Record) -> None:
        record.kept = {name: detached(carry[name]) for name in self._kept.get(number, ())}

    def _compute(self, segment: Compute, carry: dict[str, Any], record: Record) -> None:
        grad = torch.is_grad_enabled()
        leaves = {name: detached(carry[name]) for name in segment.reads}  # one, however often it is read
        inputs = tuple(leaves[name] for name in segment.reads)
        if grad and segment.recompute:
            record.rng = Rng.now(inputs)
            with torch.no_grad():
                results = as_results(segment, segment.fn(*inputs))
            # Whether they really depend on a parameter or an input shows when they are computed again.
            results = [as_leaf(r, True) for r in results]
        else:
            results = as_results(segment, segment.fn(*inputs))
            if grad:
                _book(segment, inputs, results, record)
        carry.update({name: detached(value) for name, value in zip(segment.writes, results)})

    def _exchange(self, segment: Communicate, passage: Passage, record: Record) -> Task:
        inputs = passage.attempt(partial(_gathered, segment, passage.carry))
        record.differentiable = tuple(needs_grad(passage.carry.get(name)) for name in segment.reads)
        received = yield from passage.communicate(segment.communication.forward, inputs)
        if received is not None:
            record.context = received[1]
            passage.attempt(lambda: self._take(segment, passage.carry, received[0], any(record.differentiable)))

    def _take(self, segment: Communicate, carry: dict[str, Any], received: tuple[Any, ...], wanted: bool) -> None:
        for name, value in zip(segment.writes, as_results(segment, received)):
            carry[name] = as_leaf(value, wanted and torch.is_grad_enabled())

    # -- backward

    def backward(self, passage: Passage, run: BackwardRun) -> Task:
        """From `passage.gradients` of the results to those of the inputs."""
        for number, segment in reversed(list(enumerate(self._segments))):
            if number in self._regions:
                yield from self._run_again(self._regions[number], passage, run)
            yield from self._back(segment, passage, run)
        passage.attempt(run.weight_gradients)

    def _back(self, segment: Segment, passage: Passage, run: BackwardRun) -> Task:
        record = passage.records.pop() if passage.records else Record()
        if isinstance(segment, Compute):
            passage.attempt(lambda: self._compute_backward(segment, record, passage, run))
        else:
            yield from self._exchange_backward(segment, record, passage, run)

    def _compute_backward(self, segment: Compute, record: Record, passage: Passage, run: BackwardRun) -> None:
        gradients = {name: passage.gradients.pop(name, None) for name in segment.writes}
        given = [(edge, gradients[name]) for name, edge in record.roots.items() if gradients[name] is not None]
        if given:
            roots, values = zip(*given)
            with run.context():
                Variable._execution_engine.run_backward(
                    roots, values, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        for name, leaf in record.leaves.items():
            passage.add_gradient(name, leaf.grad)

    def _exchange_backward(self, segment: Communicate, record: Record, passage: Passage, run: BackwardRun) -> Task:
        gradients = passage.attempt(lambda: tuple(passage.gradients.pop(name, None) for name in segment.writes))
        start = _started_then(segment.communication.backward, lambda: passage.attempt(run.weight_gradients))
        received = yield from passage.communicate(start, record.context, gradients)
        if received is not None:
            passage.attempt(lambda: self._give_back(segment, record, passage, received[0]))

    def _give_back(self, segment: Communicate, record: Record, passage: Passage, gradients: Sequence[Any]) -> None:
        if len(gradients) != len(segment.reads):
            raise ValueError(f"the backward of a communication gave {len(gradients)} gradients for what it reads, "
                             f"{segment.reads}; None stands for one that is not needed")
        for name, needed, gradient in zip(segment.reads, record.differentiable, gradients):
            if needed:
                passage.add_gradient(name, gradient)

    # -- again

    def _run_again(self, region: Iterable[int], passage: Passage, run: BackwardRun) -> Task:
        """The forward of neighbouring segments from what was kept of them, now with the graphs for their backward."""
        carry: dict[str, Any] = {}
        for number in region:
            segment, record = self._segments[number], passage.records[number] if passage.records else Record()
            carry |= record.kept
            record.kept = {}
            if isinstance(segment, Compute):
                passage.attempt(partial(self._compute_again, segment, carry, record, run))
            else:
                yield from self._exchange_again(segment, carry, record, passage, run)

    def _exchange_again(
        self, segment: Communicate, carry: dict[str, Any], record: Record, passage: Passage, run: BackwardRun
    ) -> Task:
        inputs = passage.attempt(partial(_gathered, segment, carry))
        start = _started_then(segment.communication.again, lambda: passage.attempt(run.weight_gradients))
        received = yield from passage.communicate(start, record.context, inputs)
        if received is not None:
            passage.attempt(partial(self._take, segment, carry, received[0], any(record.differentiable)))

    def _compute_again(self, segment: Compute, carry: dict[str, Any], record: Record, run: BackwardRun) -> None:
        leaves = {name: detached(carry[name]) for name in segment.reads}  # its own, as in its forward
        inputs = tuple(leaves[name] for name in segment.reads)
        with self._autocast_again(), run.recompute(), record.rng.replay():
            results = as_results(segment, segment.fn(*inputs))
        _book(segment, inputs, results, record)
        carry.update({name: detached(value) for name, value in zip(segment.writes, results)})

    def _autocast_again(self) -> AbstractContextManager:
        return nullcontext() if self._autocast is None else torch.autocast(self._autocast)


@dataclass(frozen=True)
class BackwardRun:
    """How the segments of a backward are run."""

    context: Callable[[], AbstractContextManager]  # around each: weight gradients are queued in it
    weight_gradients: Callable[[], None]  # computes those that are queued, unless that is left to a later "W"
    recompute: Callable[[], AbstractContextManager]  # around computing a segment again


def weight_gradients(passage: Passage, pieces: Sequence[Callable[[], None]], turns: int) -> Task:
    """The deferred weight gradients of a micro-batch, in `turns` parts, to hide others' communications behind."""
    for i, piece in enumerate(pieces):
        with torch.no_grad():
            passage.attempt(piece)
        if (i + 1) * turns // len(pieces) > i * turns // len(pieces):
            yield None


# -- helpers


def _book(segment: Compute, inputs: Sequence[Any], results: Sequence[Any], record: Record) -> None:
    record.leaves = {name: t for name, t in zip(segment.reads, inputs) if needs_grad(t)}
    record.roots = {name: get_gradient_edge(t) for name, t in zip(segment.writes, results) if needs_grad(t)}


def _gathered(segment: Communicate, carry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(without_grad(carry[name]) for name in segment.reads)


def _started_then(start: Callable[..., Pending], then: Callable[[], None]) -> Callable[..., Pending]:
    """Start a communication, and then do what it can be hidden behind."""

    def started(*arguments: Any) -> Pending:
        pending = start(*arguments)
        then()
        return pending

    return started
