"""`run.json`: the settings at every start of a run. What a run prints is in test_metrics.py and test_cli.py."""

import json

import pytest

from dualpipe.train.describe_run import RUN_FILE, record_start


def starts(folder):
    return json.loads((folder / RUN_FILE).read_text())["starts"]


def test_starts_of_a_run_are_kept_and_those_of_another_replaced(tmp_path):
    record_start(tmp_path, 0, {"run": {"seed": 1}})
    record_start(tmp_path, 7, {"run": {"seed": 2}})
    first, second = starts(tmp_path)
    assert (first["step"], first["settings"]) == (0, {"run": {"seed": 1}})
    assert (second["step"], second["settings"]) == (7, {"run": {"seed": 2}})
    assert first["versions"].keys() == {"dualpipe", "torch", "python"}
    record_start(tmp_path, 0, {"run": {"seed": 3}})
    assert [start["settings"] for start in starts(tmp_path)] == [{"run": {"seed": 3}}]


@pytest.mark.parametrize("content", ["{", "[]", '{"starts": 1}', '{"ends": []}'])
def test_a_damaged_file(tmp_path, content, capsys):
    (tmp_path / RUN_FILE).write_text(content)
    record_start(tmp_path, 3, {})  # a run that resumes goes on nevertheless
    assert "run.json cannot be written: " in capsys.readouterr().err
    assert (tmp_path / RUN_FILE).read_text() == content
    record_start(tmp_path, 0, {})
    assert starts(tmp_path)[0]["step"] == 0


def test_a_folder_that_is_gone(tmp_path, capsys):
    record_start(tmp_path / "none", 0, {})
    assert "run.json cannot be written" in capsys.readouterr().err
