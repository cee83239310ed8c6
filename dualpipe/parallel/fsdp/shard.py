"""Sharding of modules by FSDP2 as their dtype plan says: into units of one dtype each, with casts between dtypes.

Units and casts come from `parallel.precision.fsdp_units`. The casts are forward hooks and not those of
`MixedPrecisionPolicy`: modules that are not units, or not sharded, need them too, and until torch 2.11 a unit of
several modules casts the inputs of its first module only.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from dualpipe.kernels.formats import Format, QuantizedRows
from dualpipe.parallel.fsdp.materialize import cast_to_storage
from dualpipe.parallel.fsdp.quantized_gather import PackedGather, add_packed_gathers, attach_all
from dualpipe.parallel.fsdp.unit_records import (
    ParameterPlace,
    casting_hook,
    keep_hook_on_reduce_stream,
    own_hook,
    share_parameter,
)
from dualpipe.parallel.precision.dtype_plan import DTypePlan, slots
from dualpipe.parallel.precision.partition import Key, ModuleUnits
from dualpipe.parallel.tied import mark_sharded, original_number
from dualpipe.runtime.dtypes import short_name


def shard_stages(
    stages: Sequence[nn.Module], mesh: DeviceMesh | None, plan: DTypePlan, *, expert_mesh: DeviceMesh | None = None
) -> None:
    """Shard the stages of one rank, in ascending order, each as `shard` does; see there for the arguments and errors.

    A parameter of several stages, such as tied embeddings at both ends of a V, is sharded in the first of them; the
    others hold the same parameter, sharded or gathered. It is reduced once all of these stages are complete.
    """
    owners: dict[nn.Parameter, nn.Module] = {}
    # For each parameter, its first place in the stage that owns it, then its places in other stages.
    places: defaultdict[nn.Parameter, list[ParameterPlace]] = defaultdict(list)
    for stage in stages:
        for module in stage.modules():
            for name, param in module.named_parameters(recurse=False):
                if owners.setdefault(param, stage) is not stage or param not in places:
                    places[param].append((module, name))
    for stage in reversed(stages):  # owners last: sharding replaces their parameters, which the others must recognize
        borrowed = [param for param, owner in owners.items() if owner is not stage]
        shard(stage, mesh, plan, expert_mesh=expert_mesh, unsharded=borrowed)
    if mesh is None:
        return
    for param, param_places in places.items():
        if len(param_places) > 1:
            share_parameter(owners[param], param_places)


def shard(
    module: nn.Module, mesh: DeviceMesh | None, plan: DTypePlan, *, expert_mesh: DeviceMesh | None = None,
    output_dtype: torch.dtype | None = None, unsharded: Iterable[nn.Parameter] = (),
) -> nn.Module:
    """Shard a module with FSDP2 as the plan says, in place, also on the meta device; returns the module.

    mesh: dense parameters are sharded over its last dimension, and replicated over the others, with gradients
    all-reduced (HSDP). None: nothing is sharded, and the dtypes of the plan still apply.

    expert_mesh: the data-parallel ranks that hold the same experts. Parameters that are `DTensor`s already are experts,
    sharded over expert-parallel ranks; they are further sharded over this mesh. All gradients are the mean over the
    ranks of `mesh`.

    output_dtype: the dtype of the module's output (default: the policy's; another one causes a warning). unsharded:
    parameters to leave out, for `shard_stages`.

    A layer is gathered in one unit for each of its dtypes. Inside a layer, the output of a float32 unit stays float32
    unless a rule sets another dtype, and is cast where it enters a module of another dtype; the layer returns the
    policy's `param_dtype`.

    Raises ValueError if `ModuleUnits` does, the module is sharded already, a trained parameter is tied to one of a
    module that is sharded already, the meshes do not fit the experts, or, with no mesh, a parameter would have to
    compute in another dtype than it is stored in.
    """
    if isinstance(module, FSDPModule):
        raise ValueError("the module is sharded already; shard it once, from the outermost module")
    originals = _trained_parameters(module, unsharded)
    for name, param in originals.items():
        if original_number(param) is not None:
            raise ValueError(f"the parameter {name} is tied to one of a module that is sharded already, and would "
                             "become a weight of its own; give all stages of the rank to "
                             "dualpipe.parallel.shard_stages, or the outermost module to shard")
    policy_dtype = plan.policy.output_dtype
    output_dtype = output_dtype or policy_dtype
    if not output_dtype.is_floating_point:
        raise ValueError(f"output_dtype must be a floating-point dtype; got {output_dtype}")
    if output_dtype is not policy_dtype:
        warnings.warn(f"the module returns {short_name(output_dtype)}, not the policy's output_dtype "
                      f"{short_name(policy_dtype)}", stacklevel=2)
    units = ModuleUnits(module, plan, output_dtype=output_dtype)
    cast_to_storage(module, mesh, plan, expert_mesh)
    if mesh is not None and mesh.ndim > 2:  # FSDP2 takes (shard,) or (replicate, shard)
        *replicated, last = mesh.mesh_dim_names or ()
        mesh = DeviceMesh._concatenate([mesh[tuple(replicated)]._flatten("_".join(replicated)), mesh[last]])
    formats = _formats_of(module, plan)
    gathers: list[PackedGather] = []
    assigned: set[nn.Module] = set()
    for modules, key in units.units:
        managed = [inner for outer in modules for inner in outer.modules() if inner not in assigned]
        assigned.update(managed)
        if mesh is not None:
            gathers += _fully_shard(modules, key, mesh, expert_mesh, formats, unsharded)
        if key:
            _accumulate_in(key.reduce, modules, managed, now=mesh is None)
    if gathers:  # before the hooks of FSDP2, whose first forward may pad the shards of all units
        module.register_forward_pre_hook(own_hook(lambda *_: attach_all(gathers)), prepend=True)
    for inner, (inputs, outputs) in units.casts.items():
        _cast(inner, inputs, outputs)
    for inner, dtypes in units.narrowed.items():
        _narrow(inner, dtypes)
    sharded = dict(module.named_parameters(remove_duplicate=False))
    for name, param in originals.items():
        if sharded[name] is not param:
            mark_sharded(param)
    return module


def _trained_parameters(module: nn.Module, unsharded: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the trained parameters to shard, by all their names."""
    left_out = set(unsharded)
    named = module.named_parameters(remove_duplicate=False)
    return {name: param for name, param in named if param.requires_grad and param not in left_out}


def _formats_of(module: nn.Module, plan: DTypePlan) -> dict[tuple[nn.Module, str], Format]:
    """Return the formats of quantized parameters, by owner and name."""
    formats: dict[tuple[nn.Module, str], Format] = {}
    for slot in slots(module):
        format = plan.of(slot.name).format
        if format is not None:
            formats[slot.owner, slot.key] = format
    return formats


def _fully_shard(
    modules: tuple[nn.Module, ...], key: Key | None, dense_mesh: DeviceMesh, expert_mesh: DeviceMesh | None,
    formats: Mapping[tuple[nn.Module, str], Format], unsharded: Iterable[nn.Parameter],
) -> list[PackedGather]:
    """Apply `fully_shard` to the modules of a unit; returns its gathers of quantized bytes."""
    has_experts = key is not None and key.expert
    mesh = expert_mesh if has_experts and expert_mesh is not None else dense_mesh
    num_shards = mesh.size(mesh.ndim - 1)
    quantized = {owner._parameters[name]: format for (owner, name), format in formats.items()}

    def divide(gradient: Tensor) -> None:
        gradient.div_(dense_mesh.size() // mesh.size())

    # FSDP2 cannot shard scalars, and does not reduce the gradients of ignored parameters. So only frozen scalars are
    # ignored, and parameters that another stage shards.
    ignored = {p for m in modules for p in m.parameters() if p.dim() == 0 and not p.requires_grad}.union(unsharded)
    fully_shard(
        list(modules) if len(modules) > 1 else modules[0],
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(key and key.compute, key and key.reduce, cast_forward_inputs=False),
        shard_placement_fn=partial(_expert_placement, quantized, num_shards) if has_experts else None,
        ignored_params=ignored or None,
    )
    first = modules[0]
    gathers = add_packed_gathers(first, formats) if isinstance(first, FSDPModule) else []
    if gathers:
        for module in modules:
            module.register_forward_pre_hook(own_hook(lambda *_: attach_all(gathers)), prepend=True)
    if mesh.size() != dense_mesh.size() and isinstance(first, FSDPModule):
        # FSDP2 takes the mean over the unit's mesh; the hook divides by the remaining factor, which gives the mean over
        # `dense_mesh`. set_gradient_divide_factor is not an option: gloo lacks the reduction that it uses, and if FSDP2
        # is made to use sums instead, it divides twice on a mesh of one rank.
        first.set_all_reduce_hook(divide)
        for module in modules:
            module.register_forward_pre_hook(own_hook(lambda *_: keep_hook_on_reduce_stream(first)))
    return gathers


def _expert_placement(
    quantized: Mapping[nn.Parameter | None, Format], num_shards: int, param: nn.Parameter
) -> Shard | None:
    """Return a dimension to shard an expert parameter on; None: dimension 0, as FSDP2 chooses.

    The dimension is not the one sharded over expert-parallel ranks, since sharding that twice would make a
    _StridedShard, and its size is divisible by the number of shards. A quantized weight is sharded by rows, in whole
    blocks.
    """
    placements = param.placements if isinstance(param, DTensor) else ()
    sharded_dims = {placement.dim for placement in placements if isinstance(placement, Shard)}
    format = quantized.get(param)
    dims = range(param.dim())
    block = 1
    if format is not None:
        dims = range(param.dim() - 1)
        block = format.block[0] if num_shards > 1 else 1
    for dim in dims:
        if dim not in sharded_dims and param.shape[dim] % (num_shards * block) == 0:
            return Shard(dim)
    return None


def _accumulate_in(dtype: torch.dtype, called: Iterable[nn.Module], managed: list[nn.Module], *, now: bool) -> None:
    """Accumulate gradients of the parameters of `managed` modules in `dtype`.

    Gathered parameters exist only from the first forward on, so forward pre-hooks of the `called` modules set the
    dtype. now: also set it immediately, for parameters that are not sharded.
    """
    places = [(module, name) for module in managed for name, _ in module.named_parameters(recurse=False)]

    def set_grad_dtype(*_: Any) -> None:
        for module, name in places:
            param = module._parameters[name]
            if param is not None and param.requires_grad and param.grad_dtype is not dtype:
                param.grad_dtype = dtype

    if now:
        set_grad_dtype()
    for module in called:
        module.register_forward_pre_hook(own_hook(set_grad_dtype))


def _narrow(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast parameters to these dtypes for the module's forward; gradients flow through the cast."""

    def narrow(*_: Any) -> None:
        for key, dtype in dtypes.items():
            param = module._parameters[key]
            if param is not None:
                vars(module)[key] = param.to(dtype)  # attribute lookup prefers it to the parameter

    def restore(*_: Any) -> None:
        for key in dtypes:
            vars(module).pop(key, None)

    module.register_forward_pre_hook(narrow)  # after the hook of FSDP2, which gathers
    module.register_forward_hook(restore, always_call=True)


def _cast(module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    """Cast the floating-point inputs of a module's forward, and its outputs unless the dtype is None."""

    def cast(dtype: torch.dtype, value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value,
                             is_leaf=lambda part: isinstance(part, QuantizedRows))  # quantized rows are not cast

    cast_inputs = own_hook(lambda _, args, kwargs: cast(inputs, (args, kwargs)))
    module.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    if outputs is not None:
        module.register_forward_hook(casting_hook(lambda _, args, output: cast(outputs, output), outputs))
