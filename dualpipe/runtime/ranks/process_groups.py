"""Process groups: backends, timeouts, and creation by the members alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dualpipe.runtime.device import current
from dualpipe.runtime.nccl import TOTALS, Traffic, nccl_options


def is_first_rank() -> bool:
    """Return True on the first rank of the job, also before its process group exists: torchrun sets RANK."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank == 0


def backends(group: ProcessGroup) -> dict[str, str]:
    """Return the backends of a group by device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout of a group, for which torch has no public call."""
    device = "cuda" if backends(group).get("cuda") == "nccl" else "cpu"
    return group._get_backend(torch.device(device)).options._timeout


def new_gloo_group(group: ProcessGroup) -> ProcessGroup:
    """Create a gloo group, which can carry host tensors, with the ranks and the timeout of `group`."""
    request = (dist.get_process_group_ranks(group), TOTALS)
    return create_groups([request], parent=group, timeout=timeout_of(group), backend="gloo")[0]


def create_groups(
    requests: Sequence[tuple[Sequence[int], Traffic]], *, parent: ProcessGroup, timeout: timedelta,
    backend: str | None = None,
) -> list[ProcessGroup]:
    """Create a process group for each request; collective over `parent`, while ranks outside of it take no part.

    This rank is in every requested group. All ranks of `parent` request the same number of groups, and the ranks of one
    group request it at the same index. NCCL makes a communicator at its first use, which waits forever if a rank is
    missing: make sure beforehand that all ranks are there.

    Args:
        requests: global ranks, and the use of the group, which sets the limits of NCCL.
        parent: a group that contains the ranks of all requests.
        timeout: of the new groups.
        backend: of the new groups; None: that of the default group.
    """
    world: Any = dist.group.WORLD
    uses_nccl = "nccl" in (backend or dist.get_backend_config(world))
    # torch names a group by its ranks and by the number of groups in the process: ranks with fewer groups add dummies.
    num_groups = len(dist.distributed_c10d._world.pg_names)
    max_groups = torch.tensor(num_groups, device="cpu" if "cpu" in backends(parent) else current())
    dist.all_reduce(max_groups, dist.ReduceOp.MAX, group=parent)
    dummies = [([dist.get_rank()], requests[0][1])] * (int(max_groups) - num_groups)
    # If the default group is bound to a device, torch makes NCCL groups by splitting its communicator, in which all
    # ranks of the job must take part. For a new gloo group too, torch calls the split on ranks that are not members.
    bound_device = world.bound_device_id
    world.bound_device_id = None
    try:
        groups = [
            dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True,
                           pg_options=nccl_options(traffic, timeout) if uses_nccl else None)
            for ranks, traffic in (*dummies, *requests)
        ]
    finally:
        world.bound_device_id = bound_device
    return groups[len(dummies):]
