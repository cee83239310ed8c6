"""Non-finite numbers, spikes and differences between ranks: their detected origin, and the reaction of the run."""

import pytest
import torch
from safetensors.torch import load_file

from dualpipe.checkpoint import latest
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.train.guard import SpikeDetector
from dualpipe.train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("without_evaluation")

# A NaN in the first `times` results of that name in a step, on one rank. The rerun makes the results once more.
NAN = """
import os
import torch
from dualpipe.runtime.recorder import Recorder

made, left = Recorder.made, [{times}]

def planted(self, what, *results):
    name = getattr(what, "title", str(what))
    tensors = [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
    if name == {what!r} and self.step == {step} and tensors and os.environ.get("RANK", "0") == "{rank}" and left[0]:
        left[0] -= 1
        tensors[0].data.view(-1)[0] {change}
    made(self, what, *results)

Recorder.made = planted
"""
ALONE = ("--parallel.pp", "1")
FORWARD, BACKWARD = "segment 0 of F(stage 1, micro-batch 2)", "segment 1 of {}(stage 2, micro-batch 3)"


def planted(what, rank, step, *, times=99, change='= float("nan")'):
    return NAN.format(what=what, rank=rank, step=step, times=times, change=change)


def rows(folder, out):
    return {row["step"]: row for row in read_metrics(folder / out / "metrics.jsonl")}


SEGMENTS = ("--memory.recompute", "experts")


def test_the_run_stops_with_the_origin_of_a_nan_and_the_step_can_be_replayed(run_folder, dualpipe):
    before = planted(FORWARD, 1, 2)
    done = dualpipe(run_folder, "train", "run.toml", *SEGMENTS, "--output.dir", "stop", before=before)
    assert done.returncode == 1 and list(rows(run_folder, "stop")) == [1]
    bundle = "stop/bundles/step-00000002"
    error, origin, hint = done.stderr.splitlines()
    assert error.startswith("error: the gradient norm is nan at step 2")
    assert origin.startswith(f"first in rank 1 (pp 1), {FORWARD}; gradients that are not finite: ")
    assert hint.endswith(f"dualpipe replay {run_folder / bundle}")

    again = dualpipe(run_folder, "replay", bundle, before=before)
    assert again.returncode == 0 and "reproduced" in again.stdout, again.stdout + again.stderr
    assert f"first in rank 1 (pp 1), {FORWARD}" in again.stdout
    sound = dualpipe(run_folder, "replay", bundle)
    assert sound.returncode == 1 and "NOT reproduced" in sound.stdout and "not repeatable" in sound.stdout
    model = run_folder / bundle / "config.json"
    model.write_text(model.read_text().replace('"head_dim": 16', '"head_dim": 32'))
    changed = dualpipe(run_folder, "replay", bundle)
    assert changed.returncode == 2 and "config.json has changed" in changed.stderr


PARAMETER = """
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.guard import Guard

snapshot = Guard.snapshot

def spoiled(self, batch):
    for stage in self._runner.model.stages:
        for name, parameter in stage.named_parameters():
            if Recorder.current().step == 2 and name == "layers.2.mlp.gate.weight":
                parameter.data[0, 0] = float("inf")
    return snapshot(self, batch)

Guard.snapshot = spoiled
"""


def test_a_parameter_that_was_not_finite_before_is_named_with_its_module(run_folder, dualpipe):
    done = dualpipe(run_folder, "train", "run.toml", *ALONE, "--output.dir", "parameter", before=PARAMETER)
    assert done.returncode == 1
    assert "\nfirst in rank 0, F(stage 1, micro-batch 0), in layers.2.mlp.gate; " in done.stderr, done.stderr
    assert "parameters before the step that are not finite: layers.2.mlp.gate.weight on rank 0; " in done.stderr


def test_a_finite_rerun_blames_the_rank_that_was_not_finite(run_folder, dualpipe):
    before = planted("B(stage 2, micro-batch 1)", 1, 2, times=1)
    done = dualpipe(run_folder, "train", "run.toml", "--output.dir", "once", before=before)
    assert done.returncode == 1
    text = "not repeatable: first in rank 1 (pp 1), B(stage 2, micro-batch 1), but in a rerun the whole step is finite"
    assert text in done.stderr
    assert "suspect the device or the memory of rank 1 (pp 1)" in done.stderr


def tensors(folder, out, step):
    """Return the tensors of a checkpoint."""
    files = sorted((folder / out / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


# Rows for other ranks are in a buffer of the maximum size: the rows after the sent ones may be anything.
UNWRITTEN = """
from dualpipe.parallel.experts.dispatcher import AllToAllDispatcher

plan = AllToAllDispatcher.plan

def with_room(self, *inputs):
    rows, weights, dispatch = plan(self, *inputs)
    rows.data[int(dispatch.counts[:, 0].sum()):] = float("nan")
    return rows, weights, dispatch

AllToAllDispatcher.plan = with_room
"""


@pytest.mark.slow
def test_unsent_rows_of_a_dispatch_buffer_are_ignored(run_folder, dualpipe):
    before = UNWRITTEN + planted("segment 0 of F(stage 1, micro-batch 1)", 1, 2)
    options = (*ALONE, "--parallel.ep", "2", "--train.num_chunks", "2", "--output.dir", "rows")
    done = dualpipe(run_folder, "train", "run.toml", *options, before=before)
    assert done.returncode == 1
    assert "\nfirst in rank 1 (ep 1), segment 0 of F(stage 1, micro-batch 1); " in done.stderr, done.stderr


DP2 = ("--parallel.dp", "2", "--train.num_chunks", "2")


@pytest.mark.parametrize("layout, rank", [(ALONE, 0), pytest.param(DP2, 3, marks=pytest.mark.slow)])
def test_a_skipped_step_changes_nothing(run_folder, dualpipe, layout, rank):
    options = (*layout, "--guard.on_nonfinite", "skip", "--checkpoint.interval", "1", "--checkpoint.keep_last", "0",
               "--checkpoint.mode", "sync", "--output.dir", out := f"skip{len(layout)}")
    done = dualpipe(run_folder, "train", "run.toml", *options, before=planted("F(stage 1, micro-batch 1)", rank, 3))
    assert done.returncode == 0, done.stderr
    assert list(rows(run_folder, out)) == [1, 2, 4, 5]
    where = "rank 3 (pp 1, dp 1)" if rank else "rank 0"
    assert f"first in {where}, F(stage 1, micro-batch 1); " in done.stdout
    assert "skipped: the step updates nothing" in done.stdout
    before, after, later = (tensors(run_folder, out, step) for step in (2, 3, 4))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not all(torch.equal(tensor, later[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_more_steps_in_a_row_than_the_limit_stop_the_run(run_folder, dualpipe):
    before = planted("F(stage 0, micro-batch 1)", 0, 2).replace("self.step == 2", "self.step >= 2")
    options = (*ALONE, "--guard.on_nonfinite", "skip", "--guard.limit", "2", "--output.dir", "limit")
    done = dualpipe(run_folder, "train", "run.toml", *options, before=before)
    assert done.returncode == 1 and "guard.limit = 2" in done.stderr
    assert done.stderr.startswith("error: the gradient norm is nan at step 4")
    assert list(rows(run_folder, "limit")) == [1]
    bundles = sorted(path.name for path in (run_folder / "limit/bundles").glob("step-*"))
    assert bundles == ["step-00000002", "step-00000003", "step-00000004"]


CONSTANT = (*ALONE, "--optimizer.schedule", "constant", "--checkpoint.interval", "2", "--train.eval_batches", "0")
SKIPPING = """
from dualpipe.train.saver import Saver

resume = Saver.resume

def skip_batches(self, state):
    done = resume(self, state)
    state.loader.skipped_batches = 2
    return done

Saver.resume = skip_batches
"""


@pytest.mark.slow
def test_the_run_rolls_back_and_continues_with_the_data_after_the_bad_step(run_folder, dualpipe):
    before = planted("F(stage 1, micro-batch 0)", 0, 4, times=2)  # in the step, and in its rerun
    options = (*CONSTANT, "--guard.on_nonfinite", "rollback")
    done = dualpipe(run_folder, "train", "run.toml", *options, "--output.dir", "back", before=before)
    assert done.returncode == 0, done.stderr
    assert "rolled back to step 2; the data of steps 3 to 4 is skipped" in done.stdout
    # The same without: two steps, and the rest with other data.
    two = (*CONSTANT, "--output.dir", "two")
    assert dualpipe(run_folder, "train", "run.toml", *two, "--train.steps", "2").returncode == 0
    other = dualpipe(run_folder, "train", "run.toml", *two, before=SKIPPING)
    assert other.returncode == 0, other.stderr
    losses = [{step: row["loss"] for step, row in rows(run_folder, out).items()} for out in ("back", "two")]
    assert losses[0] == losses[1] and list(losses[0]) == [1, 2, 3, 4, 5]
    assert Checkpoint.read(latest(run_folder / "back/checkpoints")).manifest.extra["loader"]["passed_over"] == 2


@pytest.mark.slow
def test_the_run_rolls_back_to_the_checkpoint_that_it_resumed_from(run_folder, dualpipe):
    options = (*CONSTANT, "--output.dir", "older", "--train.steps", "4")
    assert dualpipe(run_folder, "train", "run.toml", *options).returncode == 0
    options += ("--checkpoint.resume", "older/checkpoints/step-00000002", "--guard.on_nonfinite", "rollback")
    before = planted("F(stage 1, micro-batch 0)", 0, 3, times=2)
    done = dualpipe(run_folder, "train", "run.toml", *options, before=before)
    assert done.returncode == 0, done.stdout
    assert "rolled back to step 2; the data of steps 3 to 3 is skipped" in done.stdout, done.stdout


def test_a_rollback_without_a_checkpoint_stops_the_run(run_folder, dualpipe):
    options = (*ALONE, "--guard.on_nonfinite", "rollback", "--output.dir", "nothing")
    done = dualpipe(run_folder, "train", "run.toml", *options, before=planted("F(stage 1, micro-batch 0)", 0, 2))
    assert done.returncode == 1 and "there is no checkpoint to roll back to; set checkpoint.interval" in done.stderr


SPIKE = """
import dualpipe.train.guard as guard
from dualpipe import Pipeline

guard.MIN_SPIKE_HISTORY = 4
norms = []
clip = Pipeline.clip_grad_norm_

def leaping(self, max_norm):
    norms.append(max_norm)
    for p in self.parameters():
        if len(norms) == 7 and p.grad is not None:
            p.grad *= 1e4
    return clip(self, max_norm)

Pipeline.clip_grad_norm_ = leaping
"""


@pytest.mark.parametrize("action", ["rollback", pytest.param("warn", marks=pytest.mark.slow)])
def test_a_spike_of_the_gradient_norm_gives_a_warning_or_a_rollback(run_folder, dualpipe, action):
    options = (*CONSTANT, "--train.steps", "8", "--guard.spike", "20", "--guard.on_spike", action)
    options += ("--output.dir", action)
    done = dualpipe(run_folder, "train", "run.toml", *options, before=SPIKE)
    assert done.returncode == 0, done.stderr
    assert "WARNING: step 7: grad_norm " in done.stdout and "step 6: " not in done.stdout.replace("/8", "")
    assert ("rolled back to step 6; the data of steps 7 to 7 is skipped" in done.stdout) == (action == "rollback")
    norms = [row["grad_norm"] for row in rows(run_folder, action).values()]
    assert len(norms) == 8 and (norms[6] > 1000) == (action == "warn")


def test_a_new_level_stops_being_a_spike():
    detector = SpikeDetector(20.0, include_spikes=True)
    warned = []
    for step in range(1, 301):
        level = 1.0 + step % 7 / 100 + 5 * (step > 100)
        if detector.check(step, {"loss": level, "grad_norm": 1.0}):
            warned.append(step)
    assert warned[0] == 101 and warned[-1] < 170


FLIP = """
import os
import torch
from dualpipe.train.optim.optimizer import Optimizer

step = Optimizer.step

def flipping(self, lr, norm):
    step(self, lr, norm)
    if os.environ.get("RANK") == "1":
        state = next(iter(self._inner["adamw"].state.values()))
        state["step"].view(-1).view(torch.int32)[0] |= 1 << 7

Optimizer.step = flipping
"""


def test_a_flipped_bit_in_replicated_state_is_detected(run_folder, dualpipe):
    options = (*ALONE, *DP2, "--guard.checksum_interval", "3")
    done = dualpipe(run_folder, "train", "run.toml", *options, "--output.dir", "flipped", before=FLIP)
    assert done.returncode == 1 and done.stderr.startswith("error: after step 3: ")
    assert "rank 0 (dp 0) or rank 1 (dp 1) has wrong bits in optimizer/" in done.stderr
    assert "/step, which ranks 0, 1 replicate" in done.stderr


RECHECK = ("--guard.recheck_interval", "2")
TWICE = {
    "pp2": (),
    "segments": SEGMENTS,
    "zbv-bf16": ("--parallel.schedule", "zbv", "--train.dtype", "bf16"),
    "pp2-dp2": DP2,
    "pp2-ep2-bf16": ("--parallel.ep", "2", "--train.num_chunks", "2", "--train.dtype", "bf16"),
    "1f1b": ("--parallel.schedule", "1f1b"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", TWICE)
def test_rechecks_find_equal_bits_and_change_nothing(run_folder, dualpipe, layout):
    losses = []
    for out, options in (("once", ()), ("twice", RECHECK)):
        done = dualpipe(run_folder, "train", "run.toml", *TWICE[layout], *options, "--output.dir", f"{out}-{layout}")
        assert done.returncode == 0, done.stderr
        losses.append([row["loss"] for row in rows(run_folder, f"{out}-{layout}").values()])
    assert losses[0] == losses[1]


SECOND = """
from contextlib import contextmanager
from dualpipe import Pipeline

in_order, second = Pipeline.in_order, []

@contextmanager
def noted(self, *, deferred):
    second[:] = [1] * deferred
    with in_order(self, deferred=deferred):
        yield
    second.clear()

Pipeline.in_order = noted
"""


@pytest.mark.parametrize("what, rank", [
    ("F(stage 1, micro-batch 0)", 1), pytest.param("I(stage 3, micro-batch 0)", 0, marks=pytest.mark.slow)])
def test_other_bits_in_the_second_run_name_the_rank(run_folder, dualpipe, what, rank):
    before = SECOND + planted(what, rank, 2, change="*= 1.001").replace("left[0]:", "second:")
    done = dualpipe(run_folder, "train", "run.toml", *RECHECK, "--output.dir", f"twice{rank}", before=before)
    assert done.returncode == 1, done.stdout
    what = what.replace("I(", "B(").replace("micro-batch 0", "micro-batch 1")
    text = f"error: after step 2: rank {rank} (pp {rank}) got other bits for {what} when it computed it a second time"
    assert done.stderr.startswith(text), done.stderr
