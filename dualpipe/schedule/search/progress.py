"""Progress of a search, on stderr: one line that is updated on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

from dualpipe.schedule.draw import number

TICK = 1.0  # seconds between updates of the line on a terminal
INTERVAL = 10.0  # seconds between lines elsewhere


class SearchProgress:
    """Callback for `search`, used in a `with` statement around it.

    Nothing is printed for a search whose result is read from disk, as it never calls the callback.

    Args:
        title: the result that is searched for, such as "a schedule of 4 ranks and 8 micro-batches".
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last_printed = -INTERVAL  # seconds after the start
        self._state = ""
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if not self._is_terminal:
            return
        self._ticker.join()
        if self._state:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, fraction_done: float, best_makespan: float | None = None) -> None:
        """Print the fraction of the search that is done and the best makespan so far."""
        best = "" if best_makespan is None else f", best {number(best_makespan)}"
        self._state = f"{fraction_done:.0%} done{best}"
        elapsed = time.monotonic() - self._started
        if self._is_terminal:
            self._update_line()
        elif fraction_done == 1.0 or elapsed - self._last_printed >= INTERVAL:
            self._last_printed = elapsed
            print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        return f"searching for {self._title}: {self._state}, {time.monotonic() - self._started:.0f} s"

    def _update_line(self) -> None:
        print(f"\r\033[K{self._line()}", end="", file=sys.stderr, flush=True)

    def _tick(self) -> None:
        while not self._stop.wait(TICK):
            if self._state:
                self._update_line()
