"""Operators that work on the bytes of quantized tensors: those that move, slice, copy, gather or create tensors.

All other operators get dequantized values, or raise: see `QuantizedTensor.__torch_dispatch__`. Dimension letters are
those of tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from dualpipe.quantized.tensor import QuantizedTensor, is_strict, operator

aten = torch.ops.aten
functional = torch.ops._c10d_functional
c10d = torch.ops.c10d


def plain_values(x: Tensor) -> Tensor:
    """Return the values of a tensor as a plain tensor: the master of a quantized one, or else the dequantized bytes."""
    if not isinstance(x, QuantizedTensor):
        return x
    return x.dequantize() if x.master is None else x.master


# -- copies


@operator(aten.detach.default, aten.alias.default)
def _alias(x: QuantizedTensor) -> QuantizedTensor:
    alias = x.map_storage(lambda part: part.detach())
    alias.transposed = x.transposed
    return alias


@operator(aten.clone.default)
def _clone(x: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return x.map_storage(lambda part: part.contiguous().clone())


@operator(aten._to_copy.default)
def _to(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, x.dtype):
        return x.dequantize().to(device=device, dtype=dtype)
    non_blocking = options.get("non_blocking", False)
    return x.map_storage(lambda part: part.to(device or part.device, copy=True, non_blocking=non_blocking))


@operator(aten._pin_memory.default)
def _pin_memory(x: QuantizedTensor, device: Any = None) -> QuantizedTensor:
    return x.map_storage(lambda part: part.contiguous().pin_memory())


@operator(aten.is_pinned.default)
def _is_pinned(x: QuantizedTensor, device: Any = None) -> bool:
    return x.block_rows.is_pinned()


@operator(aten.record_stream.default)
def _record_stream(x: QuantizedTensor, stream: Any) -> None:
    for part in (x.block_rows, x.master):
        if part is not None:
            part.record_stream(stream)


# -- views and parts


@operator(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(x: QuantizedTensor, size: Sequence[int]) -> Any:
    return _reshape(x, torch.empty(x.shape, device="meta").view(size).shape)


@operator(aten.as_strided.default)
def _as_strided(x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Return a contiguous view from the start, possibly without the last rows, as FSDP2 makes of a gathered parameter.

    Raises ValueError for any other view.
    """
    contiguous_stride = [prod(size[dim + 1 :]) for dim in range(len(size))]
    is_contiguous = list(stride) == contiguous_stride or not prod(size)
    if not is_contiguous or offset:
        raise ValueError(f"as_strided({list(size)}, {list(stride)}, {offset}) of {x!r} is not a contiguous view from "
                         "its start; call dequantize() first")
    if len(size) == x.dim() and tuple(size[1:]) == tuple(x.shape[1:]) and size[0] < x.shape[0]:
        num_rows = x.format.block_rows(size[0])
        block_rows = x.block_rows[:, :num_rows] if x.dim() == 2 else x.block_rows[: size[0]]
        return x.like(block_rows, tuple(size), master=None if x.master is None else x.master[: size[0]])
    return _reshape(x, size)


def _reshape(x: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor:
    """Return a view as matrices of whole block rows, or a flat view."""
    size = tuple(size)
    shape = x.matrix_shape
    block_rows = x.block_rows
    if size not in (shape, (x.numel(),)):
        if not _can_view_as_matrices(x, size):
            raise ValueError(f"{x!r} cannot be viewed as {size}; give {shape}, matrices of whole blocks, or a flat "
                             "shape, or call dequantize() first")
        num_matrices = 1 if len(size) == 2 else size[0]
        block_rows = block_rows.view(num_matrices, x.format.block_rows(size[-2]), block_rows.shape[-1])
        shape = size
    master = None if x.master is None else x.master.view(size)
    view = x.like(block_rows, shape, flat=len(size) == 1, master=master)
    view.transposed = x.transposed if shape == x.matrix_shape else None
    return view


def _can_view_as_matrices(x: QuantizedTensor, size: tuple[int, ...]) -> bool:
    """Return True if `size` has the same columns, and the same rows or no block row with rows of two matrices."""
    shape = x.matrix_shape
    if len(size) not in (2, 3) or size[-1] != shape[-1] or prod(size) != x.numel():
        return False
    block_height = x.format.block[0]
    return size[-2] == shape[-2] or (size[-2] % block_height == 0 and shape[-2] % block_height == 0)


@operator(aten.slice.Tensor)
def _slice(
    x: QuantizedTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> QuantizedTensor:
    begin, end, stride = slice(start, stop, step).indices(x.shape[dim])
    if stride != 1:
        raise ValueError(f"every {stride}th row of {x!r} is not a range of bytes; use step 1, or call "
                         "dequantize() first")
    return x.cut(dim, begin, max(begin, end))


@operator(aten.select.int)
def _select(x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    if x.dim() != 3 or dim % 3:
        raise ValueError(f"[{index}] of dimension {dim} of {x!r} is not a matrix; slice rows, or call "
                         "dequantize() first")
    num_matrices = x.shape[0]
    if not -num_matrices <= index < num_matrices:
        raise IndexError(f"matrix {index} is out of range for {x!r}; give an index from {-num_matrices} to "
                         f"{num_matrices - 1}")
    index %= num_matrices
    part = x.cut(0, index, index + 1)
    return x.like(part.block_rows, x.shape[1:], master=None if part.master is None else part.master[0])


@operator(aten.split.Tensor)
def _split(x: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    parts = torch.empty(x.shape, device="meta").split(size, dim)
    return _split_with_sizes(x, [part.shape[dim] for part in parts], dim)


@operator(aten.split_with_sizes.default)
def _split_with_sizes(x: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    torch.empty(x.shape, device="meta").split_with_sizes(sizes, dim)  # raises if the sizes do not add up
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [x.cut(dim, end - size, end) for size, end in zip(sizes, ends)]


@operator(aten.unbind.int)
def _unbind(x: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


@operator(aten.cat.default)
def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    shape = torch.cat([torch.empty(part.shape, device="meta") for part in parts], dim).shape  # raises as torch does
    num_dims = len(shape)
    if num_dims == 1 and not is_strict.get():
        # DDP concatenates flat tensors, broadcasts them, and copies the result into the tensors. Concatenate the
        # masters, which would lose precision if they were overwritten with dequantized values.
        return torch.cat([plain_values(part).to(part.dtype) for part in parts])
    dim %= num_dims
    if dim == num_dims - 1 or not all(isinstance(part, QuantizedTensor) for part in parts):
        return NotImplemented
    first = parts[0]
    is_row_dim = dim == num_dims - 2
    ends_in_block = any(part.shape[dim] % first.format.block[0] for part in parts[:-1])  # the last part may
    if any(part.format != first.format for part in parts) or (is_row_dim and ends_in_block):
        return NotImplemented
    masters = [part.master for part in parts]
    master = None if any(master is None for master in masters) else torch.cat(masters, dim)
    return first.like(torch.cat([part.block_rows for part in parts], 1 if is_row_dim else 0), shape, master=master)


@operator(aten.constant_pad_nd.default)
def _pad(x: QuantizedTensor, pad: Sequence[int], value: float = 0) -> Any:
    """Append rows or matrices of zeros, as to shards before a gather. The bytes of zeros are zeros."""
    if value or any(pad[::2]) or any(pad[1:2]) or x.dim() == 1:
        return NotImplemented
    added = [*pad[1::2], 0, 0]  # by dimension, last first
    padded_size = [size + more for size, more in zip(reversed(x.shape), added)]
    num_matrices, num_rows, _ = x.block_rows.shape
    padded = cast(QuantizedTensor, x.new_zeros(padded_size[::-1]))
    padded.block_rows[:num_matrices, :num_rows].copy_(x.block_rows)
    if padded.master is not None:
        padded.master[tuple(map(slice, x.shape))].copy_(cast(Tensor, x.master))
    return padded


# -- collectives


@operator(functional.all_gather_into_tensor.default)
def _all_gather(x: QuantizedTensor, size: int, group: str) -> QuantizedTensor:
    """Gather the bytes along the first dimension, as for a state dict of whole tensors. Masters are not gathered."""
    num_rows, num_columns = x.matrix_shape[-2:]
    if x.dim() == 2 and size > 1 and num_rows % x.format.block[0]:
        raise ValueError(f"cannot gather {x!r}: its {num_rows} rows are not a multiple of {x.format.block[0]}; shard "
                         "it over fewer ranks, or call dequantize() first")
    gathered = functional.wait_tensor(functional.all_gather_into_tensor(x.block_rows.contiguous(), size, group))
    if x.dim() == 2:
        return x.like(gathered.view(1, -1, gathered.shape[-1]), (size * num_rows, num_columns))
    return x.like(gathered, (len(gathered), num_rows, num_columns))


def _wait_operators() -> list[Any]:
    operators = [functional.wait_tensor.default]
    if hasattr(functional, "_wrap_tensor_autograd"):  # since torch 2.13
        operators.append(functional._wrap_tensor_autograd.default)
    return operators


@operator(*_wait_operators())
def _wait(x: QuantizedTensor) -> QuantizedTensor:
    return x  # `_all_gather` has waited


@operator(c10d.scatter_.default)
def _scatter(outputs: Sequence[QuantizedTensor], inputs: Sequence[Sequence[QuantizedTensor]], *rest: Any) -> Any:
    """Scatter the bytes, and the masters if there are any, as `distribute_tensor` does for shards."""
    names = ("block_rows",) if outputs[0].master is None else ("block_rows", "master")
    work = None
    for name in names:
        sent = [[getattr(part, name).contiguous() for part in parts] for parts in inputs]
        received = [getattr(output, name) for output in outputs]
        _, work = c10d.scatter_(received, sent, *rest)
        work.wait()
    return outputs, work


@operator(c10d.broadcast_.default)
def _broadcast(tensors: Sequence[Any], *rest: Any) -> Any:
    """Broadcast values, because the tensors may be plain on other ranks, and quantize the received values."""
    values = [plain_values(tensor).to(tensor.dtype, copy=True) for tensor in tensors]
    _, work = c10d.broadcast_(values, *rest)
    work.wait()
    for tensor, received in zip(tensors, values):
        tensor.quantize_(received)
    return tensors, work


# -- writing


@operator(aten.copy_.default)
def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, QuantizedTensor):
        target.copy_(source.dequantize(), non_blocking)
    elif isinstance(source, QuantizedTensor) and source.format == target.format and source.shape == target.shape:
        _copy_bytes(target, source, non_blocking)
    else:
        target.quantize_(plain_values(source))
    return target


def _copy_bytes(target: QuantizedTensor, source: QuantizedTensor, non_blocking: bool) -> None:
    """Copy bytes and master.

    If the source has no master and the same bytes as the target, the target's master stays: the dequantized bytes would
    be less precise.
    """
    if target.master is not None:
        if source.master is not None:
            target.master.copy_(source.master, non_blocking)
        elif not torch.equal(target.block_rows, source.block_rows):
            target.master.copy_(source.dequantize(), non_blocking)
    target.block_rows.copy_(source.block_rows, non_blocking)


def _filler(function: Any) -> Callable[..., QuantizedTensor]:
    """Return the in-place operator `function` for quantized tensors: fill a plain tensor, then quantize it."""

    def fill(x: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
        x.quantize_(function(torch.empty(x.shape, device=x.device), *args, **kwargs))
        return x

    return fill


for _fill in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.normal_.default, aten.uniform_.default):
    operator(_fill)(_filler(_fill))


@operator(aten.equal.default)
def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, QuantizedTensor) and isinstance(y, QuantizedTensor) and x.format == y.format:
        return x.shape == y.shape and torch.equal(x.block_rows, y.block_rows)
    return cast(bool, NotImplemented)


# -- new tensors


def _new(x: QuantizedTensor, size: Sequence[int], dtype: torch.dtype | None, device: Any) -> QuantizedTensor | None:
    """Return zeros in the format of `x`; None if another dtype is requested or no such tensor has this size."""
    size = tuple(size)
    is_flat = size == (x.numel(),)
    has_partial_byte = size and size[-1] * x.format.bits % 8
    if dtype not in (None, x.dtype) or has_partial_byte or not (len(size) in (2, 3) or is_flat):
        return None
    shape = x.matrix_shape if len(size) == 1 else size
    new = QuantizedTensor.empty(shape, x.format, dtype=x.dtype, device=device or x.device,
                                keep_master=x.master is not None)
    return _reshape(new, size)


@operator(aten.empty_like.default, aten.zeros_like.default)
def _empty_like(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    new = _new(x, x.shape, dtype, device)
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=device or x.device) if new is None else new


@operator(aten.full_like.default)
def _full_like(
    x: QuantizedTensor, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Any:
    return _empty_like(x, dtype=dtype, device=device).fill_(value)


@operator(aten.new_empty.default, aten.new_zeros.default)
def _new_empty(
    x: QuantizedTensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Any:
    new = _new(x, size, dtype, device)
    if new is None:
        return torch.zeros(tuple(size), dtype=dtype or x.dtype, device=device or x.device)
    new.padded = new.block_rows  # FSDP2 creates such a tensor to pad a shard
    return new


@operator(aten.new_full.default)
def _new_full(
    x: QuantizedTensor, size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, device: Any = None,
    **options: Any,
) -> Any:
    return _new_empty(x, size, dtype=dtype, device=device).fill_(value)
