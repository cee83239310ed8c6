"""Runs that are killed and go on, bit for bit; in the same layout, and in others."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dualpipe import cli
from dualpipe.checkpoint import latest
from dualpipe.checkpoint.native_folder import read_manifest
from dualpipe.train.metrics import read_metrics
from hub import read_all, rewrite, save_qwen

ALONE = ["--parallel.pp", "1"]
LAYOUTS = {
    "pp2": [],
    "pp2-dp2": ["--parallel.dp", "2", "--train.num_chunks", "2"],
    "pp2-ep2": ["--parallel.ep", "2", "--train.num_chunks", "2"],
}  # fmt: skip


def losses(folder, out):
    return [row["loss"] for row in read_metrics(folder / out / "metrics.jsonl")]


def contents(folder, out):
    """The checksums of the files of the newest checkpoint that hold tensors and random states, by name."""
    newest = latest(folder / out / "checkpoints")
    files = read_manifest(newest).files
    found = {name: info for name, info in files.items() if name.endswith(".distcp") or name.startswith("rank-")}
    assert len(found) >= 4, "of two ranks"
    return newest.name, found


def killed_after(start, folder, out, step, *options):
    """Start a run and `kill -9` its launcher once the checkpoint of `step` is committed; no rank lives on."""
    process = start(folder, "train", "run.toml", "--output.dir", out, *options)
    deadline = time.monotonic() + 90
    while not (folder / out / "checkpoints" / f"step-{step:08}" / "manifest.json").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    ranks = children(process.pid)
    assert len(ranks) >= 2
    os.kill(process.pid, signal.SIGKILL)  # the launcher alone
    process.wait()
    while any(is_alive(rank) for rank in ranks):
        assert time.monotonic() < deadline + 10, "ranks outlive the launcher"
        time.sleep(0.05)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_resume(dualpipe, start_dualpipe, folder, name, steps, kill_at, *options):
    common = ["--train.steps", str(steps), "--checkpoint.interval", str(kill_at), *options]
    straight = dualpipe(folder, "train", "run.toml", "--output.dir", f"{name}-straight", *common)
    assert straight.returncode == 0, straight.stderr
    killed_after(start_dualpipe, folder, f"{name}-killed", kill_at, *common)
    rest = dualpipe(folder, "train", "run.toml", "--output.dir", f"{name}-killed", *common)
    assert rest.returncode == 0, rest.stderr
    assert "resuming from" in rest.stdout
    assert losses(folder, f"{name}-killed") == losses(folder, f"{name}-straight")
    assert len(losses(folder, f"{name}-killed")) == steps
    assert contents(folder, f"{name}-killed") == contents(folder, f"{name}-straight")


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_for_bit(run_folder, dualpipe, start_dualpipe, mode):
    check_resume(dualpipe, start_dualpipe, run_folder, mode, 7, 3, "--checkpoint.mode", mode,
                 "--router.balance", "0.1", "--router.balance_level", "global")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_a_killed_run_goes_on_bit_for_bit_in_every_layout(run_folder, dualpipe, start_dualpipe, options, dtype):
    name = "-".join((dtype, *options)).replace("--", "")
    check_resume(dualpipe, start_dualpipe, run_folder, name, 20, 8, "--train.dtype", dtype, *options)


@pytest.fixture(scope="module")
def half_way(run_folder, dualpipe):
    """A run of four steps of eight, with a checkpoint of the fourth, and the losses of all eight."""
    common = ["--train.steps", "8", "--checkpoint.interval", "4"]
    done = dualpipe(run_folder, "train", "run.toml", "--output.dir", "half", *common)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(run_folder / "half" / "checkpoints" / "step-00000008")
    return common, losses(run_folder, "half")


def check_layout(folder, half_way, out, run):
    expected = half_way[1]
    run("train", "run.toml", "--output.dir", out, "--checkpoint.resume", str(folder / "half" / "checkpoints"))
    rows = read_metrics(folder / out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [5, 6, 7, 8]
    assert [row["loss"] for row in rows] == pytest.approx(expected[4:], rel=1e-5)


def test_one_rank_goes_on_with_the_same_losses(run_folder, half_way, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    check_layout(run_folder, half_way, "one", lambda *given: cli.main([*given, *half_way[0], *ALONE]))
    assert "random numbers start anew, as the layout is another" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("options", list(LAYOUTS.values())[1:], ids=list(LAYOUTS)[1:])
def test_another_layout_goes_on_with_the_same_losses(run_folder, dualpipe, half_way, options):
    def run(*given):
        done = dualpipe(run_folder, *given, *half_way[0], *options)
        assert done.returncode == 0, done.stderr

    check_layout(run_folder, half_way, options[0].strip("-"), run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint.resume", "nothing"], "nothing"),
        (["--checkpoint.resume", "half/checkpoints", "--train.sequence_length", "8"], "the loader's state is of"),
        (["--checkpoint.resume", "half/checkpoints", "--model.config", "wider.json"], "layers.0.mlp.gate.weight"),
        (["--checkpoint.interval", "-1"], "checkpoint.interval = -1: must not be negative"),
        (["--checkpoint.mode", "later"], "--checkpoint.mode"),
    ],
)  # fmt: skip
def test_what_cannot_be_resumed_is_said_once(run_folder, half_way, monkeypatch, capsys, options, message):
    model = json.loads((run_folder / "config.json").read_text())
    (run_folder / "wider.json").write_text(json.dumps({**model, "num_experts": 8}))
    monkeypatch.chdir(run_folder)
    assert cli.main(["train", "run.toml", "--output.dir", "refused", *ALONE, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("error: ") == 1


def test_a_finished_run_has_nothing_left_to_do_unless_it_never_resumes(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    run = ["train", "run.toml", *ALONE, "--checkpoint.interval", "2", "--output.dir", "again"]
    assert cli.main([*run, "--train.steps", "2"]) == 0
    first = losses(run_folder, "again")
    capsys.readouterr()
    assert cli.main([*run, "--train.steps", "2"]) == 0
    text = capsys.readouterr().out
    assert "after step 2" in text and "step 1/2" not in text
    assert cli.main([*run, "--train.steps", "2", "--checkpoint.resume", "never"]) == 0
    assert losses(run_folder, "again") == first
    assert "step 1/2" in capsys.readouterr().out


def test_from_hugging_face_to_a_run_and_back(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    save_qwen(run_folder / "hub", vocab_size=257)
    assert cli.main(["hf", "import", "hub", "imported"]) == 0
    assert cli.main(["hf", "export", "imported", "same", "--dtype", "fp32"]) == 0
    before, after = ({name: tensor for file in (run_folder / out).glob("*.safetensors")
                      for name, tensor in load_file(file).items()} for out in ("hub", "same"))  # fmt: skip
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    run = ["train", "run.toml", *ALONE, "--model.config", "hub/config.json", "--train.steps", "2"]
    assert cli.main([*run, "--output.dir", "a", "--checkpoint.resume", "imported", "--export.to_hf", "a/hf",
                     "--checkpoint.interval", "2"]) == 0  # fmt: skip
    assert cli.main([*run, "--output.dir", "b", "--init.from_hf", "hub"]) == 0
    assert losses(run_folder, "a") == losses(run_folder, "b")
    assert cli.main(["hf", "export", "a/checkpoints", "exported", "--dtype", "fp32"]) == 0
    ours, theirs = (load_file(run_folder / path / "model.safetensors") for path in ("exported", "a/hf"))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_importing_into_a_run_is_refused_and_float32_among_bfloat16_survives(run_folder, half_way, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    save_qwen(run_folder / "mixed", dtype=torch.bfloat16, vocab_size=257)
    tensors = read_all(run_folder / "mixed")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    rewrite(run_folder / "mixed", tensors)
    assert cli.main(["hf", "import", "mixed", "half/checkpoints"]) == 2
    assert "half/checkpoints has checkpoints of a run; give a new directory" in capsys.readouterr().err
    assert cli.main(["hf", "import", "mixed", "mixed-imported"]) == 0
    assert cli.main(["hf", "export", "mixed-imported", "mixed-again"]) == 0
    again = read_all(run_folder / "mixed-again")
    assert {name for name, tensor in again.items() if tensor.dtype is torch.float32} == {"model.norm.weight"}
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_an_imported_checkpoint_is_gone_on_from_without_saving_any(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    save_qwen(run_folder / "plain", vocab_size=257)
    assert cli.main(["hf", "import", "plain", "auto/checkpoints"]) == 0
    run = ["train", "run.toml", *ALONE, "--model.config", "plain/config.json", "--train.steps", "1"]
    assert cli.main([*run, "--output.dir", "auto"]) == 0
    assert "resuming from auto/checkpoints/step-00000000, after step 0" in capsys.readouterr().out
