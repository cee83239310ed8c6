"""FSDP2 units of a stage: the modules, parameter places, process groups and dtypes that FSDP2 has recorded for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dualpipe.parallel.fsdp.private import groups_of, private, state_of

ParameterPlace = tuple[nn.Module, str]  # a module that has a parameter, and the parameter's name there
Hook = TypeVar("Hook", bound=Callable[..., Any])
_OWN_HOOK = "_dualpipe_own_hook"  # attribute of the hooks that `own_hook` has marked
_OUTPUT_DTYPE = "_dualpipe_output_dtype"  # attribute of the hooks that `casting_hook` has marked


def own_hook(hook: Hook) -> Hook:
    """Mark a forward hook of this library that only casts or prepares, and return it."""
    setattr(hook, _OWN_HOOK, True)
    return hook


def casting_hook(hook: Hook, dtype: torch.dtype) -> Hook:
    """Mark a forward hook of this library that casts outputs to a dtype, and return it."""
    setattr(hook, _OUTPUT_DTYPE, dtype)
    return own_hook(hook)


def dtype_of_casts(hook: Callable[..., Any]) -> torch.dtype | None:
    """Return the dtype that a hook casts outputs to, if `casting_hook` has marked it, else None."""
    dtype: torch.dtype | None = getattr(hook, _OUTPUT_DTYPE, None)
    return dtype


def is_own_hook(hook: Callable[..., Any]) -> bool:
    """Return True for a hook that `own_hook` has marked."""
    return hasattr(hook, _OWN_HOOK)


def units_of(stage: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on, outermost first.

    Of several modules that were sharded together, only the first is returned.
    """
    sharded = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    return list({id(state_of(unit)): unit for unit in reversed(sharded)}.values())[::-1]


def fsdp_params_of(units: Iterable[FSDPModule]) -> Iterator[Any]:
    """Yield FSDP2's records of the parameters of units."""
    for group in chain.from_iterable(groups_of(unit) for unit in units):
        yield from private(group, "fsdp_params")


def places_of(fsdp_param: Any) -> list[ParameterPlace]:
    """Return the places where FSDP2 sets a parameter: its owner first, then the modules that share it."""
    info = private(fsdp_param, "_module_info")
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]


def share_parameter(stage: nn.Module, places: Sequence[ParameterPlace]) -> None:
    """Make FSDP2 set a parameter of `stage`, sharded or gathered, at places in other stages too.

    places: the place in `stage`, whose units shard the parameter, then the other places.
    """
    owner_place, *other_places = places
    for fsdp_param in fsdp_params_of(units_of(stage)):
        if owner_place not in places_of(fsdp_param):
            continue
        info = private(fsdp_param, "_module_info")
        for module, name in other_places:
            info.shared_modules.append(module)
            info.shared_param_names.append(name)
            setattr(module, name, private(fsdp_param, "sharded_param"))


def frozen_modules(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost frozen modules that have submodules, with their names."""
    frozen: set[nn.Module] = set()
    for name, module in stage.named_modules():
        is_frozen = not any(param.requires_grad for param in module.parameters())
        if is_frozen and module not in frozen and any(True for _ in module.children()):
            yield name, module
        if is_frozen:
            frozen.update(module.modules())


def casts_inputs_and_outputs(module: nn.Module) -> bool:
    """Return True for an FSDP2 unit whose policy casts its inputs and outputs."""
    if not isinstance(module, FSDPModule):
        return False
    policies = [private(fsdp_param, "mp_policy") for fsdp_param in fsdp_params_of([module])]
    return all(policy.param_dtype and policy.output_dtype for policy in policies)


def process_groups(stages: Iterable[nn.Module], others: Iterable[ProcessGroup] = ()) -> list[ProcessGroup]:
    """Return the groups over which parameters of `stages` are distributed, and `others`.

    Groups of one rank are left out, and so are groups whose ranks are part of another group.
    """
    groups: dict[tuple[int, ...], ProcessGroup] = {}
    for group in (*mesh_groups(stages), *others):
        groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    rank_sets = [set(ranks) for ranks in groups]
    return [group for ranks, group in groups.items()
            if len(ranks) > 1 and not any(set(ranks) < other for other in rank_sets)]


def mesh_groups(stages: Iterable[nn.Module]) -> list[ProcessGroup]:
    """Return all groups of the meshes that parameters of `stages` are distributed over, and those that FSDP2 uses.

    torch caches layouts, so a DTensor may have an equal mesh that was built earlier in the process, whose groups are
    others than those that FSDP2 reduces over.
    """
    meshes: list[DeviceMesh] = []
    for stage in stages:
        meshes += [param.device_mesh for param in stage.parameters() if isinstance(param, DTensor)]
        for unit in units_of(stage):
            meshes += [private(private(group, "mesh_info"), "mesh") for group in groups_of(unit)]
    distinct = {id(mesh): mesh for mesh in meshes}.values()
    return list(dict.fromkeys(group for mesh in distinct for group in mesh.get_all_groups()))


def keep_hook_on_reduce_stream(unit: FSDPModule) -> None:
    """Make FSDP2 run the all-reduce hook of a unit on its reduce-scatter stream; call it once FSDP2 has its streams.

    By default FSDP2 runs such a hook on another stream and then casts and accumulates the reduced gradients there. But
    the memory of these gradients belongs to the reduce-scatter stream, on which the next unit's reduction may overwrite
    them before they are read. With an all-reduce (HSDP), FSDP2 keeps the memory itself and ignores this setting.
    """
    for group in groups_of(unit):
        if private(group, "_all_reduce_hook") is not None and private(group, "_all_reduce_hook_stream") is None:
            group._all_reduce_hook_stream = private(private(group, "comm_ctx"), "reduce_scatter_stream")
