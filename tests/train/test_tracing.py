"""`dualpipe train --trace`: the steps in the file, their content, and invalid options."""

import errno
import json
import re

import pytest

from device_steps import as_training, write_run
from dualpipe import cli
from dualpipe.schedule.read_costs import parse_costs
from dualpipe.trace.file import read
from dualpipe.trace.measured import Measured
from dualpipe.trace.summary import Summary
from dualpipe.train.profile import Steps, parse_steps
from faults import planted, planting
from ranks import run_ranks
from traces import check_format

FOUR = ("--parallel.ep", "2", "--train.steps", "4", "--train.eval_interval", "3", "--checkpoint.interval", "2",
        "--train.num_chunks", "4")


@pytest.fixture(scope="module")
def trace_file(run_folder, dualpipe):
    slow = "delay rank=3 step=3 action=F what='stage 1, micro-batch 0' seconds=2"
    done = dualpipe(run_folder, "train", "--trace", "steps=2..3", "run.toml", *FOUR, before=planting(slow))
    assert done.returncode == 0, done.stderr
    assert "trace: out/trace-2-3.json (see it in ui.perfetto.dev, or by dualpipe trace summary)\n" in done.stdout
    return run_folder / "out/trace-2-3.json"


@pytest.mark.slow
def test_all_that_a_step_is_made_of(trace_file):
    check_format(json.loads(trace_file.read_text()))
    trace = read(trace_file)
    assert {each.args.get("step") for each in trace.slices} == {2, 3}
    assert {trace.name(rank) for rank in trace.rows} == {f"rank {rank} (pp {rank // 2}, ep {rank % 2})"
                                                         for rank in range(4)}
    assert trace.schedule.name == "dualpipev" and trace.schedule.num_microbatches == 4
    for rank in range(4):
        threads = {}
        for each in trace.slices:
            if each.rank == rank:
                threads.setdefault(each.thread, set()).add(each.kind)
        assert threads["compute"] >= {"F", "FB", "segment", "wgrad", "optimizer", "data", "evaluate", "save"}
        assert threads["communication"] >= {"send", "receive", "gather", "reduce", "exchange", "all_to_all", "clip",
                                            "vote", "agree", "routers"}
        assert "write" in threads["checkpoint"]
        started, waited = (sorted(each.name for each in trace.slices if (each.rank, each.kind) == (rank, kind))
                           for kind in ("exchange", "all_to_all"))
        assert started == waited and len({*started}) == len(started), "it can be told which one is waited for"
        segments = [each for each in trace.slices if each.rank == rank and each.kind == "segment"]
        assert {each.args["between_ranks"] for each in segments} == {True, False}
        assert {each.args["stage"] for each in segments} == set(trace.schedule.rank_stages(rank // 2))
    assert list(trace.info["loads"]) == ["2", "3"] and all(sum(load) > 0 for load in trace.info["loads"].values())


def test_where_its_time_went(trace_file, tmp_path, capsys):
    picture, costs = tmp_path / "trace.svg", tmp_path / "costs.json"
    assert cli.main(["trace", "summary", str(trace_file), "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "2 steps of 4 ranks, dualpipev, 4 micro-batches; clocks are right to " in text
    assert "all-to-all" in text and "gathers" in text and "reductions" in text and "evaluate" in text
    assert "<svg" in picture.read_text()
    lines = text.splitlines()
    assert lines[lines.index("the slowest actions") + 1].startswith(
        "  rank 3 (pp 1, ep 1), step 3, F(stage 1, micro-batch 0): ")
    for rank, cause in (  # the one of the fault, one that exchanges tokens with it, one that waits for its gradients
        (3, "in F(stage 1) slower than its median"), (2, "waiting for rank 3 (pp 1, ep 1)"),
        (1, "waiting for rank 3 (pp 1, ep 1)"),
    ):
        start = f"  rank {rank} (pp {rank // 2}, ep {rank % 2}) lost "
        (lost,) = (line for line in lines if line.startswith(start))
        found = re.search(rf"([\d.]+) {re.escape(cause)}", lost)
        assert found and float(found[1]) > 900, lost  # of 2 s in one of two steps
    assert cli.main(["trace", "costs", str(trace_file), "--out", str(costs)]) == 0
    assert capsys.readouterr().out.startswith("stage  kind")
    found = parse_costs(str(costs))
    assert len(found.per_stage) == 4 and found.F > 0 and found.FB > 0 and found.R > 0
    assert cli.main(["schedule", "--ranks", "2", "--microbatches", "4", "--costs", str(costs)]) == 0


@pytest.mark.parametrize("what", ["summary", "costs"])
def test_a_trace_that_is_not_there(what, capsys):
    assert cli.main(["trace", what, "none.json"]) == 2
    assert "none.json" in capsys.readouterr().err


def test_the_steps_to_trace_or_profile():
    assert parse_steps("", 5, "--trace") is None
    assert parse_steps("steps=10..12", 12, "--trace") == Steps(10, 12)
    assert parse_steps("steps=3", 3, "--trace") == Steps(3, 3)
    assert parse_steps("steps=1..2,file=a, b=c.json", 5, "--trace", with_file=True) == Steps(1, 2, "a, b=c.json")


@pytest.mark.parametrize("text", ["10..12", "steps=1..", "steps=1,file=", "steps=0..2", "steps=4..6", "steps=3..2"])
def test_other_steps_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_steps(text, 5, "--trace", with_file=True)


def test_a_profile_has_no_file():
    with pytest.raises(ValueError, match=r"'steps=1,file=x\.json'"):
        parse_steps("steps=1,file=x.json", 5, "--profile")


@pytest.mark.parametrize("option", ["--trace", "--profile"])
def test_what_cannot_be_recorded_is_said_in_a_line(option, run_toml, capsys):
    assert cli.main(["train", str(run_toml), "--parallel.pp", "1", option, "10..12"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {option}: '10..12'") and err.count("\n") == 1


def test_a_run_that_ends_before(run_toml, monkeypatch, capsys):
    monkeypatch.chdir(run_toml.parent)
    options = ["--parallel.pp", "1", "--train.time_limit", "0.01", "--checkpoint.mode", "off"]
    assert cli.main(["train", "run.toml", *options, "--trace", "steps=1..5,file=early.json"]) == 75
    assert "trace: early.json" in capsys.readouterr().out
    assert {each.args.get("step") for each in read("early.json").slices} == {1}


def alone(*options):
    return cli.main(["train", "run.toml", "--parallel.pp", "1", "--train.steps", "3", "--train.eval_interval", "0",
                     *options])


def test_a_bad_step_is_the_last_one_and_run_again(run_toml, monkeypatch, capsys):
    monkeypatch.chdir(run_toml.parent)
    with planted("nan rank=0 step=3 action=F"):
        assert alone("--trace", "steps=2..3", "--guard.on_nonfinite", "skip") == 0
    out = capsys.readouterr().out
    assert "skipped: the step updates nothing" in out and "trace: out/trace-2-3.json" in out
    trace = read("out/trace-2-3.json")
    (check,) = (each for each in trace.slices if each.kind == "check")
    assert any(check.start < each.start < check.end for each in trace.slices if each.kind == "F")
    assert len(Measured(trace).runs[0]) == 2, "what is run again is none of the steps"
    assert Summary(Measured(trace)).totals(0)["check"] == pytest.approx((check.end - check.start) / 2e6)


def test_a_step_that_stops_the_run_is_in_the_trace(run_toml, monkeypatch, capsys):
    monkeypatch.chdir(run_toml.parent)
    with planted("nan rank=0 step=3 action=F"):
        assert alone("--trace", "steps=2..3") == 1
    assert "\ntrace until the error: out/trace-2-3.json\n" in capsys.readouterr().err
    trace = read("out/trace-2-3.json")
    assert {each.args.get("step") for each in trace.slices} == {2, 3}
    assert any(each.kind == "check" for each in trace.slices), "the step again"
    assert len(Measured(trace).runs[0]) == 2


@pytest.mark.slow
def test_each_rank_that_is_left_writes_what_it_has(run_folder, dualpipe):
    lost = dualpipe(run_folder, "train", "--trace", "steps=2..3,file=left.json", "run.toml", "--output.dir", "left",
                    before=planting("kill rank=1 step=3 action=F"))
    assert lost.returncode == 128 + 9, lost.stderr
    assert [path.name for path in run_folder.glob("left*.json")] == ["left-rank0.json"]
    assert "\ntrace until the error: left-rank0.json\n" in lost.stderr
    check_format(json.loads((run_folder / "left-rank0.json").read_text()))


@pytest.mark.slow
def test_a_run_that_goes_on_within_the_steps_to_trace_or_behind_them(run_toml, monkeypatch, capsys):
    monkeypatch.chdir(run_toml.parent)
    saves = ["--checkpoint.mode", "sync", "--checkpoint.interval", "1"]
    assert alone(*saves, "--train.time_limit", "0.01", "--trace", "steps=1..2") == 75
    assert alone(*saves, "--train.time_limit", "0.01", "--trace", "steps=1..2") == 75
    for name, step in (("trace-1-2", 1), ("trace-2-2", 2)):
        assert {each.args.get("step") for each in read(f"out/{name}.json").slices} == {step}
    capsys.readouterr()
    assert alone(*saves, "--trace", "steps=1..2") == 0
    assert "no trace is taken" in capsys.readouterr().out


@pytest.mark.parametrize("file, message", [
    ("none/trace.json", "there is no folder none"), ("text", "text is a folder"),
])
def test_a_place_without_a_file_is_refused_before_the_first_step(file, message, run_toml, monkeypatch, capsys):
    monkeypatch.chdir(run_toml.parent)
    assert alone("--trace", f"steps=3,file={file}") == 2
    said = capsys.readouterr()
    assert message in said.err and "step 1/3" not in said.out


def test_a_full_disk_costs_the_trace_and_not_the_run(run_toml, monkeypatch, capsys):
    def refused(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(run_toml.parent)
    monkeypatch.setattr("dualpipe.trace.file.replace_file", refused)
    assert alone("--trace", "steps=1") == 0
    out = capsys.readouterr().out
    assert "WARNING: the trace out/trace-1-1.json" in out and "step 3/3" in out


def training_on_a_device(rank, folder):
    device = as_training(rank, folder, "--train.steps", "3", "--trace", "steps=2")
    return {wait: count for wait, count in device.waits.items() if "trace" in wait}, list(device.faults)


@pytest.mark.slow
def test_on_a_device_the_host_waits_at_both_ends(tmp_path):
    write_run(tmp_path)
    ((waits, faults),) = run_ranks(training_on_a_device, 1, str(tmp_path), fresh=True)
    assert not faults and list(waits.values()) == [1, 1, 1], waits  # the last: for the loads, once the device is done
    trace = read(tmp_path / "out/trace-2-2.json")
    assert {each.thread for each in trace.rows[0]} == {"device"} and len(trace.memory) > 0
    assert list(trace.info["loads"]) == ["2"], "of the last step too"
