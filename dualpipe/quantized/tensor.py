"""A tensor whose numbers are quantized in blocks, for parameters that are sharded, trained and checkpointed as bytes.

    weight = QuantizedTensor.quantize(torch.randn(256, 512), "mxfp8")
    weight.dequantize()                 plain float32
    weight[128:].block_rows             a view of the bytes of the second half

It holds one uint8 tensor of block rows (`dualpipe.kernels.formats`), and gives itself out as a tensor of the shape and
dtype of the numbers, so that modules, FSDP2, checkpoints and optimizers take it for one. Whatever moves, cuts, copies
or makes a new one like it works on the bytes. Whatever computes sees the numbers in that dtype, unless `strict` says
that this shall raise, as it hides a cost. To write into it quantizes into the bytes that are there.

A trained one has a master: the float32 values that were quantized, which an optimizer updates. Where there is one, it
goes through everything that the bytes go through.

Dimension letters: M matrices, N rows, K columns, R block rows, B bytes of a block row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dualpipe.kernels.formats import Format, format_of
from dualpipe.kernels.quantize import dequantize, quantize, transpose_blocks

_strict: ContextVar[bool] = ContextVar("dualpipe_quantized_strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Raise in this block where an operator would have to dequantize, instead of doing so."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


class _PreGather:
    """What FSDP2 calls for what it gathers of a tensor: the bytes, without the master, and the shape of what they are.

    Of a shard that is smaller than others it compares the size with that of the bytes, and fails on that rank alone,
    unless the function asks for the mesh only; the shape is then the padded one, of which FSDP2 takes a part.
    """

    def __get__(self, tensor: QuantizedTensor, kind: type) -> Callable[..., Any]:
        return tensor._to_gather if tensor.padded is None else tensor._to_gather_padded


class QuantizedTensor(Tensor):
    """A matrix (N, K), or a stack (M, N, K), in a `Format`; see this file's beginning."""

    format: Format
    block_rows: Tensor  # (M, R, B) uint8, of a matrix M is 1; rows may be any distance apart
    master: Tensor | None  # float32, of this tensor's shape
    matrix_shape: tuple[int, ...]  # the shape, also of a view that is flat
    transposed: Tensor | None  # block rows of the transposed matrices, where a gather made them with the others
    _turned: tuple[Tensor, int, Tensor] | None  # block rows, their version, and what `transposed_rows` made of them
    padded: Tensor | None  # of a shard that is smaller than others: what `block_rows` is the first part of, as large

    @staticmethod
    def __new__(
        cls, block_rows: Tensor, shape: Sequence[int], dtype: torch.dtype, format: Format, master: Tensor | None = None,
        *, flat: bool = False, requires_grad: bool = False,
    ) -> QuantizedTensor:
        """block_rows: (M, R, B) uint8; shape: (N, K) or (M, N, K). flat: the same with one dimension."""
        size = (prod(shape),) if flat else tuple(shape)
        self = cast(QuantizedTensor, Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=block_rows.device, requires_grad=requires_grad))
        self.format, self.block_rows, self.master, self.matrix_shape = format, block_rows, master, tuple(shape)
        self.transposed = self._turned = self.padded = None
        return self

    @classmethod
    def quantize(
        cls, x: Tensor, format: Format | str, *, dtype: torch.dtype | None = None, keep_master: bool = False,
        amax: Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize (N, K) or (M, N, K) floating-point numbers.

        dtype: what it gives itself out as, by default that of `x`. keep_master: with the numbers as its master. amax:
        the largest magnitude of each whole matrix, (M,), where `x` is a part of it; see `matrix_amax`.

        Raises ValueError for another number of dimensions, no floating-point numbers, a format that there is not, or
        one of 4 bits and an odd K.
        """
        format = format_of(format)
        if not x.is_floating_point() or x.dim() not in (2, 3):
            raise ValueError(f"{format} takes floating-point numbers of shape (N, K) or (M, N, K); got "
                             f"{tuple(x.shape)} {x.dtype}")
        format.check(x.shape)
        x, dtype = x.detach(), dtype or x.dtype
        master = x.float().clone() if keep_master else None
        return cls(quantize(_stack(x), format, amax), x.shape, dtype, format, master)

    @classmethod
    def empty(
        cls, shape: Sequence[int], format: Format | str, *, dtype: torch.dtype,
        device: torch.device | str | None = None, keep_master: bool = False,
    ) -> QuantizedTensor:
        """One of zeros, whose bytes are zeros too."""
        format = format_of(format)
        format.check(tuple(shape))
        matrices = 1 if len(shape) == 2 else shape[0]
        size = (matrices, format.block_rows(shape[-2]), format.row_bytes(shape[-1]))
        master = torch.zeros(tuple(shape), device=device) if keep_master else None
        return cls(torch.zeros(size, dtype=torch.uint8, device=device), shape, dtype, format, master)

    def dequantize(self) -> Tensor:
        """The numbers that the bytes stand for, plain float32."""
        rows, columns = self.matrix_shape[-2:]
        return dequantize(self.block_rows, self.format, rows, columns).reshape(self.shape)

    def transposed_rows(self) -> Tensor:
        """Block rows of the transposed matrices, which products of a backward take, in a format with square blocks:
        `transposed`, or made here when first asked for and kept until the bytes change."""
        if self.transposed is not None:
            return self.transposed
        data, turned = self.block_rows, self._turned
        if turned is None or turned[0] is not data or turned[1] != data._version:
            made = transpose_blocks(data, self.format, *self.matrix_shape[-2:])
            self._turned = turned = data, data._version, made
        return turned[2]

    def quantize_(self, x: Tensor, amax: Tensor | None = None) -> None:
        """Take other numbers, of the same shape, into the same memory; amax: as of `quantize`."""
        plain = x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()
        plain = plain.to(self.device).expand(self.shape).reshape(self.matrix_shape)
        quantize(_stack(plain), self.format, amax, out=self.block_rows)  # first, as it may refuse them
        if self.master is not None and self.master is not x:
            self.master.copy_(plain)

    def like(self, block_rows: Tensor, shape: Sequence[int] | None = None, **changed: Any) -> QuantizedTensor:
        """One of the same format and dtype with other bytes; what is not given is as it is here, but for the master."""
        shape = self.matrix_shape if shape is None else shape
        return QuantizedTensor(block_rows, shape, changed.pop("dtype", self.dtype), self.format, **changed)

    def cut(self, dim: int, start: int, stop: int) -> QuantizedTensor:
        """Rows, or matrices of a stack, from `start` to `stop`, sharing memory.

        Raises ValueError where that cuts columns, or through the rows that share a scale.
        """
        shape, dims = self.matrix_shape, len(self.matrix_shape)
        dim, step, data = dim % self.dim(), self.format.block[0], self.block_rows
        rows = slice(start // step, -(-stop // step) if stop > start else start // step)
        through = start % step or (stop % step and rows.stop != data.shape[1])  # the last block may end in padding
        if self.dim() == 1 or dim == dims - 1 or (dim == dims - 2 and stop > start and through):
            if (start, stop) != (0, self.shape[dim]):
                raise ValueError(f"[{start}:{stop}] of dimension {dim} of {tuple(self.shape)} in {self.format} would "
                                 f"cut through blocks; cut rows at multiples of {step}, or dequantize() first")
        else:
            data = data[:, rows] if dim == dims - 2 else data[start:stop]
        changed = list(shape)
        if self.dim() > 1:
            changed[dim] = stop - start
        master = self.master if self.master is None else self.master.narrow(dim, start, stop - start)
        part = self.like(data, changed, flat=self.dim() == 1, master=master)
        part.padded = self.padded if dim == start == 0 and stop < shape[0] else None
        return part

    def both(self, change: Callable[[Tensor], Tensor], **changed: Any) -> QuantizedTensor:
        """One whose bytes and master are what `change` makes of those here."""
        flat, master = self.dim() == 1, None if self.master is None else change(self.master)
        if self.padded is None:
            return self.like(change(self.block_rows), flat=flat, master=master, **changed)
        padded, (matrices, rows, _) = change(self.padded), self.block_rows.shape
        part = self.like(padded[:matrices, :rows], flat=flat, master=master, **changed)
        part.padded = padded
        return part

    # --- FSDP2 ---

    fsdp_pre_all_gather = _PreGather()

    def _to_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], torch.Size]:
        if self.shape[1:] != outer_size[1:]:
            raise ValueError(f"FSDP2 gathers bytes of dimension 0 only; {tuple(outer_size)} was sharded into "
                             f"{tuple(self.shape)}: leave shard_placement_fn out, or shard by dualpipe.parallel.shard")
        rows = self.block_rows if self.dim() == 3 else self.block_rows[0]
        return (rows.contiguous(),), outer_size

    def _to_gather_padded(self, mesh: Any) -> tuple[tuple[Tensor], torch.Size]:
        whole = cast(Tensor, self.padded)
        rows, first = (whole, len(whole)) if self.dim() == 3 else (whole[0], whole.shape[1] * self.format.block[0])
        return (rows.contiguous(),), torch.Size((mesh.size() * first, *self.shape[1:]))

    def fsdp_post_all_gather(
        self, gathered: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """What FSDP2 calls with gathered bytes; `out`: the parameter of before, in whose memory they are."""
        rows = _stack(gathered[0])[: shape[0] if len(shape) == 3 else 1, : self.format.block_rows(shape[-2])]
        weight = QuantizedTensor(rows, shape, dtype, self.format) if out is None else out
        inner = finish_gather(weight, exact=self.padded is None)
        return None if out is not None else (weight, inner)

    # What torch keeps below is a storage of no bytes, at no address, that says it has numel x itemsize of them: whoever
    # compares storages would take all quantized tensors for one. `data_ptr()` stays 0, by which torch knows a wrapper.

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage that the bytes are in, which may be part of it."""
        if torch._guards.TracingContext.try_get():  # torch.compile, to which a storage belongs to one tensor
            return super().untyped_storage()
        return self.block_rows.untyped_storage()

    def _typed_storage(self) -> torch.TypedStorage:
        """As `storage()` gives: bytes, which are no numbers of this tensor's dtype."""
        return torch.TypedStorage(wrap_storage=self.untyped_storage(), dtype=torch.uint8, _internal=True)

    def __dlpack__(self, **_: Any) -> Any:
        """Raises ValueError: who takes it so would read at no address."""
        raise ValueError(f"{self!r} has no memory that others could read as numbers; dequantize() first")

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """What the block rows take; where that is less than the storage has, there are other tensors in it."""
        return self.block_rows.numel()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """As of any tensor. To assign plain numbers quantizes them and takes their dtype, as `module.to(dtype)` does;
        those that are here already, in that dtype, leave the bytes and the master as they are."""
        return cast(Tensor, Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            numbers, value = value, self.both(lambda part: part.to(value.device), dtype=value.dtype)
            if not torch.equal(value, numbers):
                value = value.both(torch.clone)
                value.quantize_(numbers)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in ("format", "block_rows", "master", "matrix_shape", "transposed", "padded"):
            setattr(self, name, getattr(value, name))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        trained = ", master" if self.master is not None else ""
        return (f"QuantizedTensor({self.format}, {tuple(self.shape)}, {self.dtype}, {self.device}{trained}, "
                f"requires_grad={self.requires_grad})")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        inner = ["block_rows"] if self.master is None else ["block_rows", "master"]
        return inner, (self.matrix_shape, self.dtype, self.format, self.dim() == 1)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> QuantizedTensor:
        shape, dtype, format, flat = context
        return QuantizedTensor(inner["block_rows"], shape, dtype, format, inner.get("master"), flat=flat)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A parameter, as of a model that is pickled, goes with its master; any other, as of a state dict, without, as
        masters are the optimizer's. Of the storage only what is this tensor's, so that equal ones have equal files."""
        place = (self.format.name, self.format.block, self.matrix_shape, str(self.dtype).removeprefix("torch."))
        is_param, rows = isinstance(self, nn.Parameter), self.block_rows
        if not rows.is_contiguous() or rows.untyped_storage().nbytes() != rows.numel():
            rows = rows.contiguous().clone()
        return rebuild, (rows, self.master if is_param else None, *place, self.dim() == 1, self.requires_grad, is_param)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (own := _OPERATORS.get(function)) is not None:
            # As outside: views of the bytes then share their version, and writing raises it; see `transposed_rows`.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                if (done := own(*args, **kwargs)) is not NotImplemented:
                    return done
        name = str(function)
        # Also within a list, or as `out`: those of fused and foreach optimizers would be updates of copies, and lost.
        written = [args[index] if index < len(args) else kwargs.get(each.name)
                   for index, each in enumerate(function._schema.arguments) if each.is_write]
        if any(isinstance(each, QuantizedTensor) for each in tree_leaves(written)):
            raise ValueError(f"{name} would change a quantized tensor in place; update its master, or a plain copy, "
                             "and copy_ that into it")
        if _strict.get():
            raise ValueError(f"{name} would dequantize a quantized tensor to compute; call dequantize() where that is "
                             "meant")
        plain = tree_map_only(QuantizedTensor, lambda each: each.dequantize().to(each.dtype), (args, kwargs))
        return function(*plain[0], **plain[1])


def finish_gather(weight: Tensor, *, exact: bool) -> tuple[Tensor, ...]:
    """Make what a gathered weight, or its local part, has besides its bytes, in the memory that is there; returns it.

    exact: whether its shape is that of the parameter, and not of what is padded.
    """
    local = cast(QuantizedTensor, getattr(weight, "_local_tensor", weight))
    local._turned = None  # FSDP2 hides the change of the bytes
    if not exact or local.format.block[0] != local.format.block[1]:
        return ()
    turned = transpose_blocks(local.block_rows, local.format, *local.matrix_shape[-2:])
    if local.transposed is None:
        local.transposed = turned
    else:
        with torch.autograd._unsafe_preserve_version_counter(local.transposed):  # as FSDP2 does for the bytes
            local.transposed.copy_(turned)
    return (local.transposed,)


def rebuild(
    block_rows: Tensor, master: Tensor | None, name: str, block: Sequence[int], shape: Sequence[int], dtype: str,
    flat: bool, requires_grad: bool, is_param: bool,
) -> QuantizedTensor:
    """Make a `QuantizedTensor` of what its pickle holds; raises ValueError for a format of other blocks than here."""
    format = format_of(name)
    if tuple(block) != format.block:
        raise ValueError(f"the file holds {name} in blocks of {tuple(block)}, which are {format.block} here; write it "
                         "again with this version, or load it dequantized")
    found = QuantizedTensor(block_rows, tuple(shape), getattr(torch, dtype), format, master, flat=flat)
    if is_param:
        return cast(QuantizedTensor, nn.Parameter(found, requires_grad))
    found.requires_grad = requires_grad
    return found


torch.serialization.add_safe_globals([rebuild, QuantizedTensor])


def _stack(x: Tensor) -> Tensor:
    return x[None] if x.dim() == 2 else x


def _numbers(x: Tensor) -> Tensor:
    """Plain ones: of a quantized tensor its master, or what its bytes stand for."""
    if not isinstance(x, QuantizedTensor):
        return x
    return x.dequantize() if x.master is None else x.master


# --- operators: those that work on bytes; they return NotImplemented where the numbers are needed ---------------------

aten, functional, c10d = torch.ops.aten, torch.ops._c10d_functional, torch.ops.c10d
_OPERATORS: dict[Any, Callable[..., Any]] = {}


def _operator(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(own: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATORS.update(dict.fromkeys(functions, own))
        return own

    return register


@_operator(aten.detach.default, aten.alias.default)
def _alias(x: QuantizedTensor) -> QuantizedTensor:
    same = x.both(lambda part: part.detach())
    same.transposed = x.transposed
    return same


@_operator(aten.clone.default)
def _clone(x: QuantizedTensor, **_: Any) -> QuantizedTensor:
    return x.both(lambda part: part.contiguous().clone())


@_operator(aten._to_copy.default)
def _to(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    if dtype not in (None, x.dtype):
        return x.dequantize().to(device=device, dtype=dtype)
    non_blocking = options.get("non_blocking", False)
    return x.both(lambda part: part.to(device or part.device, copy=True, non_blocking=non_blocking))


@_operator(aten._pin_memory.default)
def _pin_memory(x: QuantizedTensor, device: Any = None) -> QuantizedTensor:
    return x.both(lambda part: part.contiguous().pin_memory())


@_operator(aten.is_pinned.default)
def _is_pinned(x: QuantizedTensor, device: Any = None) -> bool:
    return x.block_rows.is_pinned()


@_operator(aten.record_stream.default)
def _record_stream(x: QuantizedTensor, stream: Any) -> None:
    for part in (x.block_rows, x.master):
        if part is not None:
            part.record_stream(stream)


@_operator(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(x: QuantizedTensor, size: Sequence[int]) -> Any:
    return _reshaped(x, torch.empty(x.shape, device="meta").view(size).shape)


@_operator(aten.as_strided.default)
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


@_operator(aten.slice.Tensor)
def _slice(
    x: QuantizedTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> QuantizedTensor:
    begin, end, stride = slice(start, stop, step).indices(x.shape[dim])
    if stride != 1:
        raise ValueError(f"every {stride}th row of {x!r} is no range of bytes; dequantize() first")
    return x.cut(dim, begin, max(begin, end))


@_operator(aten.select.int)
def _select(x: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    if x.dim() != 3 or dim % 3:
        raise ValueError(f"[{index}] of dimension {dim} of {x!r} is no matrix; slice rows, or dequantize() first")
    if not -x.shape[0] <= index < x.shape[0]:
        raise IndexError(f"there is no matrix {index} in {x!r}")
    index %= x.shape[0]
    part = x.cut(0, index, index + 1)
    return x.like(part.block_rows, x.shape[1:], master=None if part.master is None else part.master[0])


@_operator(aten.split.Tensor)
def _split(x: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    return _split_with_sizes(x, [part.shape[dim] for part in torch.empty(x.shape, device="meta").split(size, dim)], dim)


@_operator(aten.split_with_sizes.default)
def _split_with_sizes(x: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    torch.empty(x.shape, device="meta").split_with_sizes(sizes, dim)  # raises where they are not all there is
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [x.cut(dim, end - size, end) for size, end in zip(sizes, ends)]


@_operator(aten.unbind.int)
def _unbind(x: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


@_operator(aten.cat.default)
def _cat(parts: Sequence[Any], dim: int = 0) -> Any:
    shape = torch.cat([torch.empty(part.shape, device="meta") for part in parts], dim).shape  # or what that raises
    first, dims = parts[0], len(shape)
    if dims == 1 and not _strict.get():  # what DDP sends, and writes into all of them: masters must not be lost by it
        return torch.cat([_numbers(part).to(part.dtype) for part in parts])
    dim %= dims
    # Only the last part may end within a block row.
    if (not all(isinstance(part, QuantizedTensor) and part.format == first.format for part in parts) or dim == dims - 1
            or (dim == dims - 2 and any(part.shape[dim] % first.format.block[0] for part in parts[:-1]))):
        return NotImplemented
    masters = [part.master for part in parts]
    return first.like(torch.cat([part.block_rows for part in parts], 1 if dim == dims - 2 else 0), shape,
                      master=None if any(master is None for master in masters) else torch.cat(masters, dim))


@_operator(aten.constant_pad_nd.default)
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


@_operator(functional.all_gather_into_tensor.default)
def _all_gather(x: QuantizedTensor, size: int, group: str) -> QuantizedTensor:
    """Bytes only, along the first dimension: of a state dict of whole tensors. Masters stay where they are."""
    rows, columns = x.matrix_shape[-2:]
    if x.dim() == 2 and size > 1 and rows % x.format.block[0]:
        raise ValueError(f"{x!r} cannot be gathered: its rows must be a multiple of {x.format.block[0]}")
    data = functional.wait_tensor(functional.all_gather_into_tensor(x.block_rows.contiguous(), size, group))
    if x.dim() == 2:
        return x.like(data.view(1, -1, data.shape[-1]), (size * rows, columns))
    return x.like(data, (len(data), rows, columns))


@_operator(functional.wait_tensor.default, *(
    wrap.default for name in ("_wrap_tensor_autograd",) if (wrap := getattr(functional, name, None))  # since torch 2.13
))
def _gathered(x: QuantizedTensor) -> QuantizedTensor:
    return x  # `_all_gather` has waited


@_operator(c10d.scatter_.default)
def _scatter(into: Sequence[QuantizedTensor], parts: Sequence[Sequence[QuantizedTensor]], *rest: Any) -> Any:
    """What `distribute_tensor` does for shards: bytes, and masters where there are some, are sent."""
    work = None
    for name in ("block_rows", "master") if into[0].master is not None else ("block_rows",):
        sent = [[getattr(part, name).contiguous() for part in each] for each in parts]
        _, work = c10d.scatter_([getattr(each, name) for each in into], sent, *rest)
        work.wait()
    return into, work


@_operator(c10d.broadcast_.default)
def _broadcast(tensors: Sequence[Any], *rest: Any) -> Any:
    """Numbers are sent, as the other ranks may have plain tensors for them, and quantized again by whoever has not."""
    sent = [_numbers(each).to(each.dtype, copy=True) for each in tensors]
    _, work = c10d.broadcast_(sent, *rest)
    work.wait()
    for each, numbers in zip(tensors, sent):
        each.quantize_(numbers)
    return tensors, work


@_operator(aten.copy_.default)
def _copy(into: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(into, QuantizedTensor):
        into.copy_(source.dequantize(), non_blocking)
    elif not (isinstance(source, QuantizedTensor) and source.format == into.format and source.shape == into.shape):
        into.quantize_(_numbers(source))
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
    _OPERATORS[_each] = _filler(_each)


@_operator(aten.equal.default)
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


@_operator(aten.empty_like.default, aten.zeros_like.default)
def _empty_like(x: QuantizedTensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Any:
    fresh = _new(x, x.shape, dtype, device)
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=device or x.device) if fresh is None else fresh


@_operator(aten.full_like.default)
def _full_like(
    x: QuantizedTensor, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Any:
    return _empty_like(x, dtype=dtype, device=device).fill_(value)


@_operator(aten.new_empty.default, aten.new_zeros.default)
def _new_empty(
    x: QuantizedTensor, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Any:
    if (fresh := _new(x, size, dtype, device)) is None:
        return torch.zeros(tuple(size), dtype=dtype or x.dtype, device=device or x.device)
    fresh.padded = fresh.block_rows  # FSDP2 takes such for a shard and what there is too much of it
    return fresh


@_operator(aten.new_full.default)
def _new_full(
    x: QuantizedTensor, size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, device: Any = None,
    **options: Any,
) -> Any:
    return _new_empty(x, size, dtype=dtype, device=device).fill_(value)
