"""The windows of a run: the steps that a trace is taken of, and those that torch profiles."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

from dualpipe.train.observers.profiler import ProfiledSteps
from dualpipe.train.observers.tracing import TracedSteps


class ObservedSteps:
    """The trace and the profile of a run, for a `with` around all steps. Every rank calls it alike."""

    def __init__(self, traced: TracedSteps, profiled: ProfiledSteps) -> None:
        self.traced = traced
        self._all = (traced, profiled)
        self._held = ExitStack()

    def __enter__(self) -> Self:
        for window in self._all:
            self._held.enter_context(window)
        return self

    def __exit__(self, *raised: object) -> None:
        self._held.__exit__(*raised)  # type: ignore[arg-type]

    def before(self, step: int) -> None:
        """Open what is wanted of `step`, which comes now."""
        for window in self._all:
            window.before(step)

    def after(self, step: int, *, run_ends: bool) -> None:
        """Write what ends with `step`, or with the run."""
        for window in self._all:
            window.after(step, run_ends=run_ends)
