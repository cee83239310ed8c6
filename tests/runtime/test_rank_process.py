"""A process as a rank of a job: its exit status and its report."""

import json

import pytest

from dualpipe.runtime import rank_process
from dualpipe.runtime.errors import PipelineError, RankLost
from dualpipe.runtime.rank_process import RankInfo


@pytest.mark.parametrize(
    ("error", "status", "last_line"),
    [(None, 0, ""), (ValueError("bad"), 2, "error: bad"), (KeyError("fault"), 1, "error: rank 1: KeyError: 'fault'")],
)
def test_one_of_several_ranks_exits_at_once_and_prints_its_error(monkeypatch, capsys, error, status, last_line):
    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(rank_process.os, "_exit", leave)
    monkeypatch.delenv(rank_process.ERROR_FILE, raising=False)
    with pytest.raises(SystemExit) as left, rank_process.as_rank(RankInfo(1, 2, 1, 2)):
        if error is not None:
            raise error
    err = capsys.readouterr().err
    assert (left.value.code, err.splitlines()[-1:]) == (status, [last_line] if last_line else [])
    assert ("Traceback" in err) == isinstance(error, KeyError)


@pytest.mark.parametrize(("error", "is_from_another_rank"), [
    (RankLost("rank 1 is gone"), True), (ValueError("bad"), False), (PipelineError("rank 1 failed"), True),
])
def test_errors_from_another_rank_are_recognized(error, is_from_another_rank):
    assert rank_process.is_from_another_rank(error) == is_from_another_rank
    mine, theirs = PipelineError("rank 0 failed"), PipelineError("rank 1 failed")
    mine.__cause__, theirs.__cause__ = ValueError("bad"), None
    assert not rank_process.is_from_another_rank(mine) and rank_process.is_from_another_rank(theirs)


def test_a_rank_reports_its_error_to_the_launcher(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(rank_process.ERROR_FILE, str(tmp_path / "error"))
    rank_process.report_exit("error: bad", 2)
    report = json.loads((tmp_path / "error").read_text())
    assert (report["text"], report["status"], report["lost"]) == ("error: bad", 2, False)
    (tmp_path / "error").unlink()
    rank_process.report_exit("", 0)
    assert not (tmp_path / "error").exists() and capsys.readouterr().err == ""


def test_a_job_of_one_rank_goes_on_after_the_block(monkeypatch):
    monkeypatch.delenv(rank_process.ERROR_FILE, raising=False)
    with rank_process.as_rank(RankInfo(0, 1, 0, 1)) as ending:
        assert ending.status == 0
    with pytest.raises(KeyError), rank_process.as_rank(RankInfo(0, 1, 0, 1)):
        raise KeyError


def test_the_restart_count_is_torchruns(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert rank_process.restart_count() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert rank_process.restart_count() == 2
