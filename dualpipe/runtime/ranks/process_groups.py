"""Process groups: their backends and timeouts, and how new ones are made by their members alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dualpipe.runtime.device import current
from dualpipe.runtime.nccl import TOTALS, Traffic, nccl_options


def backends(group: ProcessGroup) -> dict[str, str]:
    """Backend by device type: the configuration is such as "cpu:gloo,cuda:nccl"."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def timeout_of(group: ProcessGroup) -> timedelta:
    """The timeout that the caller gave the process group; torch has no public call for it."""
    device = "cuda" if backends(group).get("cuda") == "nccl" else "cpu"
    return group._get_backend(torch.device(device)).options._timeout


def new_gloo_group(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks and timeout that can carry host tensors."""
    wanted = dist.get_process_group_ranks(group), TOTALS
    return create_groups([wanted], beside=group, timeout=timeout_of(group), backend="gloo")[0]


def create_groups(
    wanted: Sequence[tuple[Sequence[int], Traffic]], *, beside: ProcessGroup, timeout: timedelta,
    backend: str | None = None,
) -> list[ProcessGroup]:
    """A process group for each of these lists of ranks of the default group, and what it carries with NCCL.

    This rank is in all of them. Collective over `beside`: its ranks ask for as many groups each, those of one group for
    it at the same place. Ranks outside take no part, however many there are. NCCL's communicators are made at their
    first use, which no timeout ends: see before that all ranks are there. backend: by default the default group's.
    """
    world: Any = dist.group.WORLD
    nccl = "nccl" in (backend or dist.get_backend_config(world))
    # torch names such a group by its ranks and how many groups the process has: ranks that have fewer make up for it.
    have = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor(have, device="cpu" if "cpu" in backends(beside) else current())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=beside)
    filling = [([dist.get_rank()], wanted[0][1])] * (int(most) - have)
    # Beside a default group that is bound to a device, torch splits each NCCL group off that, for which it needs all
    # ranks of the job, and where it makes a gloo group, it has all but the members do so.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        created = [
            dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True,
                           pg_options=nccl_options(traffic, timeout) if nccl else None)
            for ranks, traffic in (*filling, *wanted)
        ]
    finally:
        world.bound_device_id = device
    return created[len(filling):]
