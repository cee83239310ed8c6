"""The device mesh of a job: who shares what with whom.

Dimensions are ("pp", "dp", "ep"), outermost first: the ranks of an expert-parallel group, which talk most, are next to
each other; those of a pipeline, which talk least, furthest apart. Example: 8 ranks as pp 2, dp 2, ep 2: ranks 0 and 1
share the experts of a stage, ranks 0 to 3 hold the same stages, ranks 0 and 4 are one pipeline.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("pp", "dp", "ep")


def build_mesh(pp: int, dp: int, ep: int, device: torch.device) -> DeviceMesh:
    """The mesh over all ranks of the default process group, each of its groups used once.

    A communicator that is made in the middle of a step, in another order on each rank, can deadlock; so all are made
    here. Raises ValueError unless pp * dp * ep ranks are there.
    """
    if pp * dp * ep != dist.get_world_size():
        raise ValueError(f"pp * dp * ep = {pp} * {dp} * {ep} = {pp * dp * ep}, but there are {dist.get_world_size()} "
                         "ranks; start as many as the layout needs")  # fmt: skip
    mesh = init_device_mesh(device.type, (pp, dp, ep), mesh_dim_names=DIMENSIONS)
    for name in DIMENSIONS:
        dist.all_reduce(torch.zeros(1, device=device), group=mesh[name].get_group())
    return mesh
