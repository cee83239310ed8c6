"""The mesh of a job: its sizes, what is said where they do not fit, and its groups."""

import warnings

import pytest
import torch
import torch.distributed as dist

from dualpipe.parallel.mesh import build_mesh, dense_mesh, mesh_sizes
from ranks import run_ranks


@pytest.mark.parametrize(
    ("ranks", "pp", "ep", "dp"), [(8, 2, 2, 2), (8, 1, 1, 8), (8, 2, 4, 1), (1, 1, 1, 1), (12, 3, 2, 2)]
)
def test_dp_is_what_the_others_leave(ranks, pp, ep, dp):
    assert mesh_sizes(ranks, pp, None, ep) == mesh_sizes(ranks, pp, dp, ep) == (pp, dp, ep)


WRONG = {
    (8, 3, None, 2): "pp * ep = 3 * 2 does not fit 8 ranks: pp * dp * ep must be 8. Possible: with ep = 2, pp = 1 or 2 "
    "or 4; with pp = 3, no ep; or start another number of ranks",
    (8, 2, 1, 2): "with dp * ep = 1 * 2, pp = 4; with pp * ep = 2 * 2, dp = 2; with pp * dp = 2 * 1, ep = 4",
    (8, 2, 3, 2): "with dp * ep = 3 * 2, no pp; with pp * ep = 2 * 2, dp = 2; with pp * dp = 2 * 3, no ep",
    (8, 2, 0, 2): "sizes of the mesh must be at least 1; got dp = 0",
    (8, -2, None, -4): "at least 1; got pp * ep = -2 * -4",
}


@pytest.mark.parametrize("sizes", WRONG)
def test_sizes_that_do_not_fit_are_refused_with_those_that_would(sizes):
    with pytest.raises(ValueError) as raised:
        mesh_sizes(*sizes)
    assert WRONG[sizes] in str(raised.value)


def groups(rank, pp, dp, ep):
    """Who is in each group, and how many groups the calls after `build_mesh` add."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = build_mesh(pp, dp, ep, torch.device("cpu"))
        made = dist.distributed_c10d.get_process_group_ranks(dense_mesh(mesh).get_group())
        again = dense_mesh(mesh).get_group() is dense_mesh(mesh).get_group()
    members = {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in mesh.mesh_dim_names}
    return tuple(mesh.shape), members, made, again


def test_ranks_of_an_expert_parallel_group_are_neighbours():
    results = run_ranks(groups, 8, 2, None, 2)
    assert all(shape == (2, 2, 2) and same for shape, _, _, same in results)
    assert results[3][1] == {"pp": [3, 7], "dp": [1, 3], "ep": [2, 3]}
    assert results[3][2] == [0, 1, 2, 3] and results[6][2] == [4, 5, 6, 7]


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 1), (2, 1, 1)])
def test_dimensions_of_one_rank(sizes):
    for rank, (shape, members, dense, _) in enumerate(run_ranks(groups, 2, *sizes)):
        assert shape == sizes
        assert dense == ([rank] if sizes[0] == 2 else [0, 1])
        assert all(len(members[name]) == size for name, size in zip(("pp", "dp", "ep"), sizes))
