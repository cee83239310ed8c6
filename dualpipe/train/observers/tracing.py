"""Tracing some steps of a run: `dualpipe train --trace steps=10..12`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dualpipe.pipeline.engine import Pipeline
from dualpipe.runtime.errors import PipelineError
from dualpipe.trace.tracer import Tracer, check_path
from dualpipe.train.launch.distributed import Job
from dualpipe.train.observers.step_window import Steps, StepWindow, parse_steps


def parse(text: str, steps: int) -> Steps | None:
    """Parse --trace of a run of so many steps; None where it is empty. Raises ValueError for what cannot be."""
    return parse_steps(text, steps, "--trace", with_file=True)


class TracedSteps(StepWindow):
    """Takes a trace of all ranks of the job, into `folder` unless the wanted steps name a file."""

    product = "trace"

    def __init__(self, wanted: Steps | None, job: Job, pipeline: Pipeline, folder: Path) -> None:
        """Raises ValueError, on all ranks, for a file that cannot be."""
        super().__init__(wanted, job.rank)
        self._group, self._pipeline, self._folder = job.group, pipeline, folder
        self._tracer: Tracer | None = None
        self._path = Path()
        if wanted is not None and wanted.file:
            job.ranks.first(partial(check_path, Path(wanted.file)))  # before the work of hours

    @property
    def is_open(self) -> bool:
        """Return True if the step that is under way is in the trace."""
        return self._tracer is not None

    def _open(self, step: int, last: int) -> None:
        file = "" if self._wanted is None else self._wanted.file
        # Named by its own first step: what was traced before an early end stays.
        self._path = Path(file or self._folder / f"trace-{step}-{last}.json")
        self._tracer = self._pipeline.trace(self._path, group=self._group)
        self._tracer.__enter__()

    def _close(self) -> None:
        tracer, self._tracer, self._wanted = self._tracer, None, None
        assert tracer is not None, "it is open"
        try:
            tracer.finish()
            self._say(f"trace: {self._path} (see it in ui.perfetto.dev, or by dualpipe trace summary)")
        except ValueError as error:  # on all ranks: such as a full disk, which the run can do without
            self._say(f"WARNING: {error}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._tracer is not None:
            # Errors of a step and of its numbers are those of all ranks.
            self._tracer.finish(error, together=isinstance(error, PipelineError | FloatingPointError))

    def loads(self, step: int, loads: Sequence[float]) -> None:
        """Note the tokens that the experts of each rank got in a step, where they are known."""
        if self._tracer is not None and any(loads):
            self._tracer.loads[step] = list(loads)
