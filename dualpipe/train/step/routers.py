"""The routers of a run's stages, as configured in [router]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.train.config.schema import Config
from dualpipe.train.step.loss import token_weight


def build_routers(
    config: Config, stages: Sequence[nn.Module], *, group: dist.ProcessGroup | None, device: torch.device,
    context: ContextParallel | None = None, whole: bool = False,
) -> RouterSet:
    """Configure the routers in `stages` as `config.router` says and return them as a set. Collective over `group`.

    Call it before the stages are put into a pipeline. Raises ValueError for options that the model's routers lack.

    Args:
        context: context parallelism of the stages; None without it.
        whole: `stages` are the unpipelined model, and this rank runs the micro-batches of all pipelines.
    """
    router = config.router
    train = config.train
    parallel = config.parallel
    return RouterSet(
        stages, num_microbatches=train.num_chunks * (parallel.batch_shards if whole else 1), balance=router.balance,
        level=router.balance_level, z=router.z_loss, bias_update_rate=router.bias_update_rate,
        weight=token_weight(SequenceSplit() if context is None else context.split, train.sequence_length),
        sequence_group=context.stream.group if context is not None and context.split.size > 1 else None,
        group=group, replicas=1 if whole else parallel.replicas, device=device,
    )
