"""Sharding a module as its dtype plan says: FSDP2 units of one dtype each, and casts where dtypes meet.

    host      the module itself, an element of its outermost ModuleList or ModuleDict (a layer), or a frozen tower
    unit      parameters of one key (storage, compute, reduce, expert or dense) in a host, gathered and reduced together
    cast      what goes into a module that owns parameters has their compute dtype, where its host mixes dtypes

FSDP2 gathers a unit in one dtype and reduces it in one; its assertion about that comes in the first forward, and says
nothing of frozen parameters. So parameters are grouped here, before anything is sharded. The casts are forward hooks of
ours and not those of `MixedPrecisionPolicy`: modules that are not units need them as well, so do modules that are not
sharded at all, and until torch 2.11 a unit of several modules casts the inputs of its first one only.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from dualpipe.dtypes import short_name

if TYPE_CHECKING:
    from dualpipe.parallel.precision import DTypePlan, DTypePolicy


class Key(NamedTuple):
    """What the parameters of a unit have in common."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    expert: bool  # already sharded over the expert-parallel ranks


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered and reduced together; no key: no parameter of its own."""

    modules: tuple[nn.Module, ...]
    key: Key | None


@dataclass(frozen=True)
class Cast:
    """What a module's floating-point inputs and outputs are cast to; None leaves them."""

    module: nn.Module
    inputs: torch.dtype
    outputs: torch.dtype | None


class Layout(NamedTuple):
    """How a module is cut; `units` innermost first, the order in which they are to be sharded."""

    units: list[Unit]
    casts: list[Cast]


def plan_units(module: nn.Module, plan: DTypePlan, *, output_dtype: torch.dtype | None = None) -> Layout:
    """Cut a module into units and casts; changes nothing. `output_dtype` defaults to the policy's.

    Raises:
        ValueError: the plan lacks a tensor of the module, or dtypes meet where FSDP2 cannot keep them apart: in the
            parameters that one module owns directly, in a container without a forward, in tied parameters.
    """
    planner = _Planner(module, plan)
    planner.add_host(module, output_dtype or plan.policy.output_dtype, layered=False)
    return Layout(_join_tied(module, planner.units), planner.casts)


def frozen_modules(root: nn.Module) -> set[nn.Module]:
    """Every module inside a module that has parameters, none of them trainable."""
    frozen: set[nn.Module] = set()
    for module in root.modules():
        params = list(module.parameters())
        if module not in frozen and params and not any(param.requires_grad for param in params):
            frozen.update(module.modules())
    return frozen


# -- cutting


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


class _Planner:
    """Walks a module from the top; every parameter ends in one unit."""

    def __init__(self, root: nn.Module, plan: DTypePlan) -> None:
        self.plan = plan
        self.units: list[Unit] = []
        self.casts: list[Cast] = []
        self.names = {module: name for name, module in root.named_modules()}
        self.frozen = frozen_modules(root)
        self.own = {module: self._own_key(module) for module in self.names}  # refuses what cannot be told apart
        self.keys = {module: {self.own[m] for m in module.modules()} - {None} for module in self.names}
        self.computes = {module: set(self._casts_in(module)) for module in self.names}
        self.seen: set[nn.Module] = set()

    def add_host(self, host: nn.Module, output: torch.dtype | None, *, layered: bool) -> None:
        """Add the units of a host, the host itself last, and its casts."""
        main = self._main_key(host, layered)
        self.casts.append(Cast(host, main.compute if main else self.plan.policy.param_dtype, output))
        if len(self.computes[host]) > 1:
            self._add_casts(host, layered)
        self._add_units(host, main, layered)

    def _add_units(self, host: nn.Module, main: Key | None, layered: bool) -> None:
        groups: defaultdict[Key, list[nn.Module]] = defaultdict(list)
        self._descend(host, main, layered, groups)
        self.units += [Unit(tuple(modules), key) for key, modules in groups.items()]
        self.units.append(Unit((host,), main))

    def _descend(self, module: nn.Module, main: Key | None, layered: bool, groups: dict) -> None:
        for child in module.children():
            if not self.keys[child] or child in self.seen:
                continue
            self.seen.add(child)
            own = self.own[child]
            if self._is_host(child, module, layered):
                in_layer = layered or isinstance(module, nn.ModuleList | nn.ModuleDict)
                self.add_host(child, self._host_output(child), layered=in_layer)
            elif not _has_forward(child) and own not in (None, main):
                raise ValueError(f"{self.names[child]} ({type(child).__name__}) has no forward, so its parameters, "
                                 f"{_describe(own)}, cannot be gathered apart from those around it, "
                                 f"{_describe(main)}: give both the same dtype, or move them to a module "
                                 "that has one")
            elif _has_forward(child) and len(self.keys[child]) == 1 and not self._hosts_inside(child, layered):
                (key,) = self.keys[child]
                if key != main:
                    groups[key].append(child)
            elif own in (None, main):
                self._descend(child, main, layered, groups)
            else:
                self._add_units(child, own, layered)

    def _is_host(self, child: nn.Module, parent: nn.Module, layered: bool) -> bool:
        if not self.keys[child] or not _has_forward(child):
            return False
        layer = not layered and isinstance(parent, nn.ModuleList | nn.ModuleDict)
        inside = any(True for _ in child.children()) or any(True for _ in child.buffers(recurse=False))
        return layer or (inside and child in self.frozen and parent not in self.frozen)

    def _hosts_inside(self, module: nn.Module, layered: bool) -> bool:
        return any(self._is_host(child, parent, layered) for parent in module.modules() for child in parent.children())

    def _host_output(self, host: nn.Module) -> torch.dtype | None:
        """A layer or tower returns the policy's compute dtype, whatever its fp32 parts do; one all in fp32, fp32."""
        base = self.plan.policy.param_dtype
        if any(compute is base for compute, _ in self.computes[host]):
            return base
        outputs = {output for _, output in self.computes[host]}
        return outputs.pop() if len(outputs) == 1 else None

    def _main_key(self, host: nn.Module, layered: bool) -> Key | None:
        if self.own[host] or len(self.keys[host]) == 1:
            return self.own[host] or next(iter(self.keys[host]))
        sizes: Counter[Key] = Counter()
        for module in self._near(host, layered):
            if (key := self.own[module]) and key.compute is self.plan.policy.param_dtype and not key.expert:
                sizes[key] += sum(param.numel() for param in module.parameters(recurse=False))
        return max(sizes, key=sizes.__getitem__, default=None)

    def _near(self, module: nn.Module, layered: bool) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if not self._is_host(child, module, layered):
                yield from self._near(child, layered)

    def _own_key(self, module: nn.Module) -> Key | None:
        keys: dict[Key, str] = {}
        for name, param in module.named_parameters(recurse=False):
            full = f"{self.names[module]}.{name}".lstrip(".")
            dtypes = self.plan.of(full)
            if param.dim() == 0 and param.requires_grad:
                raise ValueError(f"{full} is a scalar, which FSDP2 cannot shard: give it the shape (1,)")
            if param.dim() > 0:
                key = Key(dtypes.storage, dtypes.compute, self.plan.reduce_dtype(full), isinstance(param, DTensor))
                keys.setdefault(key, full)
        if len(keys) > 1:
            found = ", ".join(f"{full} ({_describe(key)})" for key, full in keys.items())
            raise ValueError(f"{self.names[module] or 'the module'} ({type(module).__name__}) directly owns parameters "
                             f"that FSDP2 cannot keep apart: {found}; give them the same dtypes with a rule or pin, or "
                             "move some to a submodule")
        return next(iter(keys), None)

    # -- casts

    def _own_casts(self, module: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple]:
        for name, tensor in tensors:
            if tensor.is_floating_point():
                dtypes = self.plan.of(f"{self.names[module]}.{name}".lstrip("."))
                yield dtypes.compute, dtypes.output

    def _casts_in(self, module: nn.Module) -> Iterator[tuple[torch.dtype, torch.dtype | None]]:
        for inner in module.modules():
            yield from self._own_casts(inner, inner.named_parameters(recurse=False))
            yield from self._own_casts(inner, inner.named_buffers(recurse=False))

    def _add_casts(self, module: nn.Module, layered: bool) -> None:
        """Casts around the largest modules of one dtype, and into those that own parameters among other dtypes."""
        for child in module.children():
            if not self.keys[child] or self._is_host(child, module, layered):
                continue
            own = set(self._own_casts(child, child.named_parameters(recurse=False)))
            whole = len(self.computes[child]) == 1
            if whole and _has_forward(child):
                self.casts.append(Cast(child, *next(iter(self.computes[child]))))
                continue
            if len({output for _, output in own}) > 1:
                raise ValueError(f"rules disagree on what {self.names[child]} returns: {own}")
            if own and _has_forward(child):
                self.casts.append(Cast(child, *next(iter(own))))
            self._add_casts(child, layered)


def _describe(key: Key | None) -> str:
    if key is None:
        return "none"
    storage, compute, reduce = map(short_name, key[:3])
    return f"{storage} computing in {compute}, reduced in {reduce}{', expert' if key.expert else ''}"


def _join_tied(root: nn.Module, units: list[Unit]) -> list[Unit]:
    """Put modules of different units that share a parameter into a unit of their own, ahead of all others."""
    unit_of: dict[nn.Module, Unit] = {}
    for unit in units:  # innermost first
        for module in (inner for outer in unit.modules for inner in outer.modules()):
            unit_of.setdefault(module, unit)
    owners: defaultdict[nn.Parameter, dict[nn.Module, None]] = defaultdict(dict)
    for module in root.modules():
        for param in module.parameters(recurse=False):
            owners[param][module] = None
    joined: list[Unit] = []
    for tied in map(tuple, owners.values()):
        parts = {unit_of[module].modules for module in tied}
        if len(parts) > 1:
            again = set(tied) & {module for unit in joined for module in unit.modules}
            if again or any(child is not module for module in tied for child in module.modules()):
                raise ValueError(f"{[type(module).__name__ for module in tied]} share a parameter across units and "
                                 "have others besides: tie modules that own nothing else")
            joined.append(Unit(tied, unit_of[tied[0]].key))
    taken = {module for unit in joined for module in unit.modules}
    rest = [replace(unit, modules=tuple(m for m in unit.modules if m not in taken)) for unit in units]
    return joined + [unit for unit in rest if unit.modules]


# -- sharding


def shard(
    module: nn.Module,
    mesh: DeviceMesh | None,
    plan: DTypePlan,
    *,
    expert_mesh: DeviceMesh | None = None,
    output_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard a module with FSDP2 as the plan says, in place; returns it. Works on the meta device too.

    `mesh` is what dense parameters are sharded over: the last dimension; over the others they are replicated, and their
    gradients reduced (HSDP). Parameters that are `DTensor`s already are experts, sharded over expert-parallel ranks;
    they are sharded further over `expert_mesh`, the data-parallel ranks that hold the same ones. Gradients of both are
    the mean over all ranks of `mesh`. Each layer is gathered in as many units as it has dtypes. Inside a layer,
    what a float32 unit returns stays float32 (a rule may say otherwise) and is cast where it enters a module of another
    dtype; the layer returns the policy's `param_dtype`, and `module` its `output_dtype` or, with a warning, the one
    given here.

    With no `mesh` nothing is sharded, and the plan holds all the same: dtypes, casts, gradients in the reduce dtype.

    Raises:
        ValueError: `plan_units` does; the module is sharded already; meshes do not fit the experts; or, with no mesh, a
            parameter would have to compute in another dtype than it is stored in.
    """
    if isinstance(module, FSDPModule):
        raise ValueError("the module is sharded already; shard it once, from the outermost module")
    layout = plan_units(module, plan, output_dtype=boundary_dtype(plan.policy, output_dtype))
    _check_meshes(module, mesh, plan, expert_mesh)
    _store(module, plan)
    dense = mesh if mesh is None else _two_dimensional(mesh)
    taken: set[nn.Module] = set()
    for unit in layout.units:
        managed = [m for outer in unit.modules for m in outer.modules() if m not in taken]
        taken.update(managed)
        reduce = unit.key.reduce if unit.key else None
        if mesh is not None:
            _fully_shard(unit, mesh, dense, expert_mesh, reduce)
        if reduce is not None:
            _accumulate_in(unit, managed, reduce, now=mesh is None)
    if hasattr(module, "segments"):  # run by its parts, it never comes to the hook
        module.boundary_dtype = boundary_dtype(plan.policy, output_dtype)
    for cast in layout.casts:
        cast.module.register_forward_pre_hook(partial(_cast_inputs, cast.inputs), with_kwargs=True)
        if cast.outputs is not None:
            cast.module.register_forward_hook(partial(_cast_outputs, cast.outputs))
    return module


def boundary_dtype(policy: DTypePolicy, explicit: torch.dtype | None = None) -> torch.dtype:
    """What crosses pipeline ranks: the policy's output dtype. An explicit other one is honoured, with a warning."""
    if explicit is None or explicit is policy.output_dtype:
        return policy.output_dtype
    if not explicit.is_floating_point:
        raise ValueError(f"output_dtype must be a floating-point dtype; got {explicit}")
    warnings.warn(f"the module returns {short_name(explicit)}, not the policy's output_dtype "
                  f"{short_name(policy.output_dtype)}", stacklevel=3)
    return explicit


def _check_meshes(
    module: nn.Module, mesh: DeviceMesh | None, plan: DTypePlan, expert_mesh: DeviceMesh | None
) -> None:
    for name, param in module.named_parameters():
        dtypes = plan.of(name)
        if mesh is None and dtypes.storage is not dtypes.compute:
            raise ValueError(f"{name} is stored in {short_name(dtypes.storage)} and computes in "
                             f"{short_name(dtypes.compute)}, which only a sharded module can: shard it over a mesh (of "
                             "one rank, if there is no other), or build it in its compute dtype")
        if not isinstance(param, DTensor):
            continue
        if not all(isinstance(placement, Shard) for placement in param.placements):
            raise ValueError(f"{name} is a DTensor placed {param.placements}; its gradient would not be reduced over "
                             "the ranks that it is replicated on: make it a plain parameter")
        ep = param.device_mesh.size()
        sizes = [None if m is None else m.size() for m in (mesh, expert_mesh)]
        if None in sizes or sizes[1] * ep != sizes[0]:
            raise ValueError(f"{name} is sharded over {ep} expert-parallel ranks: expert_mesh must be given, and mesh "
                             f"have {ep} times its ranks; their sizes are {sizes[1]} and {sizes[0]}")


def _two_dimensional(mesh: DeviceMesh) -> DeviceMesh:
    """FSDP2 takes (shard,) or (replicate, shard): dimensions that are replicated over become one."""
    if mesh.ndim <= 2:
        return mesh
    *replicated, last = mesh.mesh_dim_names
    flat = mesh[tuple(replicated)]._flatten("_".join(replicated))
    return DeviceMesh._concatenate([flat, mesh[last]])


def _store(module: nn.Module, plan: DTypePlan) -> None:
    """Give every tensor its storage dtype, in place, so that one shared with another module stays shared."""
    for prefix, owner in module.named_modules():
        for name, param in owner.named_parameters(recurse=False):
            full = f"{prefix}.{name}".lstrip(".")
            storage = plan.of(full).storage
            if param.dtype is storage:
                continue
            if param.requires_grad and torch.promote_types(param.dtype, storage) is not storage:
                raise ValueError(f"{full} is {short_name(param.dtype)} and trainable, but the plan stores it in "
                                 f"{short_name(storage)}: resolve the plan for a model built the same way")
            if isinstance(param, DTensor):  # its data is not assignable
                setattr(owner, name, nn.Parameter(param.detach().to(storage), requires_grad=param.requires_grad))
            else:
                param.data = param.data.to(storage)
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(plan.of(f"{prefix}.{name}".lstrip(".")).storage))


def _fully_shard(
    unit: Unit, mesh: DeviceMesh, dense: DeviceMesh, expert_mesh: DeviceMesh | None, reduce: torch.dtype | None
) -> None:
    expert = unit.key is not None and unit.key.expert
    own = expert_mesh if expert else dense
    precision = MixedPrecisionPolicy(
        param_dtype=unit.key.compute if unit.key else None, reduce_dtype=reduce, cast_forward_inputs=False
    )
    # Nothing trainable is ever ignored, because the gradient of an ignored parameter is not reduced.
    scalars = {p for m in unit.modules for p in m.parameters() if p.dim() == 0 and not p.requires_grad}
    fully_shard(
        list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],
        mesh=own,
        mp_policy=precision,
        shard_placement_fn=partial(_off_dimension_0, own.size(own.ndim - 1)) if expert else None,
        ignored_params=scalars or None,
    )
    if expert and mesh.size() != own.size():
        # FSDP2 takes the mean over its own mesh. Not set_gradient_divide_factor: gloo lacks the reduction that it
        # uses, and with its sums forced, a mesh of one rank is divided twice.
        unit.modules[0].set_all_reduce_hook(partial(_divide, mesh.size() // own.size()))


def _off_dimension_0(ranks: int, param: nn.Parameter) -> Shard | None:
    """A dimension that is not sharded over experts and divides evenly; sharding one twice makes a _StridedShard."""
    taken = {placement.dim for placement in param.placements} if isinstance(param, DTensor) else set()
    free = (dim for dim in range(param.dim()) if dim not in taken and param.shape[dim] % ranks == 0)
    dim = next(free, None)
    return None if dim is None else Shard(dim)


def _divide(factor: int, gradient: Tensor) -> None:
    gradient.div_(factor)


def _accumulate_in(unit: Unit, managed: list[nn.Module], dtype: torch.dtype, *, now: bool) -> None:
    """Gradients of the parameters that a forward sees accumulate in `dtype`; gathered ones exist from then on only."""
    slots = [(module, name) for module in managed for name, _ in module.named_parameters(recurse=False)]

    def set_grad_dtype(*_: Any) -> None:
        for module, name in slots:
            param = module._parameters[name]
            if param.requires_grad and param.grad_dtype is not dtype:
                param.grad_dtype = dtype

    if now:
        set_grad_dtype()
    for module in unit.modules:
        module.register_forward_pre_hook(set_grad_dtype)


def _cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
    return tree_map_only(Tensor, _cast_to(dtype), (args, kwargs))


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: tuple, output: Any) -> Any:
    return tree_map_only(Tensor, _cast_to(dtype), output)
