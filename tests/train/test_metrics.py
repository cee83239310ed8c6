"""The metrics file, the progress lines and the loss curve."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from dualpipe.train.metrics import MetricsWriter, StepMetrics, json_line, memory_bytes, read_metrics


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
    assert rows[0] == {
        "step": 1, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 100.0, "tflops_per_rank": 2.0,
        "memory_bytes": 2**20,
    }  # fmt: skip
    assert rows[1]["eval_loss"] == 1.75
    assert (rows[1]["load_max_over_mean"], rows[1]["dropped"]) == (1.5, 0)
    lines = text.splitlines()
    assert len(lines) == 2 and lines[0].startswith("step 1/9  loss 2.0000  100 tokens/s  grad norm 0.50  1 MiB")
    assert "held-out loss 1.7500" in lines[1]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"load_max_over_mean" in events.read_bytes()


def test_a_terminal_gets_a_live_line_of_80_columns(tmp_path):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, color_system=None)
    row = StepMetrics(9999, 10.5, grad_norm=12.5, lr=1e-3, tokens_per_second=99_999.0, tflops_per_rank=2.0,
                      memory_bytes=9999 * 2**20, eval_loss=1.5)  # fmt: skip
    with MetricsWriter(tmp_path, total_steps=9999, console=console) as writer:
        writer.say("before")
        writer.write(row)
    shown = text.getvalue()
    assert "before" in shown and "step 9999: loss 10.5000  held-out loss 1.5000" in shown
    assert "9999/9999" in shown and "loss 10.5000  99,999 tokens/s  grad norm 12.50  9,999 MiB" in shown


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


def test_memory_of_this_process():
    assert 2**20 < memory_bytes(torch.device("cpu")) < 2**40
