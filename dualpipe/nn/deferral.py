"""Weight gradients: computed at once or queued, and added to their accumulators.

An action "I" computes input gradients, and weight gradients only where it must: of parameters with hooks, for example.
Each layer passes the operands of its weight gradient to the active store, which belongs to the running pipeline and
queues it until the matching action "W". A "B" of a stage with segments queues too, and runs the queue while
communications are in flight. Method: zero-bubble pipeline parallelism (Qi et al., arXiv:2401.10241), with a queue of
operands instead of a walk over the autograd graph, like the `WeightGradStore` of DeepSeek's DualPipe, but without its
class-level state.

Consecutive actions "W" of one stage can be merged (`WeightGradStore.merge`): one GEMM then computes the gradient of an
expert weight for several micro-batches, and reads and writes the accumulator once. See `dualpipe.nn.deferred_grad`;
`dualpipe.nn.accumulators` has all writes to accumulators.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node
from torch.nn import Parameter

from dualpipe.nn.accumulators import accumulation_dtype, as_grad_of
from dualpipe.nn.deferred_grad import DeferredGrad, Gemm, merge_queues

_HOOKS = "dualpipe hooks"  # key of the dicts of an autograd node's hooks in its metadata

_active_store: ContextVar[WeightGradStore | None] = ContextVar("dualpipe_weight_grad_store", default=None)


class WeightGradObserver(Protocol):
    """Observer of the layers and autograd nodes that compute a step's weight gradients: the `observer` of a store."""

    def saw_graph(self, roots: Iterable[GradientEdge]) -> None:
        """Receive the results of a forward; its graph is complete and not yet freed."""

    def saw_layer(self, weight: Tensor, rows: int, *, has_hooks: bool) -> None:
        """Receive the weight of a layer that can defer its gradient, in its backward.

        Args:
            rows: number of rows that the gradient's GEMM sums over; 0 if the gradient needs no GEMM.
            has_hooks: True if the layer's parameters have hooks; the gradient is then not deferred.
        """

    def saw_put(self, node: Node | None) -> None:
        """Receive the autograd node that calls `put` in its backward; None outside of a backward."""


class WeightGradStore:
    """Deferred weight gradients of one pipeline, queued by the key of the action that deferred them.

    Attributes:
        accumulating: True while layers may bypass autograd and add directly to an accumulator of a wider dtype.
        recomputing: True during the recompute of a forward. A layer that counts something in its forward, such as batch
            norm, checks it in order not to count twice.
        observer: observes every weight gradient; None: no observer, at no cost.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[Callable[[], None]]] = {}
        self._queue: list[Callable[[], None]] | None = None  # the queue that `add` fills; None: run immediately
        self.accumulating = False
        self.recomputing = False
        self.observer: WeightGradObserver | None = None
        self._accumulation = _Accumulation(self)

    @staticmethod
    def current() -> WeightGradStore:
        """Return the active store; outside of a pipeline, a new one that runs everything immediately."""
        return _active_store.get() or WeightGradStore()

    @property
    def deferring(self) -> bool:
        """Return True while `put` queues instead of running."""
        return self._queue is not None

    def put(self, fn: Callable[[], None]) -> None:
        """Run `fn`, which adds a weight gradient to `.grad`, immediately; inside of `defer`, queue it.

        Drop `fn` if the autograd function that calls `put` in its backward has parameters as inputs, and this backward
        accumulates the gradient of none of them: an `autograd.grad(y, x)` that runs inside of the pipeline's backward.
        """
        node = torch._C._current_autograd_node()
        if node is None or _accumulates_parameters(node):
            self.add(fn)

    def add(self, fn: Callable[[], None]) -> None:
        """Run `fn` immediately; inside of `defer`, queue it. `return_or_defer` calls it for this library's layers."""
        if self.observer is not None:
            self.observer.saw_put(torch._C._current_autograd_node())
        if self._queue is None:
            fn()
        else:
            self._queue.append(fn)

    def activate(self) -> AbstractContextManager[None]:
        """Make this the active store of this thread inside of a `with`, returned by `current`."""
        return _Activation(self)

    def accumulate(self) -> AbstractContextManager[None]:
        """Set `accumulating` inside of the `with`, for a backward that computes the gradients of all parameters."""
        return self._accumulation

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Set `recomputing` inside of the `with`, for the second run of a forward."""
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    def defer(self, key: Hashable) -> AbstractContextManager[None]:
        """Queue under `key` every function that is `put` inside of the `with`; a key may be used more than once."""
        return _Deferral(self, key)

    @contextmanager
    def run_immediately(self) -> Iterator[None]:
        """Run functions that are `put` inside of the `with` immediately, also inside of `defer`.

        For gradients that are not worth the memory that deferring them takes. The backward inside must compute the
        gradients of all parameters.
        """
        queue = self._queue
        self._queue = None
        try:
            # `accumulate` cannot be nested: its exit would clear `accumulating` for the outer one.
            with nullcontext() if self.accumulating else self.accumulate():
                yield
        finally:
            self._queue = queue

    def run(self, key: Hashable) -> None:
        """Run and remove, in order, all functions queued under `key`; under `torch.no_grad()`, like a backward."""
        with torch.no_grad():
            for fn in self.take(key):
                fn()

    def merge(self, keys: Sequence[Hashable]) -> None:
        """Merge the queues of several micro-batches of a stage, and divide the merged queue among their keys.

        Call it before the first of `keys` is taken. Each then has about the same number of weight gradients. See
        `dualpipe.nn.deferred_grad.merge_queues` for the order.
        """
        queues = merge_queues([self.take(key) for key in keys])
        for key, queue in zip(keys, queues, strict=True):
            if queue:
                self._queues[key] = queue

    def take(self, key: Hashable) -> list[Callable[[], None]]:
        """Remove and return the functions that `run` would call."""
        return self._queues.pop(key, [])

    def pending(self) -> dict[Hashable, int]:
        """Return the number of queued weight gradients, by key."""
        return {key: len(queue) for key, queue in self._queues.items()}

    def clear(self) -> None:
        """Drop all queued functions."""
        self._queues.clear()


# Classes instead of generators, which would add 1 us to every step and every backward.


class _Activation(AbstractContextManager[None]):
    """Context manager that makes a store the active one of this thread."""

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._token = _active_store.set(self._store)

    def __exit__(self, *_: object) -> None:
        _active_store.reset(self._token)


class _Accumulation(AbstractContextManager[None]):
    """Context manager that sets `accumulating` of a store."""

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store.accumulating = True

    def __exit__(self, *_: object) -> None:
        self._store.accumulating = False


class _Deferral(AbstractContextManager[None]):
    """Context manager that makes a store queue under a key."""

    def __init__(self, store: WeightGradStore, key: Hashable) -> None:
        self._store = store
        self._key = key

    def __enter__(self) -> None:
        if self._store.deferring:
            raise RuntimeError("WeightGradStore.defer was entered inside of another defer, which it does not support; "
                               "leave the outer one first")
        self._store._queue = self._store._queues.setdefault(self._key, [])

    def __exit__(self, *_: object) -> None:
        self._store._queue = None


def needs_plain_autograd(*params: Tensor | None) -> bool:
    """Return True if a layer must compute with PyTorch's operators instead of an autograd function of its own.

    That is so inside of `torch.func` transforms and forward-mode derivatives, and for parameters that are complex, or
    computed from others (pruned, parametrized, adapted).
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    return any(param is not None and (not param.is_leaf or param.is_complex()) for param in params)


def return_or_defer(ctx: Any, operands: Any, gemm: Gemm) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `ctx.weight` and `ctx.bias`, or pass them to the active store, deferred or not.

    Deferred gradients are added directly to the accumulator, and inside of `WeightGradStore.accumulate` the gradients
    of a layer of which a parameter has an accumulator of another dtype. Returned to autograd, not deferred, are those
    of parameters with hooks, and of a backward that records a graph. A gradient is None if it is not needed, or if the
    store adds it.

    Args:
        ctx: context of an autograd function; `weight` and `bias` are its inputs 1 and 2.
        operands: operands of `gemm`.
        gemm: computes the gradients.
    """
    # On the host's critical path: the whole backward of a small layer takes about 20 us.
    nodes = ctx.next_functions  # one for each tensor among the inputs
    weight, bias, is_accumulated = _needed_gradients(ctx, nodes)
    if weight is None and bias is None:
        return None, None
    store = WeightGradStore.current()
    adds_directly = store.accumulating and any(
        param is not None and accumulation_dtype(param, param.dtype) is not param.dtype for param in (weight, bias)
    )
    # Gradients that are differentiated again (create_graph=True) must be in the graph.
    may_bypass = is_accumulated and (store.deferring or adds_directly) and not torch.is_grad_enabled()
    observer = store.observer if is_accumulated else None
    has_hooks = False
    if may_bypass or observer is not None:
        has_hooks = (weight is not None and has_hooks_on(weight, nodes[1][0])) or (
            bias is not None and has_hooks_on(bias, nodes[2][0]))
    if observer is not None and weight is not None and weight.dim() > 1:
        num_rows = 0 if gemm.num_rows is None else gemm.num_rows(operands)
        observer.saw_layer(weight, num_rows, has_hooks=has_hooks)
    if may_bypass and not has_hooks:
        # No graph is recorded, as no operand requires a gradient; torch.no_grad() would add 1.4 us to a call of 6 us.
        store.add(DeferredGrad(weight, bias, _without_graph(operands), gemm))
        return None, None
    dw = None if weight is None else as_grad_of(weight, gemm.weight_grad(weight, [operands], None))
    db = None if bias is None else as_grad_of(bias, gemm.compute_bias_grad(bias, operands))
    return dw, db


def _without_graph(operands: Any) -> Any:
    """Return operands whose activation does not keep the graph of earlier layers alive."""
    x = getattr(operands, "x", None)
    return operands._replace(x=x.detach()) if x is not None and x.requires_grad else operands


def _needed_gradients(ctx: Any, nodes: Any) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return the weight and the bias if the running backward needs their gradients, and True if it accumulates these.

    `ctx.needs_input_grad` is what the forward recorded. A backward can need less: `autograd.grad(y, x)` needs no
    gradients of weights, also if it runs inside of another backward, in a hook or a recomputed forward. It can also
    return gradients instead of adding them to `.grad`: `autograd.grad(y, weight)`, or of a weight that is no leaf.

    nodes: `ctx.next_functions`.
    """
    _, need_weight, need_bias, *_ = ctx.needs_input_grad
    weight = ctx.weight if need_weight else None
    bias = ctx.bias if need_bias else None
    is_leaf = (weight is None or weight.is_leaf) and (bias is None or bias.is_leaf)
    try:
        if weight is not None and not torch._C._will_engine_execute_node(nodes[1][0]):
            weight = None
        if bias is not None and not torch._C._will_engine_execute_node(nodes[2][0]):
            bias = None
    except RuntimeError:  # autograd.grad returns the gradient of this parameter
        return weight, bias, False
    return weight, bias, is_leaf


def _accumulates_parameters(node: Node) -> bool:
    """Return False if `node` has parameters as inputs, and the running backward accumulates the gradient of none."""
    sources = [source for source, _ in node.next_functions if source is not None]
    accumulators = [source for source in sources if isinstance(getattr(source, "variable", None), Parameter)]
    try:
        return not accumulators or any(map(torch._C._will_engine_execute_node, accumulators))
    except RuntimeError:  # autograd.grad returns the gradient of a parameter
        return False


def has_hooks_on(param: Tensor, node: Any) -> bool:
    """Return True if a parameter has hooks, which run only for gradients from autograd.

    node: its `AccumulateGrad` node, whose hooks count if they were registered in Python. torch shows these in the
    handles of hooks only: register one of each kind, and remember its dict with the node. That takes 4 us once in a
    step, and 1 us in every backward.
    """
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        return True
    dicts = node.metadata.get(_HOOKS)
    if dicts is None:
        hook = node.register_hook(_no_hook)
        prehook = node.register_prehook(_no_hook)
        dicts = (hook.hooks_dict_ref(), prehook.hooks_dict_ref())
        hook.remove()
        prehook.remove()
        node.metadata[_HOOKS] = dicts
    return bool(dicts[0] or dicts[1])


def _no_hook(*_: Any) -> None:
    """Do nothing."""
