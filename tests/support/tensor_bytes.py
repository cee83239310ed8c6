"""Bytes of tensors, counted as operators make and free them."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveBytes(TorchDispatchMode):
    """Count the bytes of tensors that are made inside of a `with` and alive: `now`, and at most at once, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **kwargs or {})
        operands = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage(), operands)
        return results

    def _see(self, storage: torch.UntypedStorage, operands: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in operands or key in self._alive:
            return

        def freed(_: weakref.ref) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
