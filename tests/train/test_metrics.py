"""The metrics file, the progress lines and the loss curve."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from dualpipe.nn.routing.losses import LOSSES
from dualpipe.schedule import build
from dualpipe.train import metrics as metrics_module
from dualpipe.train.metrics import Console as RunConsole
from dualpipe.train.metrics import MetricsWriter, StepMetrics, draw, json_line, memory_bytes, read_metrics, say


def metrics(step, loss=2.0, **more):
    speed = {"tokens_per_second": 100.0, "tflops_per_rank": 2.0}
    return StepMetrics(step, loss, grad_norm=0.5, lr=1e-3, **speed, memory_bytes=2**20, **more)


def write(folder, rows, **options):
    text = io.StringIO()
    console = Console(file=text, soft_wrap=True)
    with MetricsWriter(folder, total_steps=9, console=console, **options) as writer:
        for row in rows:
            writer.write(row)
            last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
            assert json.loads(last)["step"] == row.step, "flushed at once"
    return text.getvalue()


def test_a_line_per_step(tmp_path):
    text = write(tmp_path, [metrics(1), metrics(2, eval_loss=1.75, load_max_over_mean=1.5, dropped=0.0)])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    age = datetime.now(UTC) - datetime.fromisoformat(rows[0].pop("time"))
    assert timedelta(0) <= age < timedelta(minutes=5)
    assert rows[0] == {
        "step": 1, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 100.0, "tflops_per_rank": 2.0,
        "memory_bytes": 2**20,
    }
    assert rows[1]["eval_loss"] == 1.75
    assert (rows[1]["load_max_over_mean"], rows[1]["dropped"]) == (1.5, 0)
    lines = text.splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 1/9  loss 2.0000  100 tokens/s  grad norm 0.50  1 MiB")
    assert "validation loss 1.7500" in lines[1]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"load_max_over_mean" in events.read_bytes()


def test_a_terminal_gets_a_live_line_of_80_columns(tmp_path):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, color_system=None)
    row = StepMetrics(9999, 10.5, grad_norm=12.5, lr=1e-3, tokens_per_second=99_999.0, tflops_per_rank=2.0,
                      memory_bytes=9999 * 2**20, eval_loss=1.5)
    with MetricsWriter(tmp_path, total_steps=9999, console=console) as writer:
        writer.say("before")
        writer.write(row)
    shown = text.getvalue()
    assert "before" in shown and "step 9999: loss 10.5000  validation loss 1.5000" in shown
    assert "9999/9999" in shown and "loss 10.5000  99,999 tokens/s  grad norm 12.50  9,999 MiB" in shown


@pytest.mark.parametrize("width", [70, 20])
def test_a_narrow_terminal_keeps_the_step(tmp_path, width):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, color_system=None)
    with MetricsWriter(tmp_path, total_steps=99999, console=console) as writer:
        writer.write(metrics(98765))
    lines = text.getvalue().replace("\r", "\n").split("\n")
    assert any("98765/99999 loss" in line for line in lines), lines


def test_every_so_many_steps_are_written(tmp_path):
    rows = [metrics(step, eval_loss=1.0 if step == 5 else None) for step in range(1, 10)]
    text = io.StringIO()
    with MetricsWriter(tmp_path, total_steps=9, console=Console(file=text, soft_wrap=True), log_interval=4) as writer:
        for row in rows:
            writer.write(row)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [4, 5, 8, 9], "and what has an evaluation"
    assert [line.split()[1] for line in text.getvalue().splitlines()] == ["4/9", "5/9", "8/9", "9/9"]


@pytest.mark.parametrize("log_interval, expected", [
    (1, [1, 10, 14, 20, 30, 37]), (4, [4, 12, 14, 20, 32, 37]), (20, [14, 20, 37])])
def test_a_pipe_gets_the_first_of_every_ten_evaluations_and_the_last(tmp_path, log_interval, expected):
    text = io.StringIO()
    with MetricsWriter(tmp_path, total_steps=37, console=Console(file=text, soft_wrap=True), print_interval=10,
                       log_interval=log_interval) as writer:
        for step in range(1, 38):
            writer.write(metrics(step, eval_loss=1.0 if step == 14 else None))
    assert [int(line.split()[1].split("/")[0]) for line in text.getvalue().splitlines()] == expected
    written = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert written == [step for step in range(1, 38) if step % log_interval == 0 or step in (14, 37)]


# -- what cannot be written


def test_metrics_that_cannot_be_written_are_said_once_and_tried_again(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, total_steps=9) as writer:
        writer.write(metrics(1))
        path.unlink()
        writer.write(metrics(2))
        assert [r["step"] for r in read_metrics(path)] == [2], "a file that was removed is there again"
        path.rename(tmp_path / "before")
        path.symlink_to("/dev/full")
        writer.write(metrics(3))
        writer.write(metrics(4))
        path.unlink()
        (tmp_path / "before").rename(path)
        with path.open("a") as file:
            file.write('{"step": 4, "lo')  # as a disk leaves it that is full in the middle of a line
        writer.write(metrics(5))
    assert [r["step"] for r in read_metrics(path)] == [2, 5]
    err = capsys.readouterr().err
    assert f"{path} cannot be written at step 3" in err and err.count("\n") == 1


def test_training_outlives_its_output_folder(tmp_path, capsys):
    with MetricsWriter(tmp_path / "out", total_steps=9) as writer:
        writer.write(metrics(1))
        shutil.rmtree(tmp_path / "out")
        writer.write(metrics(2))
        writer.write(metrics(3))
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2 and "metrics.jsonl" in err[0] and "step 2" in err[0] and "TensorBoard" in err[1], err


def test_a_missing_tensorboard_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    write(tmp_path, [metrics(1), metrics(2)])
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    err = capsys.readouterr().err
    assert "TensorBoard" in err and err.count("\n") == 1


@pytest.mark.parametrize("console", [None, "rich"])
def test_a_reader_that_has_gone_is_said_once(capsys, monkeypatch, console):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        console = console and RunConsole(file=stdout)
        for _ in range(3):
            say("a line", console)
    err = capsys.readouterr().err
    assert err.startswith("WARNING") and err.count("\n") == 1


# -- several runs in one folder


def curve(folder):
    """Return (step, loss) of TensorBoard's events in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_two_runs_keep_their_curves_apart(tmp_path):
    write(tmp_path, [metrics(s, loss=1.0) for s in (1, 2, 3)])
    write(tmp_path, [metrics(s, loss=2.0) for s in (1, 2)])
    assert curve(tmp_path / "tensorboard.1") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert curve(tmp_path / "tensorboard") == [(1, 2.0), (2, 2.0)]
    write(tmp_path, [metrics(s, loss=3.0) for s in (2, 3)], start_step=1)
    assert curve(tmp_path / "tensorboard") == [(1, 2.0), (2, 3.0), (3, 3.0)], "a run that goes on"
    assert not (tmp_path / "tensorboard.2").exists()


def test_a_rollback_starts_the_curve_again(tmp_path):
    write_and_go_back(tmp_path)
    assert curve(tmp_path / "tensorboard") == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def write_and_go_back(folder, **options):
    """Write three steps, go back behind the first, and write steps 2 to 4 with another loss."""
    with MetricsWriter(folder, total_steps=9, **options) as writer:
        for step in (1, 2, 3):
            writer.write(metrics(step, loss=1.0))
        writer.go_back(1)
        for step in (2, 3, 4):
            writer.write(metrics(step, loss=2.0))


class WandbServer:
    """Weights & Biases for its package online: a row that is not above the newest of its run is dropped."""

    def __init__(self):
        self.rows = {}  # by the id of the run: (training step, loss) by W&B's step
        self.resume = []

    def init(self, *, project, dir, config, id, resume):
        self.resume.append(resume)
        rows = self.rows.setdefault(id or f"run{len(self.rows)}", {})
        return WandbRun(id or f"run{len(self.rows) - 1}", rows)


class WandbRun:
    def __init__(self, id, rows):
        self.id = id
        self.rows = rows
        self.step = max(rows, default=-1) + 1

    def log(self, values, step):
        if step >= self.step:
            self.step = step
            self.rows[step] = (values["step"], values["loss"])

    def define_metric(self, name, *, step_metric):
        assert (name, step_metric) == ("*", "step")

    def finish(self):
        pass


@pytest.fixture
def wandb_server(monkeypatch):
    server = WandbServer()
    monkeypatch.setitem(sys.modules, "wandb", server)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return server


def test_weights_and_biases_has_one_run_with_all_rows(tmp_path, wandb_server):
    write_and_go_back(tmp_path, wandb="project")
    trained_again = {4: (2, 2.0), 5: (3, 2.0), 6: (4, 2.0)}
    rows = {1: (1, 1.0), 2: (2, 1.0), 3: (3, 1.0)} | trained_again
    assert wandb_server.rows == {"run0": rows}
    write(tmp_path, [metrics(3, loss=3.0), metrics(4, loss=3.0)], start_step=2, wandb="project")
    assert wandb_server.rows == {"run0": rows | {7: (3, 3.0), 8: (4, 3.0)}}, "a resume with steps that were not saved"
    write(tmp_path, [metrics(1)], wandb="project")
    assert wandb_server.rows["run1"] == {1: (1, 2.0)}, "a new run in this folder"
    write(tmp_path / "new", [metrics(3)], start_step=2, wandb="project")
    assert wandb_server.rows["run2"] == {3: (3, 2.0)}, "a resume into another folder"


def test_an_id_in_the_environment_comes_first(tmp_path, wandb_server, monkeypatch):
    write(tmp_path, [metrics(1)], wandb="project")
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("WANDB_RESUME", "must")
    write(tmp_path, [metrics(2)], start_step=1, wandb="project")
    assert wandb_server.rows["mine"] == {2: (2, 2.0)} and wandb_server.resume == ["allow", "must"]
    monkeypatch.delenv("WANDB_RUN_ID")
    write(tmp_path, [metrics(3)], start_step=2, wandb="project")
    assert wandb_server.rows["mine"] == {2: (2, 2.0), 3: (3, 2.0)}, "the last id is kept"


def wandb_history(file):
    """Return the rows in a file of the package wandb, a log of LevelDB with protocol buffers, by W&B's step."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    block = 2**15
    place = 7  # behind the header
    content = b""
    rows = {}
    while place + 7 <= len(data):
        if block - place % block < 7:  # no room for a header at the end of a block
            place += block - place % block
            continue
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        content += data[place + 7 : place + 7 + size]
        if data[place + 6] in (1, 4):  # a whole record, or the last part of one
            history = Record.FromString(content).history
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in history.item}
            if row:
                rows[history.step.num] = row
            content = b""
        place += 7 + size
    return rows


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the optional package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    write_and_go_back(tmp_path, wandb="my-project", settings={"seed": 17})
    later = [metrics(4, loss=3.0), metrics(5, loss=3.0)]
    write(tmp_path, later, start_step=3, wandb="my-project", settings={"seed": 17})
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    run_id = json.loads((tmp_path / "wandb-run.json").read_text())["id"]
    assert len(files) == 3 and {file.name for file in files} == {f"run-{run_id}.wandb"}
    rows = {}
    deadline = time.monotonic() + 60
    while len(rows) < 8 and time.monotonic() < deadline:  # the package's own process writes, also after it has finished
        for file in files:  # one of each opening
            rows |= wandb_history(file)
        time.sleep(0.05)
    assert {step: (row["step"], row["loss"]) for step, row in rows.items()} == {
        1: (1, 1.0), 2: (2, 1.0), 3: (3, 1.0), 4: (2, 2.0), 5: (3, 2.0), 6: (4, 2.0),
        7: (4, 3.0), 8: (5, 3.0)}, "offline, W&B does not know the rows of the start before"
    assert all(b"my-project" in file.read_bytes() and b"seed" in file.read_bytes() for file in files)


# -- numbers


def test_a_number_that_is_not_finite_is_null():
    line = json_line({"step": 3, "loss": math.nan, "grad_norm": math.inf})
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 3, "loss": None, "grad_norm": None}


def test_another_run_keeps_the_earlier_file(tmp_path):
    write(tmp_path, [metrics(1), metrics(2)])
    write(tmp_path, [metrics(1, loss=9.0)])
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [9.0]
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.1.jsonl")] == [1, 2]


def test_resuming_continues_after_the_last_kept_step(tmp_path):
    write(tmp_path, [metrics(s) for s in (1, 2, 3)])
    write(tmp_path, [metrics(3, loss=7.0)], start_step=2)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 2.0), (2, 2.0), (3, 7.0)]
    write(tmp_path, [metrics(4)], start_step=3)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_lines_behind_one_that_cannot_be_read_are_kept_in_another_file(tmp_path):
    text = "".join(map(json_line, ({"step": 1}, {"step": 2}))) + "{broken\n" + json_line({"step": 4})
    (tmp_path / "metrics.jsonl").write_text(text)
    write(tmp_path, [metrics(3)], start_step=2)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert (tmp_path / "metrics.1.jsonl").read_text() == text


def test_a_line_cut_short_is_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json_line({"step": 1}) + '{"step": 2, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_a_damaged_file_costs_the_next_run_nothing(tmp_path):
    damaged = b'5\n{"a": 1}\n\xff\0\n'
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    write(tmp_path, [metrics(1)])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == damaged


DRAW_LOSS = metrics_module._draw_loss  # in whose place runs of tests have a stand-in (conftest.py)


def test_the_picture_is_a_png(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_module, "_draw_loss", DRAW_LOSS)
    write(tmp_path, [metrics(1), metrics(2)])
    draw(tmp_path, build("1f1b", 1, 1), unigram=3.5)
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n") and len(picture) > 5000


@pytest.mark.parametrize("depths", [0, 2])
def test_the_picture_has_a_curve_of_each_loss(tmp_path, monkeypatch, depths):
    monkeypatch.setattr(metrics_module, "_draw_loss", DRAW_LOSS)
    write(tmp_path, [metrics(step, 4.0 - step, mtp_loss=[5.0 - step, 6.0 - step][:depths] or None) for step in (1, 2)])
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.update(
        (line.get_label(), list(line.get_ydata())) for line in figure.axes[0].lines))
    draw(tmp_path, build("1f1b", 1, 1), unigram=3.5)
    ahead = {"training, 1 further ahead": [4.0, 3.0], "training, 2 further ahead": [5.0, 4.0]} if depths else {}
    assert drawn == {"training": [3.0, 2.0], "unigram model, 3.50": [3.5, 3.5]} | ahead


def test_memory_of_this_process():
    assert 2**20 < memory_bytes(torch.device("cpu")) < 2**40


def test_the_documents_list_every_metric():
    text = (Path(__file__).parents[2] / "docs/training.md").read_text()
    rows = "\n".join(re.findall(r"^\| `[a-z_]+`.*", text, re.MULTILINE))
    names = {field.name for field in dataclasses.fields(StepMetrics)} - {"router_losses"} | set(LOSSES)
    assert [name for name in sorted(names) if f"`{name}`" not in rows] == []
