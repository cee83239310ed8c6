"""Sharding a module as its dtype plan says: into FSDP2 units of one dtype each, with casts where dtypes meet.

Units and casts are those of `parallel.precision.fsdp_units`. The casts are forward hooks of ours and not those of
`MixedPrecisionPolicy`: modules that are no units, or not sharded, need them as well, and until torch 2.11 a unit of
several modules casts the inputs of its first one only.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from dualpipe.kernels.formats import Format, QuantizedRows
from dualpipe.parallel.fsdp.driver import ParameterPlace, keep_hook_on_reduce_stream, lend
from dualpipe.parallel.fsdp.materialize import store
from dualpipe.parallel.fsdp.quantized_gather import PackedGather, attach, gather_packed
from dualpipe.parallel.precision.fsdp_units import Key, ModuleUnits
from dualpipe.parallel.precision.plan import DTypePlan, slots
from dualpipe.runtime.dtypes import short_name


def shard_stages(
    stages: Sequence[nn.Module], mesh: DeviceMesh | None, plan: DTypePlan, *, expert_mesh: DeviceMesh | None = None
) -> None:
    """Shard the stages of one rank, ascending, each as `shard` does.

    Of a parameter that several have, such as that of tied embeddings at both ends of a V, FSDP2 knows in the first of
    them alone; the others see it as it is there, sharded or gathered, and it is reduced when all of them are done.
    """
    owners: dict[nn.Parameter, nn.Module] = {}
    # The owner's first place, and those of others.
    places: defaultdict[nn.Parameter, list[ParameterPlace]] = defaultdict(list)
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

    Raises ValueError where `ModuleUnits` does, the module is sharded already, meshes do not fit the experts, or, with
    no mesh, a parameter would have to compute in another dtype than it is stored in.
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
    cut = ModuleUnits(module, plan, output_dtype=boundary)
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
    for inner, (inputs, outputs) in cut.casts.items():
        _cast(inner, inputs, outputs)
    for inner, dtypes in cut.narrowed.items():
        _narrow(inner, dtypes)
    return module


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
