"""The file of a trace: what is written is read again, and what is no trace is refused."""

import json
import re
from itertools import accumulate

import pytest

from dualpipe.trace import costs, summary
from dualpipe.trace.file import COMPUTE, Slice, Trace, read
from traces import SCHEDULE, as_planned, check_format


def test_a_trace_is_what_was_written(tmp_path):
    trace = as_planned()
    trace.write(tmp_path / "trace.json")
    check_format(json.loads((tmp_path / "trace.json").read_text()))
    again = read(tmp_path / "trace.json")
    assert sorted(again.slices, key=str) == sorted(trace.slices, key=str) and again.memory == trace.memory
    assert again.schedule == SCHEDULE and again.schedule.name == "dualpipev"


@pytest.mark.parametrize("change, message", [
    (lambda text: text[: len(text) // 2], "cut off"), (lambda text: "", "cut off"),
    (lambda text: "\x00\xff", "cut off"),
    (lambda text: '{"traceEvents": []}', "KeyError: 'otherData'"), (lambda text: "[]", "TypeError"),
    (lambda text: text.replace("dualpipe trace 1", "dualpipe trace 2"), "'dualpipe trace 2'"),
    (lambda text: re.sub(r'"ts":[\d.]+', '"ts":Infinity', text), "OverflowError"),
    (lambda text: "[" * 10**6, "RecursionError"),
    (lambda text: re.sub(r'"ranks": {.*}}, "sch', '"ranks": {}, "sch', text), "not a trace of this library"),
    (lambda text: text.replace('"cat":"F",', ""), "KeyError: 'cat'"),
    (lambda text: text.replace('"schedule": {', '"schedule": null, "other": {'), "no step of training"),
    (lambda text: text.replace('"0F0", ', ""), "schedule 'dualpipev'"),
    (lambda text: text.replace('["0F0", ', '["0X0", '), "'0X0'"),
])
def test_what_is_no_trace_is_refused_in_a_line(tmp_path, change, message):
    path = tmp_path / "trace.json"
    as_planned(runs=1).write(path)
    path.write_text(change(path.read_text()), encoding="latin-1")
    for report in (summary.report, costs.report):
        with pytest.raises(ValueError) as raised:
            report(str(path), None)
        assert message in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="No such file"):
        read("none.json")


def test_slices_that_meet_do_not_overlap_for_who_cuts_off_their_times(tmp_path):
    steps = [number * number % 997 + 1 for number in range(1000)]  # ns
    slices = [Slice(0, COMPUTE, "segment", "one", end - step, end, {}) for step, end in zip(steps, accumulate(steps))]
    ranks = {"0": {"name": "rank 0", "clock_error_us": 0}}
    Trace(slices, [], {"ranks": ranks, "schedule": None, "loads": {}}).write(tmp_path / "trace.json")
    check_format(json.loads((tmp_path / "trace.json").read_text()))
