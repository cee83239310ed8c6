"""The grouped products in PyTorch: what runs on CPU, and what the kernels are compared with.

They read `offs` back, so on CUDA they wait for the device. Dimension letters as in `grouped_gemm`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_grouped_gemm(
    x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None = None, gather: Tensor | None = None
) -> Tensor:
    """`torch.nn.functional.grouped_mm` where it takes the operands, one product per expert where not."""
    x = x if gather is None else _gathered(x, gather, offs)
    if bias is None and _fits_grouped_mm(x, w):
        return F.grouped_mm(x, w.transpose(-2, -1), offs=offs)
    y = x.new_empty(x.shape[0], w.shape[1])
    for e, start, end in _segments(offs):
        if bias is None:
            torch.mm(x[start:end], w[e].t(), out=y[start:end])
        else:
            torch.addmm(bias[e], x[start:end], w[e].t(), out=y[start:end])
    return y


def reference_grouped_gemm_dgrad(dy: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """As `reference_grouped_gemm`."""
    if _fits_grouped_mm(dy, w):
        return F.grouped_mm(dy, w, offs=offs)
    dx = dy.new_empty(dy.shape[0], w.shape[2])
    for e, start, end in _segments(offs):
        torch.mm(dy[start:end], w[e], out=dx[start:end])
    return dx


def reference_grouped_gemm_wgrad(
    dy: Tensor, x: Tensor, offs: Tensor, out: Tensor, accumulate: bool, gather: Tensor | None = None
) -> None:
    """As `reference_grouped_gemm`."""
    x = x if gather is None else _gathered(x, gather, offs)
    if out.dtype is x.dtype and _fits_grouped_mm(dy, x):
        dw = F.grouped_mm(dy.t(), x, offs=offs)
        out.add_(dw) if accumulate else out.copy_(dw)
        return
    for e, start, end in _segments(offs):
        dw = dy[start:end].to(out.dtype).t().mm(x[start:end].to(out.dtype))
        out[e].add_(dw) if accumulate else out[e].copy_(dw)


def _gathered(x: Tensor, gather: Tensor, offs: Tensor) -> Tensor:
    """x[gather] up to the last end; what `gather` holds past it is not looked at."""
    rows, used = x.new_empty(gather.shape[0], x.shape[1]), int(offs[-1])
    torch.index_select(x, 0, gather[:used], out=rows[:used])
    return rows


def _segments(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, start, end) of each expert."""
    start = 0
    for e, end in enumerate(offs.tolist()):
        yield e, start, end
        start = end


def _fits_grouped_mm(*operands: Tensor) -> bool:
    """Whether `F.grouped_mm` takes row-major `operands`: half precision, rows that start at multiples of 16 bytes."""
    return all(
        t.dtype in (torch.bfloat16, torch.float16)
        and t.is_contiguous()
        and t.numel() > 0
        and t.shape[-1] * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
        for t in operands
    )
