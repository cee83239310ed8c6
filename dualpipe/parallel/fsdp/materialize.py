"""Initialization of modules built on the meta device: parameters, sharded or not, are allocated once and filled.

    module = build_on_meta(lambda: Stage(config))       parameters on meta, buffers with their values
    shard(module, mesh, plan)                           optional: DTensors, still on meta
    materialize(module, device, plan, seed=0)           each rank's shard is allocated and filled

A module provides `init_weights(seed)`, which initializes every parameter. To give the same values under every mesh
layout, it fills by name, with `dualpipe.nn.init.seeded_normal_`, or with constants (`fill_`, `zero_`).

`nn.Module.to_empty` is not used: it discards the values of buffers, leaves every tensor uninitialized and unties
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from dualpipe.parallel.precision.dtype_plan import DTypePlan, Slot, saved_slots, slots
from dualpipe.quantized.quantize_model import check_sharding, filling, quantize_param, quantized_part
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import raise_for

_LARGE_BYTES = 10**9  # above the size of any buffer

T = TypeVar("T")


class Sliceable(Protocol):
    """Interface of a tensor, or of an object that reads part of one when indexed, such as a tensor in a file.

    A quantized one also has a method `quantized(part, format)`, which returns the bytes of a part, like
    `QuantizedTensor.block_rows`, or None if the tensor is in another format.
    """

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its elements."""

    def __getitem__(self, part: tuple[slice, ...], /) -> Tensor: ...


class _LargeOnMeta(TorchFunctionMode):
    """Mode in which `torch.empty` creates large tensors on the meta device."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            on_meta = function(*args, **kwargs | {"device": "meta"})
            if on_meta.nbytes > _LARGE_BYTES:
                return on_meta
        return function(*args, **kwargs)


def build_on_meta(fn: Callable[[], T]) -> T:
    """Return the result of `fn()`, which builds modules, with parameters on the meta device and buffers in memory.

    A parameter moves to meta when it is registered, so that only one at a time takes memory; one above 1 GB, such as
    stacked experts, is created on meta. `torch.device("meta")` would lose the values of buffers. Uses a process-wide
    hook: build modules in one thread at a time.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta" and not nn.parameter.is_lazy(param):
            _replace(param, torch.empty_like(param, device="meta"))

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        with torch.device("cpu"), _LargeOnMeta():  # independent of the caller's default device
            return fn()
    finally:
        handle.remove()


@torch.no_grad()
def materialize(
    module: nn.Module, device: torch.device | str, plan: DTypePlan, *, seed: int | None = None,
    source: Mapping[str, Sliceable] | None = None, param_device: torch.device | str | None = None,
) -> None:
    """Allocate the parameters of `module` on `device`, in the storage dtypes of the plan, and fill them.

    A parameter on meta is allocated; if it is a DTensor, only its local shard is. A plain parameter with values moves
    to the device, a DTensor with values stays where it is, and buffers move with their values. Every tensor remains the
    same object, so that tied tensors stay tied, also across calls for the stages of one rank. Then the parameters are
    filled, one at a time:

    - with `seed`, by `module.init_weights(seed)`;
    - with `source`, from whole tensors by name, of which only this rank's part is read. It needs every parameter and
      persistent buffer; one name of a tied parameter is enough;
    - with neither, tensors from meta hold NaN, integers their maximum, for a distributed checkpoint to load into;
      `assert_materialized` recognizes values that were not loaded.

    Quantized parameters are filled through float32 masters and then quantized; frozen ones drop their masters after
    that. A shard gets the bytes that it has when the whole weight is quantized. With a format that has a scale of the
    whole matrix, this is collective over the ranks that share a matrix.

    param_device: the device of parameters if it is not `device`: "cpu" under FSDP2's CPU offload. Create optimizers
    afterwards. FSDP2 copies an uneven shard once more, to pad it, when it first runs.

    Raises ValueError before anything is changed, with a line for each of the first 200 problems: a buffer without a
    value, unless a distributed checkpoint has it; names that only `source` or only the module has; shapes that differ;
    values that the plan's dtype would round, except in frozen modules, which the plan narrows deliberately. Raises it
    afterwards for parameters that `init_weights` did not fill and for tied names whose values differ.
    """
    check_materialize(module, plan, seed=seed, source=source)
    device = torch.device(device)
    param_device = device if param_device is None else torch.device(param_device)
    empty = {slot.name for slot in slots(module) if slot.tensor.device.type == "meta"}
    for slot in slots(module):
        _replace(slot.tensor, _allocated(slot, plan, device if slot.is_buffer else param_device))
    if seed is not None:
        with filling(module.parameters()):
            module.init_weights(seed)  # type: ignore[operator]
    elif source is not None:
        _fill_from(module, source)
    if seed is not None or source is not None:
        assert_materialized(module, device, param_device=param_device, values=empty)


def _allocated(slot: Slot, plan: DTypePlan, device: torch.device) -> Tensor:
    """Return a tensor on `device` in its storage dtype; one from meta holds the mark of uninitialized values."""
    tensor = slot.tensor
    # A quantized tensor keeps its dtype, which is the dtype of the values that it stands for.
    storage = plan.of(slot.name).storage if quantized_part(tensor) is None else tensor.dtype
    if tensor.device.type == "meta":
        return torch.full_like(tensor, _uninitialized(storage), dtype=storage, device=device)
    if isinstance(tensor, DTensor):
        return tensor
    return tensor.to(device, storage)


def _uninitialized(dtype: torch.dtype) -> float | bool:
    """Return the value that marks uninitialized tensors: NaN, an integer's maximum; booleans have none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def _fill_from(module: nn.Module, source: Mapping[str, Sliceable]) -> None:
    """Fill parameters and persistent buffers from whole tensors; ValueError if the values of tied names differ."""
    from dualpipe.nn.init import local_part  # imports all layers and kernels, which few importers of this file need

    # Entered once for all of these parameters, since it is collective.
    with filling(param for param in module.parameters() if _has_matrix_scale(param)):
        for places in saved_slots(module):
            tensor = places[0].tensor
            first, *others = [slot.name for slot in places if slot.name in source]
            if _copy_blocks(tensor, source[first], local_part(tensor)[1]):
                continue
            with filling([] if _has_matrix_scale(tensor) else [tensor]):
                local, part = local_part(tensor)
                local.copy_(source[first][part])
            for name in others:
                if not torch.equal(local, source[name][part].to(local)):
                    raise ValueError(f"{first} and {name} are tied, but their values in the source differ; leave "
                                     "one out")


def _copy_blocks(param: Tensor, source: Sliceable, part: tuple[slice, ...]) -> bool:
    """Copy the quantized blocks of a source to a parameter, and their dequantized values to its master, if any.

    Returns False, with nothing copied, unless parameter and source have the same format.
    """
    quantized_param = quantized_part(param)
    read = getattr(source, "quantized", None)
    if quantized_param is None or read is None:
        return False
    block_rows = read(part, quantized_param.format)
    if block_rows is None:
        return False
    quantized_param.copy_(quantized_param.like(block_rows))
    return True


def _has_matrix_scale(param: Tensor) -> bool:
    """Return True for a parameter quantized in a format with a scale of the whole matrix."""
    part = quantized_part(param)
    return part is not None and part.format.matrix_scale


@torch.no_grad()
def check_materialize(
    module: nn.Module, plan: DTypePlan, *, seed: int | None = None, source: Mapping[str, Sliceable] | None = None
) -> None:
    """Raise the errors that `materialize` raises before it changes anything."""
    if seed is not None and source is not None:
        raise ValueError(f"both seed ({seed}) and source are given; choose what fills the parameters")
    if seed is not None and not hasattr(module, "init_weights"):
        raise ValueError(f"{type(module).__name__} has no init_weights(seed); write one with "
                         "dualpipe.nn.init.seeded_normal_, or pass source instead of seed")
    problems = chain(_buffer_problems(module, is_loaded=seed is None), _value_problems(module, plan, source))
    raise_for(f"{type(module).__name__} cannot be materialised:", problems)


def _buffer_problems(module: nn.Module, *, is_loaded: bool) -> Iterator[str]:
    """Describe buffers without values. is_loaded: persistent buffers get values from a checkpoint."""
    for slot in slots(module):
        if not slot.is_buffer or slot.tensor.device.type != "meta":
            continue
        if not slot.is_saved:
            yield (f"{slot.name}: on meta, so without a value, and not persistent, so in no checkpoint; build "
                   "with build_on_meta instead of a meta device")
        elif not is_loaded:
            yield (f"{slot.name}: on meta, so without a value; build with build_on_meta instead of a meta "
                   "device, or load a checkpoint")


def _value_problems(module: nn.Module, plan: DTypePlan, source: Mapping[str, Sliceable] | None) -> Iterator[str]:
    """Describe the problems of a source, and the values of source and parameters that the plan would round."""
    tensors = {} if source is None else source
    all_places = sorted(saved_slots(module), key=lambda places: places[0].is_buffer)  # parameters first
    for places in all_places:
        first = places[0]
        storage = plan.of(first.name).storage
        dtypes: dict[str, torch.dtype] = {}  # of the values, by name
        if not first.is_buffer and first.tensor.device.type != "meta":
            dtype = first.tensor.dtype
            if isinstance(first.tensor, DTensor) and dtype != storage:
                yield f"{first.name}: a DTensor with values in {dtype} stays so, not {storage}; shard it on meta"
            else:
                dtypes[first.name] = dtype
        present = [slot.name for slot in places if slot.name in tensors]
        if source is not None and not present:
            yield f"{first.name}: missing in the source; add it"
        for name in present:
            if tuple(tensors[name].shape) != tuple(first.tensor.shape):
                yield f"{name}: {tuple(tensors[name].shape)} in the source, {tuple(first.tensor.shape)} in the module"
        yield from _rounded(dtypes, first, storage)
        yield from _rounded({name: tensors[name].dtype for name in present}, first, storage)
    module_names = {slot.name for places in all_places for slot in places}
    for name in tensors:
        if name not in module_names:
            yield f"{name}: the source has it and the module does not; leave it out"


def _rounded(dtypes: Mapping[str, torch.dtype], slot: Slot, storage: torch.dtype) -> Iterator[str]:
    """Describe values whose cast to the storage dtype would round them; frozen modules are narrowed deliberately."""
    for name, dtype in dtypes.items():
        if not slot.is_frozen and _rounds(dtype, storage):
            yield (f"{name}: values in {dtype} would be rounded to {storage}; cast them first, or pass their dtypes to "
                   "resolve_dtypes as source_dtypes")


def _rounds(dtype: torch.dtype, storage: torch.dtype) -> bool:
    """Return True if a cast may change values, by precision or range. Any cast of integers or booleans counts."""
    if not (dtype.is_floating_point and storage.is_floating_point):
        return dtype != storage
    old = torch.finfo(dtype)
    new = torch.finfo(storage)
    return new.eps > old.eps or new.max < old.max or new.tiny > old.tiny


@torch.no_grad()
def assert_materialized(
    module: nn.Module, device: torch.device | str, *, param_device: torch.device | str | None = None,
    values: bool | Collection[str] = True,
) -> None:
    """Raise ValueError naming the first 200 parameters and buffers that are not initialized on their device.

    These are on meta, on the wrong device, or uninitialized: they hold a NaN, or integers that are all the maximum of
    their dtype, as `materialize` leaves them. Booleans are not checked. Reads all memory once and waits for the device.

    values: the names whose values are checked; True for all, False for none.
    """
    device = torch.device(device)
    param_device = device if param_device is None else torch.device(param_device)
    problems: list[str] = []
    unfilled: dict[str, Tensor] = {}  # flags on the device, so that the host waits once
    tensors: list[tuple[str, Tensor, torch.device]] = []
    tensors += [(name, param, param_device) for name, param in module.named_parameters()]
    tensors += [(name, buffer, device) for name, buffer in module.named_buffers()]
    for name, tensor, expected in tensors:
        if tensor.device.type == "meta":
            problems.append(f"{name} is on meta")
        elif not _is_on(tensor, expected):
            problems.append(f"{name} is on {tensor.device}, not on {expected}")
        elif values is True or (values and name in values):
            flag = _is_unfilled(tensor)
            if flag is not None:
                unfilled[name] = flag
    problems += [f"{name} was never filled, or holds NaN" for name, flag in unfilled.items() if flag]
    raise_for(f"{type(module).__name__} is not materialised:", problems)


def _is_unfilled(tensor: Tensor) -> Tensor | None:
    """Return a flag on the device that is True for uninitialized values; None if the dtype has no such value."""
    from dualpipe.nn.init import local_part

    part = local_part(tensor)[0]
    if part.is_floating_point() or part.is_complex():
        return part.isnan().any()
    if part.dtype != torch.bool and part.numel():
        return (part == torch.iinfo(part.dtype).max).all()
    return None


def cast_to_storage(
    module: nn.Module, mesh: DeviceMesh | None, plan: DTypePlan, expert_mesh: DeviceMesh | None
) -> None:
    """Cast every tensor to the storage dtype or format of the plan, in place: shared tensors stay shared.

    mesh, expert_mesh: the meshes of `shard`. Raises ValueError, before anything is changed, for a parameter that does
    not fit the plan or the meshes.
    """
    for slot in slots(module):
        if not slot.is_buffer:
            _check_storage(slot.name, slot.tensor, plan, mesh)
            if isinstance(slot.tensor, DTensor):
                _check_placement(slot.name, slot.tensor, mesh, expert_mesh)
    for slot in slots(module):
        tensor = slot.tensor
        dtypes = plan.of(slot.name)
        if dtypes.format is not None and (mesh is None or not dtypes.gathered):
            stored = quantize_param(tensor, dtypes.format, dtypes.compute if mesh is None else dtypes.storage)
            setattr(slot.owner, slot.key, nn.Parameter(stored, requires_grad=tensor.requires_grad))
        elif tensor.dtype is dtypes.storage:
            continue
        elif slot.is_buffer:
            setattr(slot.owner, slot.key, tensor.to(dtypes.storage))
        elif isinstance(tensor, DTensor):  # its `data` cannot be assigned
            stored = nn.Parameter(tensor.detach().to(dtypes.storage), requires_grad=tensor.requires_grad)
            setattr(slot.owner, slot.key, stored)
        else:
            tensor.data = tensor.data.to(dtypes.storage)


def _check_storage(name: str, param: Tensor, plan: DTypePlan, mesh: DeviceMesh | None) -> None:
    """Raise ValueError for a parameter that cannot be stored as the plan says."""
    dtypes = plan.of(name)
    storage = dtypes.storage
    is_narrowed = dtypes.unsharded is storage  # a hook casts it for its module's forward
    if dtypes.format is not None:
        check_sharding(name, param, dtypes.format, 1 if mesh is None else mesh.size(mesh.ndim - 1))
    elif mesh is None and storage is not dtypes.compute and not is_narrowed:
        raise ValueError(f"{name} is stored in {short_name(storage)} and computes in {short_name(dtypes.compute)}, "
                         "which only a sharded module can: shard it over a mesh (of one rank, if there is no other), "
                         "or build it in its compute dtype")
    if param.requires_grad and torch.promote_types(param.dtype, storage) is not storage:
        raise ValueError(f"{name} is {short_name(param.dtype)} and trainable, but the plan stores it in "
                         f"{short_name(storage)}: resolve the plan for a model built the same way")


def _check_placement(name: str, param: DTensor, mesh: DeviceMesh | None, expert_mesh: DeviceMesh | None) -> None:
    """Raise ValueError for an expert parameter whose placement does not fit the meshes."""
    if not all(isinstance(placement, Shard) for placement in param.placements):
        raise ValueError(f"{name} is a DTensor placed {param.placements}; its gradient would not be reduced over "
                         "the ranks that it is replicated on: make it a plain parameter")
    ep = param.device_mesh.size()
    mesh_size = None if mesh is None else mesh.size()
    expert_size = None if expert_mesh is None else expert_mesh.size()
    if mesh_size is None or expert_size is None or expert_size * ep != mesh_size:
        raise ValueError(f"{name} is sharded over {ep} expert-parallel ranks: expert_mesh must be given, and mesh "
                         f"have {ep} times its ranks; their sizes are {expert_size} and {mesh_size}")


def _replace(old: Tensor, new: Tensor) -> None:
    """Replace the tensor `old` by `new` for all references to it: in tied modules, FSDP2, other stages."""
    if new is old:
        return
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        if old.grad_dtype is not old.dtype:
            new.grad_dtype = old.grad_dtype
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
    torch.utils.swap_tensors(old, new)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    """Return True if a tensor is on a device; a device without an index stands for all of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
