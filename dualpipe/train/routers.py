"""What [router] of a config asks of the routers of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from dualpipe.nn.router import Router, random_like_stride
from dualpipe.nn.router_set import RouterSet
from dualpipe.train.config import Config

_NEAR, _PATIENCE = 0.9, 50  # of the limit; in steps: routers that start at the limit have left it by then


def build_routers(
    config: Config, stages: Sequence[nn.Module], *, group: dist.ProcessGroup | None, device: torch.device,
    whole: bool = False,
) -> RouterSet:
    """The routers in `stages`, set to what `config.router` says. Collective over `group`.

    whole: `stages` are the whole model, alone on this rank, which runs the micro-batches of all pipelines.

    Raises ValueError for what the model's routers cannot do.
    """
    r, replicas = config.router, config.parallel.replicas
    stride = r.balanced_stride
    if not stride:  # the same for all routers of a model
        first = next((m for stage in stages for m in stage.modules() if isinstance(m, Router)), None)
        stride = 1 if first is None else random_like_stride(first.out_features, first.top_k, config.parallel.ep)
    return RouterSet(
        stages, num_chunks=config.train.num_chunks * (replicas if whole else 1), balance=r.balance,
        level=r.balance_level, z=r.z_loss, bias_update_rate=r.bias_update_rate, balanced=r.balanced,
        balanced_stride=stride, group=None if whole else group, replicas=1 if whole else replicas, device=device,
    )


class CollapseWatch:
    """Notices when one expert of some layer keeps getting nearly every token.

    limit: `load_max_over_mean` where it gets all; 1 is even.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.limit = num_experts / top_k
        self._steps = 0  # near the limit, in a row

    def warning(self, load_max_over_mean: float | None) -> str:
        """What is to be said after one more step: a text once in a collapse, else nothing."""
        near = self.limit > 1 and (load_max_over_mean or 0) >= _NEAR * self.limit
        self._steps = self._steps + 1 if near else 0
        if self._steps != _PATIENCE:
            return ""
        return (f"WARNING: for {_PATIENCE} steps one expert of some layer got nearly every token (load_max_over_mean "
                f"{load_max_over_mean:.2f}, at most {self.limit:g}): its router has collapsed; raise router.balance, "
                "to 0.01 for a start")

