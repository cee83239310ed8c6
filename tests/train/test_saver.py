"""Checkpoints of a run: after a stopped rank, saved at once, and kept before an anomaly."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from dualpipe import cli
from dualpipe.checkpoint import latest, verify
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.train.saver import Saver

pytestmark = pytest.mark.usefixtures("without_evaluation")
TIMEOUT = 5  # s


def ranks_of(launcher):
    """Return the process ids of a launcher's ranks, in order."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


@pytest.mark.parametrize("rank, mode, writer, delay", [
    (1, "async", "thread", 0.5),
    *(pytest.param(rank, mode, writer, delay, marks=pytest.mark.slow) for mode, writer, delay in (
        ("sync", "thread", 0.11), ("async", "thread", 0.23), ("async", "process", 0.32)) for rank in (0, 1)),
])
def test_a_stopped_rank_blocks_no_other(run_folder, start_dualpipe, rank, mode, writer, delay):
    out = f"stopped-{rank}-{mode}-{writer}-{delay}"
    process = start_dualpipe(
        run_folder, "train", "run.toml", "--output.dir", out, "--train.steps", "100000", "--parallel.timeout", TIMEOUT,
        "--checkpoint.interval", "1", "--checkpoint.mode", mode, "--checkpoint.writer", writer,
    )
    folder = run_folder / out / "checkpoints"
    while not list(folder.glob("step-*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    time.sleep(delay)
    os.kill(ranks_of(process.pid)[rank], signal.SIGSTOP)
    start = time.monotonic()
    _, error = process.communicate(250)
    assert time.monotonic() - start < TIMEOUT + 5, error
    assert process.returncode and f"rank {rank} (pp {rank})" in error
    assert not verify(latest(folder))
    # Otherwise the next save removes it: rank 0 cannot, or the writer process of the stopped rank still writes.
    assert rank == 0 or writer == "process" or not list(folder.glob(".tmp-*"))


def at_saving(monkeypatch, call):
    """Replace `save(saver, state, step)` of a run by `call(saver, state, step, save)`."""
    save = Saver.save
    monkeypatch.setattr(Saver, "save", lambda saver, state, step: call(saver, state, step, save))


def in_one_process(folder, monkeypatch, out, steps, interval, *options):
    monkeypatch.chdir(folder)
    return cli.main(["train", "run.toml", "--parallel.pp", "1", "--output.dir", out, "--train.steps", f"{steps}",
                     "--checkpoint.interval", f"{interval}", *options])


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_save_now_saves_at_once_and_only_once(run_folder, monkeypatch, mode):
    saved = {}

    def call(saver, state, step, save):
        save(saver, state, step)
        if step < 3:  # the second is due
            saved[step] = saver.save_now(state, step)
            assert saved[step] is None or not verify(saved[step])

    at_saving(monkeypatch, call)
    assert in_one_process(run_folder, monkeypatch, f"now-{mode}", 4, 2, "--checkpoint.mode", mode) == 0
    folder = (run_folder / f"now-{mode}" / "checkpoints").resolve()
    assert saved == {step: folder / f"step-{step:08}" for step in (1, 2)}
    assert [Checkpoint.read(folder / f"step-{step:08}").manifest.sequence for step in (1, 2, 4)] == [0, 1, 2]
    assert in_one_process(run_folder, monkeypatch, f"never-{mode}", 2, 0) == 0
    assert saved == {1: None, 2: None}


@pytest.mark.slow
def test_a_checkpoint_before_an_anomaly_is_kept_also_after_a_resume(run_folder, monkeypatch):
    advice = {}

    def call(saver, state, step, save):
        advice[step] = saver.suggest_older_checkpoint(step)
        if step == 3:
            saver.mark_anomaly(step)
        save(saver, state, step)

    at_saving(monkeypatch, call)
    for steps in (4, 6):
        assert in_one_process(run_folder, monkeypatch, "anomaly", steps, 1, "--checkpoint.keep_last", "1") == 0
        saved = sorted((run_folder / "anomaly" / "checkpoints").glob("step-*"))
        assert [int(path.name[5:]) for path in saved] == [2, steps]
    folder = (run_folder / "anomaly" / "checkpoints").relative_to(run_folder)
    assert [step for step, text in advice.items() if text] == [5]
    assert f"checkpoint.resume = '{folder / 'step-00000002'}'" in advice[5]


def test_a_poisoned_parameter_ends_the_run(run_folder, monkeypatch, capsys):
    def call(saver, state, step, save):
        if step == 2:
            state.optimizer.parameters[0].detach().view(-1)[0] = torch.nan
        save(saver, state, step)

    at_saving(monkeypatch, call)
    assert in_one_process(run_folder, monkeypatch, "poisoned", 3, 1) == 1
    err = capsys.readouterr().err
    assert "embed_tokens.weight on rank 0: not finite" in err and "checkpoints/step-00000001" in err


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["never", "step-00000002"])
def test_a_restarted_run_resumes_from_its_own_checkpoints(run_folder, monkeypatch, capsys, resume):
    out = f"again-{resume}"
    path, begins = ("never", "step 1/") if resume == "never" else (f"{out}/checkpoints/{resume}", "after step 2,")

    def train(steps, restarts, resume):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", f"{restarts}")
        assert in_one_process(run_folder, monkeypatch, out, steps, 1, "--checkpoint.resume", resume,
                              "--checkpoint.keep_last", "0") == 0
        return capsys.readouterr().out

    train(3, 0, "auto")
    assert begins in train(4, 1, path), "this run has saved nothing yet"
    assert "after step 4," in train(5, 2, path)
    assert begins in train(6, 0, path), "it is not started again"
