"""What the kernels that move and scale rows ask of their operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualpipe.kernels.backend import tl


def compute_dtype(first: Tensor, *others: Tensor | None) -> torch.dtype:
    """What to compute in: at least float32, float64 where an operand has it."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    for other in others:
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return dtype


def tl_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype that kernels compute in."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def has_dense_rows(x: Tensor) -> bool:
    """Whether the elements of a row of the matrix `x` are neighbours; its rows may be any distance apart."""
    return x.stride(1) == 1 or x.shape[1] == 1


def with_dense_rows(x: Tensor) -> Tensor:
    """`x`, copied only where the elements of a row are not neighbours."""
    return x if has_dense_rows(x) else x.contiguous()
