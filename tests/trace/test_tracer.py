"""Traces of real ranks: the file's content, on one clock, and its state after a rank fails."""

import contextlib
import json
import math
import re
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dualpipe import Pipeline
from dualpipe.pipeline import PipelineError
from dualpipe.runtime import recorder
from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.recorder import ENTRIES, Recorder
from dualpipe.trace import costs, summary, tracer
from dualpipe.trace.file import COMMUNICATION, COMPUTE, read
from dualpipe.trace.measured import Measured
from ranks import run_ranks
from toys import make_stages, num_stages, stages_of_rank
from traces import check_format

MICRO_BATCHES = 4


def pipeline(rank, ranks, name="dualpipev", process_group=None):
    stages = make_stages(num_stages(name, ranks))
    own = [stages[number] for number in stages_of_rank(name, ranks, rank)]
    return Pipeline(own, schedule=name, process_group=process_group)


def step(pipe, criterion=F.mse_loss):
    x = torch.randn(8, 8, dtype=torch.float64, device="cpu")
    ends = {"criterion": criterion, "labels": x} if pipe.rank == 0 else {}
    pipe.step(*(x,) if pipe.rank == 0 else (), num_chunks=MICRO_BATCHES, **ends)


def traced(rank, folder):
    """Trace two steps with an evaluation between them, without a dropped event; one more step is not in the trace."""
    pipe, own = pipeline(rank, 2), Recorder.current()
    step(pipe)
    with pipe.trace(f"{folder}/trace.json"):
        step(pipe)
        with torch.no_grad():
            step(pipe)
        with own.doing("many"):
            for _ in range(ENTRIES + 1):
                own.begin("one")
                own.end()
        with own.lane("data").doing("read", "a batch"):
            step(pipe)
        own.begin("open")
    own.unwind(0)
    step(pipe)
    assert not own.keeps_all and len(own._ring) == ENTRIES and not own._observers
    steps = pipe._programs.schedule(MICRO_BATCHES).ranks
    return [[(action,) for each in own for action in each] for own in steps]  # for stages without segments


def test_two_ranks(tmp_path):
    ranks, _ = run_ranks(traced, 2, str(tmp_path))
    found = json.loads((tmp_path / "trace.json").read_text())
    check_format(found)
    trace = read(tmp_path / "trace.json")
    assert list(map(list, trace.schedule.ranks)) == ranks and trace.schedule.placement == (0, 1, 1, 0)
    for rank in (0, 1):
        own = [each for each in trace.slices if each.rank == rank]
        actions = [each.args["actions"] for each in own if "actions" in each.args]
        expected = [list(map(str, action)) for action in ranks[rank]]
        forwards = [actions for actions in ([a for a in step if "F" in a] for step in expected) if actions]
        assert actions == expected + forwards + expected, "a step, an evaluation, a step"
        assert sum(each.kind == "one" for each in own) == ENTRIES + 1
        assert [(each.thread, each.name, each.args) for each in own if each.kind == "read"] == [
            ("data", "a batch", {})]
        (last,) = (each for each in own if each.kind == "open")
        assert last.end >= max(each.end for each in own) - 1 and any(sample[0] == rank for sample in trace.memory)
    sends = {each.args["flow"]: each for each in trace.slices if each.kind == "send" and "flow" in each.args}
    assert len(sends) == 2 * 4 * MICRO_BATCHES + 2 * MICRO_BATCHES  # there and back in two steps, there in one
    assert sum(event["ph"] == "s" for event in found["traceEvents"]) == len(sends)
    text = summary.report(str(tmp_path / "trace.json"), str(tmp_path / "trace.svg"))
    assert "2 steps of 2 ranks, dualpipev, 4 micro-batches" in text


def test_one_rank_alone(tmp_path):
    pipe = pipeline(0, 1)
    with Recorder().activate(), pipe.trace(tmp_path / "trace.json"):
        step(pipe)
    check_format(json.loads((tmp_path / "trace.json").read_text()))
    assert read(tmp_path / "trace.json").info["ranks"]["0"]["clock_error_us"] == 0
    text = summary.report(str(tmp_path / "trace.json"), None)
    assert "1 step of 1 rank, dualpipev, 4 micro-batches; " in text and "exposed + hidden" not in text
    with Recorder().activate(), pipe.trace(tmp_path / "none.json"):
        pass
    with pytest.raises(ValueError, match="no step of training by a whole pipeline"):
        read(tmp_path / "none.json")


OFFSET, DRIFT = 5_000_000_000, 0.1  # ns; much more than the drift of real clocks


def with_another_clock(rank, folder):
    clock = time.perf_counter_ns
    zero = clock()
    fast = mock.Mock(side_effect=lambda: round(clock() + (OFFSET + (clock() - zero) * DRIFT) * rank))
    with mock.patch.object(recorder, "perf_counter_ns", fast), mock.patch.object(tracer, "perf_counter_ns", fast):
        pipe = pipeline(rank, 2)
        with pipe.trace(f"{folder}/trace.json") as taken:
            step(pipe)
            time.sleep(0.3)
            step(pipe)
    return [(clock.offset + OFFSET * rank, clock.error) for clock in taken._clocks]


def test_clocks_that_differ(tmp_path):
    first, second = run_ranks(with_another_clock, 2, str(tmp_path))
    assert first == [(0, 0), (0, 0)]
    assert all(0 < error < 1e9 for _, error in second)
    assert second[1][0] < second[0][0] - 0.3e9 * DRIFT + second[0][1] + second[1][1], "the drift is seen"
    check_format(json.loads((tmp_path / "trace.json").read_text()))
    trace = read(tmp_path / "trace.json")
    assert [told["clock_offset_us"] < -OFFSET / 1e3 for told in trace.info["ranks"].values()] == [False, True]
    took = [max(each.end for each in trace.slices if each.rank == rank) for rank in (0, 1)]
    assert abs(took[1] - took[0]) < 1e9 < OFFSET


def test_of_many_messages_the_fastest_one_tells_the_clock():
    now, ways = [0], iter([700, 700, 100, 50, *[900] * 100])  # ns, there and back

    def pass_by():
        now[0] += next(ways)
        return SimpleNamespace(wait=lambda: None)

    def send(tensors, peer, tag):
        return pass_by()

    def receive(tensors, peer, tag):
        tensors[0].fill_(now[0] + OFFSET)
        return pass_by()

    place = tracer.PipelinePlace(1, (0, 1), "1f1b", (0, 1), 1)
    with Recorder().activate(), mock.patch.object(tracer, "perf_counter_ns", lambda: now[0]):
        taken = tracer.Tracer("", None, torch.device("cpu"), place, int)
        taken._group, taken._ranks = SimpleNamespace(send=send, recv=receive), SimpleNamespace(size=2, rank=1)
        with mock.patch.object(Recorder, "members", lambda *_: (0, 1)):
            clock = taken._compare_clocks()
    assert clock == (1400, OFFSET + 25, 75), "half of 150 ns; the way there took 25 ns more than that"


def failing(rank, folder):
    """Return the messages of an error that the pipeline sends to all ranks, and of a trace file without a folder."""
    pipe, said = pipeline(rank, 2), []
    with pytest.raises(ValueError, match=r"there is no folder .*/none for the trace trace.json; create it"):
        pipe.trace(f"{folder}/none/trace.json").__enter__()
    with pytest.raises(PipelineError) as raised, pipe.trace(f"{folder}/trace.json"):
        step(pipe)
        step(pipe, criterion=lambda *_: 1 / 0)
    said += [str(raised.value), *raised.value.__notes__]
    assert not Recorder.current().keeps_all and "begin" not in vars(Recorder.current())
    pipe = pipeline(rank, 2, process_group=dist.new_group([0, 1]))
    with pipe.trace(f"{folder}/after.json"):
        with pytest.raises(ValueError, match="a trace is being taken already; end it before the trace twice begins"):
            pipe.trace("twice").__enter__()
        step(pipe)
    return said


def test_an_error_goes_on_and_says_what_was_traced_until_then(tmp_path):
    (said, same) = run_ranks(failing, 2, str(tmp_path))
    assert said == same and "ZeroDivisionError" in said[0]
    assert said[1:] == [f"trace until the error: {tmp_path}/trace.json"]
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "after.json"}
    check_format(json.loads((tmp_path / "trace.json").read_text()))
    assert "1 step of 2 ranks" in summary.report(str(tmp_path / "trace.json"), None), "of the one that failed is less"


def test_a_step_that_failed_is_not_the_schedule_and_a_trace_can_be_taken_again(tmp_path):
    pipe = pipeline(0, 1)
    with Recorder().activate():
        taken = pipe.trace(tmp_path / "trace.json")
        for _ in range(2):
            with taken:
                with contextlib.suppress(PipelineError):
                    step(pipe, criterion=lambda *_: 1 / 0)
                step(pipe)
            trace = read(tmp_path / "trace.json")
            assert trace.schedule.num_microbatches == MICRO_BATCHES and len(Measured(trace).runs[0]) == 1
    assert len(trace.memory) <= len(trace.slices), "nothing is left of the one before"


def test_a_step_of_another_pipeline_is_none_of_this_one(tmp_path):
    pipe, another = pipeline(0, 1), pipeline(0, 1)
    with Recorder().activate(), pipe.trace(tmp_path / "trace.json"):
        for each in (another, pipe, another, pipe):
            step(each)
    trace = read(tmp_path / "trace.json")
    assert [each.args.get("run") for each in trace.slices if each.name == "F(stage 0, micro-batch 0)"] == [
        None, 1, None, 2]
    found = Measured(trace)
    assert len(found.runs[0]) == 2 and {len(spans) for spans in found.samples().values()} == {2}
    assert not summary.Summary(found).totals(0).keys() & {"F", "B"}, "it computes, too"


def test_a_step_within_something_else(tmp_path):
    pipe, path = pipeline(0, 1), str(tmp_path / "trace.json")
    with Recorder().activate(), pipe.trace(path), Recorder.current().doing("mine"):
        step(pipe)
    for report in (summary.report, costs.report):
        with pytest.raises(ValueError, match="no step of training outside of other activities"):
            report(path, None)


def leaving(rank, folder):
    pipe = pipeline(rank, 2)
    start = time.monotonic()
    try:
        with pipe.trace(f"{folder}/trace.json"):
            step(pipe)
            if rank == 1:
                raise KeyError("of this rank alone")
    except KeyError as error:
        return time.monotonic() - start, error.__notes__


def test_a_rank_that_fails_alone_waits_for_nobody_and_is_named_by_the_one_that_waits(tmp_path):
    lost, (seconds, notes) = run_ranks(leaving, 2, str(tmp_path), group_timeout=40, check=False, fresh=True)
    assert isinstance(lost, RankLost) and re.search(r"waited .* for the clocks of all ranks from rank 1", str(lost))
    own = tmp_path / "trace-rank1.json"
    assert list(tmp_path.iterdir()) == [own] and notes == [f"trace until the error: {own}"] and seconds < 20
    found = json.loads(own.read_text())
    check_format(found)
    assert list(found["otherData"]["ranks"]) == ["1"]
    with pytest.raises(ValueError, match="no step of training by a whole pipeline"):
        read(own)


def test_a_trace_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tracer, "_schedule", mock.Mock(side_effect=ValueError("no room")))
    with Recorder().activate(), pytest.raises(KeyError) as raised, pipeline(0, 1).trace(tmp_path / "trace.json"):
        raise KeyError("mine")
    assert raised.value.__notes__ == ["the trace was not written: no room"]


# -- a device, which is pretended


def on_device(rank, shape, folder):
    from device_steps import as_process

    plain = Pipeline.step

    def traced_step(pipe, *args, **kwargs):
        with pipe.trace(f"{folder}/trace.json", group=dist.group.WORLD):
            return plain(pipe, *args, **kwargs)

    @contextlib.contextmanager
    def plant():
        nonlocal plain
        plain = Pipeline.step
        with mock.patch.object(Pipeline, "step", traced_step):
            yield

    device, _ = as_process(rank, shape, plant=plant)
    return dict(device.waits), list(device.faults)


@pytest.mark.slow  # tests/train/test_tracing.py has one rank
def test_times_of_a_device(tmp_path):
    shape = (2, 1, 2)
    waits, faults = zip(*run_ranks(on_device, math.prod(shape), shape, str(tmp_path)))
    assert not any(faults)
    assert not any("trace" in wait for each in waits for wait in each), "no host waits within a step"
    check_format(json.loads((tmp_path / "trace.json").read_text()))
    trace = read(tmp_path / "trace.json")
    for rank in range(4):
        own, of_host = [each for each in trace.slices if each.rank == rank], (COMPUTE, COMMUNICATION)
        host, rows = ([each for each in own if (each.thread in of_host) == wanted] for wanted in (True, False))
        threads = {each.kind: {row.thread for row in rows if row.kind == each.kind} for each in rows}
        assert threads["F"] == threads["segment"] == threads["all_to_all"] == threads["receive"] == {"device"}
        assert threads["exchange"] and threads["exchange"] <= {"device, stream 1", "device, stream 2"}, "of each stage"
        assert [(each.kind, each.name) for each in host] == [(each.kind, each.name) for each in rows]
        for each, timed in zip(host, rows):
            assert each.start <= timed.start <= timed.end and timed.end >= each.end, "the host is first to begin"
        assert trace.rows[rank] == sorted((each for each in rows if each.thread == "device"),
                                          key=lambda each: (each.start, -each.end))
    assert max(size for _, _, size in trace.memory) > 0
    assert "all-to-all" in summary.report(str(tmp_path / "trace.json"), None)
