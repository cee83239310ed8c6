"""The dtypes of every tensor of a run's model, as train.dtype and [dtypes] say."""

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
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.resolve import Resolved


def plan_run(
    resolved: Resolved, recorded: Mapping[str, torch.dtype] | None, mesh: DeviceMesh | None = None
) -> DTypePlan:
    """The plan of a run whose parallel.dp is known: what `dualpipe train` does and `dualpipe dtypes` prints.

    recorded: what the checkpoint that is gone on from says, see `plan_model`; None where there is none.
    """
    config = resolved.config
    return plan_model(
        resolved.model, resolved.dtypes.compute, replicas=config.parallel.replicas, rules=resolved.dtypes.rules,
        recorded=recorded, from_hf=config.init.from_hf if recorded is None else "", mesh=mesh,
    )


def plan_model(
    config: TrainedModel, dtype: torch.dtype, *, replicas: int, rules: Sequence[Rule] = (), from_hf: str = "",
    recorded: Mapping[str, torch.dtype] | None = None, mesh: DeviceMesh | None = None,
) -> DTypePlan:
    """The plan of the whole model, of which each rank has a part: it computes in `dtype` and accumulates gradients in
    at least float32. Collective over `mesh` where `from_hf` is given.

    Parameters that several replicas share are stored in at least float32; others in `dtype`, and the optimizer keeps
    float32 masters. There, where nothing is gathered, what a rule gathers in a format is stored in it: the same bytes.

    recorded, from_hf: the dtypes in the checkpoint that will be loaded, by name, or a directory with a Hugging Face
    checkpoint: what is float32 among narrower ones stays so. One in float32 throughout says nothing; without replicas
    its values become the masters.

    Raises ValueError as `resolve_dtypes` does, and without replicas for a rule that stores what it does not compute in.
    """
    wide, known = torch.promote_types(dtype, torch.float32), recorded
    if replicas == 1:
        rules = [replace(rule, storage=rule.gather, gather=None) if rule.gather else rule for rule in rules]
    whole = _whole_on_meta(config, wide if replicas > 1 else dtype)
    if not isinstance(config, HubConfig):
        known = None  # the stages are made by transformers, which reads all in the dtype that it is told
    elif from_hf:
        known = RankSync.of_mesh(mesh).first(lambda: hub_dtypes(from_hf, config))
    if known and not any(name in known for name, _ in whole.named_parameters()):
        known = None  # of another model, which is said when it is loaded
    policy = DTypePolicy(dtype, wide, dtype, rules)
    plan = resolve_dtypes(whole, policy, known)
    return plan if replicas > 1 else _stored_as_computed(whole, plan, known or {})


def _whole_on_meta(config: TrainedModel, dtype: torch.dtype) -> nn.Module:
    """Return the whole model, on meta and stored in `dtype`, to be looked at alone."""
    (whole,) = stages_on_meta(config)  # which takes seconds for a large model: made once in a run
    if all(parameter.dtype is dtype for parameter in whole.parameters()):
        return whole
    return deepcopy(whole).to(dtype=dtype)


def _stored_as_computed(whole: nn.Module, plan: DTypePlan, known: Mapping[str, torch.dtype]) -> DTypePlan:
    """The plan of ranks that share no storage: a checkpoint's wider values are kept as the optimizer's masters."""
    rounded = {name: plan.of(name).compute for name, dtype in known.items() if name in plan.tensors
               and torch.promote_types(dtype, plan.of(name).compute) is not plan.of(name).compute}
    if rounded:
        plan = resolve_dtypes(whole, plan.policy, {**known, **rounded})
    for name, dtypes in plan.tensors.items():
        if dtypes.storage is not dtypes.compute and not dtypes.format and not dtypes.unsharded:
            raise ValueError(f"{name} is stored in {short_name(dtypes.storage)} and computes in "
                             f"{short_name(dtypes.compute)}, which only a sharded module can: use parallel.dp or "
                             "ep > 1, or leave out storage, as the optimizer keeps float32 masters")
    return plan
