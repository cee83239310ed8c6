"""Weight gradients: the queue of the deferred ones, and the accumulators that they are added to.

An "I" computes input gradients only; each layer hands the computation of its weight gradient to the store of the
pipeline that is running, which keeps it until the matching "W". Method: zero-bubble pipeline parallelism (Qi et al.,
arXiv:2401.10241); a queue of closures instead of a walk over the autograd graph, as the `WeightGradStore` of DeepSeek's
DualPipe, without its class-level state.

The accumulator is the parameter's `.grad`, which may be wider than the parameter: with `grad_dtype` float32 a bfloat16
parameter accumulates in float32, and the products that make its gradient are not rounded to bfloat16 on the way.
Experts that are distributed over expert-parallel ranks are DTensors: gradients are computed and added on their local
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.tensor import DTensor

_running: ContextVar[WeightGradStore | None] = ContextVar("dualpipe_weight_grad_store", default=None)


class WeightGradObserver(Protocol):
    """Sees where the weight gradients of a step come from, while it is a store's `observer`."""

    def saw_graph(self, roots: Iterable[GradientEdge]) -> None:
        """Take the results of a forward, whose graph is complete and not yet freed."""

    def saw_layer(self, weight: Tensor, rows: int, *, has_hooks: bool) -> None:
        """Take the weight of a layer that hands its gradient, a GEMM over `rows` rows, to the store.

        rows: 0 where the gradient is no GEMM. has_hooks: the gradient goes through autograd instead.
        """

    def saw_put(self, node: Node | None) -> None:
        """Take the autograd node whose backward calls `put`; None outside of a backward."""


class WeightGradStore:
    """Deferred weight gradients of one pipeline, queued under the key of the "I" that put them there."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[Callable[[], None]]] = {}
        self._queue: list[Callable[[], None]] | None = None  # the queue that `put` fills; None: run at once
        self.accumulating = False  # whether layers add to accumulators that are wider than their parameters themselves
        self.recomputing = False  # whether a forward is run again, whose statistics have been counted
        self.observer: WeightGradObserver | None = None  # asked for in every call, so that None costs nothing
        self._accumulation = _Accumulation(self)

    @staticmethod
    def current() -> WeightGradStore:
        """The store of the backward that is running; outside a pipeline, one that runs everything at once."""
        return _running.get() or WeightGradStore()

    @property
    def deferring(self) -> bool:
        """Return True while `put` queues."""
        return self._queue is not None

    def put(self, fn: Callable[[], None]) -> None:
        """Run `fn` (it adds a weight gradient into `.grad`) at once, or queue it while an "I" is running."""
        if self.observer is not None:
            self.observer.saw_put(torch._C._current_autograd_node())
        if self._queue is None:
            fn()
        else:
            self._queue.append(fn)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this the store that `current` finds in this thread."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def accumulate(self) -> AbstractContextManager[None]:
        """Say that the backward inside is for every parameter, so that layers may add to accumulators themselves."""
        return self._accumulation

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Say that what runs inside has run before."""
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    def defer(self, key: Hashable) -> AbstractContextManager[None]:
        """Queue what is `put` inside under `key`; may be entered more than once."""
        return _Deferral(self, key)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Run what is `put` inside, also while an "I" is running: for what would keep more than it saves time."""
        queue, self._queue = self._queue, None
        try:
            with nullcontext() if self.accumulating else self.accumulate():
                yield
        finally:
            self._queue = queue

    def run(self, key: Hashable) -> None:
        """Run and drop, in order, everything queued under `key`; without gradients, as in a backward."""
        with torch.no_grad():
            for fn in self.take(key):
                fn()

    def take(self, key: Hashable) -> list[Callable[[], None]]:
        """Remove from the queue what `run` would call, and return it."""
        return self._queues.pop(key, [])

    def pending(self) -> dict[Hashable, int]:
        """Return the number of queued weight gradients, by key."""
        return {key: len(queue) for key, queue in self._queues.items()}

    def clear(self) -> None:
        """Drop everything that waits."""
        self._queues.clear()


# Classes, as generators would add 1 us to each backward.


class _Accumulation(AbstractContextManager[None]):
    """Sets `accumulating` of a store while it is entered."""

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store.accumulating = True

    def __exit__(self, *_: object) -> None:
        self._store.accumulating = False


class _Deferral(AbstractContextManager[None]):
    """Has a store queue under a key while it is entered."""

    def __init__(self, store: WeightGradStore, key: Hashable) -> None:
        self._store = store
        self._key = key

    def __enter__(self) -> None:
        if self._store.deferring:
            raise RuntimeError("WeightGradStore.defer does not nest")
        self._store._queue = self._store._queues.setdefault(self._key, [])

    def __exit__(self, *_: object) -> None:
        self._store._queue = None


def weight_grads(
    ctx: Any, dy: Tensor, x: Tensor | None, weight_grad: Callable[..., Tensor], bias_grad: Callable[..., Tensor],
    *, in_place: bool = False, rows: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `ctx.weight` and `ctx.bias`, inputs 1 and 2; None for what needs none, or what the store adds.

    Made by `weight_grad(weight, dy, x)` and `bias_grad(bias, dy)`; x is None where only the latter is needed. in_place:
    the former can add to one more operand, and to an accumulator of another dtype it does so without autograd. rows: of
    the GEMM that makes the weight gradient, where `dy` does not say.
    """
    # On the host's critical path: a small layer's whole backward takes about 20 us.
    _, need_weight, need_bias, *_ = ctx.needs_input_grad
    weight, bias = ctx.weight if need_weight else None, ctx.bias if need_bias else None
    if weight is None and bias is None:
        return None, None
    store = WeightGradStore.current()
    if store.observer is not None and weight is not None and weight.dim() > 1:
        is_gemm = x is None or x.is_floating_point()  # not an embedding's tokens
        num_rows = dy.shape[:-1].numel() if rows is None else rows
        has_hooks = _has_hooks(ctx.weight) or _has_hooks(ctx.bias)
        store.observer.saw_layer(weight, num_rows if is_gemm else 0, has_hooks=has_hooks)
    straight = in_place and store.accumulating and not torch.is_grad_enabled() and any(
        param is not None and accumulation_dtype(param, param.dtype) is not param.dtype for param in (weight, bias)
    )
    if not (store.deferring or straight) or _has_hooks(ctx.weight) or _has_hooks(ctx.bias):
        dw = None if weight is None else as_grad_of(weight, weight_grad(weight, dy, x))
        return dw, None if bias is None else as_grad_of(bias, bias_grad(bias, dy))
    if torch.is_grad_enabled():
        raise RuntimeError("a deferred weight gradient cannot be differentiated again: call backward without "
                           "create_graph=True, or outside of WeightGradStore.defer")
    # Detached: the activation must not keep the graph of the layers before it alive.
    x = None if x is None else x.detach()

    # Neither dy nor x requires a gradient, so no graph is made; torch.no_grad() would add 1.4 us to about 6.
    def add() -> None:
        into = weight.grad if weight is not None and in_place else None
        if into is not None and into.layout is torch.strided:
            weight_grad(weight, dy, x, local(into))
        elif weight is not None:
            add_grad(weight, weight_grad(weight, dy, x))
        if bias is not None:
            add_grad(bias, bias_grad(bias, dy))

    store.put(add)
    return None, None


def _has_hooks(param: Tensor | None) -> bool:
    """Return True if a parameter has hooks, which only a gradient from autograd passes through."""
    return param is not None and bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def add_grad(param: Tensor, grad: Tensor) -> None:
    """Add `grad`, which nobody else may hold, to `param.grad`: what autograd does for a leaf, in the same dtypes.

    Where there is no `.grad` yet, `grad` becomes it, cast to `param.grad_dtype` (None allows any). An existing one is
    added to in place and keeps its dtype. `grad` is the local part where `param` is a DTensor.
    """
    accumulator = param.grad
    if accumulator is not None and accumulator.layout is torch.strided:
        local(accumulator).add_(grad)
        return
    if param.grad_dtype is not None:
        grad = grad.to(param.grad_dtype)
    # One that is not strided is from an embedding with sparse=True: a dense tensor cannot be added to it in place.
    param.grad = as_grad_of(param, grad) if accumulator is None else grad + accumulator


def accumulation_dtype(param: Tensor, otherwise: torch.dtype) -> torch.dtype:
    """The dtype in which to make gradients of `param`: its accumulator's where that is not its own, or `otherwise`."""
    dtype = param.grad_dtype if param.grad is None else param.grad.dtype
    return otherwise if dtype is None or dtype is param.dtype else dtype


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor that needs no gradient, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_grad_of(param: Tensor, grad: Tensor) -> Tensor:
    """A gradient of `param` from that of its local part: distributed where `param` is."""
    if not isinstance(param, DTensor) or isinstance(grad, DTensor):
        return grad
    return DTensor.from_local(
        grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
