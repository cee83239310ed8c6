"""Progress of a search for a schedule, on stderr: one line that changes on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

from dualpipe.schedule.svg import number

TICK = 1.0  # seconds between two looks at the clock, on a terminal
INTERVAL = 10.0  # seconds between two lines, elsewhere


class SearchProgress:
    """Callback for `search`, to be used in a `with` statement around it.

    what: what is searched for, such as "a schedule of 4 ranks and 8 micro-batches".
    A search whose result is read from disk never calls it, and nothing is printed.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._is_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._printed = -INTERVAL  # seconds after the start
        self._state = ""
        self._is_done = threading.Event()
        self._ticking = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._ticking.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        if not self._is_terminal:
            return
        self._ticking.join()
        if self._state:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, done: float, best: float) -> None:
        """Report the share of the search that is done, and the best makespan so far."""
        self._state = f"{done:.0%} done, best {number(best)}"
        elapsed = time.monotonic() - self._started
        if self._is_terminal:
            self._print_over()
        elif done == 1.0 or elapsed - self._printed >= INTERVAL:
            self._printed = elapsed
            print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        return f"searching for {self.what}: {self._state}, {time.monotonic() - self._started:.0f} s"

    def _print_over(self) -> None:
        print(f"\r\033[K{self._line()}", end="", file=sys.stderr, flush=True)

    def _tick(self) -> None:
        while not self._is_done.wait(TICK):
            if self._state:
                self._print_over()
