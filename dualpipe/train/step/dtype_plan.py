"""The dtypes of every tensor of a run's model, as configured in train.dtype and [dtypes]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint import hub_dtypes
from dualpipe.models import HubConfig
from dualpipe.parallel import DTypePlan, DTypePolicy, Rule, resolve_dtypes
from dualpipe.runtime.dtypes import short_name
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.train.config.fit import Resolved
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta


def resolve_run_dtypes(
    resolved: Resolved, recorded: Mapping[str, torch.dtype] | None, mesh: DeviceMesh | None = None
) -> DTypePlan:
    """Return the plan that `dualpipe train` uses and `dualpipe dtypes` prints. parallel.dp must be resolved.

    recorded: dtypes in the checkpoint to resume from, see `resolve_model_dtypes`; None without one.
    """
    config = resolved.config
    return resolve_model_dtypes(
        resolved.model, resolved.dtypes.compute, replicas=config.parallel.replicas, rules=resolved.dtypes.rules,
        recorded=recorded, from_hf=config.init.from_hf if recorded is None else "", mesh=mesh,
    )


def resolve_model_dtypes(
    config: TrainedModel, dtype: torch.dtype, *, replicas: int, rules: Sequence[Rule] = (), from_hf: str = "",
    recorded: Mapping[str, torch.dtype] | None = None, mesh: DeviceMesh | None = None,
) -> DTypePlan:
    """Return the plan of the whole model, which computes in `dtype` and accumulates gradients in at least float32.

    With several replicas, parameters are sharded and stored in at least float32. With one they are stored in `dtype`,
    and the optimizer keeps float32 masters. Nothing is gathered then, so weights are stored in the `gather` format of
    their rule: the same bytes as after a gather.

    Args:
        recorded: dtypes in the checkpoint to load, by name.
        from_hf: directory with a Hugging Face checkpoint to load instead. Its dtypes count like recorded ones:
            parameters in float32 among narrower ones stay float32. A checkpoint that is float32 throughout does not
            change the plan; with one replica its values become the masters.

    Collective over `mesh` with `from_hf`. Raises ValueError like `resolve_dtypes`, and with one replica for a rule
    whose storage differs from its compute dtype.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if replicas == 1:
        rules = [replace(rule, storage=rule.gather, gather=None) if rule.gather else rule for rule in rules]
    whole = _whole_on_meta(config, wide if replicas > 1 else dtype)
    loaded = recorded
    if not isinstance(config, HubConfig):
        loaded = None  # transformers builds these stages and reads all weights in the dtype that it is given
    elif from_hf:
        loaded = RankSync.of_mesh(mesh).first(lambda: hub_dtypes(from_hf, config))
    if loaded and not any(name in loaded for name, _ in whole.named_parameters()):
        loaded = None  # a checkpoint of another model: loading it raises the error
    policy = DTypePolicy(dtype, wide, dtype, rules)
    plan = resolve_dtypes(whole, policy, loaded)
    return plan if replicas > 1 else _store_as_computed(whole, plan, loaded or {})


def _whole_on_meta(config: TrainedModel, dtype: torch.dtype) -> nn.Module:
    """Return the whole model on meta, stored in `dtype`. It must not be changed."""
    (whole,) = stages_on_meta(config)  # cached: building a large model takes seconds
    if all(parameter.dtype is dtype for parameter in whole.parameters()):
        return whole
    return deepcopy(whole).to(dtype=dtype)


def _store_as_computed(whole: nn.Module, plan: DTypePlan, loaded: Mapping[str, torch.dtype]) -> DTypePlan:
    """Return the plan of a model that is not sharded: parameters are stored in their compute dtype.

    Values of a checkpoint in a wider dtype become the optimizer's masters.

    loaded: dtypes in the checkpoint, by name.
    """
    rounded = {}
    for name, dtype in loaded.items():
        if name not in plan.tensors:
            continue
        compute = plan.of(name).compute
        if torch.promote_types(dtype, compute) is not compute:
            rounded[name] = compute
    if rounded:
        plan = resolve_dtypes(whole, plan.policy, {**loaded, **rounded})
    for name, dtypes in plan.tensors.items():
        if dtypes.storage is not dtypes.compute and not dtypes.format and not dtypes.unsharded:
            raise ValueError(f"{name} is stored in {short_name(dtypes.storage)} and computes in "
                             f"{short_name(dtypes.compute)}, which only a sharded module can: use parallel.dp or "
                             "ep > 1, or leave out storage, as the optimizer keeps float32 masters")
    return plan
