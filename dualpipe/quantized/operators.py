"""What operators do with the bytes of quantized tensors: those that move, cut, copy, gather, or make another one alike.

All others are given the numbers, or raise: see `QuantizedTensor.__torch_dispatch__`. Letters are those of tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from dualpipe.quantized.tensor import QuantizedTensor, is_strict, numbers_of, operator

aten, functional, c10d = torch.ops.aten, torch.ops._c10d_functional, torch.ops.c10d


@operator(aten.detach.default, aten.alias.default)
def _alias(x: QuantizedTensor) -> QuantizedTensor:
    same = x.both(lambda part: part.detach())
    same.transposed = x.transposed
    return same


@operator(aten.clone.default)
def _clone(x: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return x.both(lambda part: part.contiguous().clone())


@operator(aten._to_copy.default)
def _to(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, x.dtype):
        return x.dequantize().to(device=device, dtype=dtype)
    non_blocking = options.get("non_blocking", False)
    return x.both(lambda part: part.to(device or part.device, copy=True, non_blocking=non_blocking))


@operator(aten._pin_memory.default)
def _pin_memory(x: QuantizedTensor, device: Any = None) -> QuantizedTensor:
    return x.both(lambda part: part.contiguous().pin_memory())


@operator(aten.is_pinned.default)
def _is_pinned(x: QuantizedTensor, device: Any = None) -> bool:
    return x.block_rows.is_pinned()


@operator(aten.record_stream.default)
def _record_stream(x: QuantizedTensor, stream: Any) -> None:
    for part in (x.block_rows, x.master):
        if part is not None:
            part.record_stream(stream)


@operator(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(x: QuantizedTensor, size: Sequence[int]) -> Any:
    return _reshaped(x, torch.empty(x.shape, device="meta").view(size).shape)


@operator(aten.as_strided.default)
def _as_strided(x: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Only what FSDP2 asks for of a gathered parameter: contiguous, from the start, perhaps without the last rows."""
    contiguous = list(stride) == [prod(size[dim + 1 :]) for dim in range(len(size))] or not prod(size)
    if not contiguous or offset:
        raise ValueError(f"as_strided({list(size)}, {list(stride)}, {offset}) is no view of {x!r}; dequantize() first")
    if len(size) == x.dim() and tuple(size[1:]) == tuple(x.shape[1:]) and size[0] < x.shape[0]:
        rows = x.format.block_rows(size[0])
        data = x.block_rows[:, :rows] if x.dim() == 2 else x.block_rows[: size[0]]
        return x.like(data, tuple(size), master=None if x.master is None else x.master[: size[0]])
    return _reshaped(x, size)


def _reshaped(x: QuantizedTensor, size: Sequence[int]) -> Any:
    size, shape = tuple(size), x.matrix_shape
    data = x.block_rows
    if size not in (shape, (x.numel(),)):
        between = all(rows % x.format.block[0] == 0 for rows in (*size[-2:-1], shape[-2]))  # block rows of two matrices
        if not (len(size) in (2, 3) and size[-1] == shape[-1] and prod(size) == x.numel()
                and (size[-2] == shape[-2] or between)):
            raise ValueError(f"{x!r} cannot be viewed as {size}: it is {shape} in blocks, or flat; dequantize() first")
        data = data.view(1 if len(size) == 2 else size[0], x.format.block_rows(size[-2]), data.shape[-1])
        shape = size
    master = None if x.master is None else x.master.view(size)
    same = x.like(data, shape, flat=len(size) == 1, master=master)
    same.transposed = x.transposed if shape == x.matrix_shape else None
    return same


@operator(aten.slice.Tensor)
def _slice(
    x: QuantizedTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> QuantizedTensor:
    begin, end, stride = slice(start, stop, step).indices(x.shape[dim])
    if stride != 1:
        raise ValueError(f"every {stride}th row of {x!r} is no range of bytes; dequantize() first")
    return x.cut(dim, begin, max(begin, end))


@operator(aten.select.int)
def _select(x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    if x.dim() != 3 or dim % 3:
        raise ValueError(f"[{index}] of dimension {dim} of {x!r} is no matrix; slice rows, or dequantize() first")
    if not -x.shape[0] <= index < x.shape[0]:
        raise IndexError(f"there is no matrix {index} in {x!r}")
    index %= x.shape[0]
    part = x.cut(0, index, index + 1)
    return x.like(part.block_rows, x.shape[1:], master=None if part.master is None else part.master[0])


@operator(aten.split.Tensor)
def _split(x: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    return _split_with_sizes(x, [part.shape[dim] for part in torch.empty(x.shape, device="meta").split(size, dim)], dim)


@operator(aten.split_with_sizes.default)
def _split_with_sizes(x: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    torch.empty(x.shape, device="meta").split_with_sizes(sizes, dim)  # raises where they are not all there is
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [x.cut(dim, end - size, end) for size, end in zip(sizes, ends)]


@operator(aten.unbind.int)
def _unbind(x: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


@operator(aten.cat.default)
def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    shape = torch.cat([torch.empty(part.shape, device="meta") for part in parts], dim).shape  # or what that raises
    first, dims = parts[0], len(shape)
    if dims == 1 and not is_strict.get():  # what DDP sends, and writes into all of them: masters must not be lost by it
        return torch.cat([numbers_of(part).to(part.dtype) for part in parts])
    dim %= dims
    # Only the last part may end within a block row.
    if (not all(isinstance(part, QuantizedTensor) and part.format == first.format for part in parts) or dim == dims - 1
            or (dim == dims - 2 and any(part.shape[dim] % first.format.block[0] for part in parts[:-1]))):
        return NotImplemented
    masters = [part.master for part in parts]
    return first.like(torch.cat([part.block_rows for part in parts], 1 if dim == dims - 2 else 0), shape,
                      master=None if any(master is None for master in masters) else torch.cat(masters, dim))


@operator(aten.constant_pad_nd.default)
def _pad(x: QuantizedTensor, pad: Sequence[int], value: float = 0) -> Any:
    """With rows or matrices of zeros at the end, as of shards before they are gathered: their bytes are zeros too."""
    if value or any(pad[::2]) or any(pad[1:2]) or x.dim() == 1:
        return NotImplemented
    grown = [size + more for size, more in zip(reversed(x.shape), [*pad[1::2], 0, 0])]
    (matrices, rows, _), padded = x.block_rows.shape, cast(QuantizedTensor, x.new_zeros(grown[::-1]))
    padded.block_rows[:matrices, :rows].copy_(x.block_rows)
    if padded.master is not None:
        padded.master[tuple(map(slice, x.shape))].copy_(cast(Tensor, x.master))
    return padded


@operator(functional.all_gather_into_tensor.default)
def _all_gather(x: QuantizedTensor, size: int, group: str) -> QuantizedTensor:
    """Bytes only, along the first dimension: of a state dict of whole tensors. Masters stay where they are."""
    rows, columns = x.matrix_shape[-2:]
    if x.dim() == 2 and size > 1 and rows % x.format.block[0]:
        raise ValueError(f"{x!r} cannot be gathered: its rows must be a multiple of {x.format.block[0]}")
    data = functional.wait_tensor(functional.all_gather_into_tensor(x.block_rows.contiguous(), size, group))
    if x.dim() == 2:
        return x.like(data.view(1, -1, data.shape[-1]), (size * rows, columns))
    return x.like(data, (len(data), rows, columns))


@operator(functional.wait_tensor.default, *(
    wrap.default for name in ("_wrap_tensor_autograd",) if (wrap := getattr(functional, name, None))  # since torch 2.13
))
def _gathered(x: QuantizedTensor) -> QuantizedTensor:
    return x  # `_all_gather` has waited


@operator(c10d.scatter_.default)
def _scatter(into: Sequence[QuantizedTensor], parts: Sequence[Sequence[QuantizedTensor]], *rest: Any) -> Any:
    """What `distribute_tensor` does for shards: bytes, and masters where there are some, are sent."""
    work = None
    for name in ("block_rows", "master") if into[0].master is not None else ("block_rows",):
        sent = [[getattr(part, name).contiguous() for part in each] for each in parts]
        _, work = c10d.scatter_([getattr(each, name) for each in into], sent, *rest)
        work.wait()
    return into, work


@operator(c10d.broadcast_.default)
def _broadcast(tensors: Sequence[Any], *rest: Any) -> Any:
    """Numbers are sent, as the other ranks may have plain tensors for them, and quantized again by whoever has not."""
    sent = [numbers_of(each).to(each.dtype, copy=True) for each in tensors]
    _, work = c10d.broadcast_(sent, *rest)
    work.wait()
    for each, numbers in zip(tensors, sent):
        each.quantize_(numbers)
    return tensors, work


@operator(aten.copy_.default)
def _copy(into: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(into, QuantizedTensor):
        into.copy_(source.dequantize(), non_blocking)
    elif not (isinstance(source, QuantizedTensor) and source.format == into.format and source.shape == into.shape):
        into.quantize_(numbers_of(source))
    else:
        if source.master is not None and into.master is not None:
            into.master.copy_(source.master, non_blocking)
        elif into.master is not None and not torch.equal(into.block_rows, source.block_rows):  # else it is closer
            into.master.copy_(source.dequantize(), non_blocking)
        into.block_rows.copy_(source.block_rows, non_blocking)
    return into


def _filler(function: Any) -> Callable[..., QuantizedTensor]:
    def fill(x: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
        x.quantize_(function(torch.empty(x.shape, device=x.device), *args, **kwargs))
        return x

    return fill


for _each in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.normal_.default, aten.uniform_.default):
    operator(_each)(_filler(_each))


@operator(aten.equal.default)
def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, QuantizedTensor) and isinstance(y, QuantizedTensor) and x.format == y.format:
        return x.shape == y.shape and torch.equal(x.block_rows, y.block_rows)
    return cast(bool, NotImplemented)


def _new(x: QuantizedTensor, size: Sequence[int], dtype: torch.dtype | None, device: Any) -> QuantizedTensor | None:
    """One of zeros in this format; None where a plain tensor is asked for, or all that can have this size."""
    size = tuple(size)
    odd = size and size[-1] * x.format.bits % 8
    if dtype not in (None, x.dtype) or odd or (len(size) not in (2, 3) and size != (x.numel(),)):
        return None
    shape = x.matrix_shape if len(size) == 1 else size
    fresh = QuantizedTensor.empty(shape, x.format, dtype=x.dtype, device=device or x.device,
                                  keep_master=x.master is not None)
    return cast(QuantizedTensor, _reshaped(fresh, size))


@operator(aten.empty_like.default, aten.zeros_like.default)
def _empty_like(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    fresh = _new(x, x.shape, dtype, device)
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=device or x.device) if fresh is None else fresh


@operator(aten.full_like.default)
def _full_like(
    x: QuantizedTensor, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Any:
    return _empty_like(x, dtype=dtype, device=device).fill_(value)


@operator(aten.new_empty.default, aten.new_zeros.default)
def _new_empty(
    x: QuantizedTensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Any:
    if (fresh := _new(x, size, dtype, device)) is None:
        return torch.zeros(tuple(size), dtype=dtype or x.dtype, device=device or x.device)
    fresh.padded = fresh.block_rows  # FSDP2 takes such for a shard and what there is too much of it
    return fresh


@operator(aten.new_full.default)
def _new_full(
    x: QuantizedTensor, size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, device: Any = None,
    **options: Any,
) -> Any:
    return _new_empty(x, size, dtype=dtype, device=device).fill_(value)
