"""The grouped products of quack-kernels, as rivals of ours where they are installed.

Written from the signature of `quack.gemm_interface.gemm`; never run, as it needs a Hopper GPU or newer. A call that
fails there is a rival that is missing, and leaves our rows alone. Its default tiles: tuning would take minutes.
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
    """Return True where quack-kernels could run: with a GPU, and installed."""
    return torch.cuda.is_available() and find_spec("quack") is not None


def forward(x: Tensor, w: Tensor, layer: Layer, gather: Tensor | None) -> Callable[[], Any] | None:
    """x or its gathered rows, times each expert's weights (E, N, H) transposed."""
    if not is_installed():
        return None
    from quack.gemm_interface import gemm

    return lambda: gemm(x, w.mT, cu_seqlens_m=layer.bounds, A_idx=gather, tuned=False)


def weight_gradient(
    dy: Tensor, taken: Callable[[], Tensor], layer: Layer, out: Tensor, accumulate: bool
) -> Callable[[], Any] | None:
    """dy transposed times the rows of x, for each expert, into float32. taken: the rows, gathered where they are."""
    if not is_installed():
        return None
    from quack.gemm_interface import gemm

    def run() -> None:
        dw = gemm(dy.t(), taken(), cu_seqlens_k=layer.bounds, out_dtype=torch.float32, tuned=False)
        if accumulate:
            out.add_(dw)

    return run


def time_or_none(run: Callable[[], Any] | None) -> float | None:
    """Return the median milliseconds of a call, or None where there is none or it fails."""
    if run is None:
        return None
    try:
        return time_ms(run)
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        print(f"quack-kernels: {type(error).__name__}: {error}")
        return None
