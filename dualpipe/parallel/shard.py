"""Sharding a module as its dtype plan says, or having it compute as the plan says where it is not sharded.

The casts are forward hooks of ours and not those of `MixedPrecisionPolicy`: modules that are not units need them as
well, so do modules that are not sharded at all, and until torch 2.11 a unit of several modules casts the inputs of its
first one only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from dualpipe.dtypes import short_name
from dualpipe.parallel.dtype_plan import DTypePlan, DTypePolicy, slots
from dualpipe.parallel.units import Cut, Unit


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
        ValueError: `Cut` does; the module is sharded already; meshes do not fit the experts; or, with no mesh, a
            parameter would have to compute in another dtype than it is stored in.
    """
    if isinstance(module, FSDPModule):
        raise ValueError("the module is sharded already; shard it once, from the outermost module")
    boundary = boundary_dtype(plan.policy, output_dtype)
    cut = Cut(module, plan, output_dtype=boundary)
    _check_meshes(module, mesh, plan, expert_mesh)
    _store(module, plan)
    dense = None if mesh is None else _two_dimensional(mesh)
    taken: set[nn.Module] = set()
    for unit in cut.units:
        managed = [m for outer in unit.modules for m in outer.modules() if m not in taken]
        taken.update(managed)
        if dense is not None:
            _fully_shard(unit, dense, expert_mesh)
        if unit.key:
            _accumulate_in(unit.key.reduce, unit.modules, managed, now=dense is None)
    if hasattr(module, "segments"):  # run by its parts, it never comes to the hook
        module.boundary_dtype = boundary  # type: ignore[assignment]
    for cast in cut.casts:
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
        whole, experts = (None if m is None else m.size() for m in (mesh, expert_mesh))
        if whole is None or experts is None or experts * ep != whole:
            raise ValueError(f"{name} is sharded over {ep} expert-parallel ranks: expert_mesh must be given, and mesh "
                             f"have {ep} times its ranks; their sizes are {experts} and {whole}")


def _store(module: nn.Module, plan: DTypePlan) -> None:
    """Give every tensor its storage dtype, in place, so that one shared with another module stays shared."""
    for slot in slots(module):
        tensor, storage = slot.tensor, plan.of(slot.name).storage
        if tensor.dtype is storage:
            continue
        if slot.is_buffer:
            setattr(slot.owner, slot.key, tensor.to(storage))
        elif tensor.requires_grad and torch.promote_types(tensor.dtype, storage) is not storage:
            raise ValueError(f"{slot.name} is {short_name(tensor.dtype)} and trainable, but the plan stores it in "
                             f"{short_name(storage)}: resolve the plan for a model built the same way")
        elif isinstance(tensor, DTensor):  # its data is not assignable
            stored = nn.Parameter(tensor.detach().to(storage), requires_grad=tensor.requires_grad)
            setattr(slot.owner, slot.key, stored)
        else:
            tensor.data = tensor.data.to(storage)


def _fully_shard(unit: Unit, dense: DeviceMesh, expert_mesh: DeviceMesh | None) -> None:
    of_experts = unit.key is not None and unit.key.expert
    mesh = expert_mesh if of_experts and expert_mesh is not None else dense
    precision = MixedPrecisionPolicy(
        param_dtype=unit.key.compute if unit.key else None, reduce_dtype=unit.key.reduce if unit.key else None,
        cast_forward_inputs=False,
    )
    # Nothing trainable is ever ignored, because the gradient of an ignored parameter is not reduced.
    scalars = {p for m in unit.modules for p in m.parameters() if p.dim() == 0 and not p.requires_grad}
    fully_shard(
        list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],
        mesh=mesh,
        mp_policy=precision,
        shard_placement_fn=partial(_off_dimension_0, mesh.size(mesh.ndim - 1)) if of_experts else None,
        ignored_params=scalars or None,
    )
    first = unit.modules[0]
    if mesh.size() != dense.size() and isinstance(first, FSDPModule):
        # FSDP2 takes the mean over its own mesh. Not set_gradient_divide_factor: gloo lacks the reduction that it
        # uses, and with its sums forced, a mesh of one rank is divided twice.
        first.set_all_reduce_hook(partial(_divide, dense.size() // mesh.size()))


def _two_dimensional(mesh: DeviceMesh) -> DeviceMesh:
    """FSDP2 takes (shard,) or (replicate, shard): dimensions that are replicated over become one."""
    if mesh.ndim <= 2:
        return mesh
    *replicated, last = mesh.mesh_dim_names or ()
    flat = mesh[tuple(replicated)]._flatten("_".join(replicated))
    return DeviceMesh._concatenate([flat, mesh[last]])


def _off_dimension_0(ranks: int, param: nn.Parameter) -> Shard | None:
    """A dimension that is not sharded over experts and divides evenly; sharding one twice makes a _StridedShard."""
    placements = param.placements if isinstance(param, DTensor) else ()
    taken = {placement.dim for placement in placements if isinstance(placement, Shard)}
    free = (dim for dim in range(param.dim()) if dim not in taken and param.shape[dim] % ranks == 0)
    dim = next(free, None)
    return None if dim is None else Shard(dim)


def _divide(factor: int, gradient: Tensor) -> None:
    gradient.div_(factor)


def _accumulate_in(
    dtype: torch.dtype, called: Iterable[nn.Module], managed: Iterable[nn.Module], *, now: bool
) -> None:
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


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
    return _cast_outputs(dtype, module, args, (args, kwargs))


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: tuple, output: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, output)
