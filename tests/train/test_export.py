"""The export at the end of a run, and a complete run that is started again."""

import json
import os
from pathlib import Path
from stat import S_ISDIR

import pytest

from dualpipe import cli

RUN = ["train", "run.toml", "--parallel.pp", "1", "--train.steps", "1", "--train.eval_batches", "0"]
SAVE = ["--checkpoint.interval", "1"]


@pytest.fixture
def train(run_toml, monkeypatch, capsys):
    """Train on one rank in this process; return the exit status and the output."""
    monkeypatch.chdir(run_toml.parent)

    def run(*options):
        status = cli.main([*RUN, *options])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def exported():
    """Return the time of every file of exports in the output directory."""
    return {str(path): path.stat().st_mtime_ns for path in Path("out").glob("hf*/*")}


def test_a_complete_run_does_not_export_again(train):
    save = [*SAVE, "--export.to_hf", "auto"]
    assert train(*save)[0] == 0
    before = exported()
    assert before
    status, said = train(*save)
    assert status == 0 and "the model: out/hf, exported before from the same checkpoint" in said
    assert exported() == before


@pytest.mark.parametrize("change", [
    "missing", "other settings", pytest.param("no record", marks=pytest.mark.slow),
    pytest.param("other checkpoint", marks=pytest.mark.slow),
])
def test_an_export_that_is_missing_or_differs_is_made_again(train, change):
    save = [*SAVE, "--export.to_hf", "auto"]
    train(*save)
    before = exported()
    if change == "missing":
        Path("out/hf/config.json").unlink()
    elif change == "no record":
        Path("out/export.json").unlink()
    elif change == "other settings":
        save += ["--dtypes.rules", "*,save=bf16"]
    else:
        train(*SAVE, "--checkpoint.resume", "never", "--train.seed", "1")
        save += ["--train.seed", "1"]
    status, said = train(*save)
    assert status == 0 and "exported before" not in said, said
    assert {name.replace("hf/", "hf.1/") for name in before} >= {name for name in exported() if "hf.1" in name} != set()
    assert exported()["out/hf/config.json"] != before["out/hf/config.json"]
    assert "exported before" in train(*save)[1]


def test_a_directory_of_a_name_is_not_refused_if_it_has_the_export(train):
    save = [*SAVE, "--export.to_hf", "named"]
    assert train(*save)[0] == train(*save)[0] == 0
    record = json.loads(Path("out/export.json").read_text())
    assert record["directory"] == str(Path("named").resolve())
    status, said = train(*save, "--train.steps", "2")
    assert status == 2 and "export.to_hf = 'named' exists and is not empty" in said


@pytest.mark.parametrize("backend", ["dualpipe", "transformers"])
def test_a_colleague_can_go_on_in_a_group_directory(train, backend):
    """With umask 002, in a directory with the setgid bit, the group can write all that a run and a pack leave."""
    folder = Path("group")
    folder.mkdir()
    folder.chmod(0o2775)
    options = ["--output.dir", "group/out", "--export.to_hf", "auto", "--model.backend", backend]
    umask = os.umask(0o002)
    try:
        assert train(*SAVE, *options)[0] == 0
        assert cli.main(["data", "pack", "text", "--out", "group/packed"]) == 0
    finally:
        os.umask(umask)
    modes = {str(path): path.stat().st_mode for path in folder.rglob("*")}
    assert {"group/out/.metrics.lock", "group/out/checkpoints/.lock", "group/packed/index.json"} <= modes.keys()
    assert any(path.startswith("group/out/hf/") for path in modes)
    wrong = {path: oct(mode) for path, mode in modes.items() if mode & 0o777 != (0o775 if S_ISDIR(mode) else 0o664)}
    assert not wrong
