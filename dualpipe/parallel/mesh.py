"""The device mesh of a job: who shares what with whom.

Dimensions are ("pp", "dp", "ep"), outermost first: the ranks of an expert-parallel group, which talk most, are next to
each other; those of a pipeline, which talk least, furthest apart. Example: 8 ranks as pp 2, dp 2, ep 2: ranks 0 and 1
share the experts of a stage, ranks 0 to 3 hold the same stages, ranks 0 and 4 are one pipeline. With context
parallelism there is "cp" before "ep": its ranks have the same rows of a batch, and each some of their tokens. To add a
dimension is to name it in `TRAFFIC`, at its place, and to give its size to `build_mesh`.

Parameters are sharded over all ranks that have the same stages; with `dp_replicate`, over those of one of as many parts
of "dp", each of which has all parameters (HSDP). That is no dimension: who has which rows of a batch stays as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.runtime.device import one_queue
from dualpipe.runtime.nccl import CONTEXT, LINK, SHARDS
from dualpipe.runtime.nccl import EXPERTS as EXPERT_ROWS
from dualpipe.runtime.ranks.process_groups import backends, create_groups, timeout_of
from dualpipe.runtime.recorder import Recorder

TRAFFIC = {"pp": LINK, "dp": SHARDS, "cp": CONTEXT, "ep": EXPERT_ROWS}  # between the ranks along a dimension
DIMENSIONS = tuple(name for name in TRAFFIC if name != "cp")  # of every mesh; "cp" only where it is more than 1
DENSE = tuple(name for name in TRAFFIC if name != "pp")  # the ranks of these have the same stages
EXPERTS = tuple(name for name in DENSE if name != "ep")  # the ranks of these have the same experts
BATCH = tuple(name for name in DENSE if name != "cp")  # the ranks of these have rows of the global batch of their own
_PARTS = "dualpipe_parts"  # attribute of a mesh from `build_mesh`: several dimensions as one, by their names
_REPLICATE, _SHARD = "replicate", "shard"  # the parts that "dp" is cut into, and the ranks of one


@dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh and where this rank stands in it, by dimensions: all of `DIMENSIONS`, and those of a mesh of
    the user's own; its groups, where there are processes."""

    sizes: Mapping[str, int]
    places: Mapping[str, int]
    device_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, device_mesh: DeviceMesh | None) -> Mesh:
        """A mesh from `build_mesh`, or one that lacks `DIMENSIONS`, which have one rank; None: this process alone."""
        if device_mesh is None:
            return cls.planned()
        names, here = device_mesh.mesh_dim_names or (), device_mesh.get_coordinate() or ()
        found = dict.fromkeys(DIMENSIONS, 1) | dict(zip(names, device_mesh.shape))
        sizes = {name: found[name] for name in dict.fromkeys((*TRAFFIC, *found)) if name in found}
        return cls(sizes, dict.fromkeys(DIMENSIONS, 0) | dict(zip(names, here)), device_mesh)

    @classmethod
    def planned(cls, **given: int) -> Mesh:
        """The first rank of a mesh of these sizes (default 1) that need not run; raises ValueError for one below 1."""
        _check_positive(given)
        return cls(dict.fromkeys(DIMENSIONS, 1) | given, dict.fromkeys((*DIMENSIONS, *given), 0))

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return prod(self.sizes.values()) if self.device_mesh is None else self.device_mesh.size()

    @property
    def replicas(self) -> int:
        """The number of pipelines, each of which has tokens of its own: what means are taken over."""
        return self.size(*DENSE)

    @property
    def replica(self) -> int:
        """The number of this rank's pipeline among them."""
        return self.rank(*DENSE)

    @property
    def batch_shards(self) -> int:
        """The parts that the rows of a global batch are cut into; context-parallel pipelines share one."""
        return self.size(*BATCH)

    @property
    def batch_shard(self) -> int:
        """The number of this rank's part among them."""
        return self.rank(*BATCH)

    @property
    def dense(self) -> DeviceMesh | None:
        """The ranks with the same stages, which dense parameters are sharded over, as one dimension; with
        `dp_replicate` as two, over the first of which they are replicated."""
        return self._storage(*DENSE)

    @property
    def experts(self) -> DeviceMesh | None:
        """The ranks with the same experts, which those are sharded over, as `dense`."""
        return self._storage(*EXPERTS)

    def _storage(self, *dimensions: str) -> DeviceMesh | None:
        """The ranks along these dimensions, as parameters are placed on them."""
        hybrid = getattr(self.device_mesh, _PARTS, {}).get((_REPLICATE, *dimensions))
        return self.part(*dimensions) if hybrid is None else hybrid

    def size(self, *dimensions: str) -> int:
        """The number of ranks along a dimension, or along several together."""
        return prod(self.sizes.get(name, 1) for name in dimensions)

    def rank(self, *dimensions: str) -> int:
        """This rank's number along a dimension, or along several together, the last of which counts fastest."""
        number = 0
        for name in dimensions:
            number = number * self.size(name) + self.places.get(name, 0)
        return number

    def part(self, *dimensions: str) -> DeviceMesh | None:
        """The ranks that differ from this one along these dimensions only, as one dimension, in the order of `rank`;
        None, where torch's mesh has none of the dimensions: this rank alone."""
        if self.device_mesh is None:
            return None
        names = tuple(name for name in dimensions if name in (self.device_mesh.mesh_dim_names or ()))
        if (part := getattr(self.device_mesh, _PARTS, {}).get(names)) is not None:
            return part
        if len(names) <= 1:
            return self.device_mesh[names[0]] if names else None
        return self.device_mesh[names]._flatten("_".join(names))  # torch keeps it: made once, found again by its name

    def group(self, *dimensions: str) -> dist.ProcessGroup | None:
        """The process group of `part`; None: this rank alone."""
        part = self.part(*dimensions)
        return None if part is None else part.get_group()


def build_mesh(
    pp: int, dp: int | None, ep: int, device: torch.device, *, cp: int = 1, dp_replicate: int = 1,
    timeout: timedelta | None = None,
) -> DeviceMesh:
    """The mesh over all ranks of the default process group. Each dimension has groups of its own, and so have those
    together that share parameters: with NCCL what shares a communicator waits for one another, and so does what shares
    its stream.

    Each group is used once: a communicator that is made in the middle of a step, in another order on each rank, can
    deadlock. `dp` None: what the others leave. `cp` 1: there is no such dimension. `dp_replicate`: the parts that `dp`
    is cut into, each of which has all parameters. `timeout`: after which a rank gives up waiting for another (default:
    as in the default group). Raises ValueError, with the sizes that are possible, unless pp * dp * cp * ep is all ranks
    and dp_replicate divides dp.
    """
    split = {} if cp == 1 else {"cp": cp}
    sizes = mesh_sizes(dist.get_world_size(), pp=pp, dp=dp, ep=ep, **split)  # without a default group torch says so
    check_replicate(sizes["dp"], dp_replicate)
    world = dist.group.WORLD
    assert world is not None, "it has a size"
    if device.type == "cuda" and (wrong := one_queue()):
        warnings.warn(wrong, stacklevel=2)
    numbers = torch.arange(world.size(), device="cpu").view(*sizes.values())
    # The same numbers with "dp" in two dimensions.
    split = {"pp": pp, _REPLICATE: dp_replicate, _SHARD: sizes["dp"] // dp_replicate, "cp": cp, "ep": ep}
    split_numbers = numbers.view(*split.values())
    recorder = Recorder.current()
    recorder.rank, recorder.sizes = world.rank(), sizes

    here = dict(zip(split, (split_numbers == world.rank()).nonzero()[0].tolist()))

    def along(*dimensions: str) -> list[int]:
        named = {_REPLICATE, _SHARD, *dimensions} if "dp" in dimensions else {*dimensions}
        index = tuple(slice(None) if name in named else place for name, place in here.items())
        return split_numbers[index].flatten().tolist()

    shared = (tuple(name for name in sizes if name in names) for names in (DENSE, EXPERTS))
    several = [names for names in shared if len(names) > 1]
    wanted = [(along(name), TRAFFIC[name]) for name in sizes]
    wanted += [(along(*names), SHARDS) for names in several]
    if dp_replicate > 1:
        wanted += [(along(*names), SHARDS) for names in ((_REPLICATE,), (_SHARD, "cp", "ep"), (_SHARD, "cp"))]
    groups = create_groups(wanted, beside=world, timeout=timeout or timeout_of(world))
    each = groups[: len(sizes)]
    device_mesh = DeviceMesh.from_group(each, device.type, mesh=numbers, mesh_dim_names=tuple(sizes))
    parts = {names: DeviceMesh.from_group(group, device.type, mesh_dim_names=("_".join(names),))
             for names, group in zip(several, groups[len(sizes):])}
    if dp_replicate > 1:
        replicate, dense, experts = groups[-3:]
        parts |= _hybrid_parts(split_numbers, device, (replicate, dense), (each[0], replicate, experts, each[-1]))
    elif EXPERTS in several:  # FSDP2 takes an expert's two dimensions from one mesh
        names, shape = ("pp", "_".join(EXPERTS), "ep"), (sizes["pp"], sizes["dp"] * sizes["cp"], sizes["ep"])
        three = [each[0], groups[-1], each[-1]]
        of_experts = DeviceMesh.from_group(three, device.type, mesh=numbers.view(shape), mesh_dim_names=names)
        parts |= {EXPERTS: of_experts[names[1]], ("ep",): of_experts["ep"]}
    setattr(device_mesh, _PARTS, parts)
    if "cpu" in backends(world):
        dist.all_reduce(torch.zeros(1, device="cpu"))  # who is missing here would be waited for without end below
    for group in (world, *groups):
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    for name in ("cp", "ep"):
        if sizes.get(name, 1) > 1:  # NCCL connects pairs of ranks on their first all-to-all
            rows = torch.zeros(sizes[name], device=device)
            dist.all_to_all_single(torch.empty_like(rows), rows, group=device_mesh.get_group(name))
    return device_mesh


def _hybrid_parts(
    numbers: torch.Tensor, device: torch.device, dense: Sequence[dist.ProcessGroup],
    experts: Sequence[dist.ProcessGroup],
) -> dict[tuple[str, ...], DeviceMesh]:
    """The meshes (replicate, shard) of dense parameters and of experts, and "ep" from the mesh of the latter, as FSDP2
    takes an expert's dimensions from one mesh.

    numbers: of all ranks, by pp, replicate, shard, cp, ep. dense, experts: this rank's groups along (replicate, shard)
    and along (pp, replicate, shard, ep).
    """
    sizes = numbers.shape
    both = (_REPLICATE, _SHARD)
    of_stage = numbers[(numbers == dist.get_rank()).nonzero()[0][0]]
    of_dense = DeviceMesh.from_group(
        list(dense), device.type, mesh=of_stage.reshape(sizes[1], -1), mesh_dim_names=both)
    of_experts = DeviceMesh.from_group(
        list(experts), device.type, mesh=numbers.reshape(sizes[0], sizes[1], -1, sizes[4]),
        mesh_dim_names=("pp", *both, "ep"))
    return {(_REPLICATE, *DENSE): of_dense, (_REPLICATE, *EXPERTS): of_experts[both], ("ep",): of_experts["ep"]}


def check_replicate(dp: int, dp_replicate: int, name: str = "dp_replicate") -> None:
    """Raise ValueError unless so many data-parallel ranks can be cut into so many equal parts."""
    if dp_replicate < 1 or dp % dp_replicate:
        raise ValueError(f"{name} = {dp_replicate} does not divide dp = {dp}, the number of data-parallel ranks; give "
                         f"{' or '.join(map(str, divisors(dp)))}, or another dp")


def mesh_sizes(ranks: int, **given: int | None) -> dict[str, int]:
    """The sizes of the dimensions that are given, outermost first; of the one that is None, what the others leave.
    Raises ValueError where they do not make `ranks`."""
    names = [name for name in TRAFFIC if name in given]
    known = {name: size for name in names if (size := given[name]) is not None}
    _check_positive(known)
    all_known = len(known) == len(names)
    rest, unfit = divmod(ranks, prod(known.values()))
    if not unfit and (rest == 1 or not all_known):
        return {name: known.get(name, rest) for name in names}
    possible = []  # what each could be if the others stay
    for name in known:
        others = {other: size for other, size in known.items() if other != name}
        left, unfit = divmod(ranks, prod(others.values()))
        sizes = " or ".join(map(str, [left] if all_known else divisors(left)))
        possible.append(f"with {_product(others)}, {f'no {name}' if unfit else f'{name} = {sizes}'}")
    raise ValueError(f"{_product(known)} does not fit {ranks} ranks: {' * '.join(names)} must be {ranks}. "
                     f"Possible: {'; '.join(possible)}; or start another number of ranks")


def _check_positive(sizes: Mapping[str, int]) -> None:
    if wrong := {name: size for name, size in sizes.items() if size < 1}:
        raise ValueError(f"sizes of the mesh must be at least 1; got {_product(wrong)}")


def _product(sizes: Mapping[str, int]) -> str:
    return f"{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))}"


def divisors(number: int) -> list[int]:
    """All numbers that `number` can be divided by, from 1 to itself."""
    return [size for size in range(1, number + 1) if number % size == 0]
