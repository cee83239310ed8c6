"""Symptoms of unhealthy steps in traces whose times are known, each with its share and a setting that exists."""

import re

import pytest

from dualpipe.schedule import build
from dualpipe.trace import symptoms
from dualpipe.trace.file import COMPUTE, Slice
from dualpipe.trace.measured import ALL_TO_ALL, Measured
from dualpipe.trace.summary import Summary
from dualpipe.train.config.schema import Config
from traces import COSTS, MS, as_planned, played


def symptoms_of(trace):
    return list(map(str, Summary(Measured(trace)).symptoms()))


def test_a_healthy_trace_has_none():
    assert symptoms_of(as_planned()) == []


def test_a_rank_whose_actions_are_sometimes_slow_leaves_the_others_waiting():
    def duration(rank, run, step):
        return COSTS.of(step) * (6 if (rank, run) == (1, 1) else 1)

    (line,) = symptoms_of(played(build("1f1b", 2, 4), duration))
    found = re.match(r"bubble: rank 0 waits (\d+)% of a step .* (\d+)% in the simulation", line)
    assert found and int(found[1]) >= int(found[2]) + 15


def test_a_rank_that_waits_for_its_batch():
    trace = played(build("1f1b", 2, 4), lambda rank, run, step: COSTS.of(step))
    ends = [max(item.end for item in trace.slices)]
    for number in range(3):
        ends.append(ends[-1] + 20 * MS)
        trace.slices.append(Slice(0, COMPUTE, "data", "the next batch", ends[-2], ends[-1], {"step": number + 1}))
    (line,) = symptoms_of(trace)
    share = 60 * MS / (ends[-1] - min(item.start for item in trace.slices))
    assert line.startswith(f"input starvation: rank 0 waits {share:.0%} of a step")


def test_experts_of_a_rank_with_more_tokens():
    loads = {"1": [100, 100, 100, 210, 60, 30]}
    trace = played(build("1f1b", 2, 4), lambda rank, run, step: COSTS.of(step), replicas=3, loads=loads)
    (line,) = symptoms_of(trace)
    assert line.startswith("load imbalance") and "rank 3 gets 2.1 times" in line


@pytest.mark.parametrize("kind, remedy", [(ALL_TO_ALL, "overlap"), ("reductions", "dp_replicate")])
def test_exposed_communication(kind, remedy):
    shares = {kind: 0.2, "gathers": 0.07, "norm": 0.5}  # the norm waits for the slowest rank; it has no setting
    line = str(symptoms.exposed_communication("rank 1", shares))
    assert "rank 1 waits 27% of a step in collectives, 20%" in line and remedy in line
    assert symptoms.exposed_communication("rank 1", {kind: 0.2}) is None


def test_no_one_is_told_to_turn_on_what_is_on():
    assert "overlap" not in symptoms.exposed_communication("rank 1", {ALL_TO_ALL: 0.4}, overlaps=True).text


def test_all_settings_that_are_named_exist():
    texts = [
        symptoms.input_starvation("", 1.0), symptoms.excess_bubble("", 1.0, 0.0), symptoms.load_imbalance("", 9.0, 1.0),
        symptoms.load_imbalance("", 9.0, 1.0, "bias_update_rate (now 0.001)"),
        *(symptoms.exposed_communication("", {kind: 1.0}) for kind in (ALL_TO_ALL, "gathers", "reductions")),
    ]
    settings = [setting for text in texts for setting in re.findall(r"\[(\w+)\] (\w+)", str(text))]
    assert len(settings) >= len(texts)
    for table, name in settings:
        assert hasattr(getattr(Config(), table), name), f"[{table}] {name}"
