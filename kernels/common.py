"""What the kernel files share: where a kernel runs, what it computes in, and how it takes rows.

Kernels run as Triton on CUDA, and everywhere under TRITON_INTERPRET=1; elsewhere their PyTorch references run. Kernel
files import `triton` and `tl` from here, so that they can be imported where Triton is not installed (it exists for
Linux only).

How many rows come from other ranks is data: any step may be the first with none, with one, or with a multiple of 16,
on each of which Triton compiles a kernel of its own. To load it the host waits for the whole device, and so for
messages of NCCL whose other ends may be waiting for this rank. So one kernel, loaded in the first step, is for any
number of rows: `do_not_specialize` names the arguments that follow from it, no tile is chosen by it, and without rows a
program is launched that finds nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads it when it is imported, so once

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    triton = SimpleNamespace(jit=lambda fn=None, **_: fn or (lambda kernel: kernel))
    tl = None


def use_triton(tensor: Tensor) -> bool:
    """Return True if the kernel for `tensor` is the Triton one."""
    return tl is not None and (INTERPRET or tensor.is_cuda)


def architecture(device: torch.device) -> int:
    """Compute capability as a number: 90 for Hopper; the interpreter counts as 80 (no tensor descriptors)."""
    return _capability(device) if device.type == "cuda" else 80


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; `triton.cdiv` takes the host a microsecond."""
    return -(-a // b)


def compute_dtype(first: Tensor, *others: Tensor | None) -> torch.dtype:
    """What to compute in: at least float32, float64 where an operand has it."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    for other in others:
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return dtype


def tl_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a dtype that kernels compute in."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def with_dense_rows(x: Tensor) -> Tensor:
    """The matrix `x`, copied only where the elements of a row are not neighbours; rows may be any distance apart."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


class RowTile(NamedTuple):
    """What one program takes of a matrix that is only read and written once."""

    rows: int  # of elements of two bytes
    cols: int
    warps: int
    unroll: int = 1  # of a loop over rows of other matrices: so many are on their way at a time

    def sized(self, dtype: torch.dtype) -> RowTile:
        """The tile with as many bytes of elements of `dtype`."""
        return self._replace(rows=max(1, self.rows * 2 // dtype.itemsize))


_LIBRARY = torch.library.Library("dualpipe", "FRAGMENT")


def operator(
    fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function, `_name`, the operator `dualpipe::name`, whose results have the form of those of `fake`.

    mutates: the arguments that it writes to, whose versions it increases itself where autograd may have kept them.

    `torch.library.custom_op` has a part for autograd and one for aliases besides, with which a call takes the host 6 us
    instead of 1. Without `register_backward`, results have no gradient: it is for what an autograd function calls.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.removeprefix("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dualpipe::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.dualpipe, name).default

    return register


def register_backward(
    op: Any, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None
) -> None:
    """Register what differentiates an `operator`, as `torch.library.register_autograd` takes it: 3 us more a call."""
    torch.library.register_autograd(op, backward, setup_context=setup_context, lib=_LIBRARY)


def once_only(what: str, instead: str) -> Callable[..., NoReturn]:
    """A backward for operators that are the backward of `what`: raises, and says what can be differentiated twice."""

    def refuse(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(f"{what} can be differentiated once only; for a second derivative "
                                  f"(create_graph=True) use {instead}")

    return refuse
