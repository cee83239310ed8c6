"""`dualpipe train --profile` and `--memory-snapshot`: the files of each rank."""

import gc
import json
from pathlib import Path

import pytest
import torch

from dualpipe import cli
from dualpipe.train import profile
from dualpipe.train.profile import Steps
from ranks import run_ranks
from trainers import built_trainer


def profiled_run(rank, toml, folder):
    """Four steps of a pipeline of two ranks, with a profile of two: after which steps garbage was collected, and
    whether Python's collector ran by itself in a step and runs so afterwards."""
    options = ["--output.dir", folder, "--train.steps", "4", "--train.eval_batches", "0", "--train.gc_interval", "2",
               "--checkpoint.mode", "off"]
    Path(folder).mkdir(exist_ok=True)
    collected, enabled = [], []
    with built_trainer(toml, options, profiled=Steps(2, 3)) as run, pytest.MonkeyPatch.context() as patch:
        right = run._step
        patch.setattr(run, "_step", lambda *arguments: (enabled.append(gc.isenabled()), right(*arguments))[1])
        patch.setattr(gc, "collect", lambda *_: collected.append(run.done))
        assert run.train() == 0
    return collected, enabled, gc.isenabled()


@pytest.mark.slow
def test_each_rank_writes_its_profile_and_all_collect_garbage_after_the_same_steps(run_toml, tmp_path):
    results = run_ranks(profiled_run, 2, str(run_toml), str(tmp_path / "out"))
    assert results == [([0, 2, 4], [False] * 4, True)] * 2
    for rank in range(2):
        events = json.loads((tmp_path / f"out/profile-2-3-rank{rank}.json").read_text())["traceEvents"]
        names = [each.get("name", "") for each in events]
        assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"}
        assert any(name.startswith("aten::") for name in names), "what torch has computed"


@pytest.mark.slow
def test_a_run_that_goes_on_behind_the_steps_or_ends_before(run_toml, monkeypatch, capsys):
    monkeypatch.chdir(run_toml.parent)
    options = ["--parallel.pp", "1", "--train.eval_batches", "0", "--checkpoint.interval", "1"]
    limit = ["--train.time_limit", "0.01"]
    assert cli.main(["train", "run.toml", *options, *limit, "--profile", "steps=1..3"]) == 75
    assert "profile: out/profile-1-3-rank0.json, and one file per rank" in capsys.readouterr().out
    assert "ProfilerStep#1" in Path("out/profile-1-3-rank0.json").read_text()
    assert cli.main(["train", "run.toml", *options, "--train.steps", "3", "--profile", "steps=1"]) == 0
    assert "no profile is taken" in capsys.readouterr().out


# -- the memory snapshot


def test_a_snapshot_is_of_a_cuda_device(run_toml, monkeypatch, capsys):
    monkeypatch.chdir(run_toml.parent)
    assert cli.main(["train", "run.toml", "--parallel.pp", "1", "--memory-snapshot"]) == 2
    assert "--memory-snapshot: the ranks run on cpu" in capsys.readouterr().err
    profile.check_memory_snapshot(torch.device("cuda", 0))


@pytest.fixture
def cuda_memory(monkeypatch):
    """Return the calls to torch.cuda.memory."""
    asked = []

    def dump(path):
        asked.append("dump")
        Path(path).write_bytes(b"history")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history",
                        lambda **options: asked.append("end" if options.get("enabled", "all") is None else "record"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return asked


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError])
def test_a_snapshot_is_written_at_the_end_however_the_run_ends(cuda_memory, tmp_path, error):
    try:
        with profile.memory_snapshot(tmp_path / "out", 3):
            assert cuda_memory == ["record"]
            if error is not None:
                raise error
    except torch.OutOfMemoryError:
        assert error is not None
    assert cuda_memory == ["record", "dump", "end"]
    assert (tmp_path / "out/memory-rank3.pickle").read_bytes() == b"history"


def test_a_snapshot_that_cannot_be_written_hides_no_error(cuda_memory, tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(KeyError), profile.memory_snapshot(tmp_path / "out", 3):
        raise KeyError
    assert "WARNING: rank 3 cannot write the memory snapshot" in capsys.readouterr().out
