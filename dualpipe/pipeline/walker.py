"""The actions of stages that are made of segments, as jobs that are walked together; for one step on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.errors import UpstreamFailed
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Names
from dualpipe.pipeline.overlap import BackwardRun, SegmentedStage, Task, walk, weight_gradients
from dualpipe.pipeline.passage import Passage

Slot = tuple[int, int]  # (stage, micro-batch)


class Job(NamedTuple):
    """An action as a task of a walk; `finish` gives its result, once it is through without an error."""

    task: Task
    passage: Passage
    finish: Callable[[], Sequence[Tensor]]


class Walker:
    """Makes jobs, keeps what a micro-batch's forward leaves for its backward, and walks jobs together.

    autocast: the device type for which the caller enabled it; it is meant for the forwards.
    """

    def __init__(self, stages: Mapping[int, SegmentedStage], store: WeightGradStore, autocast: str | None) -> None:
        self.stages, self._store, self._autocast = stages, store, autocast
        self._passages: dict[Slot, Passage] = {}
        self._broken = False  # whether a communication failed, so that the others cannot be met any more

    def walk(self, jobs: Sequence[Job]) -> None:
        """Run them in turn. Errors stay in their passages."""
        walk(job.task for job in jobs)
        self._broken = self._broken or any(job.passage.broken for job in jobs)

    def forward(
        self,
        slot: Slot,
        carry: Mapping[str, Any],
        inputs: Names,
        error: BaseException | None,
        ready: Callable[[], None],
        book: Callable[[dict[str, Any]], Sequence[Tensor]],
    ) -> Job:
        """`inputs`: those in the carry whose gradients the stage before expects. `ready` is called before anything is
        computed, `book` with the carry that is left."""
        passage = self._passages[slot] = Passage(carry, inputs=inputs, error=error, broken=self._broken)

        def run() -> Task:
            passage.attempt(ready)
            yield from self.stages[slot[0]].forward(passage)

        def finish() -> Sequence[Tensor]:
            carry, passage.carry = passage.carry, {}
            if not torch.is_grad_enabled():
                del self._passages[slot]
            elif "loss" in carry:
                passage.gradients = {"loss": torch.ones_like(carry["loss"])}
            return book(carry)

        return Job(run(), passage, finish)

    def backward(self, kind: str, slot: Slot, gradients: Sequence[Tensor], error: BaseException | None) -> Job:
        """A "B" or an "I", from the gradients of those outputs that need one."""
        passage = self._passages.pop(slot, None) or Passage({}, error=error or UpstreamFailed())
        passage.error, passage.broken = passage.error or error, passage.broken or self._broken
        if not passage.gradients:  # that of the loss is there already
            passage.gradients = dict(zip(passage.results, gradients))
        weights = (lambda: self._store.run(slot)) if kind == "B" else (lambda: None)
        run = BackwardRun(lambda: self._around_backward(slot), weights, self._store.recompute)
        return Job(self.stages[slot[0]].backward(passage, run), passage, passage.input_gradients)

    def weights(self, slot: Slot, error: BaseException | None, *, alone: bool) -> Job:
        """A "W", in as many parts as another action has communications to hide, there and back."""
        passage = Passage({}, error=error)
        turns = 1 if alone else max(1, self.stages[slot[0]].communications)
        return Job(weight_gradients(passage, self._store.take(slot), turns), passage, tuple)

    def plain(self, work: Callable[[], Sequence[Tensor]], error: BaseException | None) -> Job:
        """An action of a stage without segments, beside one that has them."""
        passage, results = Passage({}, error=error), []

        def run() -> Task:
            results.append(passage.attempt(work))
            yield from ()

        return Job(run(), passage, results.pop)

    @contextmanager
    def _around_backward(self, slot: Slot) -> Iterator[None]:
        no_autocast = nullcontext() if self._autocast is None else torch.autocast(self._autocast, enabled=False)
        with self._store.defer(slot), no_autocast:
            yield
