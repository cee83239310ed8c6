"""The step windows of a run: one for the trace and one for the profile."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from dualpipe.train.observers.profiler import ProfiledSteps
from dualpipe.train.observers.tracing import TracedSteps


class StepWindows:
    """The trace and the profile of a run, a context manager around all steps. All ranks make the same calls."""

    def __init__(self, traced: TracedSteps, profiled: ProfiledSteps) -> None:
        self.traced = traced
        self._windows = (traced, profiled)
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        for window in self._windows:
            self._entered.enter_context(window)
        return self

    def __exit__(self, *raised: object) -> None:
        self._entered.__exit__(*raised)  # type: ignore[arg-type]

    def before(self, step: int) -> None:
        """Open the windows that begin with `step`, which runs next."""
        for window in self._windows:
            window.before(step)

    def after(self, step: int, *, run_ends: bool) -> None:
        """Close the windows that end with `step`, or all at the end of the run."""
        for window in self._windows:
            window.after(step, run_ends=run_ends)
