"""Loads of experts over sequences that context-parallel ranks share, for a balance loss on each of them.

The loss on a sequence is linear in its tokens' probabilities, once it is known how often each expert was chosen in all
of it. Its gradient is wanted in the backward alone, so the ranks' counts are added up there, beside the gradients of
the dispatch, behind which the router's own backward comes next:

    forward    route    [dispatch]                 experts   [combine]   finish
    backward   route'   [dispatch', add up loads]  experts'  [combine']  finish'

They are a communication of the pipeline, as the dispatch is: all ranks start it in one order, and one that has failed
takes part with zeros.

Dimension letters: T tokens, K experts per token, E experts, N sequences, or 1 for a loss on the micro-batch, C ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dualpipe.nn.routing.losses import count_load
from dualpipe.nn.routing.router import Router
from dualpipe.nn.segments import Communication, Pending, failure_of
from dualpipe.parallel.all_to_all import AsyncAllToAll, CommStream, PendingRows
from dualpipe.parallel.experts.dispatcher import Dispatcher


def share_loads(modules: Iterable[nn.Module], ranks: AsyncAllToAll, parts: int) -> None:
    """Have the balance losses of all routers in `modules`, which are the `gate` beside a `dispatcher`, be on what
    `ranks` have together; before their segments are taken. parts: N, the same in every micro-batch."""
    stream = CommStream(ranks, "loads of experts")
    for module in (inner for outer in modules for inner in outer.modules()):
        gate, dispatcher = getattr(module, "gate", None), getattr(module, "dispatcher", None)
        if isinstance(gate, Router) and isinstance(dispatcher, Dispatcher):
            module.dispatcher = _SharingDispatcher(dispatcher, gate, stream, parts)  # type: ignore[assignment]


class _SharedPlan(NamedTuple):
    inner: Any
    load_NE: Tensor  # of this rank's tokens, int32


class _SharingDispatcher(Dispatcher):
    """A dispatcher that also adds up loads; where all experts are here, rows stay where they are."""

    def __init__(self, inner: Dispatcher, router: Router, stream: CommStream, parts: int) -> None:
        super().__init__(router.out_features)
        self._inner, self._parts = inner, parts
        dispatch = _SharingDispatch(inner.dispatch or _Stay(3), stream, (parts, router.out_features))
        self.dispatch, self.combine = dispatch, inner.combine or _Stay(1)
        router.whole_load = lambda: dispatch.load_NE

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        rows, weights, plan = self._inner.plan(x_TH, weights_TK, experts_TK)
        load_NE = count_load(experts_TK.reshape(self._parts, -1), self._num_experts)
        return rows, weights, _SharedPlan(plan, load_NE.int())

    def finish(self, rows: Tensor, plan: _SharedPlan) -> Tensor:
        return self._inner.finish(rows, plan.inner)


class _SharingDispatch:
    """A dispatch whose backward leaves in `load_NE` what all ranks counted. Context: that of the dispatch, and the
    loads of this rank."""

    load_NE: Tensor  # of the last micro-batch that had its backward

    def __init__(self, inner: Communication, stream: CommStream, shape: tuple[int, int]) -> None:
        self._inner, self._stream, self._shape = inner, stream, shape
        self.group = inner.group or stream.group

    def forward(self, inputs: tuple[Tensor, Tensor, _SharedPlan] | None) -> Pending:
        if inputs is None:
            return _Sharing(self._inner.forward(None), None)
        rows, weights, (plan, load_NE) = inputs
        return _Sharing(self._inner.forward((rows, weights, plan)), load_NE)

    def again(self, context: tuple[Any, Tensor | None], inputs: tuple[Tensor, Tensor, _SharedPlan] | None) -> Pending:
        given = inputs and (*inputs[:2], inputs[2].inner)
        return _Sharing(self._inner.again(context[0], given), None)

    def backward(self, context: tuple[Any, Tensor | None], gradients: tuple[Tensor | None, ...] | None) -> Pending:
        (inner, load_NE), each = context, [1] * self._stream.size
        rows = None
        if load_NE is not None and gradients is not None:  # else this rank has failed
            rows = load_NE.view(1, -1).expand(len(each), -1)
        loads = PendingRows(self._stream)  # may fail, so before the first message
        pending = self._inner.backward(inner, gradients)
        loads.send(rows, 4 * self._shape[0] * self._shape[1], each, each, torch.int32)
        return _SharingBack(self, pending, loads)

    def add_up(self, loads: PendingRows) -> None:
        """From all ranks' counts, which have been sent."""
        (each_CM,) = loads.receive()
        self.load_NE = each_CM.sum(0).view(self._shape)


class _Sharing:
    """A dispatch under way, whose context gets the loads beside."""

    def __init__(self, inner: Pending, load_NE: Tensor | None) -> None:
        self._inner, self._load_NE = inner, load_NE

    def take_failure(self) -> BaseException | None:
        return failure_of(self._inner)

    def advance(self) -> None:
        self._inner.advance()

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        results, context = self._inner.wait()
        return results, (context, self._load_NE)


class _SharingBack:
    """Its backward under way, and the loads."""

    def __init__(self, dispatch: _SharingDispatch, inner: Pending, loads: PendingRows) -> None:
        self._dispatch, self._inner, self._loads = dispatch, inner, loads

    def take_failure(self) -> BaseException | None:
        failures = self._loads.take_failure(), failure_of(self._inner)
        return next(filter(None, failures), None)

    def advance(self) -> None:
        self._inner.advance()

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        if self._loads.failure is None:
            self._dispatch.add_up(self._loads)
        else:
            self._loads.receive()
        return self._inner.wait()


class _Stay:
    """The dispatch or the combine of rows that stay: what is written, the first `writes` that are read, is as it was.
    Also what is pending of it."""

    group: ProcessGroup | None = None

    def __init__(self, writes: int, results: tuple[Any, ...] = (), context: int = 0) -> None:
        self._writes, self._results, self._context = writes, results, context

    def forward(self, inputs: tuple[Any, ...] | None) -> Pending:
        return _Stay(0, (inputs or ())[: self._writes], len(inputs or ()))

    def again(self, context: int, inputs: tuple[Any, ...] | None) -> Pending:
        return self.forward(inputs)

    def backward(self, context: int, gradients: tuple[Tensor | None, ...] | None) -> Pending:
        return _Stay(0, (*(gradients or ()), *[None] * (context - self._writes)))

    def advance(self) -> None:
        """Nothing is on its way."""

    def wait(self) -> tuple[tuple[Any, ...], int]:
        return self._results, self._context
