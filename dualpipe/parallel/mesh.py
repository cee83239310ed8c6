"""The device mesh of a job: who shares what with whom.

Dimensions are ("pp", "dp", "ep"), outermost first: the ranks of an expert-parallel group, which talk most, are next to
each other; those of a pipeline, which talk least, furthest apart. Example: 8 ranks as pp 2, dp 2, ep 2: ranks 0 and 1
share the experts of a stage, ranks 0 to 3 hold the same stages, ranks 0 and 4 are one pipeline.

Every rank of "dp" and "ep" together has data of its own, so dense parameters are sharded over both, `dense_mesh`;
experts, of which each rank of "ep" holds others, over "dp" alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("pp", "dp", "ep")


def build_mesh(
    pp: int, dp: int | None, ep: int, device: torch.device, *, timeout: timedelta | None = None
) -> DeviceMesh:
    """The mesh over all ranks of the default process group, each of its groups used once.

    A communicator that is made in the middle of a step, in another order on each rank, can deadlock; so all are made
    here. `dp` None: what pp and ep leave. `timeout`: after which a rank gives up waiting for another; that of the
    default group is not inherited. Raises ValueError, with the sizes that are possible, unless there are pp * dp * ep
    ranks.
    """
    sizes = mesh_sizes(dist.get_world_size(), pp, dp, ep)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
    for part in (*(mesh[name] for name in DIMENSIONS), dense_mesh(mesh)):
        if timeout is not None:
            part.get_group()._get_backend(device)._set_default_timeout(timeout)  # torch has no public call for it
        dist.all_reduce(torch.zeros(1, device=device), group=part.get_group())
    rows = torch.zeros(sizes[-1], device=device)  # NCCL connects pairs of ranks on their first all-to-all
    dist.all_to_all_single(torch.empty_like(rows), rows, group=mesh["ep"].get_group())
    return mesh


def dense_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that dense parameters are sharded over, of a mesh from `build_mesh`: "dp" and "ep" as one dimension."""
    return mesh["dp", "ep"]._flatten("dp_ep")  # torch keeps it: made once, and found again by its name


def mesh_sizes(ranks: int, pp: int, dp: int | None, ep: int) -> tuple[int, int, int]:
    """(pp, dp, ep) with dp inferred where it is None; raises ValueError where they do not make `ranks`."""
    given = {name: size for name, size in zip(DIMENSIONS, (pp, dp, ep)) if size is not None}
    if wrong := {name: size for name, size in given.items() if size < 1}:
        raise ValueError(f"sizes of the mesh must be at least 1; got {_product(wrong)}")
    rest, unfit = divmod(ranks, pp * ep)
    if unfit or dp not in (None, rest):
        raise ValueError(f"{_product(given)} does not fit {ranks} ranks: pp * dp * ep must be {ranks}. Possible: "
                         f"{'; '.join(_possible(ranks, given))}; or start another number of ranks")
    return pp, rest, ep


def _possible(ranks: int, given: dict[str, int]) -> Iterator[str]:
    """What each of the given sizes could be if the others stay."""
    exact = len(given) == len(DIMENSIONS)
    for name in given:
        others, unfit = 1, False
        for other, size in given.items():
            others *= size if other != name else 1
        rest, unfit = divmod(ranks, others)
        kept = _product({other: size for other, size in given.items() if other != name})
        if unfit:
            yield f"with {kept}, no {name}"
        else:
            yield f"with {kept}, {name} = {rest if exact else _either(divisors(rest))}"


def _product(sizes: dict[str, int]) -> str:
    return f"{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))}"


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
