"""Names of DeepSeek's DualPipe for code that was written for it. Deprecated; they hold no state.

    dualpipe.utils.WeightGradStore           dualpipe.WeightGradStore.current(), which belongs to one pipeline
    dualpipe.utils.run_backward              torch.autograd.backward
    dualpipe.set_p2p_tensor_shapes, _dtype   nothing: shapes and dtypes are agreed in each step
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dualpipe.nn.deferral import WeightGradStore as _Store

warnings.warn("dualpipe.utils is there for code written for DeepSeek's DualPipe; use "
              "dualpipe.WeightGradStore.current()", DeprecationWarning, stacklevel=2)

_NEEDLESS = "is not needed: the ranks agree on shapes and dtypes in each step; leave it out"


class _RunningStore:
    """The store of the pipeline that is running; outside of a step nothing is deferred."""

    @property
    def enabled(self) -> bool:
        """Return True if the backward that runs defers weight gradients."""
        return _Store.current().deferring

    def put(self, func: Callable[[], None]) -> None:
        """As `dualpipe.WeightGradStore.put` of the running pipeline."""
        _Store.current().put(func)

    def flush(self) -> None:
        """Nothing: the pipeline knows where each backward ends."""

    def pop(self) -> None:
        """Compute the weight gradients that have waited longest; RuntimeError where none wait."""
        store = _Store.current()
        key = next(iter(store.pending()), None)
        if key is None:
            raise RuntimeError("no weight gradients wait: outside of a pipeline's step nothing is deferred")
        store.run(key)

    def clear(self) -> None:
        """Drop everything that waits."""
        _Store.current().clear()


WeightGradStore = _RunningStore()


def run_backward(tensors: Sequence[Tensor], grad_tensors: Sequence[Tensor | None]) -> None:
    """`torch.autograd.backward` of several tensors, from gradients of each."""
    torch.autograd.backward(tensors, grad_tensors)


def set_p2p_tensor_shapes(shapes: Sequence[Sequence[int]]) -> None:
    """Nothing, with a DeprecationWarning: shapes need not be announced."""
    warnings.warn(f"set_p2p_tensor_shapes {_NEEDLESS}", DeprecationWarning, stacklevel=2)


def set_p2p_tensor_dtype(dtype: torch.dtype) -> None:
    """Nothing, with a DeprecationWarning: dtypes need not be announced."""
    warnings.warn(f"set_p2p_tensor_dtype {_NEEDLESS}", DeprecationWarning, stacklevel=2)
