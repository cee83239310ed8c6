"""FSDP2 parameters of a pipeline stage, as they are between steps: units, places, accumulators, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from dualpipe.nn.accumulators import drop
from dualpipe.parallel.fsdp.private import (
    accumulator_dtype,
    allows_several_groups,
    drop_second_accumulator,
    gathered,
    groups_of,
    private,
    set_idle,
    set_reduce_buffers,
    state_of,
)
from dualpipe.parallel.fsdp.unit_records import (
    ParameterPlace,
    casts_inputs_and_outputs,
    frozen_modules,
    places_of,
    process_groups,
    units_of,
)
from dualpipe.parallel.tied import original_number
from dualpipe.runtime.dtypes import short_name


class StageParameters:
    """FSDP2 units of a stage, which `StageStep` drives through a step; a stage may have none.

    Attributes:
        stage: the module.
        units: the modules that FSDP2 has sharded, outermost first.
        roots: units that are in no other unit.
        groups: FSDP2's groups of parameters, in the order of a backward.
        allows_several_groups: torch allows several groups in a unit.

    Raises ValueError for a stage that a pipeline cannot drive: with torch's `replicate`, with several modules in
    one `fully_shard` call but no unit around them, with CPU offload, or with a frozen module whose dtype nothing casts
    to.
    """

    def __init__(self, stage: nn.Module) -> None:
        sharded: list[Any] = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        self.stage = stage
        self.units = units_of(stage)
        inside = {inner for outer in sharded for inner in outer.modules() if inner is not outer}
        self.roots: list[Any] = [module for module in sharded if module not in inside]
        self.allows_several_groups = all(map(allows_several_groups, self.units))
        self.groups = [group for unit in reversed(self.units) for group in reversed(groups_of(unit))]
        self._is_checked = False  # `check` was called
        groups = process_groups([stage]) if sharded else ()
        self.ranks = tuple(sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)}))
        """Global numbers of the ranks that the parameters are sharded over; empty for plain parameters."""
        self._check_units()
        self._check_frozen_modules()
        for root in self.roots:
            root.set_reshard_after_forward(False)
            # With the default, one buffer, compute waits at each unit until the reduction of the previous one has
            # ended. More buffers cost no memory: each replaces the gradients that were copied into it.
            set_reduce_buffers(root, len(self.units))

    def _check_units(self) -> None:
        """Raise ValueError for units that a pipeline cannot drive."""
        for root in self.roots:
            if any(base.__name__ == "ReplicateModule" for base in type(root).__mro__):  # a private class of torch
                raise ValueError("a module was given to torch's replicate, which a pipeline cannot drive; use "
                                 "fully_shard with a mesh of (ranks, 1)")
            if len(private(state_of(root), "_modules")) > 1:
                raise ValueError("fully_shard was given several modules together that are in no larger unit of their "
                                 "stage; call fully_shard on the stage itself as well")
        for group in self.groups:
            if isinstance(private(group, "offload_policy"), CPUOffloadPolicy):
                raise ValueError("FSDP2's CPU offload is not supported under a pipeline, which keeps parameters "
                                 "gathered for a whole step; leave offload_policy out")

    def _check_frozen_modules(self) -> None:
        """Raise ValueError for a frozen module in a dtype that no trained parameter has, without casts between them.

        `fully_shard` adds no such casts. `shard` adds them, and disables `cast_forward_inputs`.
        """
        compute_dtypes: dict[nn.Parameter, torch.dtype] = {}
        for fsdp_param in self.fsdp_params():
            policy = private(fsdp_param, "mp_policy")
            if not policy.cast_forward_inputs:
                return
            param = private(fsdp_param, "sharded_param")
            compute_dtypes[param] = policy.param_dtype or param.dtype
        trained = {dtype for param, dtype in compute_dtypes.items() if param.requires_grad}
        for name, module in frozen_modules(self.stage):
            dtypes = {compute_dtypes.get(p, p.dtype) for p in module.parameters() if p.is_floating_point()}
            if trained and dtypes and dtypes.isdisjoint(trained) and not casts_inputs_and_outputs(module):
                frozen_in = " and ".join(sorted(map(short_name, dtypes)))
                trained_in = " and ".join(sorted(map(short_name, trained)))
                raise ValueError(
                    f"{name} ({type(module).__name__}) is frozen and computes in {frozen_in}, trained modules in "
                    f"{trained_in}, and fully_shard casts nothing between them: cast it first (.to(dtype)), or shard "
                    "the stage by dualpipe.parallel.shard, which adds casts; if the stage's forward casts by itself, "
                    "give fully_shard MixedPrecisionPolicy(..., cast_forward_inputs=False)")

    @property
    def is_sharded(self) -> bool:
        """Return True if FSDP2 shards parameters of the stage."""
        return bool(self.roots)

    def places(self) -> Iterator[ParameterPlace]:
        """Yield the places of the parameters in FSDP2, including those in other stages (`share_parameter`)."""
        for fsdp_param in self.fsdp_params():
            yield from places_of(fsdp_param)

    def originals(self) -> Iterator[tuple[int, ParameterPlace]]:
        """Yield FSDP2's number of the parameter that each trained parameter was made from, with its first place."""
        for fsdp_param in self.fsdp_params():
            number = original_number(fsdp_param)
            if number is not None and private(fsdp_param, "sharded_param").requires_grad:
                yield number, places_of(fsdp_param)[0]

    def used_by(self, stages: Mapping[int, nn.Module]) -> set[int]:
        """Return the numbers of the other stages that use a parameter of this stage."""
        modules = {module for module, _ in self.places()}.difference(self.stage.modules())
        return {number for number, stage in stages.items() if not modules.isdisjoint(stage.modules())}

    def check(self) -> None:
        """Raise before a step the errors that FSDP2 would raise in it.

        Raises ValueError for a stage sharded too late, and for a parameter that was replaced later: FSDP2 would go on
        with the old one.
        """
        if isinstance(self.stage, FSDPModule) and self.stage not in self.units:
            raise ValueError("a stage was given to fully_shard after the pipeline was built; build the pipeline anew")
        if not self._is_checked:
            self._check_replaced(allowed=(DTensor,))  # in its `_lazy_init` FSDP2 takes other DTensors
            for root in self.roots:
                private(state_of(root), "_lazy_init")()
            self._is_checked = True
        self._check_replaced()

    def _check_replaced(self, allowed: tuple[type, ...] = ()) -> None:
        """Raise ValueError for a parameter that is neither the sharded nor the gathered one of FSDP2's record."""
        for fsdp_param in self.fsdp_params():
            params = (private(fsdp_param, "sharded_param"), gathered(fsdp_param))
            for module, name in places_of(fsdp_param):
                current = module._parameters.get(name)
                if all(current is not param for param in params) and not isinstance(current, allowed):
                    raise ValueError(f"the parameter {name} of a {type(module).__name__} was replaced after it was "
                                     "sharded, and the new one would not be trained; copy values into a parameter, or "
                                     "replace it before fully_shard")

    def reshard(self) -> None:
        """Free the parameters that a call of the stage outside of a step has gathered."""
        for unit in self.units:
            unit.reshard()

    def set_idle(self) -> None:
        """Reset the state of all units: FSDP2 would take a forward after a backward for a recomputation."""
        for unit in self.units:
            set_idle(state_of(unit))

    def discard(self) -> None:
        """Drop gradients that a later step was to reduce."""
        drop(param for param, _ in self.unsharded())
        for fsdp_param in self.fsdp_params():
            drop_second_accumulator(fsdp_param)

    def fsdp_params(self) -> Iterator[Any]:
        """Yield FSDP2's records of the parameters, in the order of a backward."""
        for group in self.groups:
            yield from private(group, "fsdp_params")

    def unsharded(self) -> Iterator[tuple[Tensor, torch.dtype]]:
        """Yield the gathered parameters with the dtype of their accumulators; none before the first gather."""
        for fsdp_param in self.fsdp_params():
            param = gathered(fsdp_param)
            if param is not None:
                yield param, accumulator_dtype(fsdp_param)


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules inside of it, each once, in a quarter of the time of `root.modules()`."""
    modules = [root]
    seen = {root}
    for module in modules:  # grows meanwhile
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
