"""Loads of experts over sequences that context-parallel ranks share, for a balance loss on each of them.

The loss on a sequence is linear in the probabilities of its tokens, once the load of each expert in the whole sequence
is known. Only the backward needs it, so the loads of the ranks are added up there, beside the gradients of the
dispatch, which come just before the router's own backward:

    forward    route    [dispatch]                 experts   [combine]   finish
    backward   route'   [dispatch', add up loads]  experts'  [combine']  finish'

The sum is a communication of the pipeline, as the dispatch is: all ranks start them in the same order.

Dimension letters: T tokens, K experts per token, E experts, N sequences, or 1 for a loss on the micro-batch, C ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dualpipe.nn.routing.losses import count_load
from dualpipe.nn.routing.router import Router
from dualpipe.nn.segments import Communication, Pending
from dualpipe.parallel.all_to_all import AsyncAllToAll, CommStream, PendingRows
from dualpipe.parallel.experts.dispatcher import Dispatcher


def share_loads(modules: Iterable[nn.Module], ranks: AsyncAllToAll, parts: int) -> None:
    """Base the balance losses of all routers in `modules` on the tokens of all `ranks` together.

    A router is the `gate` of a module with a `dispatcher`. To be called before their segments are taken.
    parts: N, the same in every micro-batch.
    """
    stream = CommStream(ranks, "loads of experts")
    for module in (inner for outer in modules for inner in outer.modules()):
        gate, dispatcher = getattr(module, "gate", None), getattr(module, "dispatcher", None)
        if isinstance(gate, Router) and isinstance(dispatcher, Dispatcher):
            module.dispatcher = _SharingDispatcher(dispatcher, gate, stream, parts)  # type: ignore[assignment]


class _SharedPlan(NamedTuple):
    inner: Any
    load_NE: Tensor  # of this rank's tokens, int32


class _SharingDispatcher(Dispatcher):
    """A dispatcher that also adds up loads. On a rank with all experts, rows stay where they are."""

    def __init__(self, inner: Dispatcher, router: Router, stream: CommStream, parts: int) -> None:
        super().__init__(router.out_features)
        self._inner, self._parts = inner, parts
        dispatch = _SharingDispatch(inner.dispatch or _LocalRows(3), stream, (parts, router.out_features))
        self.dispatch = dispatch
        self.combine = inner.combine or _LocalRows(1)
        router.whole_load = lambda: dispatch.load_NE

    def plan(self, x_TH: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        rows, weights, plan = self._inner.plan(x_TH, weights_TK, experts_TK)
        load_NE = count_load(experts_TK.reshape(self._parts, -1), self._num_experts)
        return rows, weights, _SharedPlan(plan, load_NE.int())

    def finish(self, rows: Tensor, plan: _SharedPlan) -> Tensor:
        return self._inner.finish(rows, plan.inner)


class _SharingDispatch:
    """A dispatch whose backward leaves the sum of all ranks' loads in `load_NE`.

    Context: that of the dispatch, and the loads of this rank.
    """

    load_NE: Tensor  # of the last micro-batch that had its backward

    def __init__(self, inner: Communication, stream: CommStream, shape: tuple[int, int]) -> None:
        self._inner = inner
        self._stream = stream
        self._shape = shape
        self.group = inner.group or stream.group

    def forward(self, inputs: tuple[Tensor, Tensor, _SharedPlan]) -> Pending:
        rows, weights, plan = inputs
        return _PendingDispatch(self._inner.forward((rows, weights, plan.inner)), plan.load_NE)

    def again(self, context: tuple[Any, Tensor], inputs: tuple[Tensor, Tensor, _SharedPlan]) -> Pending:
        rows, weights, plan = inputs
        return self._inner.again(context[0], (rows, weights, plan.inner))

    def backward(self, context: tuple[Any, Tensor], gradients: tuple[Tensor | None, ...]) -> Pending:
        inner_context, load_NE = context
        pending = self._inner.backward(inner_context, gradients)
        ones = [1] * self._stream.size
        loads = PendingRows(self._stream).send(load_NE.view(1, -1).expand(len(ones), -1), ones, ones)
        return _PendingBackward(self, pending, loads)

    def add_up(self, loads: PendingRows) -> None:
        """Receive the loads of all ranks and add them up."""
        (load_CM,) = loads.receive()  # M = N * E
        self.load_NE = load_CM.sum(0).view(self._shape)


class _PendingDispatch:
    """A dispatch under way, whose context gets the loads beside."""

    def __init__(self, inner: Pending, load_NE: Tensor) -> None:
        self._inner = inner
        self._load_NE = load_NE

    def advance(self) -> None:
        self._inner.advance()

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        results, context = self._inner.wait()
        return results, (context, self._load_NE)


class _PendingBackward:
    """The backward of a dispatch under way, and the loads."""

    def __init__(self, dispatch: _SharingDispatch, inner: Pending, loads: PendingRows) -> None:
        self._dispatch = dispatch
        self._inner = inner
        self._loads = loads

    def advance(self) -> None:
        self._inner.advance()

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        self._dispatch.add_up(self._loads)
        return self._inner.wait()


class _LocalRows:
    """Dispatch or combine on a rank with all experts: returns its first `num_results` inputs. Context: their number."""

    group: ProcessGroup | None = None

    def __init__(self, num_results: int) -> None:
        self._num_results = num_results

    def forward(self, inputs: tuple[Any, ...]) -> Pending:
        return _Arrived(inputs[: self._num_results], len(inputs))

    def again(self, context: int, inputs: tuple[Any, ...]) -> Pending:
        return self.forward(inputs)

    def backward(self, context: int, gradients: tuple[Tensor | None, ...]) -> Pending:
        without_gradient = [None] * (context - self._num_results)
        return _Arrived((*gradients, *without_gradient), None)


class _Arrived:
    """A communication that has nothing to wait for."""

    def __init__(self, results: tuple[Any, ...], context: int | None) -> None:
        self._results = results
        self._context = context

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Any, ...], int | None]:
        return self._results, self._context
