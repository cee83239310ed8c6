"""Grouped GEMMs of expert layers by another library, for the forward and the input gradient.

`dualpipe.kernels` is the default and the reference. The alternatives read no rows where they are and fuse no
activation: tokens are gathered into a sorted copy first, and SwiGLU is a kernel after the GEMM. They pay where their
GEMM is faster than ours by more than that copy takes. Weight gradients stay with `dualpipe.kernels`, which adds them to
float32 accumulators from registers.

    "grouped_mm"   `torch.nn.functional.grouped_mm`: bfloat16 (float16 on some devices)
    "quack"        `quack.gemm_interface.gemm` of quack-kernels, on Hopper and Blackwell. It was written from the
                   function's published signature and has never run.

Dimension letters: T tokens, M rows sorted by expert, E experts, H in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dualpipe.kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad

ExpertGemm = Literal["dualpipe", "grouped_mm", "quack"]
DUALPIPE = "dualpipe"
EXPERT_GEMMS: tuple[str, ...] = get_args(ExpertGemm)


def expert_gemm(
    library: ExpertGemm, x: Tensor, weight_ENH: Tensor, ends_E: Tensor, *, bias_EN: Tensor | None = None,
    gather_M: Tensor | None = None,
) -> Tensor:
    """Compute `dualpipe.kernels.grouped_gemm` by a library -> (M, N).

    Args:
        library: one of `EXPERT_GEMMS`.
        x: (M, H) rows sorted by expert; with `gather_M`, (T, H) tokens.
        ends_E: end of each expert's rows, int32, on the device.
        gather_M: the token of each row. Entries past the last end may hold anything.

    Rows past the last end are undefined.
    """
    if library == DUALPIPE:
        return grouped_gemm(x, weight_ENH, ends_E, bias=bias_EN, gather=gather_M)
    rows_MH = x if gather_M is None else _gather_rows(x, gather_M)
    y_MN = _GEMMS[library](rows_MH, weight_ENH.transpose(1, 2), ends_E)
    if bias_EN is not None:
        y_MN = y_MN + bias_EN[_expert_of_rows(ends_E, y_MN.shape[0])]
    return y_MN


def expert_gemm_dgrad(library: ExpertGemm, dy_MN: Tensor, weight_ENH: Tensor, ends_E: Tensor) -> Tensor:
    """Compute `dualpipe.kernels.grouped_gemm_dgrad` by a library -> (M, H). See `expert_gemm`."""
    if library == DUALPIPE:
        return grouped_gemm_dgrad(dy_MN, weight_ENH, ends_E)
    return _GEMMS[library](dy_MN, weight_ENH, ends_E)


def _gather_rows(x_TH: Tensor, gather_M: Tensor) -> Tensor:
    """Copy the token of each row -> (M, H). No size is read back: rows without an expert copy some token."""
    if x_TH.shape[0] == 0:
        return x_TH.new_empty(gather_M.shape[0], x_TH.shape[1])
    return x_TH.index_select(0, gather_M.clamp(0, x_TH.shape[0] - 1))


def _expert_of_rows(ends_E: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each row (M,); that of rows past the last end is the last one."""
    rows_M = torch.arange(num_rows, device=ends_E.device, dtype=ends_E.dtype)
    return torch.searchsorted(ends_E, rows_M, right=True).clamp(max=ends_E.shape[0] - 1)


def _grouped_mm(a_MK: Tensor, b_EKC: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each expert's rows by torch."""
    return F.grouped_mm(a_MK.contiguous(), b_EKC, offs=ends_E)


def _quack(a_MK: Tensor, b_EKC: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each expert's rows by quack-kernels."""
    from quack.gemm_interface import gemm  # not at the top: an optional package, which compiles at its import

    bounds = torch.cat((ends_E.new_zeros(1), ends_E))
    return gemm(a_MK.contiguous(), b_EKC, cu_seqlens_m=bounds, tuned=False)


_GEMMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"grouped_mm": _grouped_mm, "quack": _quack}
