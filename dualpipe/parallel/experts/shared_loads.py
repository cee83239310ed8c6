"""Expert loads summed over context-parallel ranks, for a balance loss on each sequence that they share.

The loss on a sequence is linear in the probabilities of its tokens, given the load of each expert in the whole
sequence. Only the backward needs the loads, so the ranks sum them there, together with the gradients of the dispatch,
which precede the router's backward. The backward is read from right to left:

    forward    route    [dispatch]               experts   [combine]   finish
    backward   route'   [dispatch', sum loads]   experts'  [combine']  finish'

The sum is a communication of the pipeline, like the dispatch: all ranks start them in the same order.

Dimension letters: T tokens, K experts per token, E experts, N sequences, or 1 for a loss on the micro-batch, C ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dualpipe.nn.routing.losses import count_load
from dualpipe.nn.routing.router import Router
from dualpipe.nn.segments import Communication, Pending, recompute_method
from dualpipe.parallel.all_to_all import AsyncAllToAll, CommStream, PendingRows
from dualpipe.parallel.experts.interface import Dispatcher


def share_loads(modules: Iterable[nn.Module], ranks: AsyncAllToAll, parts: int) -> None:
    """Compute the balance losses of all routers in `modules` over the tokens of all `ranks`.

    A router is the `gate` of a module with a `dispatcher`. Call this before a pipeline reads the modules' segments.
    parts: N, the same in every micro-batch.
    """
    stream = CommStream(ranks, "loads of experts")
    for module in (inner for outer in modules for inner in outer.modules()):
        gate = getattr(module, "gate", None)
        dispatcher = getattr(module, "dispatcher", None)
        if isinstance(gate, Router) and isinstance(dispatcher, Dispatcher):
            module.dispatcher = _SharingDispatcher(dispatcher, gate, stream, parts)  # type: ignore[assignment]


class _SharedPlan(NamedTuple):
    """Plan of a dispatch, with this rank's loads."""

    inner: Any
    load_NE: Tensor  # int32, of this rank's tokens


class _SharingDispatcher(Dispatcher):
    """Dispatcher that also sums loads over ranks. On a rank with all experts, rows are not sent."""

    def __init__(self, inner: Dispatcher, router: Router, stream: CommStream, parts: int) -> None:
        super().__init__(router.out_features)
        self._inner = inner
        self._parts = parts
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
    """Dispatch whose backward stores the sum of all ranks' loads in `load_NE`.

    The context is that of the dispatch, with the loads of this rank.
    """

    load_NE: Tensor  # of the micro-batch whose dispatch ran its backward last

    def __init__(self, inner: Communication, stream: CommStream, shape: tuple[int, int]) -> None:
        self._inner = inner
        self._stream = stream
        self._shape = shape
        self.group = inner.group or stream.group

    def forward(self, inputs: tuple[Tensor, Tensor, _SharedPlan]) -> Pending:
        rows, weights, plan = inputs
        return _PendingDispatch(self._inner.forward((rows, weights, plan.inner)), plan.load_NE)

    def recompute(self, context: tuple[Any, Tensor], inputs: tuple[Tensor, Tensor, _SharedPlan]) -> Pending:
        rows, weights, plan = inputs
        method = recompute_method(self._inner)
        assert method is not None, "segments that are recomputed have communications that can be repeated"
        return method(context[0], (rows, weights, plan.inner))

    def backward(self, context: tuple[Any, Tensor], gradients: tuple[Tensor | None, ...]) -> Pending:
        inner_context, load_NE = context
        pending = self._inner.backward(inner_context, gradients)
        ones = [1] * self._stream.size
        loads = PendingRows(self._stream).send(load_NE.view(1, -1).expand(len(ones), -1), ones, ones)
        return _PendingBackward(self, pending, loads)

    def sum_loads(self, loads: PendingRows) -> None:
        """Receive the loads of all ranks and sum them."""
        (load_CM,) = loads.receive()  # M = N * E
        self.load_NE = load_CM.sum(0).view(self._shape)


class _PendingDispatch:
    """Dispatch in flight, which adds the loads to its context."""

    def __init__(self, inner: Pending, load_NE: Tensor) -> None:
        self._inner = inner
        self._load_NE = load_NE

    def advance(self) -> None:
        self._inner.advance()

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        results, context = self._inner.wait()
        return results, (context, self._load_NE)


class _PendingBackward:
    """Backward of a dispatch in flight, with the loads of all ranks."""

    def __init__(self, dispatch: _SharingDispatch, inner: Pending, loads: PendingRows) -> None:
        self._dispatch = dispatch
        self._inner = inner
        self._loads = loads

    def advance(self) -> None:
        self._inner.advance()

    def wait(self) -> tuple[tuple[Any, ...], Any]:
        self._dispatch.sum_loads(self._loads)
        return self._inner.wait()


class _LocalRows:
    """Dispatch or combine on a rank with all experts: returns its first `num_results` inputs.

    The context is the number of inputs.
    """

    group: ProcessGroup | None = None

    def __init__(self, num_results: int) -> None:
        self._num_results = num_results

    def forward(self, inputs: tuple[Any, ...]) -> Pending:
        return _Arrived(inputs[: self._num_results], len(inputs))

    def recompute(self, context: int, inputs: tuple[Any, ...]) -> Pending:
        return self.forward(inputs)

    def backward(self, context: int, gradients: tuple[Tensor | None, ...]) -> Pending:
        num_without_gradient = context - self._num_results
        return _Arrived((*gradients, *(None for _ in range(num_without_gradient))), None)


class _Arrived:
    """Communication without messages, which has nothing to wait for."""

    def __init__(self, results: tuple[Any, ...], context: int | None) -> None:
        self._results = results
        self._context = context

    def advance(self) -> None:
        pass

    def wait(self) -> tuple[tuple[Any, ...], int | None]:
        return self._results, self._context
