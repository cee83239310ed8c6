"""The stages of a rank for a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.models.stages import Recompute
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.experts.dispatcher import Dispatch
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.ranks.rank_sync import RankSync

if TYPE_CHECKING:
    from dualpipe.hf import CausalLMStage
    from dualpipe.hf.model import TransformersModel


def build_transformers_stages(
    model: TransformersModel, num_stages: int, numbers: Sequence[int], *, plan: DTypePlan, device: torch.device,
    mesh: DeviceMesh | None, seed: int, from_hf: str, layers_per_stage: Sequence[int], recompute: Sequence[str],
    dispatch: Dispatch,
) -> tuple[nn.Module, ...]:
    """Build the stages with these numbers, sharded and with weights. Collective over `mesh`.

    plan: dtypes of the whole model. All other arguments as in `build_model` and `StageOptions`. Raises ValueError, on
    all ranks, like `load_stages`.
    """
    from dualpipe.hf import load_stages

    rules = Recompute(recompute, model.num_hidden_layers)
    compute = plan.policy.param_dtype
    is_sharded = Mesh.of(mesh).replicas > 1
    stages = load_stages(
        from_hf or model.config, num_stages, numbers, mesh=mesh, policy=plan.policy, seed=seed,
        dtype=torch.promote_types(compute, torch.float32) if is_sharded else compute, layers_per_stage=layers_per_stage,
        dispatch=dispatch)
    RankSync.of_mesh(mesh).agree(lambda: _check_ties(stages, model, from_hf))
    for stage in stages:
        stage.recompute = rules
        if mesh is None:
            stage.to(device)
    return tuple(stages)


def _check_ties(stages: Sequence[CausalLMStage], model: TransformersModel, from_hf: str) -> None:
    """Raise ValueError if a head is tied by config.json alone: the files have another one than the embedding."""
    if any(stage.is_tied != model.is_tied for stage in stages if stage.is_first or stage.is_last):
        raise ValueError(f"init.from_hf = {from_hf!r} has a head that differs from the embedding, but the model ties "
                         'the two; write "tie_word_embeddings": false into its config.json')
