"""The progress of a search on a terminal."""

import sys
import threading

from dualpipe.schedule.search.progress import SearchProgress


def test_progress_on_a_terminal_goes_on_between_rounds(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("dualpipe.schedule.search.progress.TICK", 0.001)
    printed = threading.Semaphore(0)
    monkeypatch.setattr(SearchProgress, "_update_line", lambda self: printed.release())
    with SearchProgress("something") as progress:
        progress(0.5, 3.0)
        for _ in range(4):
            assert printed.acquire(timeout=60), "without another call"
