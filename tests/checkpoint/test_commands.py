"""`dualpipe checkpoint ls | verify | show`: the lines of text."""

import shlex

import pytest
import torch

from dualpipe import cli
from dualpipe.checkpoint import save
from dualpipe.checkpoint.commands import check, ls, show
from native import Trainee

CONFIG = {"optimizer": {"lr": 1, "groups": [{"pattern": "*.gate"}]}, "init": {}}


@pytest.fixture
def two(tmp_path):
    trainee = Trainee((1, 1, 1))
    for step in (1, 2):
        save(tmp_path, trainee.state, step=step, plan=trainee.plan, config=CONFIG, extra={"loader": [3]})
    return tmp_path


def test_a_sound_directory(two):
    head, *rows = ls(two)
    assert head.split() == ["step", "saved", "at", "size", "layout", "dtypes", "path", "state"]
    assert [row.split()[0] for row in rows] == ["2", "1"]
    assert all("pp 1, dp 1, ep 1" in row and " fp32 " in row and row.endswith("complete") for row in rows)
    assert [row.split()[-2] for row in rows] == [f"{two}/step-00000002", f"{two}/step-00000001"]
    assert len(list(ls(two / "step-00000001"))) == 2
    assert [line.split(", ")[0] for line in check(two)] == [f"{two}/step-0000000{n}: complete" for n in (2, 1)]
    lines = list(show(two))
    assert lines[0].startswith(f"{two}/step-00000002: step 2, saved at 20")
    assert lines[1] == "layout: pp 1, dp 1, ep 1 (1 ranks)" and f"torch {torch.__version__}" in lines[2]
    assert any(line.startswith("optimizer: ") and "fp32" in line for line in lines)
    assert lines[lines.index("extra:") + 1] == "  loader = [3]"
    at = lines.index("config:")
    assert lines[at + 1 : at + 4] == ["  optimizer.lr = 1", '  optimizer.groups[0].pattern = "*.gate"', "  init = {}"]
    assert "  norm.weight  (32,)  fp32  (storage bf16, compute bf16, save bf16)" in lines


def test_damage_and_what_is_unfinished(two):
    (two / "step-00000002" / "rank-00000.safetensors").write_text("")
    (two / ".tmp-step-00000003-ab").mkdir()
    rows = list(ls(two))
    assert "DAMAGED: " in rows[1] and "has 0 bytes" in rows[1]
    assert "not complete: " in rows[3] and ".tmp-step-00000003-ab" in rows[3]
    lines = check(two)
    assert next(lines) == f"{two}/step-00000002: DAMAGED" and "complete" in next(lines)
    with pytest.raises(ValueError, match=r"cannot be loaded:\n .*rank-00000\.safetensors has 0 bytes"):
        next(lines)
    assert cli.main(["checkpoint", "verify", str(two)]) == 1, "the check found something"
    (two / "step-00000001" / "manifest.json").unlink()
    assert cli.main(["checkpoint", "verify", str(two / "step-00000001")]) == 1
    assert cli.main(["checkpoint", "verify", str(two / "nowhere")]) == 2, "the command is wrong"
    assert any("step-00000001 has no manifest.json" in row for row in ls(two))
    with pytest.raises(ValueError, match="no complete checkpoint"):
        list(show(two / "step-00000001"))


@pytest.mark.parametrize("command", [ls, check, show])
def test_nothing_there(tmp_path, command):
    with pytest.raises(ValueError, match="has no checkpoints; give the directory"):
        list(command(tmp_path))


def test_paths_can_be_pasted_into_a_shell(two):
    spaced = two / "of mine"
    spaced.mkdir()
    (two / "step-00000002").rename(spaced / "step-00000002")
    (spaced / ".tmp-step-00000003-ab").mkdir()
    _, row, unfinished = ls(spaced)
    assert shlex.split(row)[-2] == f"{spaced}/step-00000002"
    assert shlex.split(unfinished)[1] == f"{spaced}/.tmp-step-00000003-ab"
