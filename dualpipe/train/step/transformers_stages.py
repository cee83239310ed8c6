"""The stages of a rank for a transformers model: building them, and saving the trained model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint.hub.save import CARRIED
from dualpipe.models.stages import Recompute
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.experts.dispatcher import Dispatch
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.dtypes import long_name
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.ranks.rank_sync import RankSync

if TYPE_CHECKING:
    from dualpipe.hf import CausalLMStage
    from dualpipe.hf.model import TransformersModel


def build_transformers_stages(
    model: TransformersModel, num_stages: int, numbers: Sequence[int], *, plan: DTypePlan, device: torch.device,
    mesh: DeviceMesh | None, seed: int, from_hf: str, layers_per_stage: Sequence[int], recompute: Sequence[str],
    dispatch: Dispatch, all_to_all: str,
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
        dispatch=dispatch, all_to_all=all_to_all)
    for stage in stages:
        stage.recompute = rules
        if mesh is None:
            stage.to(device)
    return tuple(stages)


def save_transformers_stages(
    stages: Sequence[nn.Module], target: Path, *, mesh: DeviceMesh | None, plan: DTypePlan, source: str
) -> None:
    """Save the model in Hugging Face's format, with the tokenizer files of `source`, if not "". Collective.

    Tensors are saved in their compute dtype, or as a rule of the plan says.
    """
    from dualpipe.hf import save_stages

    save_stages(cast("Sequence[CausalLMStage]", stages), target, mesh=mesh, plan=plan)

    def finish() -> None:
        path = target / "config.json"
        description = json.loads(path.read_text(encoding="utf-8")) | {"dtype": long_name(plan.policy.param_dtype)}
        replace_file(path, json.dumps(description, indent=2) + "\n")
        for name in CARRIED if source else ():
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, target / name)

    RankSync.of_mesh(mesh).first(finish)
