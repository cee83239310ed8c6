"""Code shared by the kernel files: choice of Triton or PyTorch, compute dtypes, tiles, operators and their backwards.

Kernels run in Triton on CUDA, and on all devices under TRITON_INTERPRET=1; otherwise their PyTorch references run.
Kernel files import `triton` and `tl` from this file, so that they can be imported if Triton is not installed (Triton
exists for Linux only).

The number of rows that a rank receives depends on the routing: any step may be the first with no row, with one row, or
with a multiple of 16. By default Triton compiles another kernel for each of these cases. Loading a kernel makes the
host wait for all work on the device. This includes NCCL messages, whose peers may be waiting for this rank: a deadlock.
Therefore one kernel, loaded in the first step, serves any number of rows: `do_not_specialize` lists the arguments that
depend on this number, tiles do not depend on it, and a kernel is launched even if there are no rows.

As in Triton, a program is one instance of a kernel: it computes one tile, or one block of rows.
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

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"  # Triton reads the variable once, at its import

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    triton = SimpleNamespace(jit=lambda fn=None, **_: fn or (lambda kernel: kernel))
    tl = None


def use_triton(tensor: Tensor) -> bool:
    """Return True if kernels run in Triton for `tensor`, False if their PyTorch references run."""
    return tl is not None and (INTERPRET or tensor.is_cuda)


def architecture(device: torch.device) -> int:
    """Return the compute capability as a number: 90 for Hopper; 80 for the interpreter (no tensor descriptors)."""
    return _capability(device) if device.type == "cuda" else 80


@cache
def _capability(device: torch.device) -> int:
    """Return the compute capability of a CUDA device as a number."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. `triton.cdiv` takes 1 us of host time."""
    return -(-a // b)


def compute_dtype(first: Tensor, *others: Tensor | None) -> torch.dtype:
    """Return the dtype to compute in: float64 if an operand has it, otherwise float32."""
    dtype = torch.promote_types(first.dtype, torch.float32)
    for other in others:
        if other is not None:
            dtype = torch.promote_types(dtype, other.dtype)
    return dtype


def tl_dtype(dtype: torch.dtype) -> Any:
    """Return the Triton dtype for a dtype that kernels compute in."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def with_dense_rows(x: Tensor) -> Tensor:
    """Return the matrix `x`, copied if its rows are not contiguous; the row stride may have any value."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


class RowTile(NamedTuple):
    """Tile of one program in a matrix that is read and written once.

    Kernel files have tables of tiles by shape class, such as "wide": a range of shapes that share a tile.

    rows: number of rows for elements of two bytes; see `scaled_for`.
    unroll: unroll factor of the loop over the rows of a token (routing.py), and so the number of loads in flight.
    """

    rows: int
    cols: int
    warps: int
    unroll: int = 1

    def scaled_for(self, dtype: torch.dtype) -> RowTile:
        """Return the tile with the same number of bytes for elements of `dtype`."""
        return self._replace(rows=max(1, self.rows * 2 // dtype.itemsize))


_LIBRARY = torch.library.Library("dualpipe", "FRAGMENT")


def operator(
    fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function `_name` as the operator `dualpipe::name`.

    Results have no gradient. A function with a backward calls the operator from an autograd function, if
    `needs_gradient`; one without `setup_context`, with which torch inspects the signature at every call (15 us). A call
    of the operator takes 1 us of host time; `torch.library.custom_op`, which also registers kernels for autograd and
    for aliases, takes 6 us, and a backward from `torch.library.register_autograd` adds 3 us to every call.

    fake: returns tensors with the shapes and dtypes of the results.
    mutates: arguments that the function writes to. It must increase their version counters itself if autograd may have
        saved them.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.removeprefix("_")
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dualpipe::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.dualpipe, name).default

    return register


def needs_gradient(*operands: Tensor | None) -> bool:
    """Return True if autograd records a function of `operands`."""
    return torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


class WithoutBackward(torch.autograd.Function):
    """Calls an operator whose results cannot be differentiated. Backward raises an error instead of losing a gradient.

    Call `WithoutBackward.apply(op, make_error, *operands)` if `needs_gradient`, otherwise `op(*operands)`.
    """

    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], make_error: Callable[[], Exception], *operands: Any) -> Any:
        ctx.make_error = make_error
        return op(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise ctx.make_error()


def double_backward_error(name: str, alternative: str) -> NotImplementedError:
    """Return the error for a backward of the backward of `name`.

    alternative: function that can be differentiated twice, for the message.
    """
    return NotImplementedError(f"{name} can be differentiated once only; for a second derivative (create_graph=True) "
                               f"use {alternative}")
