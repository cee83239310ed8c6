"""Ranks that compute slower than those with the same stages are named, and what chance does is not."""

import random
import re
from statistics import median

import pytest
import torch

from dualpipe.nn import Router
from dualpipe.nn.router_set import RouterSet, load_of
from dualpipe.pipeline.overlap import Part
from dualpipe.recorder import BEGAN, ENDED, Recorder, rank_name
from dualpipe.train.metrics import read_metrics
from dualpipe.train.stragglers import Stragglers, summary
from dualpipe.train.votes import Vote, seconds_of_step

STEPS = 20  # of an interval
slow = pytest.mark.slow


def steps(ranks, change, *, noise=0.02, seed=0, count=STEPS, has_experts=True):
    """Votes of `count` steps of ranks that need 1 s and, in experts' segments, 0.5 s; `change(rank)` says what else:
    factors of the two, and of the tokens."""
    drawn = random.Random(seed)
    for _ in range(count):
        votes = []
        for rank in range(ranks):
            others, experts, load = change(rank)
            others *= drawn.gauss(1.0, noise)
            experts *= 0.5 * drawn.gauss(1.0, noise) * has_experts
            votes.append(Vote(0, 1000 * load, others + experts, experts, others, 0.1))
        yield votes


def said(stragglers, *intervals):
    """What is said at the end of each interval; nothing is before."""
    found = []
    for votes in intervals:
        *before, last = [stragglers.add(each) for each in votes]
        assert not any(before)
        found.append(last)
    return found


def stragglers(dp=1, pp=1, ep=1):
    return Stragglers(STEPS, pp, lambda rank: rank_name(rank, {"pp": pp, "dp": dp, "ep": ep}))


def only(odd, *factors):
    return lambda rank: factors if rank == odd else (1, 1, 1)


@pytest.mark.parametrize(("ranks", "odd"), [(2, 0), (2, 1), (3, 1), (4, 2), (8, 5), (64, 17)])
def test_a_slow_device_is_named_and_for_how_long(ranks, odd):
    change = only(odd, 1.09, 1.09, 1)
    first, second, third = said(stragglers(ranks), steps(ranks, change, seed=1), steps(ranks, change, seed=2),
                                steps(ranks, lambda rank: (1, 1, 1)))
    assert re.fullmatch(rf"rank {odd} \(dp {odd}\): \d+% slower than the median for 20 steps, all segments: suspect "
                        "the device", first)
    assert int(re.search(r"(\d+)%", first)[1]) in range(7, 13)
    assert "for 40 steps" in second and third == ""


@pytest.mark.parametrize(("factors", "text"), [
    ((1, 1.6, 1.8), "60% slower than the median for 20 steps, experts only: load 1.6x"),  # of (1.8 + 3) / 4
    ((1, 1.6, 1), "experts only, with no more tokens than others"),
    ((1.6, 1, 1), "all segments but those of experts"),
])
def test_what_is_slow_is_told_apart(factors, text):
    (found,) = said(stragglers(ep=4), steps(4, only(2, *factors), noise=0.001))
    if factors[2] > 1:
        text = text.replace("1.6x", "1.5x")
    assert found.startswith("rank 2 (ep 2): ") and found.endswith(text)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_chance_is_not_taken_for_a_straggler(ranks):
    lines = [line for seed in range(60) for line in
             said(stragglers(ranks), steps(ranks, lambda rank: (1, 1, 1), noise=0.08, seed=seed))]
    assert len([line for line in lines if line]) <= 1


def test_devices_that_all_differ_are_no_stragglers():
    spread = [0.8, 0.86, 0.92, 0.98, 1.04, 1.1, 1.16, 1.22]
    assert said(stragglers(8), steps(8, lambda rank: (spread[rank], 1, 1), noise=0.001)) == [""]


def test_only_ranks_with_the_same_stages_are_compared():
    change = [(1, 1, 1), (1, 1, 1), (2, 2, 1), (2.4, 2.4, 1)]
    (found,) = said(stragglers(dp=2, pp=2), steps(4, lambda rank: change[rank], noise=0.001))
    assert found.startswith("rank 3 (pp 1, dp 1): 20% slower") and "; " not in found


def test_ranks_of_one_pipeline_are_compared_with_what_they_were():
    at_first, same, slower = (steps(2, only(1, factor, factor, 1), has_experts=False) for factor in (3, 3, 3.6))
    found = said(stragglers(pp=2), at_first, same, slower)
    assert found[:2] == ["", ""]
    assert re.fullmatch(r"rank 1 \(pp 1\): (18|19|20|21|22)% slower than the median for 20 steps, as each was in the "
                        "first 20, all segments: suspect the device", found[2])


def test_nothing_is_said_without_the_seconds_or_the_wish():
    on_cuda = [Vote(0), Vote(0)]
    assert stragglers(2).add(on_cuda) == "" and summary(on_cuda, 1, 1.0) == {}
    assert said(Stragglers(0, 1, str), steps(2, only(1, 9, 9, 1))) == [""]
    assert summary([Vote(compute=1.0)], 1, 1.0) == {}


def test_metrics_of_a_step():
    votes = [Vote(compute=1.0, wait=0.5), Vote(compute=1.2, wait=0.1), Vote(compute=3.0), Vote(compute=3.0)]
    assert summary(votes, 4, 2.0) == {"waiting_share": pytest.approx(0.075)}
    assert summary(votes, 2, 2.0)["compute_max_over_median"] == pytest.approx(1.2 / 1.1)
    assert summary(votes, 1, 2.0)["compute_max_over_median"] == pytest.approx(3.0 / 2.1)


# -- where the numbers come from


def test_seconds_are_those_of_the_actions_without_the_waits_in_them():
    recorder = Recorder()

    def entry(began, ended, kind, what="", ranks=()):
        made = recorder.begin(kind, what, ranks)
        made[BEGAN], made[ENDED] = int(began * 1e9), int(ended * 1e9)

    recorder.step = 1
    entry(0, 90, "F")
    recorder.step = 2
    entry(100, 101, "data")
    entry(101, 103, "receive", "", (1,))
    entry(103, 110, "F")
    entry(103, 105, "segment", Part("F", 0, 0, 0))
    entry(105, 106.5, "all_to_all", "", (0, 1))
    entry(106.5, 109.5, "segment", Part("F", 0, 0, 2, inside=True))
    entry(110, 114, "BW")
    entry(114, 114.25, "clip", "", (0, 1))
    entry(115, 116, "optimizer")
    recorder.begin("step")  # still open
    assert seconds_of_step(recorder) == {"compute": 10.5, "experts": 3.0, "others": 2.0, "wait": 3.75}
    recorder.step = 3
    entry(117, 119, "F")
    assert seconds_of_step(recorder) == {"compute": 2.0, "experts": 0.0, "others": 2.0, "wait": 0.0}


def test_the_load_is_that_of_the_experts_of_a_rank():
    stage = torch.nn.ModuleDict({"a": Router(8, 4, top_k=2), "b": Router(8, 8, top_k=2)})
    routers = RouterSet([stage], num_chunks=1)
    for totals in routers.totals.values():
        totals.fill_(0.5)
    load_of(routers.totals["a"])[:] = torch.tensor([1.0, 2, 4, 8])
    load_of(routers.totals["b"])[:] = torch.tensor([10.0] * 6 + [50, 60])
    assert routers.load(0, 2) == 3 + 40
    assert RouterSet([stage], num_chunks=1).load(1, 2) == 0
    routers = RouterSet([stage], num_chunks=1)
    load_of(routers.totals["b"])[:] = torch.arange(8.0)
    assert routers.load(3, 4) == 6 + 7


SLOWLY = """
import time
from dualpipe.recorder import Recorder
def made(self, what, *tensors):
    if self.rank == 1 and {which}:
        time.sleep(0.04)
Recorder.made = made
"""


EXPERTS, ALL = "getattr(what, 'inside', False)", "hasattr(what, 'kind')"


@pytest.mark.parametrize(("options", "which"), [
    (("--parallel.pp", "1", "--parallel.ep", "2"), EXPERTS),
    pytest.param(("--parallel.dp", "2"), ALL, marks=slow),
])
def test_a_rank_that_takes_longer_shows_in_the_metrics_and_is_not_named_on_cpu(run_folder, dualpipe, options, which):
    out = "-".join(options).replace(".", "")
    process = dualpipe(
        run_folder, "train", "run.toml", "--train.steps", "8", "--train.eval_interval", "0", "--train.eval_batches",
        "1", "--train.num_chunks", "2", "--metrics.straggler_interval", "8", "--output.dir", f"out{out}", *options,
        before=SLOWLY.format(which=which),
    )
    assert process.returncode == 0, process.stderr
    assert "slower than the median" not in process.stdout
    rows = read_metrics(run_folder / f"out{out}" / "metrics.jsonl")
    assert median(row["compute_max_over_median"] for row in rows) > 1.1  # of a step other processes may hold up any
    assert all(0 < row["waiting_share"] < 1 for row in rows)
