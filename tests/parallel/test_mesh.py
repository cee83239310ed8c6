"""The mesh of a job: its sizes, the errors for sizes that do not fit, and its groups."""

import os
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from math import prod
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint import Checkpoints
from dualpipe.parallel.mesh import DIMENSIONS, Mesh, build_mesh, mesh_sizes
from dualpipe.pipeline.p2p import P2PGroups
from dualpipe.runtime import nccl
from dualpipe.runtime.ranks.process_groups import new_gloo_group
from dualpipe.schedule.types import v_placement
from lone_rank import lone_rank
from pretend_cuda import pretend_cuda
from pretend_nccl import pretend_nccl
from ranks import run_ranks


@pytest.mark.parametrize(
    ("ranks", "pp", "ep", "dp"), [(8, 2, 2, 2), (8, 1, 1, 8), (8, 2, 4, 1), (1, 1, 1, 1), (12, 3, 2, 2)]
)
def test_dp_is_what_the_others_leave(ranks, pp, ep, dp):
    sizes = {"pp": pp, "dp": dp, "ep": ep}
    assert mesh_sizes(ranks, pp=pp, dp=None, ep=ep) == mesh_sizes(ranks, **sizes) == sizes


def test_dp_is_what_context_parallel_ranks_leave_too():
    sizes = {"pp": 2, "dp": 3, "cp": 4, "ep": 1}
    assert mesh_sizes(24, pp=2, dp=None, ep=1, cp=4) == sizes and list(mesh_sizes(24, **sizes)) == list(sizes)
    with pytest.raises(ValueError, match=r"2 \* 4 \* 2 does not fit 24"):
        mesh_sizes(24, pp=2, dp=None, ep=2, cp=4)


WRONG = {
    (8, 3, None, 2): "with ep = 2, pp = 1 or 2 or 4; with pp = 3, no ep",
    (8, 2, 1, 2): "with dp * ep = 1 * 2, pp = 4; with pp * ep = 2 * 2, dp = 2; with pp * dp = 2 * 1, ep = 4",
    (8, 2, 3, 2): "with dp * ep = 3 * 2, no pp; with pp * ep = 2 * 2, dp = 2; with pp * dp = 2 * 3, no ep",
    (8, 2, 0, 2): "sizes of the mesh must be at least 1; got dp = 0",
    (8, -2, None, -4): "at least 1; got pp * ep = -2 * -4",
}


@pytest.mark.parametrize("sizes", WRONG)
def test_sizes_that_do_not_fit_are_refused_with_those_that_would(sizes):
    with pytest.raises(ValueError) as raised:
        mesh_sizes(sizes[0], **dict(zip(DIMENSIONS, sizes[1:])))
    assert WRONG[sizes] in str(raised.value)


def test_ranks_that_share_sequences_are_between_dp_and_ep():
    with lone_rank(6, 8):  # dp 1, cp 1, ep 0
        mesh = build_mesh(1, 2, 2, CPU, cp=2)
        place = Mesh.of(mesh)
        parts = {"dense": place.dense, "experts": place.experts, "ep": place.part("ep"), "cp": place.part("cp")}
        members = {name: dist.get_process_group_ranks(part.get_group()) for name, part in parts.items()}
        assert mesh.mesh_dim_names == ("pp", "dp", "cp", "ep")
        assert members == {"dense": list(range(8)), "experts": [0, 2, 4, 6], "ep": [6, 7], "cp": [4, 6]}
        assert place.experts._get_root_mesh() is place.part("ep")._get_root_mesh(), "FSDP2 takes both from one mesh"
        assert (place.replicas, place.replica) == (8, 6)
        assert (place.batch_shards, place.batch_shard) == (4, 2), "they have the same rows"


def members_of(mesh):
    """Return the ranks along each dimension of a mesh, by its name."""
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}


def test_parts_of_dp_have_all_parameters_each():
    """8 ranks as dp 4 (2 x 2) and ep 2: rank 5 is the first of part 1."""
    with lone_rank(5, 8):
        place = Mesh.of(build_mesh(1, 4, 2, CPU, dp_replicate=2))
        assert place.sizes == {"pp": 1, "dp": 4, "ep": 2} and (place.replicas, place.replica) == (8, 5), "as without"
        assert members_of(place.dense) == {"replicate": [1, 5], "shard": [4, 5, 6, 7]}
        assert members_of(place.experts) == {"replicate": [1, 5], "shard": [5, 7]}
        assert dist.get_process_group_ranks(place.group("dp", "ep")) == list(range(8)), "what the loss is summed over"
        assert dist.get_process_group_ranks(place.part("ep").get_group()) == [4, 5]
        assert place.experts._get_root_mesh() is place.part("ep")._get_root_mesh(), "FSDP2 takes both from one mesh"


def test_parts_of_dp_with_context_parallelism():
    with lone_rank(6, 8):
        place = Mesh.of(build_mesh(2, 2, 1, CPU, cp=2, dp_replicate=2))
        assert members_of(place.dense) == members_of(place.experts) == {"replicate": [4, 6], "shard": [6, 7]}


def test_parts_that_do_not_divide_dp_are_refused():
    refused = pytest.raises(ValueError, match="give 1 or 2 or 3 or 6")
    with lone_rank(0, 6), refused:
        build_mesh(1, 6, 1, CPU, dp_replicate=4)


def places(shape, names):
    """Check what `Mesh` reports for a rank against torch's mesh; return its sizes, places and groups' members."""
    device_mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = Mesh.of(device_mesh)
    for name in names or ():
        part = device_mesh[name]
        assert (mesh.rank(name), mesh.size(name)) == (part.get_local_rank(), part.size())
        assert mesh.group(name) is part.get_group() and mesh.part(name).size() == part.size()
    assert mesh.world_size == dist.get_world_size()
    if mesh.dense is not None:
        assert (mesh.replica, mesh.replicas) == (mesh.dense.get_local_rank(), mesh.dense.size())
    members = {name: part and dist.get_process_group_ranks(part.get_group())
               for name, part in (("dense", mesh.dense), ("experts", mesh.experts), ("pp", mesh.part("pp")))}
    return dict(mesh.sizes), dict(mesh.places), members


def test_mesh_says_where_a_rank_stands():
    for rank in range(8):
        with lone_rank(rank, 8):
            sizes, at, members = places((2, 2, 2), DIMENSIONS)
        assert sizes == {"pp": 2, "dp": 2, "ep": 2} and tuple(at.values()) == (rank // 4, rank // 2 % 2, rank % 2)
        assert members["dense"] == ([0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7])
        assert members["experts"] == [rank & ~2, rank | 2] and members["pp"] == [rank & ~4, rank | 4]


def test_a_mesh_that_need_not_run():
    mesh = Mesh.planned(pp=16, ep=8)
    assert mesh.sizes == {"pp": 16, "dp": 1, "ep": 8} and mesh.world_size == 128 and mesh.replicas == 8
    assert mesh.rank("pp") == mesh.replica == 0 and mesh.group("pp") is mesh.dense is None
    with pytest.raises(ValueError, match=r"sizes of the mesh must be at least 1; got dp \* ep = -1 \* -1"):
        Mesh.planned(dp=-1, ep=-1)


OWN = {
    "another order": ((2, 2), ("ep", "pp"), {"pp": 2, "dp": 1, "ep": 2}),
    "no pipeline": ((2, 2), ("dp", "ep"), {"pp": 1, "dp": 2, "ep": 2}),
    "names of its own": ((2, 2), ("replicate", "shard"), {"pp": 1, "dp": 1, "ep": 1, "replicate": 2, "shard": 2}),
    "no names": ((4,), None, {"pp": 1, "dp": 1, "ep": 1}),
}


@pytest.mark.parametrize("case", OWN)
def test_mesh_of_ones_own_lacks_dimensions(case):
    shape, names, expected = OWN[case]
    for rank in range(4):
        with lone_rank(rank, 4):
            sizes, at, members = places(shape, names)
        assert sizes == expected
        assert at == dict.fromkeys(expected, 0) | dict(zip(names or (), (rank // 2, rank % 2)))
        by_case = {"another order": [rank & ~2, rank | 2], "no pipeline": [0, 1, 2, 3]}
        assert members["dense"] == by_case.get(case)
        assert members["experts"] == ([rank & ~2, rank | 2] if case == "no pipeline" else None)


def test_without_a_default_group_torch_says_so():
    with pytest.raises(ValueError, match="has not been initialized"):
        build_mesh(1, 1, 1, torch.device("cpu"))


def test_alone():
    mesh = Mesh.of(None)
    assert mesh == Mesh.planned() and mesh.world_size == mesh.replicas == mesh.size("pp") == 1
    assert mesh.replica == mesh.rank("ep") == 0 and mesh.dense is mesh.experts is mesh.group("pp") is None


@pytest.mark.parametrize("given, launched, expected", [(2, "4", 2), (None, "4", 4), (None, None, 8)])
def test_ranks_per_node_are_those_given_or_those_of_the_launcher_or_all(given, launched, expected, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launched)
    with lone_rank(0, 8):
        assert Mesh.of(build_mesh(1, 8, 1, CPU, ranks_per_node=given)).ranks_per_node == expected


# -- its groups

SIZES = [sizes for sizes in product((1, 2, 3), repeat=3) if prod(sizes) > 1]
CPU = torch.device("cpu")


def groups_of_a_rank(mesh, *, links=True):
    """Return the groups of a rank by the communication they carry."""
    place = Mesh.of(mesh)
    found = {"all ranks": dist.group.WORLD, "dense": place.group("dp", "ep")}
    found |= {name: place.group(name) for name in DIMENSIONS}
    if links:
        connections = P2PGroups(found["pp"], range(place.size("pp")), place.rank("pp"))
        connections.connect(v_placement(place.size("pp")), CPU, own_groups=True)
        found |= {stream: link.group for stream, link in connections._links.items()}
    return found


@pytest.mark.parametrize("rank", [0, -1])
def test_no_two_kinds_of_traffic_share_a_group(rank):
    for sizes in SIZES:
        size = prod(sizes)
        with lone_rank(rank % size, size):
            found = groups_of_a_rank(build_mesh(*sizes, CPU))
            assert len({id(group) for group in found.values()}) == len(found) == 5 + 4 * min(sizes[0] - 1, 1), sizes
            assert len({group.group_name for group in found.values()}) == len(found)


def groups_with_gloo(rank, sizes):
    found = groups_of_a_rank(build_mesh(*sizes, CPU), links=False)
    assert len({*found.values()}) == 5
    dist.barrier()  # until the others have connected, too
    return {name: dist.get_process_group_ranks(group) for name, group in found.items()}


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 1), (2, 1, 1)])
def test_groups_of_one_dimension_that_spans_all_ranks(sizes):
    for rank, members in enumerate(run_ranks(groups_with_gloo, 2, sizes, fresh=True)):
        expected = {name: [0, 1] if size == 2 else [rank] for name, size in zip(DIMENSIONS, sizes)}
        expected["all ranks"] = [0, 1]
        expected["dense"] = [rank] if sizes[0] == 2 else [0, 1]
        assert members == expected


def test_the_work_of_a_rank_does_not_grow_with_the_job():
    """The work of a rank is constant except for torch's list of all ranks.

    It was once a call for each group of the job, 32400.
    """
    counted = []
    for size in (256, 1024, 8192):  # the first fills caches of torch
        with lone_rank(size // 2 + 3, size) as calls:
            mesh = build_mesh(16, None, 8, CPU)
            assert (calls.groups, calls.collectives) == (4, 3)
            groups = P2PGroups(mesh.get_group("pp"), range(16), mesh.get_local_rank("pp"))
            groups.connect(v_placement(16), CPU, own_groups=True)
            assert (calls.groups, calls.collectives) == (12, 3), "a link is no matter of other pipelines"
        counted.append(calls.work)
    assert counted[1] == counted[2]


def test_ranks_outside_take_no_part_beside_a_group_that_is_bound_to_a_device():
    """Beside a group bound to a device, torch would split new groups off that one.

    A split takes all of its ranks; for a gloo group, all but the members.
    """
    with lone_rank(5, 8), mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=AssertionError):
        dist.group.WORLD.bound_device_id = cuda = torch.device("cuda", 0)
        with pytest.raises(AssertionError):
            dist.new_group([5])
        found = groups_of_a_rank(build_mesh(2, 2, 2, CPU))
        assert dist.group.WORLD.bound_device_id == cuda
        assert all(group.bound_device_id is None for name, group in found.items() if name != "all ranks")


def test_one_hardware_queue_for_all_streams_is_warned_of(monkeypatch):
    for connections in ("1", "32"):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
        with pretend_cuda(strict=False), lone_rank(0, 2), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build_mesh(1, 1, 2, torch.device("cuda", 0))
        assert ["DEVICE_MAX_CONNECTIONS=1: all streams" in str(each.message) for each in caught] == [True] * (
            connections == "1")


def one_fails(rank, at):
    """Fail on rank 1 amid the construction; return the others' error, all-reduces on the device, and seconds."""
    seconds, cuda, on_device = timedelta(seconds=4), torch.device("cuda", 0), []
    all_reduce, start = dist.all_reduce, time.monotonic()

    def watched(tensor, *args, **options):
        on_device.extend([tensor.is_cuda] * tensor.is_cuda)
        return all_reduce(tensor, *args, **options)

    with pretend_cuda(strict=False) as device, pretend_nccl(device), mock.patch.object(dist, "all_reduce", watched):
        if at == "links":
            mesh = build_mesh(3, 1, 1, cuda, timeout=seconds)
            on_device.clear()
        owner, name = (DeviceMesh, "from_group") if at == "mesh" else (dist, "new_group")
        with mock.patch.object(owner, name, side_effect=KeyError("out of luck")) if rank == 1 else nullcontext():
            try:
                if at == "links":
                    P2PGroups(mesh.get_group("pp"), range(3), rank).connect(v_placement(3), cuda)
                else:
                    build_mesh(1, 1, 3, cuda, timeout=seconds)
            except Exception as error:
                if rank == 1:
                    os._exit(1)
                return type(error).__name__, len(on_device), time.monotonic() - start


@pytest.mark.parametrize("at", [pytest.param("groups", marks=pytest.mark.slow), "mesh", "links"])
def test_a_rank_that_fails_while_groups_are_made_is_not_waited_for_without_end(at):
    """NCCL has no timeout while it creates a communicator: no rank gets that far."""
    first, _, last = run_ranks(one_fails, 3, at, check=False, group_timeout=4, fresh=True)
    for name, on_device, seconds in (first, last):
        assert "Error" in name and on_device == 0 and seconds < 30


def timeouts(rank, folder):
    """Return the timeouts of all process groups, by backend; on GPUs another gloo stands in for NCCL."""
    dist.destroy_process_group()
    dist.Backend.register_backend("beside", dist.ProcessGroupGloo, devices=["cuda"])
    seconds, cuda = timedelta(seconds=77), torch.device("cuda", 0)
    with pretend_cuda(strict=False) as device, pretend_nccl(device) as options:
        dist.init_process_group("cpu:gloo,cuda:beside", init_method=f"file://{folder}/store", rank=rank, world_size=4,
                                timeout=seconds)
        mesh = build_mesh(2, 1, 2, cuda, timeout=seconds)
        pp = P2PGroups(mesh.get_group("pp"), (0, 1), mesh.get_local_rank("pp"))
        pp.connect(v_placement(2), cuda)
        kinds = {name: kind_of(options[mesh.get_group(name)]) for name in DIMENSIONS}
        kinds |= {"dense": kind_of(options[Mesh.of(mesh).group("dp", "ep")])}
        kinds |= {"link": {kind_of(options[link.group]) for link in pp._links.values()}}
        Checkpoints(f"{folder}/checkpoints", mesh, timeout=seconds).close()
        new_gloo_group(mesh["pp"].get_group())
        groups = list(dist.distributed_c10d._world.pg_map)
        found = [{kind.type: group._get_backend(kind) for kind in group._device_types} for group in groups]
    assert sum("cuda" in of_group and of_group["cpu"] is not of_group["cuda"] for of_group in found) >= 5
    known = {backend.options._timeout for of_group in found for backend in of_group.values()}
    return known | {given._timeout for given in options.values()}, kinds


def kind_of(options):
    return nccl.Traffic(options.config.max_ctas, options.is_high_priority_stream)


def test_options_of_every_group_and_a_timeout_in_both_of_its_backends(tmp_path):
    kinds = {"pp": nccl.LINK, "dp": nccl.SHARDS, "ep": nccl.EXPERTS, "dense": nccl.SHARDS,
             "link": {nccl.LINK}}
    assert run_ranks(timeouts, 4, str(tmp_path), fresh=True) == [({timedelta(seconds=77)}, kinds)] * 4
    assert nccl.LINK == (1, True) and nccl.EXPERTS.urgent and not nccl.SHARDS.urgent
