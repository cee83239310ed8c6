"""Shard the stages of a rank over a mesh: experts over "ep", then all parameters by FSDP2 as their dtype plan says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

from torch import nn

from dualpipe.parallel.experts.dispatcher import Dispatch, ExpertParallel, shard_experts
from dualpipe.parallel.fsdp.shard import shard_stages
from dualpipe.parallel.mesh import Mesh
from dualpipe.parallel.precision.dtype_plan import DTypePlan
from dualpipe.runtime.ranks.rank_sync import RankSync


def shard_over_mesh(
    stages: Sequence[nn.Module], mesh: Mesh, plan: DTypePlan, *, num_experts: Collection[int], dispatch: Dispatch,
    fp8_rows: int | None = None, experts_are_local: bool = False,
) -> None:
    """Shard the stages of one rank, in ascending order, over the pipelines of `mesh`. Collective over all of its ranks.

    With one pipeline nothing is sharded, and the dtypes of the plan still apply.

    Args:
        stages: they have a method `use_expert_parallelism(experts: ExpertParallel)`.
        num_experts: numbers of experts of a layer that occur in the stages.
        dispatch: see `ExpertParallel`.
        fp8_rows: see `ExpertParallel`.
        experts_are_local: the stages contain this rank's experts only, see `shard_experts`.

    Raises ValueError, on all ranks, for quantized weights whose blocks cannot be split over the ranks, and for a
    dispatch that does not fit their nodes.
    """
    if mesh.replicas == 1:
        shard_stages(stages, None, plan)
        return
    expert_mesh = mesh.part("ep")
    if expert_mesh is not None and expert_mesh.size() > 1:

        def expert_parallels() -> list[list[ExpertParallel]]:
            return [
                [ExpertParallel(count, expert_mesh, fp8_rows=fp8_rows, dispatch=dispatch,
                                ranks_per_node=mesh.ranks_per_node) for count in sorted(num_experts)]
                for _ in stages
            ]

        # "auto" fits any nodes, anything else may fit those of some ranks only: the ranks agree on an error.
        by_stage = RankSync.of_mesh(None if dispatch == "auto" else mesh.device_mesh).agree(expert_parallels)
        for stage, stage_experts in zip(stages, by_stage, strict=True):
            shard_experts(stage, expert_mesh, are_local=experts_are_local)
            use_expert_parallelism = cast(Callable[[ExpertParallel], None], stage.use_expert_parallelism)
            for experts in stage_experts:
                use_expert_parallelism(experts)
    # The blocks may fit on some ranks and not on others: the ranks agree on an error.
    is_quantized = any(dtypes.format for dtypes in plan.tensors.values())
    RankSync.of_mesh(mesh.device_mesh if is_quantized else None).agree(
        lambda: shard_stages(stages, mesh.dense, plan, expert_mesh=mesh.experts))
