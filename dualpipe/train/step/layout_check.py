"""Check that a run accepts a layout with its dispatch and formats, by the run's own checks, without ranks or devices.

`dualpipe plan` and `dualpipe memory` use it, so that they do not recommend what a run refuses.
"""

from __future__ import annotations

from dualpipe.models import HubConfig
from dualpipe.parallel import DTypePlan
from dualpipe.parallel.experts.dispatcher import check_dispatch, experts_per_rank
from dualpipe.quantized.quantize_model import check_sharding
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.schema import Config
from dualpipe.train.step.stages import fp8_dispatch_block


def check_layout(config: Config, model: TrainedModel, plan: DTypePlan | None, ranks_per_node: int) -> None:
    """Raise the ValueError with which a run on devices would refuse this layout.

    Args:
        config: parallel.dp is known.
        model: its model.
        plan: its dtypes; None for a model of transformers.
        ranks_per_node: successive ranks that share a node.
    """
    p = config.parallel
    experts_per_rank("the model", model.num_experts or p.ep, p.ep)
    for first in range(0, p.world_size if p.ep > 1 else 0, p.ep):
        check_dispatch(p.dispatch, range(first, first + p.ep), ranks_per_node)
    if plan is None or not isinstance(model, HubConfig):
        return
    if config.dtypes.fp8_dispatch:
        fp8_dispatch_block(plan, config.dtypes.gemm_precision)
    if any(dtypes.format for dtypes in plan.tensors.values()):
        _check_formats(model, plan, p.dense_shards)


def _check_formats(model: HubConfig, plan: DTypePlan, num_shards: int) -> None:
    """Raise ValueError for a matrix whose blocks sharding would cut. num_shards: ranks that share a dense parameter."""
    (whole,) = stages_on_meta(model)
    for name, param in whole.named_parameters():
        format = plan.of(name).format
        if format is not None:
            check_sharding(name, param, format, num_shards)
