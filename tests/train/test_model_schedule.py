"""A run's schedule where it is searched for: once, the same on all ranks, and longer than any timeout."""

from __future__ import annotations

import os
import time
from threading import Event
from unittest import mock

import pytest

import dualpipe.runtime.ranks.rank_sync
from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.schedule import build, simulate, validate
from dualpipe.schedule.by_name import search_with_progress
from dualpipe.train import step
from dualpipe.train.config.schema import ParallelConfig
from ranks import run_ranks


def auto(**parallel) -> ParallelConfig:
    return ParallelConfig(schedule="auto", **parallel)


def of_ranks(rank, world, cache, seconds, costs):
    """The schedule of each rank, where rank 0 searches for so long and no other may."""
    import torch.distributed as dist

    os.environ["XDG_CACHE_HOME"] = str(cache)

    def find(*args, **options):
        assert rank == 0, "another rank searches"
        time.sleep(seconds)
        return search_with_progress(*args, effort=0, **options)

    one_search = mock.patch.object(step, "search_with_progress", find)
    with one_search, mock.patch.object(dualpipe.runtime.ranks.rank_sync, "TURN", 0.2):
        return step.build_schedule(auto(pp=2, schedule_costs=costs), 5, RankSync(dist.group.WORLD))


@pytest.mark.slow
def test_rank_0_searches_longer_than_the_timeout_of_the_group(tmp_path):
    found = run_ranks(of_ranks, 3, 3, tmp_path, 12.0, "F=1,B=2,W=0.9", group_timeout=10, fresh=True)
    assert found[0] == found[1] == found[2]
    assert found[0].name == "auto" and found[0].num_microbatches == 5
    validate(found[0])


def test_a_rank_that_is_lost_is_not_waited_for_with_the_search():
    class Lost(RankSync):
        def __init__(self):
            super().__init__(None)
            self.size = 2

        def first(self, work):
            assert work() == [], "the search takes longer"
            raise RankLost("rank 1 is gone")

    may_end, has_ended = Event(), Event()

    def search_long(*_, **__):
        may_end.wait(60)
        has_ended.set()

    search = mock.patch.object(step, "search_with_progress", search_long)
    with search, mock.patch.object(dualpipe.runtime.ranks.rank_sync, "TURN", 0.1):
        with pytest.raises(RankLost):
            step.build_schedule(auto(pp=2), 5, Lost())
        assert not has_ended.is_set()
    may_end.set()


@pytest.mark.parametrize("costs, message", [("F=x", "parallel.schedule_costs = 'F=x': cost F is 'x'; give a number"),
                                            ("none.json", "parallel.schedule_costs = 'none.json': .*none.json")])
def test_an_error_of_rank_0_is_one_of_all(costs, message, tmp_path):
    for error in run_ranks(of_ranks, 2, 2, tmp_path, 0.0, costs, check=False, fresh=True):
        with pytest.raises(ValueError, match=message):
            raise error


def test_alone_and_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = step.build_schedule(auto(pp=2, schedule_memory=3.0), 5)
    assert found == build("auto", 2, 5, memory=3.0)
    by_rank = step.build_schedule(auto(pp=2, schedule_memory=(2.0, 3.0)), 5)
    assert by_rank == build("auto", 2, 5, memory=(2.0, 3.0))
    assert simulate(by_rank).memory_by_rank[0] == 2
    named = ParallelConfig(pp=2, schedule="zbv")
    assert step.build_schedule(named, 5) == build("zbv", 2, 5)
    with pytest.raises(ValueError, match=r"memory is 1\.0; give stage activations, 2 or more"):
        step.build_schedule(auto(pp=2, schedule_memory=1.0), 5)
