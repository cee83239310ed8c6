"""The choice between implementations by their times: one for all ranks, of those that run on all of them."""

import time

import pytest
import torch

from dualpipe.nn import pick_fastest as module
from dualpipe.nn.pick_fastest import check_runs, pick_fastest
from dualpipe.runtime.device import deterministic
from dualpipe.runtime.ranks.rank_sync import RankSync
from ranks import run_ranks

CPU = torch.device("cpu")
ALONE = RankSync(None)


@pytest.fixture
def times(monkeypatch):
    """Have a run take the seconds that it returns."""
    monkeypatch.setattr(module, "min_seconds", lambda run, device, num_calls: run())


def seconds_of(name):
    if name == "missing":
        raise ModuleNotFoundError("No module named 'missing'\nand more")
    return {"slow": 0.003, "fast": 0.001}[name]


def test_the_fastest_is_taken(times):
    choice = pick_fastest(("slow", "missing", "fast"), seconds_of, CPU, ALONE, default="slow")
    assert choice.name == "fast"
    assert str(choice) == ("3 ms by 'slow', 1 ms by 'fast' (not running here: 'missing', ModuleNotFoundError: No "
                           "module named 'missing')")


def test_deterministic_runs_take_the_first_that_runs(times):
    with deterministic():
        assert pick_fastest(("missing", "slow", "fast"), seconds_of, CPU, ALONE, default="fast").name == "slow"


def test_nothing_runs(times):
    choice = pick_fastest(("missing",), seconds_of, CPU, ALONE, default="plain")
    assert choice.name == "plain" and not choice.seconds and "'missing', ModuleNotFoundError" in str(choice)
    assert str(pick_fastest(("slow", "fast"), None, CPU, ALONE, default="slow")) == ""


def test_it_is_timed():
    choice = pick_fastest(("sleeps", "returns"), lambda name: time.sleep(0.01 * (name == "sleeps")), CPU, ALONE,
                          default="sleeps")
    assert choice.name == "returns" and 0.01 <= choice.seconds["sleeps"] < 60


def chosen_by(rank):
    """Rank 0 has nothing to run; "b" is the fastest of rank 1, fails on rank 2, and "c" is slow on rank 2."""
    def run(name):
        if (rank, name) == (2, "b"):
            raise RuntimeError("no")
        return {"a": 0.003, "b": 0.001, "c": 0.002 * rank}[name]

    module.min_seconds = lambda run, device, num_calls: run()
    ranks = RankSync(torch.distributed.group.WORLD)
    choice = pick_fastest(("a", "b", "c"), None if rank == 0 else run, CPU, ranks, default="c")
    return choice.name, str(choice)


def test_ranks_choose_what_runs_on_all_and_is_fast_on_the_slowest():
    expected = ("a", "3 ms by 'a', 4 ms by 'c' (not running here: 'b', RuntimeError: no)")
    assert run_ranks(chosen_by, 3) == [expected] * 3


def test_what_does_not_run_is_refused():
    with pytest.raises(ValueError, match=r"^x does not run here \(ModuleNotFoundError: No .* 'missing'\); expected y"):
        check_runs(lambda: seconds_of("missing"), "x", "y")
    check_runs(lambda: seconds_of("fast"), "x", "y")
