"""Weight gradients: the queue of deferred ones, and the accumulators that they are added to.

An action "I" computes input gradients only. Each layer passes the computation of its weight gradient to the active
store, which belongs to the running pipeline and queues it until the matching action "W". Method: zero-bubble pipeline
parallelism (Qi et al., arXiv:2401.10241), with a queue of closures instead of a walk over the autograd graph, like the
`WeightGradStore` of DeepSeek's DualPipe, but without its class-level state.

The accumulator is the parameter's `.grad`, which may be wider than the parameter: with `grad_dtype` float32 a bfloat16
parameter accumulates in float32, and the GEMMs of its gradient are not rounded to bfloat16. Experts that are sharded
over expert-parallel ranks are DTensors: gradients are computed and added on their local tensors.

Actions "W" of one stage that follow each other can share their work (`WeightGradStore.merge`): the GEMMs of the same
experts in several micro-batches are one, which reads and writes the accumulator once. See
`dualpipe.nn.merged_weight_grads`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.tensor import DTensor

from dualpipe.nn.merged_weight_grads import MergeableGrad, MergeableOperands, merge_queues

_active_store: ContextVar[WeightGradStore | None] = ContextVar("dualpipe_weight_grad_store", default=None)


class WeightGradObserver(Protocol):
    """Observer of the origin of a step's weight gradients, set as the `observer` of a store."""

    def saw_graph(self, roots: Iterable[GradientEdge]) -> None:
        """Receive the results of a forward; its graph is complete and not yet freed."""

    def saw_layer(self, weight: Tensor, rows: int, *, has_hooks: bool) -> None:
        """Receive the weight of a layer that passes its gradient to the store.

        Args:
            rows: number of rows that the gradient's GEMM sums over; 0 if it is no GEMM.
            has_hooks: the gradient goes through autograd instead.
        """

    def saw_put(self, node: Node | None) -> None:
        """Receive the autograd node that calls `put` in its backward; None outside of a backward."""


class WeightGradStore:
    """Deferred weight gradients of one pipeline, queued by the key of the "I" that deferred them.

    Attributes:
        accumulating: True if layers may add to accumulators that are wider than their parameters, without autograd.
        merging: True if queues may be merged; layers whose GEMMs allow it then queue what `merge` needs.
        recomputing: True during the recompute of a forward, whose statistics are counted already.
        observer: receives the origin of every weight gradient; None costs nothing.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[Callable[[], None]]] = {}
        self._queue: list[Callable[[], None]] | None = None  # the queue that `put` fills; None: run immediately
        self.accumulating = False
        self.merging = False
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
        """Run `fn`, which adds a weight gradient to `.grad`, immediately; queue it while an "I" is running."""
        if self.observer is not None:
            self.observer.saw_put(torch._C._current_autograd_node())
        if self._queue is None:
            fn()
        else:
            self._queue.append(fn)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this the active store of this thread, returned by `current`."""
        token = _active_store.set(self)
        try:
            yield
        finally:
            _active_store.reset(token)

    def accumulate(self) -> AbstractContextManager[None]:
        """Set `accumulating` inside: the backward is for all parameters, so layers may add to accumulators."""
        return self._accumulation

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Set `recomputing` inside: the forward has run before."""
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    def defer(self, key: Hashable) -> AbstractContextManager[None]:
        """Queue under `key` every function that is `put` inside; a key may be entered more than once."""
        return _Deferral(self, key)

    @contextmanager
    def run_immediately(self) -> Iterator[None]:
        """Run functions that are `put` inside immediately, also while an "I" is running.

        For gradients that are not worth the memory that deferring them takes.
        """
        queue = self._queue
        self._queue = None
        try:
            with nullcontext() if self.accumulating else self.accumulate():
                yield
        finally:
            self._queue = queue

    at_once = run_immediately  # old name

    def run(self, key: Hashable) -> None:
        """Run and remove, in order, all functions queued under `key`; without gradients, as in a backward."""
        with torch.no_grad():
            for fn in self.take(key):
                fn()

    def merge(self, keys: Sequence[Hashable]) -> None:
        """Merge the queues of several micro-batches of a stage, and share the result out among their keys.

        Call it before the first of `keys` is run; `run` of each key then does its share, about the same number of
        weight gradients. See `dualpipe.nn.merged_weight_grads.merge_queues` for the order.
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


# Classes instead of generators, which would add 1 us to every backward.


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


def weight_grads(
    ctx: Any, dy: Tensor, x: Tensor | None, weight_grad: Callable[..., Tensor], bias_grad: Callable[..., Tensor],
    *, in_place: bool = False, rows: int | None = None, merge: MergeableOperands | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `ctx.weight` and `ctx.bias`, or pass their computation to the active store.

    Args:
        ctx: context of an autograd function; `weight` and `bias` are its inputs 1 and 2.
        dy: gradient of the output.
        x: saved input; None if only the bias needs a gradient.
        weight_grad: computes the weight gradient, `weight_grad(weight, dy, x)`.
        bias_grad: computes the bias gradient, `bias_grad(bias, dy)`.
        in_place: `weight_grad` can add to a fourth operand; it then adds to an accumulator of another dtype without
            autograd.
        rows: number of rows that the GEMM of the weight gradient sums over; None: the rows of `dy`.
        merge: what a GEMM for several micro-batches takes of this one; None, also where the store is not merging: their
            GEMMs are not merged.

    A gradient is None if it is not needed, or if the store adds it.
    """
    # On the host's critical path: the whole backward of a small layer takes about 20 us.
    _, need_weight, need_bias, *_ = ctx.needs_input_grad
    weight = ctx.weight if need_weight else None
    bias = ctx.bias if need_bias else None
    if weight is None and bias is None:
        return None, None
    store = WeightGradStore.current()
    has_hooks = _has_hooks(ctx.weight) or _has_hooks(ctx.bias)
    if store.observer is not None and weight is not None and weight.dim() > 1:
        is_gemm = x is None or x.is_floating_point()  # False for an embedding's tokens
        num_rows = dy.shape[:-1].numel() if rows is None else rows
        store.observer.saw_layer(weight, num_rows if is_gemm else 0, has_hooks=has_hooks)
    adds_directly = in_place and store.accumulating and not torch.is_grad_enabled() and any(
        param is not None and accumulation_dtype(param, param.dtype) is not param.dtype for param in (weight, bias)
    )
    if not (store.deferring or adds_directly) or has_hooks:
        dw = None if weight is None else as_grad_of(weight, weight_grad(weight, dy, x))
        return dw, None if bias is None else as_grad_of(bias, bias_grad(bias, dy))
    if torch.is_grad_enabled():
        raise RuntimeError("a deferred weight gradient cannot be differentiated again: call backward without "
                           "create_graph=True, or outside of WeightGradStore.defer")
    # Detached: the activation must not keep the graph of earlier layers alive.
    x = None if x is None else x.detach()

    # Neither dy nor x requires a gradient, so no graph is recorded; torch.no_grad() would add 1.4 us to about 6.
    def add() -> None:
        accumulator = weight.grad if weight is not None and in_place else None
        if accumulator is not None and accumulator.layout is torch.strided:
            weight_grad(weight, dy, x, local(accumulator))
        elif weight is not None:
            add_grad(weight, weight_grad(weight, dy, x))
        if bias is not None:
            add_grad(bias, bias_grad(bias, dy))

    if merge is None or weight is None or not store.deferring:
        store.put(add)
        return None, None
    add_bias = None if bias is None else partial(_add_bias_grad, bias, bias_grad, dy)
    store.put(MergeableGrad(weight, merge, partial(_add_merged, weight, merge.weight_grad), add, add_bias))
    return None, None


def _add_merged(weight: Tensor, weight_grad: Callable[..., Tensor], operands: Sequence[Any]) -> None:
    """Add the gradient of a weight over several micro-batches."""
    accumulator = weight.grad
    if accumulator is not None and accumulator.layout is torch.strided:
        weight_grad(weight, operands, local(accumulator))
    else:
        add_grad(weight, weight_grad(weight, operands))


def _add_bias_grad(bias: Tensor, bias_grad: Callable[..., Tensor], dy: Tensor) -> None:
    """Add the gradient of a bias."""
    add_grad(bias, bias_grad(bias, dy))


def _has_hooks(param: Tensor | None) -> bool:
    """Return True if a parameter has hooks, which run only for gradients from autograd."""
    return param is not None and bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def add_grad(param: Tensor, grad: Tensor) -> None:
    """Add `grad` to `param.grad` like autograd does for a leaf, with the same dtypes.

    An existing `.grad` is added to in place and keeps its dtype. Without one, `grad` becomes it, cast to
    `param.grad_dtype` (None allows any).

    grad: the local shard if `param` is a DTensor; no other code may hold it.
    """
    accumulator = param.grad
    if accumulator is not None and accumulator.layout is torch.strided:
        local(accumulator).add_(grad)
        return
    if param.grad_dtype is not None:
        grad = grad.to(param.grad_dtype)
    # A gradient that is not strided comes from an embedding with sparse=True: no dense tensor can be added in place.
    param.grad = as_grad_of(param, grad) if accumulator is None else grad + accumulator


def accumulation_dtype(param: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype to compute gradients of `param` in: its accumulator's, or `otherwise` if that is `param`'s."""
    dtype = param.grad_dtype if param.grad is None else param.grad.dtype
    return otherwise if dtype is None or dtype is param.dtype else dtype


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor that needs no gradient, sharing its memory; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_grad_of(param: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `param` from the gradient of its local shard: a DTensor if `param` is one."""
    if not isinstance(param, DTensor) or isinstance(grad, DTensor):
        return grad
    return DTensor.from_local(
        grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
