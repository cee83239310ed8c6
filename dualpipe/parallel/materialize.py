"""From a module without values to one that trains: parameters on meta, sharded or not, get memory once and are filled.

    module = build_on_meta(lambda: Stage(config))       parameters on meta, buffers with their values
    ... fully_shard(module) where wanted ...            DTensors, still on meta
    materialize(module, device, plan, seed=0)           each rank's shard allocated and filled
    assert_materialized(module, device)                 (`materialize` has asked this itself after filling)

What a module offers:

- `init_weights(seed)`, the model's own initialisation, which fills every parameter. For the same values under every
  mesh layout it goes by names, as `dualpipe.nn.init.seeded_normal_` does; `fill_` and `zero_` do too.
- `recompute_buffers(device)`, which returns a mapping from its own buffers' names (not those of its children) to new
  tensors on `device`. Every buffer that is not persistent, and so in no checkpoint, must be among them.

`nn.Module.to_empty` is never used: it wipes buffers that have values, leaves the others as garbage and unties
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from dualpipe.parallel.dtype_plan import DTypePlan, slots

_LARGE = 10**9  # bytes: beyond any buffer

T = TypeVar("T")


class Sliceable(Protocol):
    """A tensor, or anything that reads a part of one where it is indexed, such as a tensor in a file."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def __getitem__(self, part: tuple[slice, ...], /) -> Tensor: ...


def build_on_meta(fn: Callable[[], T]) -> T:
    """Return `fn()`, which builds modules; their parameters go to meta when registered, buffers keep their values.

    One parameter at a time has memory, unless it is larger than 1 GB, as stacked experts are. Under
    `torch.device("meta")` instead, a buffer's value would be lost, that of `torch.tensor(...)` too. The hook is the
    process's: build modules in one thread at a time.
    """
    handle = register_module_parameter_registration_hook(_to_meta)
    try:
        with torch.device("cpu"), _LargeOnMeta():  # whatever the caller's default device is
            return fn()
    finally:
        handle.remove()


@torch.no_grad()
def materialize(
    module: nn.Module,
    device: torch.device | str,
    plan: DTypePlan,
    *,
    seed: int | None = None,
    source: Mapping[str, Sliceable] | None = None,
    param_device: torch.device | str | None = None,
) -> None:
    """Give `module` values on `device`, in the dtypes `plan.of(name).storage`.

    A parameter on meta is allocated, of a DTensor the local shard; one with values moves, but a DTensor stays.
    Persistent buffers move with their values, others are recomputed on `device`. Every parameter and buffer remains
    the same object, so tied ones stay tied, also across calls for the stages of one rank. Then the module is filled,
    one parameter at a time:

    - with `seed`, by `module.init_weights(seed)`;
    - with `source`, from the tensors of these names, of which only this rank's part is asked for: every parameter (one
      name of a tied one is enough) and persistent buffer. Whole tensors, never DTensors;
    - with neither, what was on meta is left for a distributed checkpoint to load into: NaN, integers their maximum, so
      that `assert_materialized` can name what was not loaded.

    `param_device` is where parameters are if not on `device`: "cpu" under FSDP2's CPU offload. Optimizers are to be
    built afterwards. FSDP2 copies an uneven shard once more, into one that is padded, when it first runs.

    Raises:
        ValueError: before anything is changed, with a line for each: a buffer with neither value nor
            `recompute_buffers`, or of which that returns another shape, dtype or device; names that `source` lacks or
            has too many; other shapes; values that the plan's dtype would round, but for frozen modules, which the plan
            narrows by intention. Afterwards: what `init_weights` left out; tied names whose values differ.
    """
    recomputed = check_materialize(module, device, plan, seed=seed, source=source)
    device, param_device = torch.device(device), torch.device(device if param_device is None else param_device)
    empty = {n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.device.type == "meta"}
    for slot in slots(module):
        if slot.is_buffer:
            known = slot.name in recomputed and (not slot.is_saved or slot.tensor.device.type == "meta")
            value = recomputed[slot.name].detach() if known else slot.tensor
            _replace(slot.tensor, _moved(value, plan.of(slot.name).storage, device))
    for name, param in module.named_parameters():
        _replace(param, _moved(param, plan.of(name).storage, param_device))
    if seed is not None:
        module.init_weights(seed)  # type: ignore[operator]
    elif source is not None:
        _load(module, source)
    if seed is not None or source is not None:
        assert_materialized(module, device, param_device=param_device, values=empty)


@torch.no_grad()
def check_materialize(
    module: nn.Module,
    device: torch.device | str,
    plan: DTypePlan,
    *,
    seed: int | None = None,
    source: Mapping[str, Sliceable] | None = None,
) -> dict[str, Tensor]:
    """Raise what `materialize` raises before it changes anything; returns the recomputed buffers, by full name."""
    device = torch.device(device)
    if seed is not None and source is not None:
        raise ValueError(f"both seed ({seed}) and source are given; choose what fills the parameters")
    if seed is not None and not hasattr(module, "init_weights"):
        raise ValueError(f"{type(module).__name__} has no init_weights(seed); write one with "
                         "dualpipe.nn.init.seeded_normal_, or pass source instead of seed")
    recomputed = {
        f"{path}.{name}".lstrip("."): buffer
        for path, owner in module.named_modules(remove_duplicate=False) if hasattr(owner, "recompute_buffers")
        for name, buffer in owner.recompute_buffers(device).items()
    }
    frozen = {id(slot.tensor) for slot in slots(module) if slot.is_frozen}
    problems = [*_buffer_problems(module, device, recomputed, frozen, keep_meta=seed is None)]
    problems += _parameter_problems(module, plan, frozen)
    problems += [] if source is None else _source_problems(module, plan, source, frozen)
    if problems:
        raise ValueError("\n  ".join([f"{type(module).__name__} cannot be materialised:", *problems]))
    return recomputed


@torch.no_grad()
def assert_materialized(
    module: nn.Module,
    device: torch.device | str,
    *,
    param_device: torch.device | str | None = None,
    values: bool | Collection[str] = True,
) -> None:
    """Raise ValueError naming every parameter and buffer that is on meta, on the wrong device, or uninitialised.

    Uninitialised is what holds a NaN, or integers that are all their dtype's maximum, as `materialize` leaves them;
    booleans are not looked at. This reads all memory once and waits for the device; `values` may be the names to look
    at, or False.
    """
    device, param_device = torch.device(device), torch.device(device if param_device is None else param_device)
    wrong, rest = [], {}
    for tensors, wanted in ((module.named_parameters(), param_device), (module.named_buffers(), device)):
        for name, tensor in tensors:
            if tensor.device.type == "meta":
                wrong.append(f"{name} is on meta")
            elif not _is_on(tensor, wanted):
                wrong.append(f"{name} is on {tensor.device}, not on {wanted}")
            else:
                rest[name] = tensor
    if values is not True:
        rest = {name: tensor for name, tensor in rest.items() if values and name in values}
    if rest:
        wrong += [f"{name} was never filled, or holds NaN" for name in _unfilled(rest)]
    if wrong:
        raise ValueError("\n  ".join([f"{type(module).__name__} is not materialised:", *wrong]))


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


def _to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is not None and param.device.type != "meta" and not nn.parameter.is_lazy(param):
        _replace(param, torch.empty_like(param, device="meta"))


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


# -- what cannot be materialised


def _buffer_problems(
    module: nn.Module, device: torch.device, recomputed: Mapping[str, Tensor], frozen: set[int], *, keep_meta: bool
) -> Iterator[str]:
    buffers = [slot for slot in slots(module) if slot.is_buffer]
    for name in sorted(recomputed.keys() - {slot.name for slot in buffers}):
        yield f"{name}: recompute_buffers returns it, but there is no such buffer"
    for slot in buffers:
        name, old, owner = slot.name, slot.tensor, type(slot.owner).__name__
        if name in recomputed:
            new = recomputed[name]
            same = new.shape == old.shape and (new.dtype == old.dtype or id(old) in frozen)
            if not same or not _is_on(new, device):
                yield (f"{name}: recompute_buffers returns {tuple(new.shape)} {new.dtype} on {new.device}; the buffer "
                       f"is {tuple(old.shape)} {old.dtype}, wanted on {device}; make them agree "
                       "(module.to(dtype) casts buffers, torch.set_default_dtype while building does not)")
        elif not slot.is_saved:
            yield (f"{name}: not persistent, so in no checkpoint, and {owner} does not declare how to recompute it; "
                   "give it recompute_buffers(device), or register the buffer as persistent")
        elif old.device.type == "meta" and not keep_meta:
            yield (f"{name}: on meta, so without a value to keep; build with build_on_meta instead of a meta device, "
                   f"give {owner} recompute_buffers(device), or load a checkpoint")


def _parameter_problems(module: nn.Module, plan: DTypePlan, frozen: set[int]) -> Iterator[str]:
    for name, param in module.named_parameters():
        storage = plan.of(name).storage
        if param.device.type == "meta" or param.dtype == storage:
            continue
        if isinstance(param, DTensor):
            yield f"{name}: a DTensor with values in {param.dtype} stays so, not {storage}; shard it on meta"
        elif id(param) not in frozen:
            yield from _rounding(name, param.dtype, storage)


def _source_problems(
    module: nn.Module, plan: DTypePlan, source: Mapping[str, Sliceable], frozen: set[int]
) -> Iterator[str]:
    entries = _entries(module)
    known = {name for _, names in entries for name in names}
    for tensor, names in entries:
        present = [name for name in names if name in source]
        if not present:
            yield f"{names[0]}: missing in the source; add it"
        for name in present:
            if tuple(source[name].shape) != tuple(tensor.shape):
                yield f"{name}: {tuple(source[name].shape)} in the source, {tuple(tensor.shape)} in the module"
            if id(tensor) not in frozen:
                yield from _rounding(name, source[name].dtype, plan.of(name).storage)
    for name in source:
        if name not in known:
            yield f"{name}: the source has it and the module does not; leave it out"


def _rounding(name: str, dtype: torch.dtype, storage: torch.dtype) -> Iterator[str]:
    """A line where a cast may change values: of floats by precision and range, else unless the dtypes are one."""
    if dtype.is_floating_point and storage.is_floating_point:
        old, new = torch.finfo(dtype), torch.finfo(storage)
        loses = new.eps > old.eps or new.max < old.max or new.tiny > old.tiny
    else:
        loses = dtype != storage
    if loses:
        yield (f"{name}: values in {dtype} would be rounded to {storage}; cast them first, or tell resolve_dtypes of "
               "them by source_dtypes")


# -- values


def _moved(tensor: Tensor, storage: torch.dtype, device: torch.device) -> Tensor:
    """What takes the place of `tensor`: with its values, or without any and with what `_unfilled` recognises."""
    if tensor.device.type != "meta":
        return tensor if isinstance(tensor, DTensor) else tensor.to(device, storage)
    fraction = storage.is_floating_point or storage.is_complex
    mark = float("nan") if fraction else storage != torch.bool and torch.iinfo(storage).max
    return torch.full_like(tensor, mark, dtype=storage, device=device)


def _unfilled(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those that hold what `_moved` leaves where there are no values."""
    flags = {}
    for name, tensor in tensors.items():
        local = _local_part(tensor)[0]
        if local.is_floating_point() or local.is_complex():
            flags[name] = local.isnan().any()
        elif local.dtype != torch.bool and local.numel():
            flags[name] = (local == torch.iinfo(local.dtype).max).all()
    return [name for name, flag in flags.items() if flag]


def _entries(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """What a checkpoint holds of `module`: parameters and persistent buffers, each with all its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for slot in sorted(slots(module), key=lambda slot: slot.is_buffer):  # parameters first
        if slot.is_saved:
            found.setdefault(id(slot.tensor), (slot.tensor, []))[1].append(slot.name)
    return list(found.values())


def _load(module: nn.Module, source: Mapping[str, Sliceable]) -> None:
    for tensor, names in _entries(module):
        local, part = _local_part(tensor)
        first, *others = [name for name in names if name in source]
        local.copy_(source[first][part])
        for name in others:
            if not torch.equal(local, source[name][part].to(local)):
                raise ValueError(f"{first} and {name} are tied, but their values in the source differ; leave one out")


def _local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    from dualpipe.nn.init import local_part  # with it come all layers and kernels, which few who import this need

    return local_part(tensor)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
