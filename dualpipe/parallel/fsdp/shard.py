"""Sharding a module as its dtype plan says: into FSDP2 units of one dtype each, with casts where dtypes meet.

    host      the module itself, an element of its outermost ModuleList or ModuleDict (a layer), or a frozen tower
    unit      parameters of one key (storage, compute, reduce, expert or dense) in a host, gathered and reduced together
    cast      what goes into a module that owns parameters has their compute dtype, where its host mixes dtypes
    narrow    a parameter that is gathered wider than it computes in, for what its module owns beside it, is cast for
              the module's forward

FSDP2 gathers a unit in one dtype and reduces it in one; its assertion about that comes in the first forward, and says
nothing of frozen parameters. So parameters are grouped here, before anything is sharded. The casts are forward hooks of
ours and not those of `MixedPrecisionPolicy`: modules that are no units, or not sharded, need them as well, and until
torch 2.11 a unit of several modules casts the inputs of its first one only.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from dualpipe.kernels.formats import Format, QuantizedRows
from dualpipe.parallel.fsdp.driver import Place, keep_hook_on_reduce_stream, lend
from dualpipe.parallel.fsdp.materialize import store
from dualpipe.parallel.fsdp.quantized_gather import PackedGather, attach, gather_packed
from dualpipe.parallel.precision.plan import DTypePlan, slots
from dualpipe.runtime.dtypes import short_name

_Dtypes = tuple[torch.dtype, torch.dtype | None]  # computed in, and returned where that is another


def shard_stages(
    stages: Sequence[nn.Module], mesh: DeviceMesh | None, plan: DTypePlan, *, expert_mesh: DeviceMesh | None = None
) -> None:
    """Shard the stages of one rank, ascending, each as `shard` does.

    Of a parameter that several have, such as that of tied embeddings at both ends of a V, FSDP2 knows in the first of
    them alone; the others see it as it is there, sharded or gathered, and it is reduced when all of them are done.
    """
    owners: dict[nn.Parameter, nn.Module] = {}
    places: defaultdict[nn.Parameter, list[Place]] = defaultdict(list)  # the owner's first one, and those of others
    for stage in stages:
        for module in stage.modules():
            for name, param in module.named_parameters(recurse=False):
                if owners.setdefault(param, stage) is not stage or param not in places:
                    places[param].append((module, name))
    for stage in reversed(stages):  # an owner, which replaces its parameters, when nobody needs to recognise them
        borrowed = [param for param, owner in owners.items() if owner is not stage]
        shard(stage, mesh, plan, expert_mesh=expert_mesh, unsharded=borrowed)
    for param, found in places.items() if mesh is not None else ():
        if len(found) > 1:
            lend(owners[param], found)


def shard(
    module: nn.Module, mesh: DeviceMesh | None, plan: DTypePlan, *, expert_mesh: DeviceMesh | None = None,
    output_dtype: torch.dtype | None = None, unsharded: Iterable[nn.Parameter] = (),
) -> nn.Module:
    """Shard a module with FSDP2 as the plan says, in place; returns it. Works on the meta device too.

    `mesh` is what dense parameters are sharded over: the last dimension; over the others they are replicated, and their
    gradients reduced (HSDP). Parameters that are `DTensor`s already are experts, sharded over expert-parallel ranks;
    they are sharded further over `expert_mesh`, the data-parallel ranks that hold the same ones. Gradients of both are
    the mean over all ranks of `mesh`. With no `mesh` nothing is sharded, and the plan holds all the same.

    Each layer is gathered in as many units as it has dtypes. Inside a layer, what a float32 unit returns stays float32
    (a rule may say otherwise) and is cast where it enters a module of another dtype; the layer returns the policy's
    `param_dtype`, and `module` its `output_dtype` or, with a warning, the one given here. unsharded: parameters that
    FSDP2 is not to know of in this module, for `shard_stages`.

    Raises ValueError where `Cut` does, the module is sharded already, meshes do not fit the experts, or, with no mesh,
    a parameter would have to compute in another dtype than it is stored in.
    """
    if isinstance(module, FSDPModule):
        raise ValueError("the module is sharded already; shard it once, from the outermost module")
    planned = plan.policy.output_dtype
    boundary = output_dtype or planned  # what crosses pipeline ranks
    if not boundary.is_floating_point:
        raise ValueError(f"output_dtype must be a floating-point dtype; got {boundary}")
    if boundary is not planned:
        warnings.warn(f"the module returns {short_name(boundary)}, not the policy's output_dtype {short_name(planned)}",
                      stacklevel=2)
    cut = Cut(module, plan, output_dtype=boundary)
    store(module, mesh, plan, expert_mesh)
    if mesh is not None and mesh.ndim > 2:  # FSDP2 takes (shard,) or (replicate, shard)
        *replicated, last = mesh.mesh_dim_names or ()
        mesh = DeviceMesh._concatenate([mesh[tuple(replicated)]._flatten("_".join(replicated)), mesh[last]])
    formats = {(slot.owner, slot.key): format for slot in slots(module) if (format := plan.of(slot.name).format)}
    gathers: list[PackedGather] = []
    taken: set[nn.Module] = set()
    for modules, key in cut.units:
        managed = [m for outer in modules for m in outer.modules() if m not in taken]
        taken.update(managed)
        if mesh is not None:
            gathers += _fully_shard(modules, key, mesh, expert_mesh, formats, unsharded)
        if key:
            _accumulate_in(key.reduce, modules, managed, now=mesh is None)
    if gathers:  # ahead of FSDP2, whose first forward may pad the shards of all units
        module.register_forward_pre_hook(lambda *_: attach(gathers), prepend=True)
    if hasattr(module, "segments"):  # run by its parts, it never comes to the hook
        module.boundary_dtype = boundary  # type: ignore[assignment]
    for inner, (inputs, outputs) in cut.casts.items():
        _cast(inner, inputs, outputs)
    for inner, dtypes in cut.narrowed.items():
        _narrow(inner, dtypes)
    return module


class Key(NamedTuple):
    """What the parameters of a unit have in common."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    expert: bool  # already sharded over the expert-parallel ranks

    def __str__(self) -> str:
        storage, compute, reduce = map(short_name, self[:3])
        return f"{storage} computing in {compute}, reduced in {reduce}{', expert' if self.expert else ''}"


@dataclass
class _Part:
    """A module with what `Cut` has to know of it."""

    module: nn.Module
    name: str
    is_host: bool
    own: Key | None = None  # of the parameters that it owns directly
    narrow: torch.dtype | None = None  # what it computes in, where some of these are gathered wider than that
    casts: dict[_Dtypes, None] = field(default_factory=dict)  # of these and of frozen scalars, in order
    children: list[_Part] = field(default_factory=list)
    keys: set[Key] = field(default_factory=set)  # of all parameters inside
    dtypes: set[_Dtypes] = field(default_factory=set)  # of all floating-point tensors inside
    sizes: Counter[Key] = field(default_factory=Counter)  # dense, computing in the policy's dtype, in no host inside
    has_hosts: bool = False
    seen: bool = False  # whether its units are found

    @property
    def main(self) -> Key | None:
        """The key of its own parameters or, where it has none, of most that compute in the policy's dtype."""
        if self.own or len(self.keys) == 1:
            return self.own or next(iter(self.keys))
        return max(self.sizes, key=self.sizes.__getitem__, default=None)


class Cut:
    """How a module is cut as its plan says; nothing of the module is changed.

    units: modules whose parameters are gathered and reduced together, and their key (None: no parameters of their own);
    innermost first, the order in which they are to be sharded. casts: by module, what its floating-point inputs and
    outputs are cast to; None leaves them. narrowed: by module, the parameters that its forward sees in another dtype
    than they are gathered in. output_dtype: what the module returns, by default the policy's.

    Raises ValueError where the plan lacks a tensor, or dtypes meet where FSDP2 cannot keep them apart: in parameters
    that one module owns directly, in a container without a forward, in tied parameters.
    """

    def __init__(self, root: nn.Module, plan: DTypePlan, *, output_dtype: torch.dtype | None = None) -> None:
        self._plan, base = plan, plan.policy.param_dtype
        self._parts: dict[nn.Module, _Part] = {}
        self.units: list[tuple[tuple[nn.Module, ...], Key | None]] = []
        self.casts: dict[nn.Module, _Dtypes] = {}
        self.narrowed: defaultdict[nn.Module, dict[str, torch.dtype]] = defaultdict(dict)
        whole = self._look(root, "")
        self._find_casts(whole, output_dtype or plan.policy.output_dtype)
        for part in self._parts.values():
            if part.is_host:  # returns what is computed in, whatever its fp32 parts do; one all in fp32, fp32
                outputs = {base if any(dtype is base for dtype, _ in part.dtypes) else out for _, out in part.dtypes}
                self._find_casts(part, outputs.pop() if len(outputs) == 1 else None)
        self._find_units(whole, whole.main)
        self._join_tied()

    def _look(self, module: nn.Module, name: str, *, is_host: bool = False, in_layer: bool = False) -> _Part:
        """Note a module and what is inside, by the first place that it has; a layer has no layers of its own."""
        part = self._parts[module] = self._part(module, name, is_host)
        for key, child in module.named_children():
            if child not in self._parts:
                is_layer = isinstance(module, nn.ModuleList | nn.ModuleDict) and not in_layer
                has_more = any(True for _ in chain(child.children(), child.buffers(recurse=False)))
                is_tower = has_more and not _is_trained(child) and _is_trained(module)
                sharded = any(param.dim() for param in child.parameters())
                is_host = (is_layer or is_tower) and sharded and _has_forward(child)
                in_host = in_layer or (is_host and is_layer)
                self._look(child, f"{name}.{key}".lstrip("."), is_host=is_host, in_layer=in_host)
            inner = self._parts[child]
            part.children.append(inner)
            part.keys |= inner.keys
            part.dtypes |= inner.dtypes
            part.has_hosts |= inner.is_host or inner.has_hosts
            if not inner.is_host:
                part.sizes.update(inner.sizes)
        return part

    def _part(self, module: nn.Module, name: str, is_host: bool) -> _Part:
        """A module with what it owns directly."""
        part = _Part(module, name, is_host)
        owned: dict[Key, str] = {}
        for key, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            full, is_param = f"{name}.{key}".lstrip("."), isinstance(tensor, nn.Parameter)
            dtypes = self._plan.of(full)
            if tensor.is_floating_point():
                part.dtypes.add((dtypes.compute, dtypes.output))
                if is_param:
                    part.casts[dtypes.compute, dtypes.output] = None
            if is_param and tensor.dim() > 0:
                reduce = self._plan.reduce_dtype(full)
                gathered = dtypes.unsharded or dtypes.compute
                part.own = Key(dtypes.storage, gathered, reduce, isinstance(tensor, DTensor))
                owned.setdefault(part.own, full)
                if dtypes.unsharded:
                    part.narrow = dtypes.compute
                    self.narrowed[module][key] = dtypes.compute
            elif is_param and tensor.requires_grad:
                raise ValueError(f"{full} is a scalar, which FSDP2 cannot shard: give it the shape (1,)")
        if len(owned) > 1:
            found = ", ".join(f"{full} ({key})" for key, full in owned.items())
            raise ValueError(f"{name or 'the module'} ({type(module).__name__}) directly owns parameters that FSDP2 "
                             f"cannot keep apart: {found}; give them the same dtypes with a rule or pin, or move some "
                             "to a submodule")
        part.keys.update(owned)
        if part.own and part.own.compute is self._plan.policy.param_dtype and not part.own.expert:
            part.sizes[part.own] = sum(param.numel() for param in module.parameters(recurse=False))
        return part

    def _find_casts(self, host: _Part, output: torch.dtype | None) -> None:
        """The casts of a host, which returns `output`; where it mixes dtypes, those around the largest modules in it of
        one dtype, and into those that own parameters among other dtypes."""
        computes = {dtype for dtype, _ in host.dtypes}
        main = host.main.compute if host.main else self._plan.policy.param_dtype
        self.casts[host.module] = computes.pop() if len(computes) == 1 else host.narrow or main, output
        inside = [] if len(host.dtypes) == 1 or _mixes_by_itself(host) else host.children[::-1]
        while inside:
            part = inside.pop()
            if not part.keys or part.is_host:
                continue
            if len(part.dtypes) == 1 and _has_forward(part.module):
                (self.casts[part.module],) = part.dtypes
                continue
            if len({output for _, output in part.casts}) > 1:
                raise ValueError(f"rules disagree on what {part.name} returns: {set(part.casts)}")
            if part.casts and _has_forward(part.module):
                inputs, returned = next(iter(part.casts))
                self.casts[part.module] = part.narrow or inputs, returned
            inside += [] if _mixes_by_itself(part) else part.children[::-1]

    def _find_units(self, host: _Part, main: Key | None) -> None:
        """The units in a module, and last the module itself with what is around them, of the key `main`."""
        groups: defaultdict[Key, list[nn.Module]] = defaultdict(list)
        inside = host.children[::-1]
        while inside:
            part = inside.pop()
            if part.seen or not part.keys:
                continue
            part.seen, has_forward = True, _has_forward(part.module)
            if part.is_host:
                self._find_units(part, part.main)
            elif not has_forward and part.own not in (None, main):
                raise ValueError(f"{part.name} ({type(part.module).__name__}) has no forward, so its parameters, "
                                 f"{part.own}, cannot be gathered apart from those around it, {main or 'none'}: give "
                                 "both the same dtype, or move them to a module that has one")
            elif has_forward and len(part.keys) == 1 and not part.has_hosts:
                (key,) = part.keys
                if key != main:
                    groups[key].append(part.module)
            elif part.own in (None, main):
                inside += part.children[::-1]
            else:
                self._find_units(part, part.own)
        self.units += [(tuple(modules), key) for key, modules in groups.items()]
        self.units.append(((host.module,), main))

    def _join_tied(self) -> None:
        """Put modules of different units that share a parameter into a unit of their own, ahead of all others."""
        unit_of: dict[nn.Module, int] = {}
        for number, (modules, _) in enumerate(self.units):  # innermost first
            for module in chain.from_iterable(outer.modules() for outer in modules):
                unit_of.setdefault(module, number)
        owners: defaultdict[nn.Parameter, list[nn.Module]] = defaultdict(list)
        for module in self._parts:
            for param in module.parameters(recurse=False):
                owners[param].append(module)
        joined: dict[tuple[nn.Module, ...], Key | None] = {}
        taken: set[nn.Module] = set()
        for tied in owners.values():
            if len({unit_of[module] for module in tied}) > 1:
                if not taken.isdisjoint(tied) or any(self._parts[module].children for module in tied):
                    raise ValueError(f"{[type(module).__name__ for module in tied]} share a parameter across units and "
                                     "have others besides: tie modules that own nothing else")
                joined[tuple(tied)] = self.units[unit_of[tied[0]]][1]
                taken.update(tied)
        rest = [(tuple(m for m in modules if m not in taken), key) for modules, key in self.units]
        self.units = [*joined.items(), *(unit for unit in rest if unit[0])]


def _mixes_by_itself(part: _Part) -> bool:
    """Return True for a module whose own parameters differ in dtype, and what is inside does not: its forward was
    written for that mix, and casts where it wants to."""
    return part.narrow is not None and all(child.dtypes <= {(part.narrow, None)} for child in part.children)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_trained(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters())


# -- making it so


def _fully_shard(
    modules: tuple[nn.Module, ...], key: Key | None, dense: DeviceMesh, expert_mesh: DeviceMesh | None,
    formats: Mapping[tuple[nn.Module, str], Format], unsharded: Iterable[nn.Parameter],
) -> list[PackedGather]:
    of_experts = key is not None and key.expert
    mesh = expert_mesh if of_experts and expert_mesh is not None else dense
    ranks = mesh.size(mesh.ndim - 1)

    quantized = {owner._parameters[key]: format for (owner, key), format in formats.items()}

    def off_dimension_0(param: nn.Parameter) -> Shard | None:
        """A dimension that is not sharded over experts and divides evenly; sharding one twice makes a _StridedShard.
        Of quantized ones, rows in whole blocks."""
        placements = param.placements if isinstance(param, DTensor) else ()
        taken = {placement.dim for placement in placements if isinstance(placement, Shard)}
        step, dims = 1, range(param.dim())
        if (format := quantized.get(param)) is not None:
            step, dims = format.block[0] if ranks > 1 else 1, range(param.dim() - 1)
        free = (Shard(dim) for dim in dims if dim not in taken and param.shape[dim] % (ranks * step) == 0)
        return next(free, None)

    def divide(gradient: Tensor) -> None:
        gradient.div_(dense.size() // mesh.size())

    # Nothing trainable that is in no other unit is ignored: the gradient of an ignored parameter is not reduced.
    ignored = {p for m in modules for p in m.parameters() if p.dim() == 0 and not p.requires_grad}.union(unsharded)
    fully_shard(
        list(modules) if len(modules) > 1 else modules[0],
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(key and key.compute, key and key.reduce, cast_forward_inputs=False),
        shard_placement_fn=off_dimension_0 if of_experts else None,
        ignored_params=ignored or None,
    )
    first = modules[0]
    gathers = gather_packed(first, formats) if isinstance(first, FSDPModule) else []
    for module in modules if gathers else ():
        module.register_forward_pre_hook(lambda *_: attach(gathers), prepend=True)
    if mesh.size() != dense.size() and isinstance(first, FSDPModule):
        # FSDP2 takes the mean over its own mesh. Not set_gradient_divide_factor: gloo lacks the reduction that it
        # uses, and with its sums forced, a mesh of one rank is divided twice.
        first.set_all_reduce_hook(divide)
        for module in modules:
            module.register_forward_pre_hook(lambda *_: keep_hook_on_reduce_stream(first))
    return gathers


def _accumulate_in(dtype: torch.dtype, called: Iterable[nn.Module], managed: list[nn.Module], *, now: bool) -> None:
    """Gradients of the parameters of `managed` modules that a forward sees accumulate in `dtype`; gathered parameters
    exist from then on only, so hooks on the `called` modules see to it."""
    places = [(module, name) for module in managed for name, _ in module.named_parameters(recurse=False)]

    def set_grad_dtype(*_: Any) -> None:
        for module, name in places:
            param = module._parameters[name]
            if param is not None and param.requires_grad and param.grad_dtype is not dtype:
                param.grad_dtype = dtype

    if now:
        set_grad_dtype()
    for module in called:
        module.register_forward_pre_hook(set_grad_dtype)


def _narrow(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Have the module's forward see parameters in these dtypes; gradients go through the cast."""

    def narrow(*_: Any) -> None:
        for key, dtype in dtypes.items():
            param = module._parameters[key]
            if param is not None:
                vars(module)[key] = param.to(dtype)  # found before the parameter itself

    def restore(*_: Any) -> None:
        for key in dtypes:
            vars(module).pop(key, None)

    module.register_forward_pre_hook(narrow)  # behind FSDP2's, which gathers
    module.register_forward_hook(restore, always_call=True)


def _cast(module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    def cast(dtype: torch.dtype, value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value,
                             is_leaf=lambda part: isinstance(part, QuantizedRows))  # which stay as they are

    module.register_forward_pre_hook(lambda _, args, kwargs: cast(inputs, (args, kwargs)), with_kwargs=True)
    if outputs is not None:
        module.register_forward_hook(lambda _, args, output: cast(outputs, output))
    if hasattr(module, "casts"):  # run by its parts, it never comes to the hooks
        module.casts = inputs, outputs  # type: ignore[assignment]
