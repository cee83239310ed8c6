"""Links between the ranks of a pipeline: rounds and process groups."""

import pytest
import torch
import torch.distributed as dist

from dualpipe.pipeline.p2p import P2PGroups, stream_rounds
from dualpipe.schedule.types import v_placement
from lone_rank import lone_rank
from ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [2, 3, 4, 9, 64])
def test_rounds_of_a_v(ranks):
    streams = sorted({(a, b, kind) for a in range(ranks) for b in (a - 1, a + 1) if 0 <= b < ranks for kind in "BF"})
    rounds = stream_rounds(streams)
    assert len(rounds) == (4 if ranks == 2 else 8)
    assert sorted({stream for each in rounds for stream in each.values()}) == streams
    for each in rounds:
        assert all(rank in stream[:2] for rank, stream in each.items()), "one stream at most for a rank"
        assert len(each) == 2 * len({*each.values()})


@pytest.mark.parametrize("placement", [v_placement(5), (*range(5), *range(5)), (0, 2, 1, 0, 1, 2)], ids=str)
def test_both_ends_of_a_link_have_the_same_group_name(placement):
    """torch numbers groups: a rank must create as many as its neighbours, in the same order."""
    names = {}
    for rank in range(max(placement) + 1):
        with lone_rank(rank, max(placement) + 1):
            groups = P2PGroups(dist.group.WORLD, range(max(placement) + 1), rank)
            groups.connect(placement, CPU, own_groups=True)
            for stream, link in groups._links.items():
                assert sorted(stream[:2]) == dist.get_process_group_ranks(link.group)
                names.setdefault(stream, []).append(link.group.group_name)
    assert all(len(ends) == 2 and len({*ends}) == 1 for ends in names.values())
    assert len({name for name, _ in names.values()}) == len(names)


def connect_after_other_groups(rank):
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    groups = P2PGroups(dist.group.WORLD, (2, 0, 1), (1, 2, 0)[rank])
    groups.connect(v_placement(3), CPU, own_groups=True)
    ends = {stream: (link.group.group_name, link.peer) for stream, link in groups._links.items()}
    return groups._rank, ends


def test_links_of_ranks_with_different_numbers_of_groups():
    ends = dict(run_ranks(connect_after_other_groups, 3))
    for rank in (0, 2):
        assert len(ends[rank]) == 4
        assert all(ends[1][stream][0] == name for stream, (name, _) in ends[rank].items())
