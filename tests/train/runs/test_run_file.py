"""`run.json`: the settings at every start of a run."""

import json

import pytest

from dualpipe.train.runs.run_file import RUN_FILE, Start, read_starts, record_start


def test_starts_of_a_run_are_kept_and_those_of_another_replaced(tmp_path):
    assert read_starts(tmp_path) == []
    starts = [Start.now(0, {"run": {"seed": 1}}), Start.now(7, {"run": {"seed": 2}})]
    for start in starts:
        record_start(tmp_path, start)
    assert read_starts(tmp_path) == starts and starts[0].versions.keys() == {"dualpipe", "torch", "python"}
    record_start(tmp_path, starts[0])
    assert read_starts(tmp_path) == starts[:1]


@pytest.mark.parametrize("content", ["{", "[]", '{"starts": [{"step": 1}]}', '{"ends": []}'])
def test_a_damaged_file(tmp_path, content, capsys):
    (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"run\.json is damaged .* remove it to compare without settings"):
        read_starts(tmp_path)
    record_start(tmp_path, Start.now(3, {}))  # a run that resumes goes on nevertheless
    assert "run.json cannot be written: " in capsys.readouterr().err
    assert (tmp_path / RUN_FILE).read_text() == content
    record_start(tmp_path, Start.now(0, {}))
    assert json.loads((tmp_path / RUN_FILE).read_text())["starts"][0]["step"] == 0


def test_a_folder_that_is_gone(tmp_path, capsys):
    record_start(tmp_path / "none", Start.now(0, {}))
    assert "run.json cannot be written: No such file or directory; `dualpipe compare`" in capsys.readouterr().err
