"""The grouped products in PyTorch: what runs on CPU, and what the kernels are compared with; and what both refuse.

The references read `offs` back, so on CUDA they wait for the device. Dimension letters as in `grouped_gemm`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

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
    for e, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        yield e, start, end


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


# --- checks: ValueError for operands that do not fit, with the remedy ------------------------------------------------


def check_operands(
    offs: Tensor, equal: Sequence[tuple[str, int]], gather: Tensor | None = None, bias: Tensor | None = None,
    **operands: Tensor,
) -> None:
    """Refuse operands that do not fit each other. The first one, `w` or `out`, is (E, N, H), the others are matrices.

    equal: two sizes that must be one, by operand (or "gather") and dimension.
    """
    (first, weights), *_ = operands.items()
    for name, operand in operands.items():
        dim = 3 if name == first else 2
        if operand.dim() != dim or not operand.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor of {dim} dimensions; got {operand.dtype} of "
                             f"shape {tuple(operand.shape)}")
    if offs.dtype is not torch.int32:
        raise ValueError(f"offs must be int32; got {offs.dtype}: convert it with offs.to(torch.int32)")
    tensors = [*operands.values(), offs]
    if len({t.device for t in tensors}) > 1:
        raise ValueError(f"all operands must be on one device; got {[str(t.device) for t in tensors]}")
    dtypes = {name: operand.dtype for name, operand in operands.items() if name != "out"}  # whose own may be wider
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"{' and '.join(dtypes)} must have one dtype; got {[*dtypes.values()]}")
    if gather is not None:
        if gather.dim() != 1 or gather.dtype not in (torch.int32, torch.int64) or gather.device != offs.device:
            raise ValueError(f"gather must be (M,) int32 or int64 on {offs.device}; got {tuple(gather.shape)} "
                             f"{gather.dtype} on {gather.device}")
        operands["gather"] = gather
    names = [f"{name}.shape[{dim}]" if dim else f"rows of {name}" for name, dim in equal]
    sizes = [operands[name].shape[dim] for name, dim in equal]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{names[0]} must equal {names[1]}; got {sizes[0]} and {sizes[1]}")
    experts, bias_shape = weights.shape[0], weights.shape[:2]
    if experts < 1:
        raise ValueError("there must be at least one expert; got weights of shape (0, ...)")
    if offs.shape != (experts,):
        raise ValueError(f"offs must hold one end for each of {experts} experts; got shape {tuple(offs.shape)}")
    if bias is not None and (bias.shape, bias.dtype, bias.device) != (bias_shape, weights.dtype, offs.device):
        raise ValueError(f"bias must have shape {tuple(bias_shape)}, one row for each expert, in {weights.dtype} on "
                         f"{offs.device}; got {tuple(bias.shape)}, {bias.dtype} on {bias.device}")


def check_values(offs: Tensor, rows: int, gather: Tensor | None = None, gathered_rows: int = 0) -> None:
    """Refuse what only the data can tell: free on CPU, a wait for the device on CUDA and therefore asked for."""
    if offs.is_cuda and os.environ.get("DUALPIPE_CHECK_OFFSETS", "0") != "1":
        return
    ends = [0, *offs.tolist()]
    if any(a > b for a, b in pairwise(ends)) or ends[-1] > rows:
        raise ValueError(f"offs must rise from 0 to at most {rows}, the number of rows; got {ends[1:]}")
    if gather is None or ends[-1] == 0:
        return
    low, high = (int(v) for v in gather[: ends[-1]].aminmax())
    if low < 0 or high >= gathered_rows:
        raise ValueError(f"gather must stay within the {gathered_rows} rows of x; got {low} to {high}")
