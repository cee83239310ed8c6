"""A process as a rank of a job: how it ends, and what it tells."""

import pytest

from dualpipe.runtime import rank_process
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
