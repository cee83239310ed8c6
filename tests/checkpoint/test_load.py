"""Checkpoints of one process: contents, retention, commits, and states that do not fit."""

import copy
import hashlib
import importlib
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dualpipe.checkpoint import (
    CheckpointError,
    Checkpoints,
    directory,
    latest,
    load,
    save,
    training_state,
    verify,
)
from dualpipe.checkpoint.commands import check, ls, show
from dualpipe.checkpoint.directory import open_directory, scan
from dualpipe.checkpoint.manifest import Checkpoint
from dualpipe.train.optim.optimizer import Optimizer
from native import FILES, Trainee, is_step, state_of, steps_in

loading = importlib.import_module("dualpipe.checkpoint.load")  # the name in the package is the function


# -- contents


def test_everything_comes_back(tmp_path):
    trainee = Trainee((1, 1, 1))
    trainee.fill(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    path = save(tmp_path, trainee.state, step=12, plan=trainee.plan, config={"lr": 0.1}, extra={"loader": [4, 5]})
    numbers = random.random(), np.random.rand(), torch.rand(1).item()
    trainee.wreck()
    loaded = load(tmp_path, trainee.state)
    trainee.optimizer.round_parameters()
    assert not trainee.wrong(3)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == numbers
    assert loaded.path == path == latest(tmp_path) and (tmp_path / "latest").read_text() == "step-00000012\n"
    assert loaded.random_restored and not loaded.damaged and not loaded.allowed
    manifest = loaded.manifest
    assert (manifest.step, manifest.config, manifest.extra) == (12, {"lr": 0.1}, {"loader": [4, 5]})
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.layout == {"world": 1, "pp": 1, "dp": 1, "ep": 1}
    assert manifest.dtypes["norm.weight"] == {"storage": "bf16", "compute": "bf16", "save": "bf16"}
    assert set(manifest.files) | {"manifest.json"} == {file.name for file in path.iterdir()} == set(FILES)


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).bfloat16()
        return model, Optimizer([model], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def steps(model, optimizer, count):
        for step in range(count):
            model(torch.ones(2, 4, dtype=torch.bfloat16) * step).square().sum().backward()
            optimizer.step(0.01)
            optimizer.zero_grad()

    model, optimizer = make()
    steps(model, optimizer, 3)
    save(tmp_path, training_state([model], optimizer), step=3)
    steps(model, optimizer, 4)
    again, other = make()
    load(tmp_path, training_state([again], other))
    other.round_parameters()
    steps(again, other, 4)
    expected = training_state([model], optimizer)
    for name, tensor in training_state([again], other).items():
        assert torch.equal(tensor, expected[name]), name
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))


def test_tied_parameters_are_stored_once(tmp_path):
    trainee = Trainee((1, 1, 1), tie_word_embeddings=True)
    assert "embed_tokens.weight" in trainee.state and "lm_head.weight" not in trainee.state


def test_what_the_plan_saves_in_float32_must_be_stored_so(tmp_path):
    trainee = Trainee((1, 1, 1), dtype=torch.float32)
    name = "layers.1.mlp.gate.e_score_correction_bias"
    with pytest.raises(ValueError, match=rf"stored so:\n  {name} is stored in bf16$"):
        save(tmp_path, trainee.state | {name: trainee.state[name].bfloat16()}, step=1, plan=trainee.plan)
    assert latest(tmp_path) is None and not list(tmp_path.glob(".tmp-*"))


def test_what_cannot_be_stored_is_refused(tmp_path):
    class Odd(torch.Tensor):
        pass

    twice = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for make, message in (
        (lambda: {3: torch.zeros(1)}, "3 is a int; the names"),
        (lambda: {"odd": Odd([1.0])}, "odd is a Odd; only plain tensors"),
        (lambda: training_state(twice), "two stages have a tensor called 'weight'"),
    ):
        with pytest.raises(ValueError, match=message):
            save(tmp_path, make(), step=1)
    save(tmp_path, {"a": torch.ones(3)}, step=1)
    with pytest.raises(ValueError, match="a is expanded"):
        load(tmp_path, {"a": torch.zeros(1).expand(3)})


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, fsync, rename, replace = [], os.fsync, os.rename, os.replace

    def flushed(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(source, target):
        done.append(f"-> {Path(target).name}")
        rename(source, target)

    def replaced(source, target):
        done.append(f"-> {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", replaced)
    save(tmp_path / "new" / "er", state_of(1), step=1)
    at = done.index("-> step-00000001")
    assert {tmp_path.name, "new"} <= set(done[:at]) and "er" in done[at:]
    assert set(FILES) <= set(done[:at]) and done[at - 1].startswith(".tmp-step-00000001")
    assert "er" in done[done.index("-> latest") :]


def test_any_dtype_comes_back(tmp_path):
    values = torch.arange(6).view(2, 3).float()
    dtypes = (torch.complex128, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.bool, torch.uint64)
    state = {str(dtype): values.to(dtype).mT for dtype in dtypes} | {"one": torch.tensor(2.5, dtype=torch.complex128)}
    state |= {"column": values[:, 1], "element": values[:1, ::3][:, 0]}  # their strides are not those of a new tensor
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.save_async(state, step=2)
    for step in (1, 2):
        again = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        load(tmp_path / f"step-0000000{step}", again)
        for name, tensor in state.items():
            assert again[name].dtype is tensor.dtype
            assert torch.equal(again[name].to(torch.complex128), tensor.to(torch.complex128))
    wider = {name: torch.zeros(tensor.shape, dtype=torch.complex64) for name, tensor in state.items()}
    load(tmp_path, wider, allow=["*"])
    assert torch.equal(wider["torch.complex128"].real.T, values) and wider["one"] == 2.5


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_rank_may_have_several_files(tmp_path, monkeypatch, how):
    monkeypatch.setattr(importlib.import_module("dualpipe.checkpoint.save"), "MAX_FILE_BYTES", 20)
    with Checkpoints(tmp_path, checksum="sha256") as checkpoints:
        for step in (1, 2):
            getattr(checkpoints, how)(state_of(step), step=step)
    path = latest(tmp_path)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    assert names == ["rank-00000.1.safetensors", "rank-00000.2.safetensors", "rank-00000.safetensors"]
    state = state_of(0)
    loaded = load(tmp_path, state)
    assert is_step(state, 2) and loaded.manifest.checksum == "sha256" and loaded.random_restored and not verify(path)
    for name, (_, checksum) in loaded.manifest.files.items():
        assert hashlib.sha256((path / name).read_bytes()).hexdigest() == checksum
    (path / names[1]).unlink()
    assert "is missing" in verify(path)[0]


@pytest.mark.parametrize("arguments, message", [
    ({"step": -1}, "step must be a number"), ({"step": 3, "extra": {1, 2}}, "extra must be what JSON can hold"),
    ({"step": 3, "config": Path()}, "config must be what JSON can hold"),
])
def test_wrong_arguments(two, arguments, message):
    with pytest.raises(ValueError, match=message):
        save(two, state_of(3), **arguments)
    assert steps_in(two) == [1, 2]


# -- retention and commits


def test_unknown_checksums_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'md5'"):
        Checkpoints(tmp_path, checksum="md5")


@pytest.mark.parametrize("keep_last, keep_every, kept", [
    (None, None, [1, 2, 3, 4, 5, 6, 7]), (1, None, [7]), (2, None, [6, 7]), (2, 3, [3, 6, 7]), (1, 2, [2, 4, 6, 7]),
])
def test_retention(tmp_path, keep_last, keep_every, kept):
    with Checkpoints(tmp_path, keep_last=keep_last, keep_every=keep_every) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(state_of(step), step=step)
    assert steps_in(tmp_path) == kept
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{s:08}" for s in kept} | {"latest", ".lock"}


def test_the_newest_is_the_last_committed(tmp_path):
    """A run that went back to step 1 resumes there, however far another run had come."""
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 9, 2):
            checkpoints.save(state_of(step), step=step)
    assert latest(tmp_path).name == "step-00000002" and steps_in(tmp_path) == [2, 9]


def test_the_same_step_again(two):
    (two / "step-00000001" / "manifest.json").unlink()
    for step in (1, 2):
        assert save(two, state_of(step + 10), step=step) == two / f"step-{step:08}"
    assert steps_in(two) == [1, 2] and len(list(two.glob("step-*"))) == 2
    state = state_of(0)
    load(two, state)
    assert is_step(state, 12)


def test_what_is_damaged_is_not_counted(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(state_of(step), step=step)
    (tmp_path / "step-00000004" / "tensors.json").unlink()  # the size shows it; the next damage does not:
    (tmp_path / "step-00000003" / "rank-00000.safetensors").write_bytes(
        b" " * (tmp_path / "step-00000003" / "rank-00000.safetensors").stat().st_size
    )
    with pytest.warns(UserWarning, match="passed over"):
        loaded = load(tmp_path, state_of(0))
    assert loaded.manifest.step == 2 and [path.name[-1] for path in loaded.damaged] == ["4", "3"]
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        checkpoints.ignore([tmp_path / "step-00000003"])  # the trainer does the same with `loaded.damaged`
        checkpoints.save(state_of(5), step=5)
        assert steps_in(tmp_path) == [2, 3, 4, 5]  # two of them whole
        checkpoints.save(state_of(4), step=4)
        assert steps_in(tmp_path) == [3, 4, 5] and not verify(tmp_path / "step-00000004")


def test_manifests_that_cannot_be_read_for_a_moment_do_not_change_what_is_newest(tmp_path, monkeypatch):
    def refuse(*arguments, **more):
        raise OSError(5, "Input/output error")

    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 2, 3, 2):
            checkpoints.save(state_of(step), step=step)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", refuse)
            checkpoints.save(state_of(1), step=1)
        assert latest(tmp_path).name == "step-00000001" and steps_in(tmp_path) == [1, 2]


def test_the_directory_is_the_same_wherever_the_process_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpoints("mine") as checkpoints:
        checkpoints.save(state_of(1), step=1)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoints.save(state_of(2), step=2)
    assert steps_in(tmp_path / "mine") == [1, 2] and not list((tmp_path / "elsewhere").iterdir())
    for save_again in (checkpoints.save, checkpoints.save_async):
        with pytest.raises(ValueError, match="are closed"):
            save_again(state_of(3), step=3)


def test_a_child_of_the_process_does_not_hold_the_directory(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        checkpoints.close()
        open_directory(tmp_path, patience=0.0).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_one_that_is_replaced_while_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    """The first read falls between the removal of the old checkpoint and the rename of the new one."""
    save(tmp_path, state_of(1), step=1, extra=1)
    (path,) = tmp_path.glob("step-*")
    read, meanwhile = Checkpoint.read, iter([tmp_path / "one", tmp_path / "two"])

    def once_without(wanted):
        monkeypatch.undo()
        old = path.rename(next(meanwhile))
        try:
            return read(wanted)
        finally:
            shutil.copytree(old, path)

    monkeypatch.setattr(Checkpoint, "read", once_without)
    found = scan(tmp_path)
    assert [each.manifest.extra for each in found.committed] == [1] and not found.damaged
    monkeypatch.setattr(Checkpoint, "read", once_without)
    assert not found.committed[0].still_exists()


@pytest.mark.parametrize("keep_every", [
    5, *(pytest.param(each, marks=pytest.mark.slow) for each in (None, "the same step")),
])
def test_readers_beside_a_job_that_deletes(tmp_path, keep_every):
    done, newest = threading.Event(), [1]
    same = keep_every == "the same step"

    def write():
        with Checkpoints(tmp_path, keep_last=1, keep_every=None if same else keep_every) as checkpoints:
            while not done.is_set():
                number = newest[0] + 1
                checkpoints.save(state_of(number), step=1 if same else number, extra=number)
                newest[0] = number

    save(tmp_path, state_of(1), step=1, extra=1)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline or newest[0] <= 5:
            state, before = state_of(0), newest[0]
            loaded = load(tmp_path, state)
            assert not loaded.damaged and loaded.manifest.extra >= before
            assert is_step(state, loaded.manifest.extra)
            assert latest(tmp_path) is not None and list(check(tmp_path)) and list(show(tmp_path))
            assert not any("DAMAGED" in line for line in ls(tmp_path))
    finally:
        done.set()
        writer.join()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(two, monkeypatch):
    def replaced(checkpoint, stored, parts):
        read(checkpoint, stored, parts)
        if not again:
            again.append(save(two, state_of(7), step=2, extra="again"))

    again, read = [], loading.read_parts
    monkeypatch.setattr(loading, "read_parts", replaced)
    state = state_of(0)
    assert load(two, state).manifest.extra == "again" and is_step(state, 7)


def test_a_checkpoint_that_goes_while_it_is_read_is_no_mistake_of_the_caller(two, monkeypatch):
    def gone(checkpoint, stored, parts):
        read(checkpoint, stored, {"a.weight": parts["a.weight"]})
        shutil.rmtree(checkpoint.path)
        raise FileNotFoundError(checkpoint.path)

    read = loading.read_parts
    monkeypatch.setattr(loading, "read_parts", gone)
    with pytest.raises(RuntimeError, match="the tensors are not usable, as reading had begun"):
        load(two / "step-00000002", state_of(0))


def test_a_directory_that_could_not_be_taken_is_free(two, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(directory, "scan", lambda path: exec("raise OSError(5, 'Input/output error')"))
        with pytest.raises(ValueError, match=r"checkpoints cannot be saved to .*Input/output"):
            Checkpoints(two)
    open_directory(two, patience=0.0).close()


def test_one_that_was_renamed_but_not_flushed_is_not_forgotten(tmp_path, monkeypatch):
    def fail(path):
        if path == tmp_path:
            raise OSError(5, "Input/output error")

    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(state_of(1), step=1)
        with monkeypatch.context() as patch:
            patch.setattr(directory, "sync", fail)
            with pytest.raises(CheckpointError, match="Input/output"):
                checkpoints.save(state_of(2), step=2)
        checkpoints.save(state_of(3), step=3)
    assert steps_in(tmp_path) == [3]


def test_what_dead_jobs_left_is_removed(two):
    for name in (".tmp-step-00000003-ab", ".del-step-00000000-cd"):
        (two / name).mkdir()
        (two / name / "rank-00000.safetensors").write_text("half")
    (two / "of mine").mkdir()
    assert steps_in(two) == [1, 2]
    save(two, state_of(3), step=3)
    assert {path.name for path in two.iterdir() if not path.name.startswith("step")} == {"of mine", "latest", ".lock"}


def test_a_job_that_is_just_ending_is_waited_for(tmp_path):
    held = Checkpoints(tmp_path)
    threading.Timer(0.3, held.close).start()
    start = time.monotonic()
    Checkpoints(tmp_path).close()
    assert time.monotonic() - start > 0.2


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "in it"):
        with pytest.raises(ValueError, match="checkpoints cannot be saved to"):
            Checkpoints(path)
    with pytest.raises(ValueError, match="is a file"):
        latest(tmp_path / "file")


@pytest.mark.parametrize("at", ["directory.write_description", "directory.os.rename", "directory.Directory._tidy"])
def test_a_disk_that_fails_on_the_way(two, monkeypatch, at):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"dualpipe.checkpoint.{at}", fail)
        if "_tidy" in at:  # committed already
            with pytest.warns(UserWarning, match="is saved, but"):
                save(two, state_of(3), step=3)
        else:
            with pytest.raises(CheckpointError, match=r"step 3 was not saved to .*No space left"):
                save(two, state_of(3), step=3)
    assert steps_in(two) == ([1, 2, 3] if "_tidy" in at else [1, 2])
    assert not list(two.glob(".tmp-*"))


def test_a_manifest_that_the_disk_refuses_stops_no_save(two, monkeypatch):
    read = Path.read_text

    def refuse(self, *arguments, **more):
        if self.parent.name == "step-00000001":
            raise OSError(5, "Input/output error")
        return read(self, *arguments, **more)

    monkeypatch.setattr(Path, "read_text", refuse)
    save(two, state_of(3), step=3)
    assert latest(two).name == "step-00000003" and load(two, state_of(0)).manifest.step == 3


def test_a_name_of_the_latest_that_cannot_be_written_is_only_warned_about(two):
    (two / "latest").unlink()
    (two / "latest").mkdir()
    with pytest.warns(UserWarning, match="latest cannot be written"):
        assert save(two, state_of(3), step=3).name == "step-00000003"
    assert load(two, state_of(0)).manifest.step == 3


# -- what does not fit


def test_every_difference_at_once_and_nothing_touched(two):
    model = {"a.weight": torch.zeros(4, 3), "b.weight": torch.zeros(7), "b.weigth": torch.zeros(1),
             "scalar": torch.zeros(())}
    before = copy.deepcopy(model)
    with pytest.raises(ValueError) as caught:
        load(two, model)
    assert str(caught.value).split("\n  ")[1:] == [
        "a.weight has shape (4, 2) in the checkpoint, (4, 3) in the model",
        "b.weight is bf16 in the checkpoint, fp32 in the model",
        "b.weigth is missing from the checkpoint; the nearest name is b.weight",
        "count is in the checkpoint only",
    ]
    assert all(torch.equal(model[name], before[name]) for name in model)


def test_allowed_differences(two):
    model = {"a.weight": torch.zeros(4, 3), "b.weight": torch.zeros(7), "new": torch.zeros(1),
             "scalar": torch.zeros(())}
    with pytest.raises(ValueError, match=r"`allow`:\n  count is in the checkpoint only$"):
        load(two, model, allow=["*.weight", "new"])
    loaded = load(two, model, allow=["*.weight", "new", "c?unt"])
    assert len(loaded.allowed) == 4
    assert torch.equal(model["b.weight"], torch.full((7,), 2.0)) and model["scalar"] == 2
    assert not model["a.weight"].any() and not model["new"].any()
