"""Grouped GEMMs of quack-kernels, as rivals of ours where the package is installed.

Written from the signature of `quack.gemm_interface.gemm`; never run, because it needs a Hopper GPU or newer. A call
that fails counts as a missing rival and does not affect our rows. The tiles are quack's defaults: tuning would take
minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from expert_shapes import Layer
from gpu_bench import time_ms
from torch import Tensor


@cache
def is_installed() -> bool:
    """Return True if there is a GPU and quack-kernels is installed."""
    return torch.cuda.is_available() and find_spec("quack") is not None


def forward(x: Tensor, w: Tensor, layer: Layer, gather: Tensor | None) -> Callable[[], Any] | None:
    """Return the forward call; None without quack.

    It multiplies x, or its gathered rows, by each expert's weights (E, N, H) transposed.
    """
    if not is_installed():
        return None
    from quack.gemm_interface import gemm

    return lambda: gemm(x, w.mT, cu_seqlens_m=layer.bounds, A_idx=gather, tuned=False)


def weight_gradient(
    dy: Tensor, taken: Callable[[], Tensor], layer: Layer, out: Tensor, accumulate: bool
) -> Callable[[], Any] | None:
    """Return the weight gradient call; None without quack.

    It multiplies dy transposed by the rows of x, per expert, into float32. taken: returns the rows, gathered if needed.
    """
    if not is_installed():
        return None
    from quack.gemm_interface import gemm

    def run() -> None:
        dw = gemm(dy.t(), taken(), cu_seqlens_k=layer.bounds, out_dtype=torch.float32, tuned=False)
        if accumulate:
            out.add_(dw)

    return run


def time_or_none(run: Callable[[], Any] | None) -> float | None:
    """Return the median milliseconds of a call, or None if there is no call or it fails."""
    if run is None:
        return None
    try:
        return time_ms(run)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        print(f"quack-kernels: {type(error).__name__}: {error}")
        return None
