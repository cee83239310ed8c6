"""A process as a rank of a job: its exit status and its report."""

import pytest

from dualpipe.runtime import rank_process
from dualpipe.runtime.errors import PipelineError, RankLost, Wait, mark_names_ranks
from dualpipe.runtime.rank_process import ExitReport, Kind, RankInfo


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


WAIT = Wait(0, [1], "waited 3 s for rows from rank 1")


@pytest.mark.parametrize(("error", "cause", "kind", "wait"), [
    (ValueError("bad"), None, Kind.OWN, None),
    (RankLost("rank 1 is gone", WAIT), None, Kind.LOST, WAIT),
    (OSError("not saved"), RankLost("rank 1 is gone", WAIT), Kind.LOST, WAIT),
    (PipelineError("rank 0: bad"), ValueError("bad"), Kind.OWN, None),
    (PipelineError("rank 1: bad"), None, Kind.TOLD, None),
    (PipelineError("rank 1: bad"), RankLost("it hung up", WAIT), Kind.TOLD, None),
    (PipelineError("rank 0: it hung up", is_loss=True, wait=WAIT), None, Kind.LOST, WAIT),
])
def test_a_report_says_which_rank_an_error_comes_from(error, cause, kind, wait):
    error.__cause__ = cause
    report = ExitReport.of(error, RankInfo(2, 4, 2, 4), {})
    assert (report.rank, report.kind, report.wait) == (2, kind, wait)


def test_an_error_that_names_ranks_is_not_given_a_rank():
    for error in (PipelineError("rank 0: bad"), mark_names_ranks(RuntimeError("ranks 0-1: bad")), KeyError("rank 0")):
        error.__cause__ = ValueError("bad")
        last_line = ExitReport.of(error, RankInfo(0, 2, 0, 2), {}).text.splitlines()[-1]
        assert last_line == ("error: rank 0: KeyError: 'rank 0'" if isinstance(error, KeyError) else f"error: {error}")


def test_a_rank_reports_its_error_to_the_launcher(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(rank_process.ERROR_FILE, str(tmp_path / "error"))
    error = RankLost(WAIT.text, WAIT)
    error.traces = ["trace.json"]
    error.add_note("trace until the error: trace.json")
    report = ExitReport.of(error, RankInfo(0, 2, 0, 2), {})
    rank_process.report_exit(report)
    read = ExitReport.read(tmp_path / "error")
    assert (read.rank, read.status, read.kind, read.wait, read.traces) == (0, 1, Kind.LOST, WAIT, ["trace.json"])
    assert read.text == f"error: {WAIT.text}\ntrace until the error: trace.json" and read.time == report.time
    (tmp_path / "error").unlink()
    rank_process.report_exit(ExitReport(0, 0))
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
