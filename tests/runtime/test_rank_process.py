"""A process as a rank of a job: how it ends, and what it tells."""

import json

import pytest

from dualpipe.runtime import rank_process
from dualpipe.runtime.errors import PipelineError, RankLost
from dualpipe.runtime.rank_process import RankInfo


@pytest.mark.parametrize(
    ("error", "status", "last_line"),
    [(None, 0, ""), (ValueError("bad"), 2, "error: bad"), (KeyError("fault"), 1, "error: rank 1: KeyError: 'fault'")],
)
def test_a_rank_of_several_leaves_at_once_with_what_it_has_to_say(monkeypatch, capsys, error, status, last_line):
    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(rank_process.os, "_exit", leave)
    monkeypatch.delenv(rank_process.ERROR_FILE, raising=False)
    with pytest.raises(SystemExit) as left, rank_process.as_rank(RankInfo(1, 2, 1, 2)):
        if error is not None:
            raise error
    said = capsys.readouterr().err
    assert (left.value.code, said.splitlines()[-1:]) == (status, [last_line] if last_line else [])
    assert ("Traceback" in said) == isinstance(error, KeyError)


@pytest.mark.parametrize(("error", "is_victim"), [
    (RankLost("rank 1 is gone"), True), (ValueError("bad"), False), (PipelineError("rank 1 failed"), True),
])
def test_an_error_that_came_from_another_rank_is_not_the_cause(error, is_victim):
    assert rank_process.is_victim(error) == is_victim
    mine, theirs = PipelineError("rank 0 failed"), PipelineError("rank 1 failed")
    mine.__cause__, theirs.__cause__ = ValueError("bad"), None
    assert not rank_process.is_victim(mine) and rank_process.is_victim(theirs)


def test_a_rank_leaves_its_error_for_the_process_that_started_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(rank_process.ERROR_FILE, str(tmp_path / "error"))
    rank_process.leave_word("error: bad", 2)
    word = json.loads((tmp_path / "error").read_text())
    assert (word["text"], word["status"], word["lost"]) == ("error: bad", 2, False)
    (tmp_path / "error").unlink()
    rank_process.leave_word("", 0)
    assert not (tmp_path / "error").exists() and capsys.readouterr().err == ""


def test_a_job_of_one_rank_goes_on_behind_its_block(monkeypatch):
    monkeypatch.delenv(rank_process.ERROR_FILE, raising=False)
    with rank_process.as_rank(RankInfo(0, 1, 0, 1)) as ending:
        assert ending.status == 0
    with pytest.raises(KeyError), rank_process.as_rank(RankInfo(0, 1, 0, 1)):
        raise KeyError


def test_starts_before_are_those_that_torchrun_counts(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert rank_process.starts_before() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert rank_process.starts_before() == 2
