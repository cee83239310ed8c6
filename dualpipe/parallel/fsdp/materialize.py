"""From a module without values to one that trains: parameters on meta, sharded or not, get memory once and are filled.

    module = build_on_meta(lambda: Stage(config))       parameters on meta, buffers with their values
    ... shard(module, mesh, plan) where wanted ...      DTensors, still on meta
    materialize(module, device, plan, seed=0)           each rank's shard allocated and filled

A module offers `init_weights(seed)`, the model's own initialisation, which fills every parameter. For the same values
under every mesh layout it goes by names, as `dualpipe.nn.init.seeded_normal_` does; `fill_` and `zero_` do too.

`nn.Module.to_empty` is never used: it wipes buffers that have values, leaves the others as garbage and unties
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

from dualpipe.parallel.precision.plan import DTypePlan, saved, slots
from dualpipe.quantized.quantize_model import check_cut, filling, quantized, quantized_part
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.errors import raise_for

_LARGE = 10**9  # bytes: beyond any buffer

T = TypeVar("T")


class Sliceable(Protocol):
    """A tensor, or anything that reads a part of one where it is indexed, such as a tensor in a file.

    One that holds blocks has a method `quantized(part, format)` too: a part's block rows (M, R, B), or None where it is
    in another format.
    """

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""

    def __getitem__(self, part: tuple[slice, ...], /) -> Tensor: ...


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors of `torch.empty` on meta at once; their values mean nothing yet."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("device") is None:
            on_meta = function(*args, **kwargs | {"device": "meta"})
            if on_meta.nbytes > _LARGE:
                return on_meta
        return function(*args, **kwargs)


def build_on_meta(fn: Callable[[], T]) -> T:
    """Return `fn()`, which builds modules; their parameters go to meta when registered, buffers keep their values.

    One parameter at a time has memory, none that is larger than 1 GB, as stacked experts are. Under
    `torch.device("meta")` instead, a buffer's value would be lost. The hook is the process's: build modules in one
    thread at a time.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta" and not nn.parameter.is_lazy(param):
            _replace(param, torch.empty_like(param, device="meta"))

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        with torch.device("cpu"), _LargeOnMeta():  # whatever the caller's default device is
            return fn()
    finally:
        handle.remove()


@torch.no_grad()
def materialize(
    module: nn.Module, device: torch.device | str, plan: DTypePlan, *, seed: int | None = None,
    source: Mapping[str, Sliceable] | None = None, param_device: torch.device | str | None = None,
) -> None:
    """Give `module` values on `device`, in the dtypes `plan.of(name).storage`.

    A parameter on meta is allocated, of a DTensor the local shard; one with values moves, but a DTensor stays. Buffers
    move with their values. Every tensor remains the same object, so tied ones stay tied, also across calls for the
    stages of one rank. Then, one parameter at a time, it is filled:

    - with `seed`, by `module.init_weights(seed)`;
    - with `source`, from whole tensors of these names, of which only this rank's part is asked for: every parameter
      (one name of a tied one is enough) and persistent buffer;
    - with neither, what was on meta is left for a distributed checkpoint to load into: NaN, integers their maximum, so
      that `assert_materialized` can name what was not loaded.

    Quantized parameters are filled through their masters, which frozen ones have until then: bytes are those of the
    whole weight, quantized. With a format that has a scale of the matrix this is collective over the ranks of a matrix.

    `param_device` is where parameters are if not on `device`: "cpu" under FSDP2's CPU offload. Optimizers are to be
    built afterwards. FSDP2 copies an uneven shard once more, into one that is padded, when it first runs.

    Raises ValueError, before anything is changed, with a line for each of the first 200: a buffer without a value, but
    for a persistent one that a distributed checkpoint has; names that `source` lacks or has too many; other shapes;
    values that the plan's dtype would round, but for frozen modules, which the plan narrows by intention. Afterwards:
    what `init_weights` left out; tied names whose values differ.
    """
    from dualpipe.nn.init import local_part  # with it come all layers and kernels, which few who import this need

    check_materialize(module, plan, seed=seed, source=source)
    device, param_device = torch.device(device), torch.device(device if param_device is None else param_device)
    empty = {slot.name for slot in slots(module) if slot.tensor.device.type == "meta"}
    for slot in slots(module):
        value, storage = slot.tensor, plan.of(slot.name).storage
        if quantized_part(value) is not None:
            storage = value.dtype  # what it gives itself out as
        place = device if slot.is_buffer else param_device
        if value.device.type == "meta":  # without values, and with what `assert_materialized` recognises
            fraction = storage.is_floating_point or storage.is_complex
            mark = float("nan") if fraction else storage != torch.bool and torch.iinfo(storage).max
            value = torch.full_like(value, mark, dtype=storage, device=place)
        elif not isinstance(value, DTensor):
            value = value.to(place, storage)
        _replace(slot.tensor, value)
    if seed is not None:
        with filling(module.parameters()):
            module.init_weights(seed)  # type: ignore[operator]
    elif source is not None:
        together = [param for param in module.parameters() if _has_matrix_scale(param)]
        with filling(together):
            for places in saved(module):
                first, *others = [slot.name for slot in places if slot.name in source]
                if _take_bytes(places[0].tensor, source[first], local_part(places[0].tensor)[1]):
                    continue
                with filling([] if _has_matrix_scale(places[0].tensor) else [places[0].tensor]):
                    local, part = local_part(places[0].tensor)
                    local.copy_(source[first][part])
                for name in others:
                    if not torch.equal(local, source[name][part].to(local)):
                        raise ValueError(f"{first} and {name} are tied, but their values in the source differ; leave "
                                         "one out")
    if seed is not None or source is not None:
        assert_materialized(module, device, param_device=param_device, values=empty)


def _take_bytes(param: Tensor, source: Sliceable, part: tuple[slice, ...]) -> bool:
    """Return True if a source has blocks in the format of a parameter, which takes them as they are."""
    held, read = quantized_part(param), getattr(source, "quantized", None)
    block_rows = None if held is None or read is None else read(part, held.format)
    if held is None or block_rows is None:
        return False
    held.copy_(held.like(block_rows))  # and a master what they stand for
    return True


def _has_matrix_scale(param: Tensor) -> bool:
    part = quantized_part(param)
    return part is not None and part.format.matrix_scale


@torch.no_grad()
def check_materialize(
    module: nn.Module, plan: DTypePlan, *, seed: int | None = None, source: Mapping[str, Sliceable] | None = None
) -> None:
    """Raise what `materialize` raises before it changes anything."""
    if seed is not None and source is not None:
        raise ValueError(f"both seed ({seed}) and source are given; choose what fills the parameters")
    if seed is not None and not hasattr(module, "init_weights"):
        raise ValueError(f"{type(module).__name__} has no init_weights(seed); write one with "
                         "dualpipe.nn.init.seeded_normal_, or pass source instead of seed")
    problems = chain(_buffer_problems(module, is_loaded=seed is None), _value_problems(module, plan, source))
    raise_for(f"{type(module).__name__} cannot be materialised:", problems)


def _buffer_problems(module: nn.Module, *, is_loaded: bool) -> Iterator[str]:
    """is_loaded: persistent buffers get values from a checkpoint."""
    for slot in slots(module):
        if not slot.is_buffer or slot.tensor.device.type != "meta":
            continue
        if not slot.is_saved:
            yield (f"{slot.name}: on meta, so without a value to keep, and not persistent, so in no checkpoint; build "
                   "with build_on_meta instead of a meta device")
        elif not is_loaded:
            yield (f"{slot.name}: on meta, so without a value to keep; build with build_on_meta instead of a meta "
                   "device, or load a checkpoint")


def _value_problems(module: nn.Module, plan: DTypePlan, source: Mapping[str, Sliceable] | None) -> Iterator[str]:
    """What is wrong with a source, and what would be rounded of it or of parameters that have values."""
    given = {} if source is None else source
    held = sorted(saved(module), key=lambda places: places[0].is_buffer)  # parameters first
    for first, *others in held:
        tensor, storage, values = first.tensor, plan.of(first.name).storage, []
        if not first.is_buffer and tensor.device.type != "meta":
            values = [(first.name, tensor.dtype)]
            if isinstance(tensor, DTensor) and tensor.dtype != storage:
                yield f"{first.name}: a DTensor with values in {tensor.dtype} stays so, not {storage}; shard it on meta"
                values = []
        present = [slot.name for slot in (first, *others) if slot.name in given]
        if source is not None and not present:
            yield f"{first.name}: missing in the source; add it"
        for name in present:
            if tuple(given[name].shape) != tuple(tensor.shape):
                yield f"{name}: {tuple(given[name].shape)} in the source, {tuple(tensor.shape)} in the module"
            values.append((name, given[name].dtype))
        for name, dtype in values:
            if not first.is_frozen and _rounds(dtype, storage):
                yield (f"{name}: values in {dtype} would be rounded to {storage}; cast them first, or tell "
                       "resolve_dtypes of them by source_dtypes")
    known = {slot.name for places in held for slot in places}
    for name in given:
        if name not in known:
            yield f"{name}: the source has it and the module does not; leave it out"


def _rounds(dtype: torch.dtype, storage: torch.dtype) -> bool:
    """Return True if a cast may change values: of floats by precision and range, else unless the dtypes are one."""
    if not (dtype.is_floating_point and storage.is_floating_point):
        return dtype != storage
    old, new = torch.finfo(dtype), torch.finfo(storage)
    return new.eps > old.eps or new.max < old.max or new.tiny > old.tiny


@torch.no_grad()
def assert_materialized(
    module: nn.Module, device: torch.device | str, *, param_device: torch.device | str | None = None,
    values: bool | Collection[str] = True,
) -> None:
    """Raise ValueError naming the parameters and buffers, the first 200 of them, that are on meta, on the wrong device,
    or uninitialised: that hold a NaN, or integers that are all their dtype's maximum, as `materialize` leaves them;
    booleans are not looked at. This reads all memory once and waits for the device; `values` may be the names to look
    at, or False."""
    from dualpipe.nn.init import local_part

    device, param_device = torch.device(device), torch.device(device if param_device is None else param_device)
    wrong: list[str] = []
    unfilled: dict[str, Tensor] = {}  # flags on the device, so that the host waits once
    for tensors, wanted in ((module.named_parameters(), param_device), (module.named_buffers(), device)):
        for name, tensor in tensors:
            if tensor.device.type == "meta":
                wrong.append(f"{name} is on meta")
            elif not _is_on(tensor, wanted):
                wrong.append(f"{name} is on {tensor.device}, not on {wanted}")
            elif values is True or (values and name in values):
                part = local_part(tensor)[0]
                if part.is_floating_point() or part.is_complex():
                    unfilled[name] = part.isnan().any()
                elif part.dtype != torch.bool and part.numel():
                    unfilled[name] = (part == torch.iinfo(part.dtype).max).all()
    wrong += [f"{name} was never filled, or holds NaN" for name, flag in unfilled.items() if flag]
    raise_for(f"{type(module).__name__} is not materialised:", wrong)


def store(module: nn.Module, mesh: DeviceMesh | None, plan: DTypePlan, expert_mesh: DeviceMesh | None) -> None:
    """Give every tensor the storage dtype or format of the plan, in place, so that one shared with another module stays
    shared.

    mesh, expert_mesh: what it will be sharded over, as of `shard`. Raises ValueError, before anything is changed, for a
    parameter that does not fit the plan or the meshes.
    """
    for name, param in ((slot.name, slot.tensor) for slot in slots(module) if not slot.is_buffer):
        storage, compute, format = plan.of(name).storage, plan.of(name).compute, plan.of(name).format
        is_cast = plan.of(name).unsharded is storage  # for its module's forward
        if format is not None:
            check_cut(name, param, format, 1 if mesh is None else mesh.size(mesh.ndim - 1))
        elif mesh is None and storage is not compute and not is_cast:
            raise ValueError(f"{name} is stored in {short_name(storage)} and computes in {short_name(compute)}, which "
                             "only a sharded module can: shard it over a mesh (of one rank, if there is no other), or "
                             "build it in its compute dtype")
        if param.requires_grad and torch.promote_types(param.dtype, storage) is not storage:
            raise ValueError(f"{name} is {short_name(param.dtype)} and trainable, but the plan stores it in "
                             f"{short_name(storage)}: resolve the plan for a model built the same way")
        if not isinstance(param, DTensor):
            continue
        if not all(isinstance(placement, Shard) for placement in param.placements):
            raise ValueError(f"{name} is a DTensor placed {param.placements}; its gradient would not be reduced over "
                             "the ranks that it is replicated on: make it a plain parameter")
        ep = param.device_mesh.size()
        whole, experts = (None if m is None else m.size() for m in (mesh, expert_mesh))
        if whole is None or experts is None or experts * ep != whole:
            raise ValueError(f"{name} is sharded over {ep} expert-parallel ranks: expert_mesh must be given, and mesh "
                             f"have {ep} times its ranks; their sizes are {experts} and {whole}")
    for slot in slots(module):
        tensor, storage, format = slot.tensor, plan.of(slot.name).storage, plan.of(slot.name).format
        if format is not None and (mesh is None or not plan.of(slot.name).gathered):
            stored = quantized(tensor, format, storage if mesh is not None else plan.of(slot.name).compute)
            setattr(slot.owner, slot.key, nn.Parameter(stored, requires_grad=tensor.requires_grad))
            continue
        if tensor.dtype is storage:
            continue
        if slot.is_buffer:
            setattr(slot.owner, slot.key, tensor.to(storage))
        elif isinstance(tensor, DTensor):  # its data is not assignable
            stored = nn.Parameter(tensor.detach().to(storage), requires_grad=tensor.requires_grad)
            setattr(slot.owner, slot.key, stored)
        else:
            tensor.data = tensor.data.to(storage)


def _replace(old: Tensor, new: Tensor) -> None:
    """Make `old` the tensor `new`, for all who refer to it: tied modules, FSDP2, other stages."""
    if new is old:
        return
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        if old.grad_dtype is not old.dtype:
            new.grad_dtype = old.grad_dtype
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
    torch.utils.swap_tensors(old, new)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
