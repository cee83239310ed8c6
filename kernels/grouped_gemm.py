"""Grouped matrix products: every expert multiplies its own rows of one matrix, however many it got.

Rows are sorted by expert; `offs` holds where each expert's rows end, on the device, so that no size is read back and
no row is padded. Example: offs = [2, 2, 5] gives rows 0 and 1 to expert 0, none to expert 1 and rows 2 to 4 to expert
2; rows 5 and up belong to nobody and are neither read nor written.

Only the PyTorch reference exists: `torch.nn.functional.grouped_mm` where it takes the operands, one product per
expert where not. None of these functions is meant for autograd: `dualpipe.nn.GroupedLinear` has the backward.

Dimension letters: M rows, E experts, H in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_gemm(
    x: Tensor, w: Tensor, offs: Tensor, *, bias: Tensor | None = None, gather: Tensor | None = None
) -> Tensor:
    """y[m] = w[e] x[m] (+ bias[e]) for every row m of expert e.

    `x` (M, H), `w` (E, N, H) in the layout of nn.Linear, `offs` (E,) int32 running ends, `bias` (E, N) -> (M, N), in
    the dtype of `x`. With `gather` (M,) the rows are `x[gather]` and `x` may have any number of rows. Rows past
    `offs[-1]` stay uninitialised. Raises `ValueError` for operands that do not fit.
    """
    _check(w=(w, 3), x=(x, 2), offs=offs, same_dtype=True)
    _check_sizes(("x.shape[1]", x.shape[1]), ("w.shape[2]", w.shape[2]))
    if bias is not None and bias.shape != w.shape[:2]:
        raise ValueError(f"bias must have shape {tuple(w.shape[:2])}, one row for each expert; got {tuple(bias.shape)}")
    x = _gathered(x, gather)
    experts = _segments(offs, w.shape[0], x.shape[0])
    if bias is None and _fits_grouped_mm(x, w):
        return F.grouped_mm(x, w.transpose(-2, -1), offs=offs)
    y = x.new_empty(x.shape[0], w.shape[1])
    for e, start, end in experts:
        if bias is None:
            torch.mm(x[start:end], w[e].t(), out=y[start:end])
        else:
            torch.addmm(bias[e], x[start:end], w[e].t(), out=y[start:end])
    return y


def grouped_gemm_dgrad(dy: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Gradient of `grouped_gemm` for its rows: dx[m] = w[e]^T dy[m].

    `dy` (M, N), `w` (E, N, H), `offs` (E,) int32 -> (M, H). Rows past `offs[-1]` stay uninitialised. Raises
    `ValueError` for operands that do not fit.
    """
    _check(w=(w, 3), dy=(dy, 2), offs=offs, same_dtype=True)
    _check_sizes(("dy.shape[1]", dy.shape[1]), ("w.shape[1]", w.shape[1]))
    experts = _segments(offs, w.shape[0], dy.shape[0])
    if _fits_grouped_mm(dy, w):
        return F.grouped_mm(dy, w, offs=offs)
    dx = dy.new_empty(dy.shape[0], w.shape[2])
    for e, start, end in experts:
        torch.mm(dy[start:end], w[e], out=dx[start:end])
    return dx


def grouped_gemm_wgrad(
    dy: Tensor, x: Tensor, offs: Tensor, *, out: Tensor, accumulate: bool, gather: Tensor | None = None
) -> None:
    """Gradient of `grouped_gemm` for its weights: dw[e] = sum over the rows m of expert e of dy[m] x[m]^T.

    `dy` (M, N), `x` (M, H) or, with `gather` (M,), any rows to take `x[gather]` from, `offs` (E,) int32. The result is
    written to `out` (E, N, H), or added to it with `accumulate`, in the dtype of `out`: products for a float32 `out`
    are never rounded to bfloat16. An expert without rows gets zeros. Raises `ValueError` for operands that do not fit.
    """
    _check(out=(out, 3), dy=(dy, 2), x=(x, 2), offs=offs, same_dtype=False)
    x = _gathered(x, gather)
    _check_sizes(("rows of dy", dy.shape[0]), ("rows of x", x.shape[0]))
    if out.shape[1:] != (dy.shape[1], x.shape[1]):
        raise ValueError(f"out must have shape (E, {dy.shape[1]}, {x.shape[1]}) for dy and x; got {tuple(out.shape)}")
    experts = _segments(offs, out.shape[0], dy.shape[0])
    if out.dtype is x.dtype and _fits_grouped_mm(dy, x):
        dw = F.grouped_mm(dy.t(), x, offs=offs)
        out.add_(dw) if accumulate else out.copy_(dw)
        return
    for e, start, end in experts:
        dw = dy[start:end].to(out.dtype).t().mm(x[start:end].to(out.dtype))
        out[e].add_(dw) if accumulate else out[e].copy_(dw)


def _gathered(x: Tensor, gather: Tensor | None) -> Tensor:
    if gather is None:
        return x
    if gather.dim() != 1 or gather.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"gather must be (M,) int32 or int64; got {tuple(gather.shape)} {gather.dtype}")
    return x.index_select(0, gather)


def _segments(offs: Tensor, num_experts: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """(expert, start, end) of each expert; checks the offsets at once where that costs no synchronisation."""
    if offs.shape != (num_experts,):
        raise ValueError(f"offs must hold one end for each of {num_experts} experts; got shape {tuple(offs.shape)}")
    if offs.device.type == "cpu":
        ends = [0, *offs.tolist()]
        if any(a > b for a, b in pairwise(ends)) or ends[-1] > rows:
            raise ValueError(f"offs must rise from 0 to at most {rows}, the number of rows; got {ends[1:]}")
    return _each_segment(offs)


def _each_segment(offs: Tensor) -> Iterator[tuple[int, int, int]]:
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


def _check(*, offs: Tensor, same_dtype: bool, **operands: tuple[Tensor, int]) -> None:
    for name, (operand, dim) in operands.items():
        if operand.dim() != dim or not operand.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor of {dim} dimensions; got {operand.dtype} of "
                             f"shape {tuple(operand.shape)}")  # fmt: skip
    if offs.dtype is not torch.int32:
        raise ValueError(f"offs must be int32; got {offs.dtype}: convert it with offs.to(torch.int32)")
    tensors = [operand for operand, _ in operands.values()]
    if len({t.device for t in (*tensors, offs)}) > 1:
        raise ValueError(f"all operands must be on one device; got {[str(t.device) for t in (*tensors, offs)]}")
    if same_dtype and len({t.dtype for t in tensors}) > 1:
        raise ValueError(f"{' and '.join(operands)} must have one dtype; got {[t.dtype for t in tensors]}")


def _check_sizes(a: tuple[str, int], b: tuple[str, int]) -> None:
    if a[1] != b[1]:
        raise ValueError(f"{a[0]} must equal {b[0]}; got {a[1]} and {b[1]}")
