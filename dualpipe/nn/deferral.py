"""The queue of deferred weight gradients.

An "I" computes input gradients only; each layer hands the computation of its weight gradient to the store of the
pipeline that is running, which keeps it until the matching "W". Method: zero-bubble pipeline parallelism (Qi et al.,
arXiv:2401.10241), the `WeightGradStore` of DeepSeek's DualPipe, without its class-level state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_running: ContextVar[WeightGradStore | None] = ContextVar("dualpipe_weight_grad_store", default=None)


class WeightGradStore:
    """Deferred weight gradients of one pipeline, queued under the key of the "I" that put them there."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[Callable[[], None]]] = {}
        self._queue: list[Callable[[], None]] | None = None  # the queue that `put` fills; None: run at once
        self.active = False  # whether its pipeline is running
        self.recomputing = False  # whether a forward is run again, whose statistics have been counted

    @staticmethod
    def current() -> WeightGradStore:
        """The store of the backward that is running; outside a pipeline, one that runs everything at once."""
        return _running.get() or WeightGradStore()

    @property
    def deferring(self) -> bool:
        """Whether `put` queues."""
        return self._queue is not None

    def put(self, fn: Callable[[], None]) -> None:
        """Run `fn` (it adds a weight gradient into `.grad`) at once, or queue it while an "I" is running."""
        if self._queue is None:
            fn()
        else:
            self._queue.append(fn)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this the store that `current` finds in this thread."""
        token, self.active = _running.set(self), True
        try:
            yield
        finally:
            _running.reset(token)
            self.active = False

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Say that what runs inside has run before."""
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    @contextmanager
    def defer(self, key: Hashable) -> Iterator[None]:
        """Queue what is `put` inside under `key`."""
        if self._queue is not None:
            raise RuntimeError("WeightGradStore.defer does not nest")
        self._queue = self._queues.setdefault(key, [])
        try:
            yield
        finally:
            self._queue = None

    def run(self, key: Hashable) -> None:
        """Run and drop, in order, everything queued under `key`; without gradients, as in a backward."""
        with torch.no_grad():
            for fn in self.take(key):
                fn()

    def take(self, key: Hashable) -> list[Callable[[], None]]:
        """What `run` would call, dropped from the queue."""
        return self._queues.pop(key, [])

    def pending(self) -> dict[Hashable, int]:
        """How many weight gradients wait, by key."""
        return {key: len(queue) for key, queue in self._queues.items()}

    def clear(self) -> None:
        """Drop everything that waits."""
        self._queues.clear()
