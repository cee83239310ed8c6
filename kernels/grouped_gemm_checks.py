"""What the grouped products refuse, with the remedy."""

from __future__ import annotations

import os
from itertools import pairwise

import torch
from torch import Tensor


def check_product(x: Tensor, w: Tensor, offs: Tensor, bias: Tensor | None, gather: Tensor | None) -> None:
    """Of the forward."""
    check_operands(w=(w, 3), x=(x, 2), offs=offs)
    check_sizes(("x.shape[1]", x.shape[1]), ("w.shape[2]", w.shape[2]))
    check_ends(offs, w.shape[0])
    check_gather(gather, x)
    if bias is not None and (bias.shape, bias.dtype, bias.device) != (w.shape[:2], x.dtype, x.device):
        raise ValueError(f"bias must have shape {tuple(w.shape[:2])}, one row for each expert, in {x.dtype} on "
                         f"{x.device}; got {tuple(bias.shape)}, {bias.dtype} on {bias.device}")


def check_operands(*, offs: Tensor, **operands: tuple[Tensor, int]) -> None:
    check_tensors(**operands)
    if offs.dtype is not torch.int32:
        raise ValueError(f"offs must be int32; got {offs.dtype}: convert it with offs.to(torch.int32)")
    tensors = [operand for operand, _ in operands.values()]
    check_one_device(*tensors, offs)
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError(f"{' and '.join(operands)} must have one dtype; got {[t.dtype for t in tensors]}")


def check_tensors(**operands: tuple[Tensor, int]) -> None:
    for name, (operand, dim) in operands.items():
        if operand.dim() != dim or not operand.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor of {dim} dimensions; got {operand.dtype} of "
                             f"shape {tuple(operand.shape)}")


def check_one_device(*tensors: Tensor) -> None:
    if len({t.device for t in tensors}) > 1:
        raise ValueError(f"all operands must be on one device; got {[str(t.device) for t in tensors]}")


def check_sizes(a: tuple[str, int], b: tuple[str, int]) -> None:
    if a[1] != b[1]:
        raise ValueError(f"{a[0]} must equal {b[0]}; got {a[1]} and {b[1]}")


def check_ends(offs: Tensor, experts: int) -> None:
    if experts < 1:
        raise ValueError("there must be at least one expert; got weights of shape (0, ...)")
    if offs.shape != (experts,):
        raise ValueError(f"offs must hold one end for each of {experts} experts; got shape {tuple(offs.shape)}")


def check_gather(gather: Tensor | None, x: Tensor) -> None:
    if gather is None:
        return
    if gather.dim() != 1 or gather.dtype not in (torch.int32, torch.int64) or gather.device != x.device:
        raise ValueError(f"gather must be (M,) int32 or int64 on {x.device}; got {tuple(gather.shape)} {gather.dtype} "
                         f"on {gather.device}")


def check_values(offs: Tensor, rows: int, gather: Tensor | None = None, gathered_rows: int = 0) -> None:
    """What only the data can tell: free on CPU, a wait for the device on CUDA and therefore asked for."""
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
