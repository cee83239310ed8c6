"""A rank's share of the model that a hub-style config.json describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.models import Qwen3MoeConfig, build_stages
from dualpipe.models.stages import Recompute
from dualpipe.nn import cross_entropy_loss
from dualpipe.parallel.expert import ExpertParallel, shard_experts
from dualpipe.parallel.materialize import build_on_meta, materialize
from dualpipe.parallel.mesh import dense_mesh
from dualpipe.parallel.precision import DTypePlan, DTypePolicy, resolve_dtypes, shard
from dualpipe.schedule import Schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # [train] dtype


class Model(NamedTuple):
    """The stages that one rank holds, in ascending order."""

    name: str
    stages: tuple[nn.Module, ...]
    vocab_size: int
    has_first: bool
    has_last: bool


def read_model_config(path: str | Path) -> Qwen3MoeConfig:
    """Read a hub-style config.json.

    Raises:
        ValueError: the file is missing, is not JSON, or describes no model that this library has.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"model.config: there is no file {path}; give the path of a hub-style config.json")
    try:
        return Qwen3MoeConfig.from_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def build_model(
    config: Qwen3MoeConfig, schedule: Schedule, rank: int, *, seed: int, dtype: torch.dtype, device: torch.device,
    mesh: DeviceMesh | None = None, recompute: Sequence[str] = (),
) -> Model:  # fmt: skip
    """Build the stages of pipeline rank `rank`. The weights depend on `seed` only, not on how the model is cut.

    Raises ValueError for a model that cannot be cut so.

    recompute: what is computed again instead of kept, see `dualpipe.models.stages.Recompute`.
    mesh: from `build_mesh`. Where it has several pipelines, they share the parameters' storage: those are stored in at
    least float32 and computed with in `dtype`. Without, they are stored in `dtype`.
    """
    numbers = schedule.rank_stages(rank)
    first, last = 0 in numbers, schedule.num_stages - 1 in numbers
    if config.tie_word_embeddings and first != last:
        raise ValueError(
            f"tie_word_embeddings needs the first and the last stage on one rank, but schedule {schedule.name!r} puts "
            "them on two; use a V-shaped schedule (dualpipev, zbv)"
        )
    mesh = mesh if mesh is not None and dense_mesh(mesh).size() > 1 else None
    if config.tie_word_embeddings and mesh is not None:
        raise ValueError("tie_word_embeddings needs the embedding and the head in one FSDP2 unit, which two stages "
                         "cannot be; set it to false in the model's config.json, or parallel.dp = ep = 1")  # fmt: skip
    try:
        stages = build_on_meta(lambda: build_stages(config, schedule.num_stages, only=numbers))
    except ValueError as error:
        raise ValueError(f"parallel.pp = {schedule.num_ranks} with schedule {schedule.name!r}: {error}") from error
    for stage in stages:
        stage.recompute = Recompute(recompute)
    filled = _initialised(stages, seed, dtype, device, mesh)
    return Model("Qwen3-MoE", filled, config.vocab_size, first, last)


def build_whole(config: Qwen3MoeConfig, *, seed: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The unpipelined model, with the same weights."""
    (stage,) = _initialised(build_on_meta(lambda: build_stages(config, 1)), seed, dtype, device)
    return stage


def plan_dtypes(stages: list[nn.Module], dtype: torch.dtype, *, sharded: bool) -> DTypePlan:
    """The plan of a model that computes in `dtype` and accumulates gradients in at least float32.

    Sharded parameters are stored in at least float32; others in `dtype`, and the optimizer keeps float32 masters.
    """
    wide = torch.promote_types(dtype, torch.float32)
    nn.ModuleList(stages).to(dtype=wide if sharded else dtype)  # together, so that a tied weight stays one
    return resolve_dtypes(stages, DTypePolicy(dtype, wide, dtype))


def _initialised(
    stages: list[nn.Module], seed: int, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None = None
) -> tuple[nn.Module, ...]:  # fmt: skip
    plan = plan_dtypes(stages, dtype, sharded=mesh is not None)
    for stage in stages:
        if mesh is not None:
            shard_experts(stage, mesh["ep"])
            stage.use_expert_parallelism(ExpertParallel(stage.config.num_experts, mesh["ep"]))
        dense, experts = (None, None) if mesh is None else (dense_mesh(mesh), mesh["dp"])
        shard(stage, dense, plan, expert_mesh=experts)
        materialize(stage, device, plan, seed=seed)
    return tuple(stages)


def micro_batch_loss(num_chunks: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A criterion whose sum over a step's micro-batches is the mean over the global batch."""

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy_loss(logits, targets) / num_chunks

    return criterion
