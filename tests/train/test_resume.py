"""Runs that are killed and go on, bit for bit; in the same layout, and in others."""

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command import COMMAND
from dualpipe import cli
from dualpipe.checkpoint import latest
from dualpipe.checkpoint.directory import scan
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.train.metrics import read_metrics
from dualpipe.train.trainer import Trainer
from hub import read_all, rewrite, save_qwen
from native import steps_in
from object_store import set_faults
from processes import is_alive

saving = importlib.import_module("dualpipe.checkpoint.save")  # the name in the package is the function
pytestmark = pytest.mark.usefixtures("without_evaluation")
ALONE = ["--parallel.pp", "1"]
LAYOUTS = {
    "pp2": [],
    "pp2-dp2": ["--parallel.dp", "2", "--train.num_chunks", "2"],
    "pp2-ep2": ["--parallel.ep", "2", "--train.num_chunks", "2"],
}


def losses(folder, out):
    return [row["loss"] for row in read_metrics(folder / out / "metrics.jsonl")]


def contents(folder, out):
    """The checksums of the files of the newest checkpoint that hold tensors and random states, by name."""
    newest = latest(folder / out / "checkpoints")
    files = Checkpoint.read(newest).manifest.files
    found = {name: info for name, info in files.items() if name.startswith("rank-")}
    assert len(found) >= 2, "of two ranks"
    return newest.name, found


def killed_after(start, folder, out, step, *options):
    """Start a run and `kill -9` its launcher once the checkpoint of `step` is committed; nothing of it lives on."""
    process = start(folder, "train", "run.toml", "--output.dir", out, *options)
    deadline = time.monotonic() + 250
    while not (folder / out / "checkpoints" / f"step-{step:08}" / "manifest.json").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    below = descendants(process.pid)
    assert len(below) >= 2, "the ranks, and their writers while they write"
    os.kill(process.pid, signal.SIGKILL)  # the launcher alone
    process.wait()
    while any(is_alive(pid) for pid in below):
        assert time.monotonic() < deadline + 10, "ranks or writers outlive the launcher"
        time.sleep(0.05)


def descendants(pid):
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # what has ended has none
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(child)]
    return found


@pytest.mark.parametrize("delay", [0.1, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0, 0.4))])
def test_no_rank_outlives_a_launcher_that_is_killed_while_they_start(run_folder, start_dualpipe, delay):
    out = f"orphans-{delay}"
    process = start_dualpipe(run_folder, "train", "run.toml", "--output.dir", out, "--train.steps", "100000",
                             command=COMMAND)
    while not (below := descendants(process.pid)):
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(map(is_alive, below)) or processes_of(out):
        assert time.monotonic() < deadline, "ranks outlive the launcher"
        time.sleep(0.05)


def processes_of(out):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if out.encode() in (folder / "cmdline").read_bytes() and is_alive(folder.name):
                found.append(folder.name)
    return found


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


@pytest.mark.parametrize("mode, writer", [
    ("async", "thread"), *(pytest.param(*how, marks=pytest.mark.slow) for how in (("async", "process"), ("sync", "-"))),
])
def test_a_killed_run_goes_on_bit_for_bit(run_folder, dualpipe, start_dualpipe, mode, writer):
    check_resume(dualpipe, start_dualpipe, run_folder, f"{mode}-{writer}", 7, 3, "--checkpoint.mode", mode,
                 *(("--checkpoint.writer", writer) if mode == "async" else ()),
                 "--router.balance", "0.1", "--router.balance_level", "global")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["storage", "gather"])
def test_a_killed_run_of_quantized_weights_goes_on_bit_for_bit(run_folder, dualpipe, start_dualpipe, way):
    """With a scale of the matrix, whose rows two ranks share, and without; a checkpoint has the masters of both."""
    check_resume(dualpipe, start_dualpipe, run_folder, f"quantized-{way}", 7, 3, *LAYOUTS["pp2-dp2"],
                 "--train.dtype", "bf16", "--dtypes.rules", f"*.experts,{way}=nvfp4", f"*.self_attn,{way}=mxfp8")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_that_is_killed_again_and_again_goes_on_bit_for_bit(run_folder, dualpipe, start_dualpipe, options):
    """At random moments while it trains, and writes every step; every third time while it starts or resumes."""
    name = f"often-{options[0].strip('-') if options else 'pp2'}"
    common = ["--train.steps", "120", "--checkpoint.interval", "1", *options]
    straight = dualpipe(run_folder, "train", "run.toml", "--output.dir", f"{name}-straight", *common, timeout=300)
    assert straight.returncode == 0, straight.stderr
    generator, out = random.Random(name), f"{name}-killed"
    for kill in range(6):
        before = latest(run_folder / out / "checkpoints")
        process = start_dualpipe(run_folder, "train", "run.toml", "--output.dir", out, *common)
        while kill % 3 < 2 and latest(run_folder / out / "checkpoints") == before:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        time.sleep(generator.uniform(0, 1 if kill % 3 < 2 else 8))
        assert process.poll() is None, "it came to its end before it was killed"
        below = descendants(process.pid)
        os.kill(below[-1] if kill % 2 and below else process.pid, signal.SIGKILL)  # one rank, or the launcher
        assert process.wait(250)
        assert kill % 3 == 2 or latest(run_folder / out / "checkpoints") != before
    rest = dualpipe(run_folder, "train", "run.toml", "--output.dir", out, *common, timeout=300)
    assert rest.returncode == 0, rest.stderr
    assert losses(run_folder, out) == losses(run_folder, f"{name}-straight")
    assert contents(run_folder, out) == contents(run_folder, f"{name}-straight")


@pytest.fixture(scope="module")
def half_way(run_folder, dualpipe):
    """A run of four steps of eight, with a checkpoint of the fourth, and the losses of all eight."""
    common = ["--train.steps", "8", "--checkpoint.interval", "4"]
    done = dualpipe(run_folder, "train", "run.toml", "--output.dir", "half", *common)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(run_folder / "half" / "checkpoints" / "step-00000008")
    return common, losses(run_folder, "half")


@pytest.mark.slow
@pytest.mark.parametrize("options", [ALONE, *list(LAYOUTS.values())[1:]], ids=["alone", *list(LAYOUTS)[1:]])
def test_another_layout_goes_on_with_the_same_losses(run_folder, dualpipe, half_way, options):
    common, expected = half_way
    out = "other-" + "".join(options)
    done = dualpipe(run_folder, "train", "run.toml", "--output.dir", out, "--checkpoint.resume", "half/checkpoints",
                    *common, *options)
    assert done.returncode == 0, done.stderr
    assert "random states are drawn anew" in done.stdout
    rows = read_metrics(run_folder / out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [5, 6, 7, 8]
    assert [row["loss"] for row in rows] == pytest.approx(expected[4:], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint.resume", "nothing"], "nothing does not exist"),
        (["--checkpoint.resume", "half"], "give half/checkpoints"),
        (["--checkpoint.resume", "half/checkpoints", "--train.sequence_length", "8"], "loader"),
        (["--checkpoint.resume", "half/checkpoints", "--model.config", "wider.json"], "layers.0.mlp.gate.weight"),
    ],
)
def test_what_cannot_be_resumed_is_said_once(run_folder, half_way, monkeypatch, capsys, options, message):
    model = json.loads((run_folder / "config.json").read_text())
    (run_folder / "wider.json").write_text(json.dumps({**model, "num_experts": 8}))
    monkeypatch.chdir(run_folder)
    assert cli.main(["train", "run.toml", "--output.dir", "refused", *ALONE, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("error: ") == 1


def test_what_has_changed_is_said(run_folder, half_way, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    resume = ["train", "run.toml", "--output.dir", "changed", *half_way[0], *ALONE]
    resume += ["--checkpoint.resume", "half/checkpoints", "--optimizer.lr", "0.002", "--train.seed", "5"]
    assert cli.main(resume) == 2
    assert "seed 0 (now 5)" in capsys.readouterr().err
    assert cli.main([*resume, "--checkpoint.allow", "loader"]) == 0
    assert "parallel.pp 2 -> 1, train.seed 0 -> 5, optimizer.lr" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(run_folder / "changed" / "metrics.jsonl")] == [5, 6, 7, 8]
    (start,) = json.loads((run_folder / "changed" / "run.json").read_text())["starts"]
    assert (start["step"], start["settings"]["run"]["train"]["seed"]) == (4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("failing, status, kept", [
    ([2], 0, [1, 3, 4, 5]), ([2, 3], 1, [1]), ([1, 3], 0, [2, 4, 5]), ([4], 0, [1, 2, 3, 5]),
    ([5], 1, [1, 2, 3, 4]),
])
def test_one_checkpoint_may_fail(run_folder, monkeypatch, capsys, tmp_path, mode, failing, status, kept):
    def write(folder, files, checksum):
        if int(folder.name.split("-")[2]) in failing:
            raise OSError(28, "No space left on device")
        return write_files(folder, files, checksum)

    write_files = saving.write_files
    monkeypatch.setattr(saving, "write_files", write)
    monkeypatch.chdir(run_folder)
    out = tmp_path / "out"
    run = ["train", "run.toml", *ALONE, "--train.steps", "5", "--checkpoint.interval", "1", "--checkpoint.mode", mode]
    run += ["--export.to_hf", str(tmp_path / "hf")]
    assert cli.main([*run, "--output.dir", str(out), "--checkpoint.keep_last", "0"]) == status
    text, error = capsys.readouterr()
    assert [int(path.name[5:]) for path in sorted((out / "checkpoints").glob("step-*"))] == kept
    assert text.count("WARNING: the checkpoint of step") == len(failing) - status
    assert (f"the checkpoint of step {failing[-1]} was not saved" in error) == (status != 0)
    assert error.count("\n") == status
    assert len(losses(out.parent, "out")) == (5 if failing != [2, 3] else 3 if mode == "sync" else 4)
    assert (tmp_path / "hf" / "model.safetensors").exists() == (failing != [2, 3])


def test_ranks_agree_on_what_could_not_be_written(run_folder, dualpipe):
    """No file may have more than 100 KB."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))"
    run = ["train", "run.toml", "--output.dir", "limited", "--checkpoint.interval", "1", "--train.steps", "9"]
    done = dualpipe(run_folder, *run, before=limit)
    assert done.returncode == 1 and done.stdout.count("WARNING: the checkpoint of step 1 was not saved") == 1
    folder = run_folder / "limited" / "checkpoints"
    assert "step 2" in done.stderr and "ranks 0-1" in done.stderr and done.stderr.count("\n") == 1
    assert len(losses(run_folder, "limited")) == 3 and [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("broken", ["step", "export"])
def test_what_was_not_saved_is_said_with_what_ended_the_run(run_folder, monkeypatch, capsys, tmp_path, broken):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    def diverge(self, number, batches):
        return refuse() if number == 3 else step(self, number, batches)

    def refuse(*arguments, **options):
        raise FloatingPointError("the end")

    step = Trainer._step
    monkeypatch.setattr(saving, "write_files", fail)
    monkeypatch.chdir(run_folder)
    run = ["train", "run.toml", *ALONE, "--checkpoint.interval", "2", "--output.dir", str(tmp_path)]
    if broken == "step":
        monkeypatch.setattr(Trainer, "_step", diverge)
        run += ["--checkpoint.mode", "async", "--train.steps", "3"]
    else:
        monkeypatch.setattr("dualpipe.train.export.save_hf", refuse)
        run += ["--checkpoint.mode", "sync", "--train.steps", "2", "--export.to_hf", str(tmp_path / "hf")]
    assert cli.main(run) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "error: the end" and error[1].startswith("and: the checkpoint of step 2 was not saved")


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


@pytest.mark.slow
def test_a_run_that_began_elsewhere_goes_on_from_its_own(run_folder, half_way, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    begin = ["train", "run.toml", *half_way[0], *ALONE, "--output.dir", "branch", "--checkpoint.interval", "1"]
    begin += ["--checkpoint.resume", "half/checkpoints"]
    assert cli.main([*begin, "--train.steps", "6"]) == 0
    capsys.readouterr()
    assert cli.main([*begin, "--train.steps", "7"]) == 0
    assert "after step 6" in capsys.readouterr().out
    assert cli.main([*begin, "--checkpoint.resume", "half", "--train.steps", "7"]) == 2
    assert "checkpoint.resume = 'half'" in capsys.readouterr().err
    back = str(run_folder / "branch" / "checkpoints" / "step-00000005")  # of its own: back to there
    assert cli.main([*begin[:-1], back, "--train.steps", "6"]) == 0
    assert f"resuming from {back}" in capsys.readouterr().out
    assert cli.main([*begin[:-1], "branch/checkpoints", "--train.steps", "2"]) == 0
    assert "nothing is left to do: train.steps = 2" in capsys.readouterr().out


def test_what_was_passed_over_is_said_in_a_line(run_folder, dualpipe, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    run = ["train", "run.toml", *ALONE, "--output.dir", "damaged", "--checkpoint.interval", "1", "--train.steps", "2"]
    assert cli.main(run) == 0
    newest = run_folder / "damaged" / "checkpoints" / "step-00000002"
    os.truncate(newest / "rank-00000.safetensors", 5)
    capsys.readouterr()
    exported = dualpipe(run_folder, "hf", "export", "damaged/checkpoints", "damaged/hf")
    assert exported.returncode == 0 and exported.stderr.count("\n") == 1
    assert "passed over for damaged/checkpoints/step-00000001" in exported.stderr
    with pytest.warns(UserWarning, match="passed over for"):
        assert cli.main(run) == 0
    assert "after step 1" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", "damaged/checkpoints"]) == 0, "it was replaced"


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "manifest.json"])
def test_the_way_out_of_checkpoints_that_are_all_damaged(run_folder, monkeypatch, capsys, file):
    monkeypatch.chdir(run_folder)
    run = ["train", "run.toml", *ALONE, "--output.dir", file, "--checkpoint.interval", "1", "--train.steps", "2"]
    assert cli.main(run) == 0
    for checkpoint in (run_folder / file / "checkpoints").glob("step-*"):
        os.truncate(checkpoint / file, 5)
    capsys.readouterr()
    assert cli.main(run) == 2
    assert 'checkpoint.resume = "never"' in capsys.readouterr().err
    assert cli.main([*run, "--checkpoint.resume", "never"]) == 0, "the remedy works"
    assert cli.main(["checkpoint", "verify", f"{file}/checkpoints"]) == 0


def test_from_hugging_face_to_a_run_and_back(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    save_qwen(run_folder / "hub", vocab_size=257)
    assert cli.main(["hf", "import", "hub", "imported"]) == 0
    assert cli.main(["hf", "export", "imported", "same", "--dtype", "fp32"]) == 0
    before, after = ({name: tensor for file in (run_folder / out).glob("*.safetensors")
                      for name, tensor in load_file(file).items()} for out in ("hub", "same"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    run = ["train", "run.toml", *ALONE, "--model.config", "hub/config.json", "--train.steps", "2"]
    assert cli.main([*run, "--output.dir", "a", "--checkpoint.resume", "imported", "--export.to_hf", "a/hf",
                     "--checkpoint.interval", "2"]) == 0
    assert cli.main([*run, "--output.dir", "b", "--init.from_hf", "hub"]) == 0
    assert losses(run_folder, "a") == losses(run_folder, "b")
    assert cli.main(["hf", "export", "a/checkpoints", "exported", "--dtype", "fp32"]) == 0
    ours, theirs = (load_file(run_folder / path / "model.safetensors") for path in ("exported", "a/hf"))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_importing_into_a_run_is_refused(run_folder, half_way, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    save_qwen(run_folder / "whole", vocab_size=257)
    assert cli.main(["hf", "import", "whole", "half/checkpoints"]) == 2
    assert "half/checkpoints" in capsys.readouterr().err


@pytest.mark.slow
def test_float32_among_bfloat16_survives_an_import(run_folder, monkeypatch):
    monkeypatch.chdir(run_folder)
    save_qwen(run_folder / "mixed", dtype=torch.bfloat16, vocab_size=257)
    tensors = read_all(run_folder / "mixed")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    rewrite(run_folder / "mixed", tensors)
    assert cli.main(["hf", "import", "mixed", "mixed-imported"]) == 0
    assert cli.main(["hf", "export", "mixed-imported", "mixed-again"]) == 0
    again = read_all(run_folder / "mixed-again")
    assert {name for name, tensor in again.items() if tensor.dtype is torch.float32} == {"model.norm.weight"}
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    run = ["train", "run.toml", *ALONE, "--model.config", "mixed/config.json", "--train.dtype", "bf16"]
    for steps in ("1", "2"):  # from the import, then from the run's own
        source = "mixed-imported" if steps == "1" else "auto"
        assert cli.main([*run, "--train.steps", steps, "--optimizer.schedule", "wsd", "--output.dir", "mixed-a",
                         "--checkpoint.interval", "1", "--checkpoint.resume", source]) == 0
    assert cli.main([*run, "--train.steps", "2", "--optimizer.schedule", "wsd", "--output.dir", "mixed-b",
                     "--init.from_hf", "mixed"]) == 0
    assert losses(run_folder, "mixed-a") == losses(run_folder, "mixed-b")


def test_the_source_of_the_weights_is_not_read_again(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    save_qwen(run_folder / "gone", vocab_size=257)
    run = ["train", "run.toml", *ALONE, "--model.config", "gone/config.json", "--init.from_hf", "gone",
           "--checkpoint.interval", "1", "--output.dir", "went"]
    assert cli.main([*run, "--train.steps", "1"]) == 0
    for file in (run_folder / "gone").glob("*.safetensors"):
        file.unlink()
    assert cli.main([*run, "--train.steps", "2"]) == 0
    assert len(losses(run_folder, "went")) == 2
    assert cli.main([*run, "--train.steps", "2", "--checkpoint.resume", "never"]) == 2


def test_an_imported_checkpoint_is_gone_on_from_without_saving_any(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    save_qwen(run_folder / "plain", vocab_size=257)
    assert cli.main(["hf", "import", "plain", "auto/checkpoints"]) == 0
    run = ["train", "run.toml", *ALONE, "--model.config", "plain/config.json", "--train.steps", "1"]
    assert cli.main([*run, "--output.dir", "auto"]) == 0
    assert "resuming from auto/checkpoints/step-00000000, after step 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_from_a_store(run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(run_folder)
    url = f"object://{tmp_path}/checkpoints"
    set_faults()

    def train(out, steps, *options):
        cli.main(["train", "run.toml", *ALONE, "--output.dir", str(tmp_path / out), "--train.steps", f"{steps}",
                  "--optimizer.schedule", "constant", "--checkpoint.interval", "1", *options])
        return losses(tmp_path, out)

    straight = train("straight", 3)
    train("stored", 1, "--checkpoint.dir", url)
    assert train("stored", 3, "--checkpoint.dir", url) == straight and steps_in(url) == [1, 2, 3]
    second = next(checkpoint.path for checkpoint in scan(url).committed if checkpoint.manifest.step == 2)
    assert train("other", 3, "--checkpoint.resume", str(second)) == straight[2:]
    assert {"straight", "stored", "other", "checkpoints"} == {path.name for path in tmp_path.iterdir()}
    assert not list(run_folder.glob("object*"))
