"""The routers of a run's stages, as [router] says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.parallel.context.context_parallel import ContextParallel
from dualpipe.parallel.experts.shared_loads import share_loads
from dualpipe.train.config.schema import Config
from dualpipe.train.step.loss import token_weight


def build_routers(
    config: Config, stages: Sequence[nn.Module], *, group: dist.ProcessGroup | None, device: torch.device,
    context: ContextParallel | None = None, whole: bool = False,
) -> RouterSet:
    """The routers in `stages`, set to what `config.router` says, before a pipeline has them. Collective over `group`.

    context: of the stages, where ranks share sequences. whole: `stages` are the whole model, alone on this rank, which
    runs the micro-batches of all pipelines.

    Raises ValueError for what the model's routers cannot do.
    """
    r, train, parallel = config.router, config.train, config.parallel
    split = SequenceSplit() if context is None else context.split
    if context is not None and split.size > 1 and r.balance and r.balance_level != "global":
        parts = train.micro_batch_size if r.balance_level == "sequence" else 1
        share_loads(stages, context.stream.all_to_all, parts)
    return RouterSet(
        stages, num_microbatches=train.num_chunks * (parallel.batch_shards if whole else 1), balance=r.balance,
        level=r.balance_level, z=r.z_loss, bias_update_rate=r.bias_update_rate,
        weight=token_weight(split, train.sequence_length), group=group, replicas=1 if whole else parallel.replicas,
        device=device,
    )
