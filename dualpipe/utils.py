"""Names of DeepSeek's DualPipe for code that was written for it. Deprecated; they hold no state.

    old name                                 replacement
    dualpipe.utils.WeightGradStore           dualpipe.WeightGradStore.current(), which belongs to one pipeline
    dualpipe.utils.run_backward              torch.autograd.backward
    dualpipe.set_p2p_tensor_shapes, _dtype   none: the ranks agree on shapes and dtypes in every step
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dualpipe.nn.deferral import WeightGradStore as _Store

warnings.warn("dualpipe.utils is for code that was written for DeepSeek's DualPipe; use "
              "dualpipe.WeightGradStore.current()", DeprecationWarning, stacklevel=2)

_NOT_NEEDED = "is not needed: the ranks agree on shapes and dtypes in every step; leave it out"


class _RunningStore:
    """Proxy of the running pipeline's store; outside of a step nothing is deferred."""

    @property
    def enabled(self) -> bool:
        """Return True if the running backward defers weight gradients."""
        return _Store.current().deferring

    def put(self, func: Callable[[], None]) -> None:
        """Call `dualpipe.WeightGradStore.put` of the running pipeline."""
        _Store.current().put(func)

    def flush(self) -> None:
        """Do nothing: the pipeline knows where every backward ends."""

    def pop(self) -> None:
        """Compute the oldest deferred weight gradients. Raises RuntimeError if none are deferred."""
        store = _Store.current()
        key = next(iter(store.pending()), None)
        if key is None:
            raise RuntimeError("there are no deferred weight gradients; call pop() inside of a pipeline's step")
        store.run(key)

    def clear(self) -> None:
        """Drop all deferred weight gradients."""
        _Store.current().clear()


WeightGradStore = _RunningStore()


def run_backward(tensors: Sequence[Tensor], grad_tensors: Sequence[Tensor | None]) -> None:
    """Call `torch.autograd.backward` for several tensors with their gradients."""
    torch.autograd.backward(tensors, grad_tensors)


def set_p2p_tensor_shapes(shapes: Sequence[Sequence[int]]) -> None:
    """Do nothing but warn: shapes need not be announced."""
    warnings.warn(f"set_p2p_tensor_shapes {_NOT_NEEDED}", DeprecationWarning, stacklevel=2)


def set_p2p_tensor_dtype(dtype: torch.dtype) -> None:
    """Do nothing but warn: dtypes need not be announced."""
    warnings.warn(f"set_p2p_tensor_dtype {_NOT_NEEDED}", DeprecationWarning, stacklevel=2)
