"""The start-up time of a run, by phase, up to the end of the first step."""

from __future__ import annotations

import time

from dualpipe.runtime.rank_process import process_age
from dualpipe.runtime.recorder import Recorder


class StartUp:
    """Measures the seconds of each phase, from the start of this process to the end of the first step."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """Take the age of the process as the time of its imports: construct it after all of them.

        recorder: that of this thread by default.
        """
        self._recorder = recorder or Recorder.current()
        self._seconds = {"imports": process_age()}
        self._phase = ""
        self._phase_start = time.perf_counter()

    def begin(self, phase: str = "") -> None:
        """End the current phase, if any, and begin `phase`, unless it is empty."""
        now = time.perf_counter()
        if self._phase:
            elapsed = now - self._phase_start
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + elapsed
            self._recorder.end()
        self._phase = phase
        self._phase_start = now
        if phase:
            self._recorder.begin("start", phase)

    def end(self) -> str:
        """End the last phase and return a summary of all; return "" if it has ended before."""
        if not self._phase:
            return ""
        self.begin()
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._seconds.items())
        return f"first step {process_age():.1f} s after the start: {phases}"
