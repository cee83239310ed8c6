"""Where time went, of traces whose times are known: what is measured, what it costs, and what ranks have lost to whom.
"""

import json
import re
from dataclasses import replace
from itertools import accumulate

import pytest

from dualpipe.schedule import Costs, build, simulate
from dualpipe.schedule.command import parse_costs
from dualpipe.trace import costs, summary
from dualpipe.trace.costs import MeasuredCosts
from dualpipe.trace.file import COMMUNICATION, COMPUTE, Slice, Trace, read
from dualpipe.trace.measured import Measured
from dualpipe.trace.summary import Summary
from schedules import SCHEDULES
from traces import MS, check_format, played

COSTS = Costs(F=3.0, B=5.0, I=3.0, W=2.0, FB=7.0, p2p=0.5)


def per_stage(num_stages):
    """Each stage is bigger than the one before."""
    return replace(COSTS, per_stage={stage: COSTS.scaled(1 + stage / 4) for stage in range(1, num_stages)})


PER_STAGE = per_stage(8)
SCHEDULE = build("dualpipev", 4, 8)


def as_planned(schedule=SCHEDULE, given=PER_STAGE, **options):
    return played(schedule, lambda rank, run, step: given.of(step), **options)


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
    assert again.makespan == pytest.approx(expected.makespan, rel=1e-4)
    for mine, theirs in zip(again.spans, expected.spans):
        assert [span.end for span in mine] == pytest.approx([span.end for span in theirs], rel=1e-4)
    assert found.p2p == pytest.approx(0.5 if ranks > 1 else 0.0)
    assert text.endswith(f"wrote {tmp_path}/costs.json, in milliseconds, for dualpipe schedule --costs "
                         f"{tmp_path}/costs.json\n")
    alone = {step[0].kind for steps in schedule.ranks for step in steps if len(step) == 1}
    assert ("none ran alone: I, W;" in text) == (not alone & {"I", "W"})
    first = next(line.split() for line in text.splitlines() if line.split()[:2] == ["0", "F"])
    assert first[2:5] == ["3", "3", "3"]


def test_a_pair_that_was_faster_than_one_of_its_actions_is_taken_for_as_long(tmp_path):
    """On a busy machine medians of other samples say so, and `Costs` would refuse it."""
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
    """A summary of three steps, in one of which a forward of rank 2 takes so many ms more, or less."""

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
    assert lines[2].startswith("rank 2 lost 4.00 ms: 4.00 in F(stage 2) slower than its median, ")
    assert lines[3].startswith(f"rank 3 lost {sum(lost[3].values()):.2f} ms: ")
    assert f"{lost[3]['waiting', '2']:.2f} waiting for rank 2" in lines[3]
    assert next(iter(found.slowest())) == ("rank 2, step 2, F(stage 2, micro-batch 0): 16.5 ms, 12.0 more than its "
                                           "median")


def test_experts_with_more_tokens_than_others():
    def duration(rank, run, step):
        return COSTS.of(step) * (1.5 if rank == 3 else 1)  # one of three pipelines, in whose experts more tokens are

    loads = {"1": [100, 100, 100, 210, 60, 30], "2": [100, 100, 100, 210, 60, 30]}
    found = Summary(Measured(played(build("1f1b", 2, 4), duration, replicas=3, loads=loads)))
    lines = list(found.losses())
    assert "in B(stage 1) slower than its median (experts 2.1x mean load)" in lines[3]
    assert "mean load" not in lines[0] + lines[4]


def test_a_picture_and_a_table(tmp_path):
    as_planned().write(tmp_path / "trace.json")
    files = [str(tmp_path / f"trace.{form}") for form in ("json", "svg", "html")]
    text = summary.report(*files)
    assert f"{tmp_path}/trace.json: 3 steps of 4 ranks, dualpipev, 8 micro-batches; clocks are right to 0.00 ms" in text
    assert text.endswith(f"wrote {files[1]}\nwrote {files[2]}\n")
    page = (tmp_path / "trace.html").read_text()
    assert '"measured"' in page and '"simulated"' in page and "clocks are right to 0.00 ms" in page
    assert "overlapped with" in (tmp_path / "trace.svg").read_text()
    rows = [line.split() for line in text.splitlines() if line.startswith("rank ")]
    ideal = simulate(SCHEDULE, PER_STAGE)
    for rank, row in enumerate(rows[:4]):
        every, compute, bubble, exposed = map(float, row[2:6])
        assert every == pytest.approx(ideal.makespan + 1, rel=1e-2)
        assert compute == pytest.approx(ideal.makespan - ideal.bubble[rank], rel=1e-2)
        assert bubble <= ideal.bubble[rank] + 1 and exposed > 0


def two_ranks(rows):
    """A trace of slices (rank, kind, name, start, end, more) in ms, which are communications where more has ranks."""
    slices = [Slice(rank, COMMUNICATION if "ranks" in more else COMPUTE, kind, name, start * MS, end * MS, more)
              for rank, kind, name, start, end, more in rows]
    ranks = {f"{rank}": {"name": f"rank {rank}", "place": 0, "members": [rank], "clock_error_us": 0} for rank in (0, 1)}
    schedule = {"name": "1f1b", "num_microbatches": 1, "placement": [0], "ranks": [["0F0", "0B0"]]}
    return Measured(Trace(slices, [], {"ranks": ranks, "schedule": schedule, "loads": {}}))


def test_a_wait_is_for_who_is_late_and_then_for_the_communication():
    both = {"ranks": [0, 1], "number": 1}
    rows = [
        (0, "F", "F", 0, 30, {"actions": ["0F0"]}), (1, "F", "F", 0, 30, {"actions": ["0F0"]}),
        (0, "exchange", "rows 1", 2, 3, {}), (1, "exchange", "rows 1", 12, 13, {}),
        (0, "all_to_all", "rows 1", 5, 16, both), (1, "all_to_all", "rows 1", 15, 16, both),
        (0, "clip", "norm", 40, 50, both), (1, "clip", "norm", 44, 50, both),
        (0, "evaluate", "evaluate", 50, 60, {}), (0, "clip", "norm", 51, 59, {"ranks": [0, 1], "number": 2}),
    ]
    found = two_ranks(rows)
    first, second = found.spans[0][0], found.spans[1][0]
    assert (first.late, first.exposed["all-to-all"], first.own) == ({1: 7 * MS}, 4 * MS, 19 * MS)
    assert (second.late.total(), second.exposed["all-to-all"], second.own) == (0, MS, 29 * MS)
    assert (first.cost, second.cost) == (23 * MS, 30 * MS), "what a rank is late is no cost of another one's action"
    assert found.hidden[0]["all-to-all"] == found.hidden[1]["all-to-all"] == 2 * MS
    assert [span.late[1] for span in found.spans[0][1:]] == [4 * MS, 0]
    assert found.spans[0][2].exposed.total() == 0, "an evaluation is told as a whole"


def test_what_another_stream_does_is_hidden_unless_it_is_waited_for():
    rows = [
        (0, "F", "F", 0, 30, {"actions": ["0F0"]}), (0, "exchange", "rows 1", 5, 25, {}),
        (0, "all_to_all", "rows 1", 20, 25, {}), (0, "evaluate", "evaluate", 40, 80, {}),
        (0, "exchange", "rows 2", 45, 65, {}), (0, "all_to_all", "rows 2", 60, 65, {}),
    ]
    trace = two_ranks(rows).trace
    slices = [each._replace(thread="device, stream 1" if each.kind == "exchange" else "device")
              for each in trace.slices]
    found = Measured(replace(trace, slices=slices))
    assert found.spans[0][0].exposed["all-to-all"] == 5 * MS
    assert found.hidden[0]["all-to-all"] == 15 * MS, "an evaluation is told as a whole"


def test_a_header_is_waited_for_as_its_message():
    flow = {"ranks": [1], "number": 0, "bytes": 8, "flow": "a from 1 to 0, 1"}
    found = two_ranks([
        (1, "send", "the activation", 20, 23, flow | {"ranks": [0]}),
        (0, "receive", "the activation", 1, 22, {"ranks": [1], "number": 0}),
        (0, "receive", "the activation", 22, 25, flow),
    ])
    assert [(dict(+span.late), dict(+span.exposed)) for span in found.spans[0]] == [
        ({1: 19 * MS}, {"activations": 2 * MS}), ({}, {"activations": 3 * MS})]
    assert found.latency == 5 * MS, "it was not waited for when it was sent: the best there is"


def test_a_trace_is_what_was_written(tmp_path):
    trace = as_planned()
    trace.write(tmp_path / "trace.json")
    check_format(json.loads((tmp_path / "trace.json").read_text()))
    again = read(tmp_path / "trace.json")
    assert sorted(again.slices, key=str) == sorted(trace.slices, key=str) and again.memory == trace.memory
    assert again.schedule == SCHEDULE and again.schedule.name == "dualpipev"


@pytest.mark.parametrize("change, message", [
    (lambda text: text[: len(text) // 2], "trace.json is no trace, or was cut off: "),
    (lambda text: "", "trace.json is no trace, or was cut off: "),
    (lambda text: "\x00\xff", "trace.json is no trace, or was cut off: "),
    (lambda text: '{"traceEvents": []}', "trace.json is no trace of this library (KeyError: 'otherData'); take one by"),
    (lambda text: "[]", "trace.json is no trace of this library (TypeError"),
    (lambda text: text.replace("dualpipe trace 2", "dualpipe trace 1"),
     "trace.json: it is a 'dualpipe trace 1', of which this version reads 'dualpipe trace 2' alone; take"),
    (lambda text: re.sub(r'"ts":[\d.]+', '"ts":Infinity', text),
     "trace.json is no trace of this library (OverflowError"),
    (lambda text: "[" * 10**6, "trace.json is no trace of this library (RecursionError"),
    (lambda text: re.sub(r'"ranks": {.*}}, "sch', '"ranks": {}, "sch', text), "trace.json is no trace of this library"),
    (lambda text: text.replace('"cat":"F",', ""), "trace.json is no trace of this library (KeyError: 'cat')"),
    (lambda text: text.replace('"schedule": {', '"schedule": null, "other": {'),
     "trace.json: the trace holds no step of training"),
    (lambda text: text.replace('"0F0", ', ""), "trace.json: schedule 'dualpipev'"),
    (lambda text: text.replace('["0F0", ', '["0X0", '), "'0X0' is not an action like 0F7"),
])
def test_what_is_no_trace_is_refused_in_a_line(tmp_path, change, message):
    path = tmp_path / "trace.json"
    as_planned(runs=1).write(path)
    path.write_text(change(path.read_text()), encoding="latin-1")
    for report in (summary.report, costs.report):
        with pytest.raises(ValueError) as raised:
            report(str(path), None)
        assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"^cannot read the trace none.json: No such file or directory$"):
        read("none.json")


def test_slices_that_meet_do_not_overlap_for_who_cuts_off_their_times(tmp_path):
    steps = [number * number % 997 + 1 for number in range(1000)]  # ns
    slices = [Slice(0, COMPUTE, "segment", "one", end - step, end, {}) for step, end in zip(steps, accumulate(steps))]
    ranks = {"0": {"name": "rank 0", "clock_error_us": 0}}
    Trace(slices, [], {"ranks": ranks, "schedule": None, "loads": {}}).write(tmp_path / "trace.json")
    check_format(json.loads((tmp_path / "trace.json").read_text()))
