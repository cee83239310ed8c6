"""The time that a run takes to start: its parts, up to the end of the first step."""

from __future__ import annotations

import time

from dualpipe.runtime.rank_process import process_age
from dualpipe.runtime.recorder import Recorder


class StartUp:
    """The seconds that each part of a start takes, from the start of this process to the end of the first step."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """To be made when everything is imported. recorder: this thread's, unless given."""
        self._recorder = recorder or Recorder.current()
        self._seconds = {"imports": process_age()}
        self._part, self._since = "", time.perf_counter()

    def begin(self, part: str = "") -> None:
        """End the part that is under way, and begin this one (or none)."""
        now = time.perf_counter()
        if self._part:
            self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
            self._recorder.end()
        self._part, self._since = part, now
        if part:
            self._recorder.begin("start", part)

    def end(self) -> str:
        """End the last part; what is to be said of them all, nothing when called again."""
        if not self._part:
            return ""
        self.begin()
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self._seconds.items())
        return f"first step {process_age():.1f} s after the start: {parts}"
