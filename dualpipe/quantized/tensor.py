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

_operators: dict[Any, Callable[..., Any]] = {}  # those that work on bytes: filled by dualpipe/quantized/operators.py
is_strict: ContextVar[bool] = ContextVar("dualpipe_quantized_strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Raise in this block where an operator would have to dequantize, instead of doing so."""
    token = is_strict.set(True)
    try:
        yield
    finally:
        is_strict.reset(token)


def operator(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a function be operators of quantized tensors; it returns NotImplemented where the numbers are needed."""

    def register(own: Callable[..., Any]) -> Callable[..., Any]:
        _operators.update(dict.fromkeys(functions, own))
        return own

    return register


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
        if (own := _operators.get(function)) is not None:
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
        if is_strict.get():
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


def numbers_of(x: Tensor) -> Tensor:
    """Plain ones: of a quantized tensor its master, or what its bytes stand for."""
    if not isinstance(x, QuantizedTensor):
        return x
    return x.dequantize() if x.master is None else x.master
