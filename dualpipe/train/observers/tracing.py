"""Traces of some steps of a run: `dualpipe train --trace steps=10..12`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dualpipe.pipeline.engine import Pipeline
from dualpipe.runtime.errors import PipelineError
from dualpipe.trace.tracer import Tracer, check_path
from dualpipe.train.launch.distributed import Job
from dualpipe.train.observers.step_window import Steps, StepWindow


class TracedSteps(StepWindow):
    """Traces all ranks of the job, to `steps.file` if given, else to a file in `folder`."""

    output = "trace"

    def __init__(self, steps: Steps | None, job: Job, pipeline: Pipeline, folder: Path) -> None:
        """Check the file. Raises ValueError, on all ranks, if it cannot be written."""
        super().__init__(steps, job.rank)
        self._group = job.group
        self._pipeline = pipeline
        self._folder = folder
        self._tracer: Tracer | None = None
        self._path = Path()
        if steps is not None and steps.file:
            job.ranks.first(partial(check_path, Path(steps.file)))  # before hours of training

    @property
    def is_open(self) -> bool:
        """True if the current step is traced."""
        return self._tracer is not None

    def _open(self, step: int, last: int) -> None:
        file = "" if self._steps is None else self._steps.file
        # Named after the first step that is traced now: a trace that an early end cut short is not overwritten.
        self._path = Path(file or self._folder / f"trace-{step}-{last}.json")
        self._tracer = self._pipeline.trace(self._path, group=self._group)
        self._tracer.__enter__()

    def _close(self) -> None:
        tracer = self._tracer
        assert tracer is not None, "a window is closed only while it is open"
        self._tracer = None
        self._steps = None
        try:
            tracer.finish()
            self._say(f"trace: {self._path} (see it in ui.perfetto.dev, or by dualpipe trace summary)")
        except ValueError as error:  # on all ranks: training continues without a trace, for example on a full disk
            self._say(f"WARNING: {error}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._tracer is not None:
            # These two errors are raised on all ranks, so all of them write the trace together.
            self._tracer.finish(error, together=isinstance(error, PipelineError | FloatingPointError))

    def loads(self, step: int, loads: Sequence[float]) -> None:
        """Record the number of tokens that each rank's experts got in a step.

        Does nothing if all are 0: that step was before the trace. Loads are read later than their step.
        """
        if self._tracer is not None and any(loads):
            self._tracer.loads[step] = list(loads)
