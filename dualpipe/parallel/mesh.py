"""The device mesh of a job: its dimensions, the process groups along them, and the place of this rank.

Dimensions are ("pp", "dp", "ep"), outermost first: expert-parallel ranks communicate most and are adjacent; pipeline
ranks communicate least and are furthest apart. Example: 8 ranks as pp 2, dp 2, ep 2: ranks 0 and 1 share the experts of
a stage, ranks 0 to 3 hold the same stages, ranks 0 and 4 are one pipeline. Context parallelism adds "cp" before "ep":
its ranks share the rows of a batch, and each has some of the tokens. To add a dimension, name it in `TRAFFIC`, whose
order is that of the mesh, and add it to `build_mesh` and `_RankLayout`.

Parameters are sharded over all ranks that hold the same stages. With `dp_replicate`, "dp" is divided into that many
parts, each with all parameters, sharded over the ranks of the part (HSDP). This adds no dimension to the mesh: the rows
of a batch that a rank holds stay the same.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.runtime.device import single_queue_problem
from dualpipe.runtime.nccl import CONTEXT, LINK, SHARDS
from dualpipe.runtime.nccl import EXPERTS as EXPERT_ROWS
from dualpipe.runtime.ranks.process_groups import backends, connect_all, create_groups, timeout_of
from dualpipe.runtime.recorder import Recorder

TRAFFIC = {"pp": LINK, "dp": SHARDS, "cp": CONTEXT, "ep": EXPERT_ROWS}  # NCCL settings of each dimension's groups
DIMENSIONS = tuple(name for name in TRAFFIC if name != "cp")  # every mesh has these; "cp" only above size 1
DENSE = tuple(name for name in TRAFFIC if name != "pp")  # ranks along these hold the same stages
EXPERTS = tuple(name for name in DENSE if name != "ep")  # ranks along these hold the same experts
BATCH = tuple(name for name in DENSE if name != "cp")  # ranks along these hold different rows of the global batch
# Attribute that `build_mesh` sets on the device mesh: its submeshes for `Mesh.part`, by the names of their dimensions.
_FLATTENED = "dualpipe_parts"
_RANKS_PER_NODE = "dualpipe_ranks_per_node"  # attribute that `build_mesh` sets as well
_REPLICATE = "replicate"  # the parts of "dp" with `dp_replicate`
_SHARD = "shard"  # the ranks of one part


@dataclass(frozen=True)
class Mesh:
    """Sizes of a mesh, the coordinates of this rank in it, and the device mesh with its process groups.

    sizes, places: the size and this rank's coordinate in each dimension: all of `DIMENSIONS`, and any others of the
    device mesh. device_mesh: None for this process alone, or for a mesh that is only planned.
    """

    sizes: Mapping[str, int]
    places: Mapping[str, int]
    device_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, device_mesh: DeviceMesh | None) -> Mesh:
        """Wrap a mesh from `build_mesh`, or any other; dimensions it lacks have size 1. None: this process alone."""
        if device_mesh is None:
            return cls.planned()
        names = device_mesh.mesh_dim_names or ()
        coordinate = device_mesh.get_coordinate() or ()
        all_sizes = dict.fromkeys(DIMENSIONS, 1) | dict(zip(names, device_mesh.shape))
        ordered_names = dict.fromkeys((*TRAFFIC, *all_sizes))
        sizes = {name: all_sizes[name] for name in ordered_names if name in all_sizes}
        return cls(sizes, dict.fromkeys(DIMENSIONS, 0) | dict(zip(names, coordinate)), device_mesh)

    @classmethod
    def planned(cls, **sizes: int) -> Mesh:
        """Return a mesh of these sizes (default 1) without processes, as seen by rank 0; ValueError for sizes < 1."""
        _check_positive(sizes)
        return cls(dict.fromkeys(DIMENSIONS, 1) | sizes, dict.fromkeys((*DIMENSIONS, *sizes), 0))

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return prod(self.sizes.values()) if self.device_mesh is None else self.device_mesh.size()

    @property
    def replicas(self) -> int:
        """Number of pipelines, each with different tokens: losses and gradients are means over them."""
        return self.size(*DENSE)

    @property
    def replica(self) -> int:
        """Index of this rank's pipeline."""
        return self.rank(*DENSE)

    @property
    def batch_shards(self) -> int:
        """Number of parts of the rows of a global batch; context-parallel pipelines share a part."""
        return self.size(*BATCH)

    @property
    def batch_shard(self) -> int:
        """Index of this rank's part of the rows."""
        return self.rank(*BATCH)

    @property
    def ranks_per_node(self) -> int | None:
        """Number of successive ranks of the job that share a node; None: unknown, the mesh is not from `build_mesh`."""
        return getattr(self.device_mesh, _RANKS_PER_NODE, None)

    @property
    def dense(self) -> DeviceMesh | None:
        """Mesh of the ranks with the same stages, over which dense parameters are sharded.

        It has one dimension; with `dp_replicate` it has two, (replicate, shard).
        """
        return self._parameter_mesh(*DENSE)

    @property
    def experts(self) -> DeviceMesh | None:
        """Mesh of the ranks with the same experts, over which experts are sharded; dimensions like `dense`."""
        return self._parameter_mesh(*EXPERTS)

    def _parameter_mesh(self, *dimensions: str) -> DeviceMesh | None:
        """Return the ranks along these dimensions as (replicate, shard) with `dp_replicate`, else as one dimension."""
        hybrid = getattr(self.device_mesh, _FLATTENED, {}).get((_REPLICATE, *dimensions))
        return self.part(*dimensions) if hybrid is None else hybrid

    def size(self, *dimensions: str) -> int:
        """Return the number of ranks along one dimension, or along several together."""
        return prod(self.sizes.get(name, 1) for name in dimensions)

    def rank(self, *dimensions: str) -> int:
        """Return this rank's index along one dimension, or along several together; the last one varies fastest."""
        index = 0
        for name in dimensions:
            index = index * self.size(name) + self.places.get(name, 0)
        return index

    def part(self, *dimensions: str) -> DeviceMesh | None:
        """Return the ranks that differ from this one along these dimensions only, flattened to one dimension.

        They are in the order of `rank`. None if the device mesh has none of the dimensions: this rank alone.
        """
        if self.device_mesh is None:
            return None
        names = tuple(name for name in dimensions if name in (self.device_mesh.mesh_dim_names or ()))
        flattened = getattr(self.device_mesh, _FLATTENED, {}).get(names)
        if flattened is not None:
            return flattened
        if not names:
            return None
        if len(names) == 1:
            return self.device_mesh[names[0]]
        return self.device_mesh[names]._flatten("_".join(names))  # torch caches it by name: groups are made once

    def group(self, *dimensions: str) -> dist.ProcessGroup | None:
        """Return the process group of `part`; None: this rank alone."""
        part = self.part(*dimensions)
        return None if part is None else part.get_group()


def build_mesh(
    pp: int, dp: int | None, ep: int, device: torch.device, *, cp: int = 1, dp_replicate: int = 1,
    timeout: timedelta | None = None, ranks_per_node: int | None = None,
) -> DeviceMesh:
    """Build the mesh over all ranks of the default process group. Collective.

    Each dimension has its own groups, and so does each combination of dimensions that parameters are sharded over: NCCL
    runs the collectives of one communicator, or of one stream, one after another.

    Each group runs one collective before this returns: communicators that are created lazily within a step, in a
    different order on each rank, can deadlock.

    dp: None for all ranks that the other dimensions leave. cp: 1 for a mesh without this dimension. dp_replicate: the
    number of parts of `dp`, each of which has all parameters. timeout: the time after which a rank stops waiting for
    another (default: that of the default group). ranks_per_node: the number of successive ranks that share a node
    (default: LOCAL_WORLD_SIZE, which torchrun sets; if it is not set, all ranks).

    Raises ValueError, with the possible sizes, unless pp * dp * cp * ep is the number of ranks and dp_replicate divides
    dp.
    """
    cp_size = {} if cp == 1 else {"cp": cp}
    sizes = mesh_sizes(dist.get_world_size(), pp=pp, dp=dp, ep=ep, **cp_size)  # torch raises without a default group
    check_replicate(sizes["dp"], dp_replicate)
    world = dist.group.WORLD
    assert world is not None, "get_world_size raises without a default group"
    problem = single_queue_problem() if device.type == "cuda" else None
    if problem:
        warnings.warn(problem, stacklevel=2)
    recorder = Recorder.current()
    recorder.rank = world.rank()
    recorder.sizes = sizes
    layout = _RankLayout(sizes, dp_replicate, cp, world.rank())
    device_mesh, groups = _build_groups(layout, device, world, timeout or timeout_of(world))
    setattr(device_mesh, _RANKS_PER_NODE, ranks_per_node or launched_ranks_per_node() or world.size())
    if "cpu" in backends(world):
        # If a rank is missing, this collective times out; the device collectives below would wait forever.
        dist.all_reduce(torch.zeros(1, device="cpu"))
    _connect(device_mesh, sizes, [world, *groups], device)
    return device_mesh


def launched_ranks_per_node() -> int | None:
    """Return the number of ranks of this node by torchrun's LOCAL_WORLD_SIZE; None without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None


class _RankLayout:
    """Global rank numbers of a mesh, with "dp" as one dimension and split into (replicate, shard)."""

    def __init__(self, sizes: Mapping[str, int], dp_replicate: int, cp: int, rank: int) -> None:
        self.sizes = sizes
        self.dp_replicate = dp_replicate
        self.numbers = torch.arange(prod(sizes.values()), device="cpu").view(*sizes.values())
        split = {"pp": sizes["pp"], _REPLICATE: dp_replicate, _SHARD: sizes["dp"] // dp_replicate, "cp": cp,
                 "ep": sizes["ep"]}
        self.split_numbers = self.numbers.view(*split.values())  # (pp, replicate, shard, cp, ep)
        self.place = dict(zip(split, (self.split_numbers == rank).nonzero()[0].tolist()))

    def ranks_along(self, *dimensions: str) -> list[int]:
        """Return the numbers of the ranks that differ from this one along these dimensions only."""
        names = {_REPLICATE, _SHARD, *dimensions} if "dp" in dimensions else {*dimensions}
        index = tuple(slice(None) if name in names else place for name, place in self.place.items())
        return self.split_numbers[index].flatten().tolist()


def _build_groups(
    layout: _RankLayout, device: torch.device, world: dist.ProcessGroup, timeout: timedelta
) -> tuple[DeviceMesh, list[dist.ProcessGroup]]:
    """Create all groups of this rank, and the mesh with its flattened dimensions; collective over `world`."""
    sizes = layout.sizes
    present = (tuple(name for name in sizes if name in names) for names in (DENSE, EXPERTS))
    flattened = [names for names in present if len(names) > 1]
    requests = [(layout.ranks_along(name), TRAFFIC[name]) for name in sizes]
    requests += [(layout.ranks_along(*names), SHARDS) for names in flattened]
    if layout.dp_replicate > 1:
        hybrid = ((_REPLICATE,), (_SHARD, "cp", "ep"), (_SHARD, "cp"))
        requests += [(layout.ranks_along(*names), SHARDS) for names in hybrid]
    groups = create_groups(requests, parent=world, timeout=timeout)
    dimension_groups = groups[: len(sizes)]
    device_mesh = DeviceMesh.from_group(
        dimension_groups, device.type, mesh=layout.numbers, mesh_dim_names=tuple(sizes))
    parts = {names: DeviceMesh.from_group(group, device.type, mesh_dim_names=("_".join(names),))
             for names, group in zip(flattened, groups[len(sizes):])}
    pp_group = dimension_groups[0]
    ep_group = dimension_groups[-1]
    if layout.dp_replicate > 1:
        replicate_group, dense_group, experts_group = groups[-3:]
        dense_groups = [replicate_group, dense_group]
        expert_groups = [pp_group, replicate_group, experts_group, ep_group]
        parts |= _hybrid_parts(layout.split_numbers, device, dense_groups, expert_groups)
    elif EXPERTS in flattened:  # FSDP2 requires one mesh for both dimensions that shard an expert
        names = ("pp", "_".join(EXPERTS), "ep")
        numbers = layout.numbers.view(sizes["pp"], sizes["dp"] * sizes["cp"], sizes["ep"])
        expert_mesh = DeviceMesh.from_group(
            [pp_group, groups[-1], ep_group], device.type, mesh=numbers, mesh_dim_names=names)
        parts |= {EXPERTS: expert_mesh[names[1]], ("ep",): expert_mesh["ep"]}
    setattr(device_mesh, _FLATTENED, parts)
    return device_mesh, groups


def _hybrid_parts(
    split_numbers: torch.Tensor, device: torch.device, dense_groups: list[dist.ProcessGroup],
    expert_groups: list[dist.ProcessGroup],
) -> dict[tuple[str, ...], DeviceMesh]:
    """Return the meshes (replicate, shard) of dense parameters and of experts, and "ep" from the mesh of experts.

    FSDP2 requires that all dimensions over which an expert is sharded or replicated come from one mesh.

    split_numbers: all ranks, (pp, replicate, shard, cp, ep). dense_groups: this rank's groups along (replicate, shard).
    expert_groups: this rank's groups along (pp, replicate, shard, ep).
    """
    pp, replicate, _, _, ep = split_numbers.shape
    names = (_REPLICATE, _SHARD)
    stage_numbers = split_numbers[(split_numbers == dist.get_rank()).nonzero()[0][0]]
    dense_mesh = DeviceMesh.from_group(
        dense_groups, device.type, mesh=stage_numbers.reshape(replicate, -1), mesh_dim_names=names)
    expert_mesh = DeviceMesh.from_group(
        expert_groups, device.type, mesh=split_numbers.reshape(pp, replicate, -1, ep),
        mesh_dim_names=("pp", *names, "ep"))
    return {(_REPLICATE, *DENSE): dense_mesh, (_REPLICATE, *EXPERTS): expert_mesh[names], ("ep",): expert_mesh["ep"]}


def _connect(
    device_mesh: DeviceMesh, sizes: Mapping[str, int], groups: list[dist.ProcessGroup], device: torch.device
) -> None:
    """Run one collective on each group, so that the communicators exist before the first step."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    for name in ("cp", "ep"):
        if sizes.get(name, 1) > 1:
            connect_all(device_mesh.get_group(name), device)


def check_replicate(dp: int, dp_replicate: int, name: str = "dp_replicate") -> None:
    """Raise ValueError unless `dp_replicate` divides `dp`; the message calls it `name`."""
    if dp_replicate < 1 or dp % dp_replicate:
        raise ValueError(f"{name} = {dp_replicate} does not divide dp = {dp}, the number of data-parallel ranks; give "
                         f"{' or '.join(map(str, divisors(dp)))}, or another dp")


def mesh_sizes(ranks: int, **sizes: int | None) -> dict[str, int]:
    """Return the sizes of these dimensions, outermost first; None stands for the ranks that the others leave.

    Raises ValueError if their product cannot be `ranks`.
    """
    names = [name for name in TRAFFIC if name in sizes]
    fixed: dict[str, int] = {}
    for name in names:
        size = sizes[name]
        if size is not None:
            fixed[name] = size
    _check_positive(fixed)
    all_fixed = len(fixed) == len(names)
    remaining, remainder = divmod(ranks, prod(fixed.values()))
    if remainder == 0 and (remaining == 1 or not all_fixed):
        return {name: fixed.get(name, remaining) for name in names}
    possible = "; ".join(_possible_sizes(ranks, fixed, name, exact=all_fixed) for name in fixed)
    raise ValueError(f"{_product(fixed)} does not fit {ranks} ranks: {' * '.join(names)} must be {ranks}. "
                     f"Possible: {possible}; or start another number of ranks")


def _possible_sizes(ranks: int, sizes: Mapping[str, int], name: str, *, exact: bool) -> str:
    """Describe the possible sizes of one dimension if the others keep theirs; `exact`: there is no free dimension."""
    others = {other: size for other, size in sizes.items() if other != name}
    remaining, remainder = divmod(ranks, prod(others.values()))
    if remainder:
        return f"with {_product(others)}, no {name}"
    choices = [remaining] if exact else divisors(remaining)
    return f"with {_product(others)}, {name} = {' or '.join(map(str, choices))}"


def _check_positive(sizes: Mapping[str, int]) -> None:
    invalid = {name: size for name, size in sizes.items() if size < 1}
    if invalid:
        raise ValueError(f"sizes of the mesh must be at least 1; got {_product(invalid)}")


def _product(sizes: Mapping[str, int]) -> str:
    """Format sizes as "pp * dp = 2 * 4"."""
    return f"{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))}"


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, from 1 to itself."""
    return [size for size in range(1, number + 1) if number % size == 0]
