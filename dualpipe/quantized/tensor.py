"""Tensor stored as quantized blocks, for parameters that are sharded, trained and checkpointed as bytes.

    weight = QuantizedTensor.quantize(torch.randn(256, 512), "mxfp8")
    weight.dequantize()                 plain float32
    weight[128:].block_rows             a view of the bytes of the second half

A `QuantizedTensor` holds one uint8 tensor of block rows (`dualpipe.kernels.formats`). To modules, FSDP2, checkpoints
and optimizers it looks like a tensor with the shape and dtype of its values. Operators that move, slice, copy or create
tensors work on the bytes. Operators that compute get the dequantized values in that dtype; as this hides a cost,
`strict` makes them raise instead. Writing values into the tensor quantizes them into its bytes.

A trained tensor has a master: the float32 values that were quantized, which an optimizer updates. The master goes
through every operator that the bytes go through.

Dimension letters: M matrices, N rows, K columns, R block rows, B bytes of a block row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dualpipe.kernels.formats import Format, format_of
from dualpipe.kernels.quantize import dequantize, quantize, transpose_blocks

is_strict: ContextVar[bool] = ContextVar("dualpipe_quantized_strict", default=False)

_operators: dict[Any, Callable[..., Any]] = {}  # implementation by torch's operator


@contextmanager
def strict() -> Iterator[None]:
    """Context manager in which operators that would dequantize a `QuantizedTensor` raise ValueError instead."""
    token = is_strict.set(True)
    try:
        yield
    finally:
        is_strict.reset(token)


def operator(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the implementation of operators for quantized tensors.

    The function returns NotImplemented if the operator needs the values, which are then dequantized.
    """

    def register(implementation: Callable[..., Any]) -> Callable[..., Any]:
        _operators.update(dict.fromkeys(functions, implementation))
        return implementation

    return register


class _PreAllGather:
    """Descriptor of `fsdp_pre_all_gather`, which FSDP2 calls for the tensors to gather: the bytes, without the master.

    The last ranks may have smaller shards than the others. If the function has five parameters, FSDP2 raises an error
    for such a shard unless the size of the tensor to gather is the padded size of the values, which bytes do not have.
    If the function takes the mesh alone, FSDP2 does not check. Therefore smaller shards get `_pre_all_gather_padded`.
    It returns a padded shape, of which FSDP2 keeps the part that belongs to the parameter.
    """

    def __get__(self, tensor: QuantizedTensor, kind: type) -> Callable[..., Any]:
        return tensor._pre_all_gather if tensor.padded is None else tensor._pre_all_gather_padded


class _TransposedCache(NamedTuple):
    """Block rows of the transposed matrices, and the block rows they were computed from with their version."""

    block_rows: Tensor
    version: int
    transposed: Tensor


class QuantizedTensor(Tensor):
    """A matrix (N, K), or a stack of matrices (M, N, K), in a quantized `Format`. See the docstring of this module.

    Attributes:
        format: the format.
        block_rows: (M, R, B) uint8; M is 1 for a matrix. Rows may have any stride.
        master: float32 values in this tensor's shape; None if it is not trained.
        matrix_shape: (N, K) or (M, N, K), also of a flat view.
        transposed: block rows of the transposed matrices, if they were computed when the tensor was gathered.
        padded: block rows followed by zeros, in the size of the largest shard, for a shard that is smaller;
            `block_rows` is a view of its first part. None for other tensors.
    """

    format: Format
    block_rows: Tensor
    master: Tensor | None
    matrix_shape: tuple[int, ...]
    transposed: Tensor | None
    padded: Tensor | None
    _transposed_cache: _TransposedCache | None

    @staticmethod
    def __new__(
        cls, block_rows: Tensor, shape: Sequence[int], dtype: torch.dtype, format: Format, master: Tensor | None = None,
        *, flat: bool = False, requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Wrap block rows (M, R, B) uint8 of a tensor of `shape` (N, K) or (M, N, K); `flat` makes it one-dimensional.

        dtype: dtype that the tensor appears to have.
        """
        size = (prod(shape),) if flat else tuple(shape)
        self = cast(QuantizedTensor, Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=block_rows.device, requires_grad=requires_grad))
        self.format = format
        self.block_rows = block_rows
        self.master = master
        self.matrix_shape = tuple(shape)
        self.transposed = None
        self.padded = None
        self._transposed_cache = None
        return self

    @classmethod
    def quantize(
        cls, x: Tensor, format: Format | str, *, dtype: torch.dtype | None = None, keep_master: bool = False,
        amax: Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize floating-point values (N, K) or (M, N, K).

        Args:
            x: the values.
            format: a format or its name.
            dtype: dtype that the tensor appears to have. Default: that of `x`.
            keep_master: keep a float32 copy of `x` as master.
            amax: (M,) largest magnitude of each whole matrix, if `x` is a part of it; see `matrix_amax`.

        Raises:
            ValueError: `x` has another number of dimensions or no floating-point dtype, the format is unknown, or it
                has 4 bits and K is odd.
        """
        format = format_of(format)
        if not x.is_floating_point() or x.dim() not in (2, 3):
            raise ValueError(f"got {x.dtype} values of shape {tuple(x.shape)}; {format} takes floating-point values of "
                             "shape (N, K) or (M, N, K)")
        format.check(x.shape)
        dtype = dtype or x.dtype
        x = x.detach()
        master = x.float().clone() if keep_master else None
        return cls(quantize(_stack(x), format, amax), x.shape, dtype, format, master)

    @classmethod
    def empty(
        cls, shape: Sequence[int], format: Format | str, *, dtype: torch.dtype,
        device: torch.device | str | None = None, keep_master: bool = False,
    ) -> QuantizedTensor:
        """Create a tensor of zeros, whose bytes are zeros too. Arguments are those of `quantize`."""
        format = format_of(format)
        format.check(tuple(shape))
        num_matrices = 1 if len(shape) == 2 else shape[0]
        size = (num_matrices, format.block_rows(shape[-2]), format.row_bytes(shape[-1]))
        master = torch.zeros(tuple(shape), device=device) if keep_master else None
        return cls(torch.zeros(size, dtype=torch.uint8, device=device), shape, dtype, format, master)

    def dequantize(self) -> Tensor:
        """Return the values of the bytes as a plain float32 tensor."""
        rows, columns = self.matrix_shape[-2:]
        return dequantize(self.block_rows, self.format, rows, columns).reshape(self.shape)

    def transposed_rows(self) -> Tensor:
        """Return block rows of the transposed matrices, which the GEMMs of a backward take. Needs square blocks.

        They are `transposed`, or computed at the first call and cached until the bytes change.
        """
        if self.transposed is not None:
            return self.transposed
        block_rows = self.block_rows
        cache = self._transposed_cache
        if cache is None or cache.block_rows is not block_rows or cache.version != block_rows._version:
            transposed = transpose_blocks(block_rows, self.format, *self.matrix_shape[-2:])
            cache = _TransposedCache(block_rows, block_rows._version, transposed)
            self._transposed_cache = cache
        return cache.transposed

    def quantize_(self, x: Tensor, amax: Tensor | None = None) -> None:
        """Quantize other values of the same shape into the memory of this tensor. amax: see `quantize`."""
        values = x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()
        values = values.to(self.device).expand(self.shape).reshape(self.matrix_shape)
        quantize(_stack(values), self.format, amax, out=self.block_rows)  # before the master, as it may raise
        if self.master is not None and self.master is not x:
            self.master.copy_(values)

    def like(self, block_rows: Tensor, shape: Sequence[int] | None = None, **changes: Any) -> QuantizedTensor:
        """Return a tensor of the same format with other block rows.

        Args:
            block_rows: (M, R, B) uint8.
            shape: (N, K) or (M, N, K). Default: the shape of this tensor.
            changes: other arguments of the constructor. The dtype stays by default; the master does not.
        """
        shape = self.matrix_shape if shape is None else shape
        dtype = changes.pop("dtype", self.dtype)
        return QuantizedTensor(block_rows, shape, dtype, self.format, **changes)

    def cut(self, dim: int, start: int, stop: int) -> QuantizedTensor:
        """Return rows, or matrices of a stack, from `start` to `stop`, sharing memory.

        Raises ValueError if that would cut columns, or rows that share a scale.
        """
        shape = self.matrix_shape
        num_dims = len(shape)
        dim = dim % self.dim()
        is_flat = self.dim() == 1
        is_row_dim = dim == num_dims - 2
        block_height = self.format.block[0]
        block_rows = self.block_rows
        first_block = start // block_height
        last_block = -(-stop // block_height) if stop > start else first_block
        # The last block may end in padding.
        cuts_block = start % block_height or (stop % block_height and last_block != block_rows.shape[1])
        if is_flat or dim == num_dims - 1 or (is_row_dim and stop > start and cuts_block):
            if (start, stop) != (0, self.shape[dim]):
                raise ValueError(f"[{start}:{stop}] of dimension {dim} of {tuple(self.shape)} in {self.format} would "
                                 f"cut through blocks; cut rows at multiples of {block_height}, or call dequantize()")
        else:
            block_rows = block_rows[:, first_block:last_block] if is_row_dim else block_rows[start:stop]
        part_shape = list(shape)
        if not is_flat:
            part_shape[dim] = stop - start
        master = None if self.master is None else self.master.narrow(dim, start, stop - start)
        part = self.like(block_rows, part_shape, flat=is_flat, master=master)
        part.padded = self.padded if dim == start == 0 and stop < shape[0] else None
        return part

    def map_storage(self, function: Callable[[Tensor], Tensor], **changes: Any) -> QuantizedTensor:
        """Return a tensor with `function` applied to block rows (or `padded`) and master. changes: see `like`."""
        is_flat = self.dim() == 1
        master = None if self.master is None else function(self.master)
        if self.padded is None:
            return self.like(function(self.block_rows), flat=is_flat, master=master, **changes)
        padded = function(self.padded)
        num_matrices, num_rows, _ = self.block_rows.shape
        mapped = self.like(padded[:num_matrices, :num_rows], flat=is_flat, master=master, **changes)
        mapped.padded = padded
        return mapped

    # --- FSDP2 ---

    fsdp_pre_all_gather = _PreAllGather()

    def _pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], torch.Size]:
        if self.shape[1:] != outer_size[1:]:
            raise ValueError(f"{tuple(outer_size)} was sharded into {tuple(self.shape)}, but FSDP2 gathers bytes along "
                             "dimension 0 only; leave out shard_placement_fn, or use dualpipe.parallel.shard")
        return ((self.block_rows if self.dim() == 3 else self.block_rows[0]).contiguous(),), outer_size

    def _pre_all_gather_padded(self, mesh: Any) -> tuple[tuple[Tensor], torch.Size]:
        padded = cast(Tensor, self.padded)
        rows = padded if self.dim() == 3 else padded[0]
        padded_size = len(padded) if self.dim() == 3 else padded.shape[1] * self.format.block[0]
        return (rows.contiguous(),), torch.Size((mesh.size() * padded_size, *self.shape[1:]))

    def fsdp_post_all_gather(
        self, gathered: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the unsharded parameter of gathered bytes. FSDP2 calls it.

        out: the unsharded parameter of an earlier gather, whose memory has the bytes already.
        """
        num_matrices = shape[0] if len(shape) == 3 else 1
        rows = _stack(gathered[0])[:num_matrices, : self.format.block_rows(shape[-2])]
        weight = QuantizedTensor(rows, shape, dtype, self.format) if out is None else out
        inner_tensors = finish_gather(weight, exact=self.padded is None)
        return None if out is not None else (weight, inner_tensors)

    # --- storage ---

    # The storage that torch keeps for a wrapper has no bytes and no address, but claims numel x itemsize bytes. Code
    # that compares storages would take all quantized tensors for one. `data_ptr()` stays 0: torch recognizes a wrapper
    # by it.

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage that contains the block rows, and possibly other tensors."""
        if torch._guards.TracingContext.try_get():  # for torch.compile, a storage belongs to one tensor
            return super().untyped_storage()
        return self.block_rows.untyped_storage()

    def _typed_storage(self) -> torch.TypedStorage:
        """Return the storage as bytes, which are no values of this tensor's dtype."""
        return torch.TypedStorage(wrap_storage=self.untyped_storage(), dtype=torch.uint8, _internal=True)

    def __dlpack__(self, **_: Any) -> Any:
        """Raise ValueError: a consumer would read at address 0."""
        raise ValueError(f"{self!r} has no memory of plain values; call dequantize() first")

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Number of bytes of the block rows. The storage has more if it holds other tensors."""
        return self.block_rows.numel()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Like `Tensor.data`. Assigning plain values quantizes them and takes their dtype, as `module.to(dtype)` does.

        Values that equal those of this tensor leave its bytes and its master unchanged.
        """
        return cast(Tensor, Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            plain = value
            value = self.map_storage(lambda part: part.to(plain.device), dtype=plain.dtype)
            if not torch.equal(value, plain):
                value = value.map_storage(torch.clone)
                value.quantize_(plain)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in ("format", "block_rows", "master", "matrix_shape", "transposed", "padded"):
            setattr(self, name, getattr(value, name))

    # --- protocols of torch ---

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        master = ", master" if self.master is not None else ""
        return (f"QuantizedTensor({self.format}, {tuple(self.shape)}, {self.dtype}, {self.device}{master}, "
                f"requires_grad={self.requires_grad})")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["block_rows"] if self.master is None else ["block_rows", "master"]
        return names, (self.matrix_shape, self.dtype, self.format, self.dim() == 1)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], context: Any, size: Any, stride: Any) -> QuantizedTensor:
        shape, dtype, format, is_flat = context
        return QuantizedTensor(tensors["block_rows"], shape, dtype, format, tensors.get("master"), flat=is_flat)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor.

        A parameter, as in a pickled model, keeps its master. Any other tensor, as in a state dict, leaves it out,
        because masters belong to the optimizer. Only this tensor's part of the storage is written, so that equal
        tensors have equal files.
        """
        is_param = isinstance(self, nn.Parameter)
        rows = self.block_rows
        if not rows.is_contiguous() or rows.untyped_storage().nbytes() != rows.numel():
            rows = rows.contiguous().clone()
        dtype_name = str(self.dtype).removeprefix("torch.")
        layout = (self.format.name, self.format.block, self.matrix_shape, dtype_name, self.dim() == 1)
        return rebuild, (rows, self.master if is_param else None, *layout, self.requires_grad, is_param)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        implementation = _operators.get(function)
        if implementation is not None:
            # Dispatch turns off the tracking of views and versions. Turn it on: a write to a view of the bytes must
            # increase the version of the bytes, which `transposed_rows` compares.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                result = implementation(*args, **kwargs)
            if result is not NotImplemented:
                return result
        # Find the arguments that the operator writes to, also lists and `out`: fused and foreach optimizers would
        # update dequantized copies, and the updates would be lost.
        written = [args[index] if index < len(args) else kwargs.get(argument.name)
                   for index, argument in enumerate(function._schema.arguments) if argument.is_write]
        if any(isinstance(tensor, QuantizedTensor) for tensor in tree_leaves(written)):
            raise ValueError(f"{function} would change a quantized tensor in place; update its master, or "
                             "update a plain copy and copy_ that into it")
        if is_strict.get():
            raise ValueError(f"{function} would dequantize a quantized tensor to compute; call dequantize() first if "
                             "that is intended")
        plain_args, plain_kwargs = tree_map_only(
            QuantizedTensor, lambda tensor: tensor.dequantize().to(tensor.dtype), (args, kwargs))
        return function(*plain_args, **plain_kwargs)


def finish_gather(weight: Tensor, *, exact: bool) -> tuple[Tensor, ...]:
    """Compute the transposed block rows of a gathered weight, if its format has square blocks, and return them.

    They are written to the memory of an earlier gather, if there was one. FSDP2 frees the returned tensors when it
    reshards the weight.

    Args:
        weight: the unsharded weight, or a DTensor with it as local part.
        exact: the weight has the parameter's shape, not the padded one.
    """
    local = cast(QuantizedTensor, getattr(weight, "_local_tensor", weight))
    local._transposed_cache = None  # FSDP2 hides that the bytes have changed
    block_height, block_width = local.format.block
    if not exact or block_height != block_width:
        return ()
    transposed = transpose_blocks(local.block_rows, local.format, *local.matrix_shape[-2:])
    if local.transposed is None:
        local.transposed = transposed
    else:
        with torch.autograd._unsafe_preserve_version_counter(local.transposed):  # as FSDP2 does for the bytes
            local.transposed.copy_(transposed)
    return (local.transposed,)


def rebuild(
    block_rows: Tensor, master: Tensor | None, name: str, block: Sequence[int], shape: Sequence[int], dtype: str,
    flat: bool, requires_grad: bool, is_param: bool,
) -> QuantizedTensor:
    """Build a `QuantizedTensor` from the content of its pickle.

    Raises ValueError if the format has other blocks in this version of the library.
    """
    format = format_of(name)
    if tuple(block) != format.block:
        raise ValueError(f"the file has {name} in blocks of {tuple(block)}, but this version has blocks of "
                         f"{format.block}; write it with this version, or load it dequantized")
    tensor = QuantizedTensor(block_rows, tuple(shape), getattr(torch, dtype), format, master, flat=flat)
    if is_param:
        return cast(QuantizedTensor, nn.Parameter(tensor, requires_grad))
    tensor.requires_grad = requires_grad
    return tensor


torch.serialization.add_safe_globals([rebuild, QuantizedTensor])


def _stack(x: Tensor) -> Tensor:
    """Return a matrix as a stack of one."""
    return x[None] if x.dim() == 2 else x
