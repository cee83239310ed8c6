"""Measured costs of the actions of a trace."""

import pytest

from dualpipe.schedule import build, simulate
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.trace import costs
from dualpipe.trace.costs import MeasuredCosts
from dualpipe.trace.measured import Measured
from schedules import SCHEDULES
from traces import COSTS, MS, SCHEDULE, as_planned, per_stage, played


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (1, 3), (4, 3), (4, 8)])
def test_costs_are_those_that_were_taken(name, ranks, microbatches, tmp_path):
    schedule = build(name, ranks, microbatches)
    given = per_stage(schedule.num_stages)
    trace = as_planned(schedule, given, latency=MS // 2)
    trace.write(tmp_path / "trace.json")
    text = costs.report(str(tmp_path / "trace.json"), str(tmp_path / "costs.json"))
    found, expected = parse_costs(str(tmp_path / "costs.json")), simulate(schedule, given)
    again = simulate(schedule, found)
    # A kind of pair that runs on several combinations of stages gets the median of what it saves on them.
    error = 3e-3 if name == "dualpipev_half" else 1e-4
    assert again.makespan == pytest.approx(expected.makespan, rel=error)
    for mine, theirs in zip(again.spans, expected.spans):
        assert [span.end for span in mine] == pytest.approx([span.end for span in theirs], rel=error)
    assert found.p2p == pytest.approx(0.5 if ranks > 1 else 0.0)
    alone = {step[0].kind for steps in schedule.ranks for step in steps if len(step) == 1}
    assert ("none ran alone: I, W;" in text) == (not alone & {"I", "W"})
    first = next(line.split() for line in text.splitlines() if line.split()[:2] == ["0", "F"])
    assert first[2:5] == ["3", "3", "3"]


def test_a_pair_that_was_faster_than_one_of_its_actions_is_taken_for_as_long(tmp_path):
    """Medians of other samples may say so on a busy machine, and `Costs` would refuse the pair."""
    trace = played(SCHEDULE, lambda rank, run, step: 4.0 if len(step) == 2 else COSTS.of(step))
    trace.write(tmp_path / "trace.json")
    text = costs.report(str(tmp_path / "trace.json"), str(tmp_path / "costs.json"))
    found = parse_costs(str(tmp_path / "costs.json"))
    assert found.FB == found.B == found.on(1).FB == 5.0
    assert "\nall stages: FB measured 4 ms, less than B alone: taken as 5 ms\nstage 0: FB measured 4 ms, " in text


def test_medians_have_a_spread():
    times = iter(range(1000))
    trace = played(build("1f1b", 1, 4), lambda rank, run, step: 10 + next(times) % 5, runs=10)
    rows = [line.split() for line in MeasuredCosts(Measured(trace)).table().splitlines()]
    assert rows[1] == ["0", "B", "12", "10", "14", "40"] and rows[2] == ["0", "F", "12", "10", "14", "40"]
