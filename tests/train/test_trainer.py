"""The moments when the host reads the values of a step from a (pretend) device, and the output of runs that end
early."""

import math
import os
import signal
import time

import pytest

from device_book import the_device
from device_steps import as_training, write_run
from dualpipe import Pipeline
from dualpipe.train.metrics import read_metrics
from dualpipe.train.optim.optimizer import Optimizer

STEPS = ("--train.num_chunks", "1", "--train.steps", "4", "--checkpoint.interval")
CLIP = Pipeline.clip_grad_norm_


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path)
    return tmp_path


def steps_written(folder):
    return [row["step"] for row in read_metrics(folder / "out" / "metrics.jsonl")]


def test_a_step_is_read_when_the_next_one_is_queued_or_before_it_is_saved(folder, monkeypatch):
    def step(self, *arguments):
        queued.append(sum(the_device().waits.values()))
        return real(self, *arguments)

    real, queued = Optimizer.step, []
    monkeypatch.setattr(Optimizer, "step", step)
    device = as_training(0, folder, *STEPS, "3")
    assert queued == [0, 0, 1, 5], "waits of the host until then: for steps, and twice for the third's checkpoint"
    read = "Event.synchronize in dualpipe/train/trainer.py: Trainer._read"
    assert device.waits[read] == 4 and steps_written(folder) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("interval, steps", [("0", 3), ("2", 2)])
def test_a_norm_that_is_not_finite_ends_the_run_before_anything_is_kept(folder, monkeypatch, capsys, interval, steps):
    def poisoned(self, max_norm):
        parameters.append([parameter.detach().clone() for parameter in self.parameters()])
        if len(parameters) == 2:
            next(self.parameters()).grad.view(-1)[0] = math.nan
        return CLIP(self, max_norm)

    parameters = []
    monkeypatch.setattr(Pipeline, "clip_grad_norm_", poisoned)
    as_training(0, folder, *STEPS, interval, status=1)
    assert "error: the gradient norm is nan at step 2; lower optimizer.lr" in capsys.readouterr().err
    assert len(parameters) == steps + 1, "one more is queued, unless this one is to be saved; it is run again"
    assert all(one.equal(other) for one, other in zip(parameters[1], parameters[-1])), "it was not updated by NaN"
    assert not any(one.equal(other) for one, other in zip(parameters[0], parameters[1]) if one.numel() > 1)
    assert steps_written(folder) == [1] and not list(folder.glob("out/checkpoints/step-*"))


@pytest.mark.slow
def test_a_step_that_is_queued_behind_one_that_is_left_out_is_run_again(folder, monkeypatch):
    def poisoned(self, max_norm):
        calls.append(max_norm)
        if len(calls) == 2:
            next(self.parameters()).grad.view(-1)[0] = math.nan
        return CLIP(self, max_norm)

    calls, losses = [], []
    monkeypatch.setattr(Pipeline, "clip_grad_norm_", poisoned)
    for interval, number in (("0", 6), ("1", 5)):  # the latter reads each step before the next
        calls.clear()
        out = f"out{interval}"
        as_training(0, folder, *STEPS, interval, "--guard.on_nonfinite", "skip", "--output.dir", out)
        assert len(calls) == number, "four steps, one run again to look at it, and the one that was queued"
        losses.append({row["step"]: row["loss"] for row in read_metrics(folder / out / "metrics.jsonl")})
    assert losses[0] == losses[1] and list(losses[0]) == [1, 3, 4]


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_known_when_a_step_fails_is_written(folder, monkeypatch, capsys, known):
    def failing(self, max_norm):
        clipped.append(None)
        if len(clipped) == 3:
            raise OSError(28, "No space left on device")
        return CLIP(self, max_norm)

    clipped = []
    monkeypatch.setattr(Pipeline, "clip_grad_norm_", failing)
    monkeypatch.setattr("device_book.Event.query", lambda event: known)
    as_training(0, folder, *STEPS, "0", status=1)
    assert "No space left on device" in capsys.readouterr().err
    assert steps_written(folder) == ([1, 2] if known else [1])


def test_a_run_that_is_asked_to_stop_reads_what_is_queued_and_saves_it(folder, monkeypatch, capsys):
    def asked(self, *arguments):
        updates.append(real(self, *arguments))
        if len(updates) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    real, updates = Optimizer.step, []
    monkeypatch.setattr(Optimizer, "step", asked)
    device = as_training(0, folder, *STEPS, "9", "--train.steps", "8", status=143)
    assert len(updates) == 3, "the word on a step is read when the next one is queued"
    assert steps_written(folder) == [1, 2, 3] and [path.name for path in folder.glob("out/checkpoints/step-*")] == [
        "step-00000003"
    ]
    assert "stopped by SIGTERM after step 3; saved: " in capsys.readouterr().out
    assert device.waits["Event.synchronize in dualpipe/train/trainer.py: Trainer._read"] == 3


@pytest.mark.parametrize("value", [True, False])
def test_the_pipeline_merges_weight_gradients_as_the_configuration_says(folder, monkeypatch, value):
    def build(self, *arguments, **options):
        given.append(options["merge_weight_grads"])
        real(self, *arguments, **options)

    real, given = Pipeline.__init__, []
    monkeypatch.setattr(Pipeline, "__init__", build)
    options = [] if value else ["--parallel.merge_weight_grads", "false"]
    as_training(0, folder, *STEPS, "9", "--train.steps", "1", *options)
    assert given == [value]
