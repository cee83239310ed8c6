"""Summaries of traces with known times: the time that each rank lost, and the rank it waited for."""


import pytest

from dualpipe.schedule import build, simulate
from dualpipe.trace import summary
from dualpipe.trace.measured import Measured
from dualpipe.trace.summary import Summary
from traces import COSTS, MS, PER_STAGE, SCHEDULE, as_planned, played


def test_as_planned_nothing_is_lost():
    found = Summary(Measured(as_planned()))
    for rank in range(4):
        assert sum(map(abs, found.lost(rank).values())) < 1e-3, found.lost(rank)
    assert list(found.losses()) == [f"rank {rank} lost nothing" for rank in range(4)]
    assert len(found.timelines()) == 3
    for timeline in found.timelines():
        assert timeline.makespan == pytest.approx(found.ideal.makespan, rel=1e-6)
        assert timeline.bubble == pytest.approx(found.ideal.bubble, abs=1e-2)


def with_another_action(more):
    def duration(rank, run, step):
        return PER_STAGE.of(step) + more * ((rank, run) == (2, 1) and str(step[0]) == "2F0")

    return Summary(Measured(played(SCHEDULE, duration)))


@pytest.mark.parametrize("more", [12, -2])
def test_what_is_lost_is_all_that_is_missing(more):
    found = with_another_action(more)
    for rank in range(4):
        late = [run[-1].slice.end / MS - found.ideal.spans[rank][-1].end for run in found.measured.runs[rank]]
        agreed = [each.end / MS for each in found.trace.rows[rank] if each.kind == "agree"]
        assert sum(found.lost(rank).values()) == pytest.approx((sum(late) - sum(agreed)) / 3, abs=1e-3) != 0
        assert sum(found.totals(rank).values()) == pytest.approx(found.window)


def test_what_a_slow_action_costs_its_rank_and_the_others():
    found = with_another_action(12)
    lost = {rank: found.lost(rank) for rank in range(4)}
    assert max(lost[2], key=lost[2].get) == ("slower", "F(stage 2)")
    assert lost[2]["slower", "F(stage 2)"] == pytest.approx(12 / 3)
    assert lost[3]["waiting", "2"] > 2 and abs(lost[3]["slower", "F(stage 3)"]) < 1e-3
    lines = list(found.losses())
    assert "rank 2 lost 4.00 ms: 4.00 in F(stage 2)" in lines[2]
    assert f"{lost[3]['waiting', '2']:.2f} waiting for rank 2" in lines[3]
    assert "F(stage 2, micro-batch 0): 16.5 ms, 12.0 more" in next(iter(found.slowest()))


def test_experts_with_more_tokens_than_others():
    def duration(rank, run, step):
        return COSTS.of(step) * (1.5 if rank == 3 else 1)  # one of three pipelines, whose experts get more tokens

    loads = {"1": [100, 100, 100, 210, 60, 30], "2": [100, 100, 100, 210, 60, 30]}
    found = Summary(Measured(played(build("1f1b", 2, 4), duration, replicas=3, loads=loads)))
    lines = list(found.losses())
    assert "2.1x mean load" in lines[3] and "mean load" not in lines[0] + lines[4]


def test_a_picture_and_a_table(tmp_path):
    as_planned().write(tmp_path / "trace.json")
    files = [str(tmp_path / f"trace.{form}") for form in ("json", "svg", "html")]
    text = summary.report(*files)
    assert "3 steps of 4 ranks, dualpipev, 8 micro-batches" in text
    page = (tmp_path / "trace.html").read_text()
    assert '"measured"' in page and '"simulated"' in page
    assert "overlapped with" in (tmp_path / "trace.svg").read_text()
    rows = [line.split() for line in text.splitlines() if line.startswith("rank ")]
    ideal = simulate(SCHEDULE, PER_STAGE)
    for rank, row in enumerate(rows[:4]):
        every, compute, bubble, exposed = map(float, row[2:6])
        assert every == pytest.approx(ideal.makespan + 1, rel=1e-2)
        assert compute == pytest.approx(ideal.makespan - ideal.bubble[rank], rel=1e-2)
        assert bubble <= ideal.bubble[rank] + 1 and exposed > 0
