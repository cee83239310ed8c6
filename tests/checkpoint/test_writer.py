"""Ranks that save wait for each other as long as there is progress, and no longer; bad steps are not committed."""

import importlib
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn

from dualpipe.checkpoint import CheckpointError, Checkpoints, directory, latest, load, training_state, verify, writer
from dualpipe.checkpoint.tensors import lay_out
from dualpipe.checkpoint.writer import HostMemory
from dualpipe.parallel.mesh import build_mesh
from dualpipe.runtime import files
from dualpipe.runtime.errors import RankLost
from ranks import run_ranks

saving = importlib.import_module("dualpipe.checkpoint.save")  # the name in the package is the function
WRITE = saving.write_files


def paced(folder, content, checksum, *, seconds):
    """Write like a disk that takes `seconds` for each piece."""
    def pieces(of):
        for piece in of:
            time.sleep(seconds)
            yield piece

    return WRITE(folder, {name: pieces(of) for name, of in content.items()}, checksum)


def save_slowly(rank, folder, how):
    """Rank 1 takes 3 s for each of two saves, and 0.3 s for each piece; 1 s without a piece would be an error."""
    mesh, state = build_mesh(2, 1, 1, torch.device("cpu")), {f"{rank}": torch.arange(10_000.0)}
    files._REPORT_INTERVAL = 4000
    saving.write_files = partial(paced, seconds=0.3) if rank == 1 else WRITE
    start = time.monotonic()
    with Checkpoints(folder, mesh, timeout=timedelta(seconds=1.5)) as checkpoints:
        getattr(checkpoints, how)(state, step=1)
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["save_async", pytest.param("save", marks=pytest.mark.slow)])
def test_a_slow_disk_is_no_error(tmp_path, how):
    assert min(run_ranks(save_slowly, 2, str(tmp_path), how, fresh=True)) > 3
    assert not verify(latest(tmp_path))


def save_and_hang(rank, folder):
    """Rank 1 hangs in its disk until both have given up twice; then both save again."""
    mesh, state, told = build_mesh(2, 1, 1, torch.device("cpu")), {f"{rank}": torch.ones(10)}, []
    freed = threading.Event()

    def hang(*given):
        freed.wait(30)
        return WRITE(*given)

    with Checkpoints(folder, mesh, timeout=timedelta(seconds=1)) as checkpoints:
        saving.write_files = hang if rank == 1 else WRITE
        start = time.monotonic()
        checkpoints.save_async(state, step=1)
        for again in (False, True):
            try:
                if again:
                    checkpoints.save_async(state, step=2)
                checkpoints.wait()
            except CheckpointError as error:
                told.append(str(error))
        told.append(time.monotonic() - start)
        freed.set()
        saving.write_files = WRITE
        checkpoints.save(state, step=3)
    return told


def test_a_rank_that_hangs_is_named_on_all_and_what_it_writes_afterwards_is_not_committed(tmp_path):
    first, second = run_ranks(save_and_hang, 2, str(tmp_path), fresh=True)
    assert first[0] == second[0] and "step 1 was not saved to" in first[0]
    assert "rank 1 (pp 1) has made no progress for 1 s" in first[0]
    assert first[1] == second[1]
    assert "rank 1 (pp 1): SaveAbandoned: an earlier save has not ended on this rank" in first[1]
    assert max(first[2], second[2]) < 20, "not when the disk goes on after 30 s"
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000003"]


@pytest.mark.parametrize("error, timeout, least", [(KeyError("of the run"), 0.5, 0.5), (RankLost("rank 1"), 28, 0)])
def test_after_an_error_what_is_in_flight_has_its_time_and_is_then_not_committed(
    tmp_path, monkeypatch, error, timeout, least
):
    """A write under way gets its time, and none where a rank is lost."""
    freed = threading.Event()
    monkeypatch.setattr(saving, "write_files", lambda *given: (freed.wait(30), WRITE(*given))[1])
    with pytest.raises(type(error)) as caught, Checkpoints(tmp_path, timeout=timedelta(seconds=30)) as checkpoints:
        checkpoints._timeout = timeout  # of this alone
        checkpoints.save_async({"a": torch.ones(3)}, step=1)
        executor = checkpoints._executor
        while not list(tmp_path.glob(".tmp-*")):
            time.sleep(0.01)
        start = time.monotonic()
        raise error
    assert least <= time.monotonic() - start < 20
    assert "step 1 was not saved" in caught.value.__notes__[0] and not list(tmp_path.glob("*step*"))
    freed.set()
    executor.shutdown()  # the thread has come to its end
    assert not list(tmp_path.glob("*step*"))


def test_a_commit_that_comes_too_late_is_none(tmp_path, monkeypatch):
    """The commit was under way when the run ended, on a disk that would not remove a folder either."""
    freed, begun, describe = threading.Event(), threading.Event(), directory.write_description
    monkeypatch.setattr(directory, "write_description",
                        lambda *given: (begun.set(), freed.wait(30), describe(*given)))
    monkeypatch.setattr(directory.shutil, "rmtree", lambda *given, **more: None)
    with pytest.raises(RankLost), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_async({"a": torch.ones(3)}, step=1)
        executor = checkpoints._executor
        assert begun.wait(30)
        raise RankLost("rank 1")
    freed.set()
    executor.shutdown()
    [left] = tmp_path.glob("*step*")
    assert left.name.startswith(".tmp-step-") and (left / "manifest.json").exists(), "all but the commit was done"


def test_after_an_error_what_comes_to_its_end_in_time_is_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "write_files", partial(paced, seconds=0.2))
    with pytest.raises(KeyError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_async({"a": torch.ones(3)}, step=1)
        raise KeyError
    assert not verify(latest(tmp_path))


def test_a_process_that_writes_tells_how_far_it_is(tmp_path, monkeypatch):
    tensor, said = torch.arange(2**25 + 5.0), []  # two pieces
    memory = HostMemory(is_shared=True)
    file = lay_out({"a": (tensor.dtype, tensor.shape)}, 10**9, lambda *_: "a.safetensors", {})
    memory.fill(file, {"a": tensor})
    written = memory.write_in_process(tmp_path, "xxh3_128", 30.0, said.append)
    assert sum(said) == written["a.safetensors"].size == (tmp_path / "a.safetensors").stat().st_size and len(said) == 3

    def refuse(size):
        raise RuntimeError("not wanted")

    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(RuntimeError, match="not wanted"):
        memory.write_in_process(tmp_path, "", 30.0, refuse)
    memory.close()


def test_the_process_that_writes_starts_without_torch():
    command = [sys.executable, "-P", "-X", "importtime", writer.__file__, str(os.getpid()), "0"]
    imports = subprocess.run(command, input="", capture_output=True, text=True).stderr
    assert "dualpipe.runtime.storage" in imports
    assert "torch" not in imports


# -- numbers that are not finite


def save_poisoned(rank, folder, value):
    """Save with a non-finite number in one tensor of rank 1 at a time; last with `finite=False`, which allows it."""
    mesh = build_mesh(2, 1, 1, torch.device("cpu"))
    stage = nn.Linear(3, 2)
    stage.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    optimizer = torch.optim.AdamW(stage.parameters())
    stage(torch.ones(3)).sum().backward()
    optimizer.step()
    told = []
    with Checkpoints(folder, mesh) as checkpoints:
        def attempt(step, save):
            try:
                save(training_state([stage], optimizer, numbers=[rank]), step=step)
                checkpoints.wait()
            except FloatingPointError as error:
                told.append(str(error))

        attempt(1, checkpoints.save)
        for step, tensor in enumerate((stage.weight, optimizer.state[stage.bias]["exp_avg_sq"]), 2):
            kept = tensor.detach().clone()
            if rank == 1:
                tensor.detach().view(-1)[-1] = value
            attempt(step, checkpoints.save if step == 2 else checkpoints.save_async)
            tensor.detach().copy_(kept)
        attempt(4, checkpoints.save)
    with Checkpoints(f"{folder}/any", mesh, finite=False) as checkpoints:
        stage.weight.detach().fill_(value)
        attempt(5, checkpoints.save)
    return told


@pytest.mark.parametrize("value", [
    float("nan"), pytest.param(float("-inf"), marks=pytest.mark.slow),
])
def test_what_is_not_finite_is_not_committed(tmp_path, value):
    first, second = run_ranks(save_poisoned, 2, str(tmp_path), value, fresh=True)
    assert first == second == [
        f"{name} on rank 1 (pp 1): not finite, so there is no checkpoint of step {step}; the newest complete "
        f"checkpoint: {tmp_path / 'step-00000001'}"
        for step, name in ((2, "stage-1.weight"), (3, "optimizer/stage-1.bias/exp_avg_sq"))
    ]
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-00000001", "step-00000004"]
    assert latest(tmp_path / "any").name == "step-00000005"


def test_masters_are_checked_and_what_is_no_parameter_is_not(tmp_path):
    state = {"w": torch.ones(3, dtype=torch.bfloat16), "optimizer/w/exp_avg": torch.zeros(3), "mask": torch.ones(2)}
    with Checkpoints(tmp_path) as checkpoints:
        state["mask"][0] = -torch.inf
        state["optimizer/w/exp_avg"][:] = 3e38  # of which the sum of squares is not finite
        checkpoints.save(state, step=1)
        state["w"][0] = torch.nan
        with pytest.raises(FloatingPointError, match=r"^w on rank 0: not finite"):
            checkpoints.save(state, step=2)


# -- before an anomaly


def test_the_newest_before_an_anomaly_stays(tmp_path):
    state = {"a": torch.ones(3)}

    def steps():
        return sorted(int(path.name[5:]) for path in tmp_path.glob("step-*"))

    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(state, step=step)
        checkpoints.keep_before_anomaly(5)  # 4 is from before
        for step in (8, 10):
            checkpoints.save(state, step=step)
        assert steps() == [4, 8, 10]
        checkpoints.keep_before_anomaly(9)
        checkpoints.keep_before_anomaly(3)  # an earlier one changes nothing
        for step in (12, 14):
            checkpoints.save(state, step=step)
        assert steps() == [8, 12, 14]
    assert load(tmp_path, state).manifest.step == 14
