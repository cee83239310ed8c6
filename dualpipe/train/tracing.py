"""Tracing some steps of a run: `dualpipe train --trace steps=10..12[,file=PATH] CONFIG`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from dualpipe.runtime.errors import PipelineError
from dualpipe.trace.tracer import Tracer, check_path
from dualpipe.train.metrics import say

if TYPE_CHECKING:
    from dualpipe.train.trainer import Run


class Steps(NamedTuple):
    """Those to trace or to profile, from 1, and the file; "": in output.dir."""

    first: int
    last: int
    file: str = ""


def parse(text: str, steps: int) -> Steps | None:
    """What `text` asks of a run of so many steps, None where it is empty. Raises ValueError for what cannot be."""
    return parse_steps(text, steps, "--trace", with_file=True)


def parse_steps(text: str, steps: int, option: str, *, with_file: bool = False) -> Steps | None:
    """The steps that the text of an option names; None where it is empty. Raises ValueError for what is not understood,
    and for steps that a run of so many does not have. with_file: whether a file may be named behind them."""
    if not text:
        return None
    match = re.fullmatch(r"steps=(\d{1,12})(?:\.\.(\d{1,12}))?(?:,file=(.+))?", text)
    if match is None or (match[3] and not with_file):
        perhaps = ", and perhaps ,file=PATH behind it" if with_file else ""
        raise ValueError(f"{option}: {text!r} is not understood; give steps=10..12, or steps=10{perhaps}")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= steps:
        raise ValueError(f"{option}: steps={first}..{last} are not steps of this run, which has 1 to {steps}; give "
                         "some of these, the first one first")
    return Steps(first, last, match[3] or "")


class TracedSteps:
    """Takes the trace of a run, if one is `wanted`; every rank calls everything alike. For a `with` around all steps,
    as an error ends the trace."""

    def __init__(self, run: Run, wanted: Steps | None) -> None:
        self._run, self._wanted = run, wanted
        self._tracer: Tracer | None = None
        if wanted is not None and wanted.file:
            run.job.ranks.first(partial(check_path, Path(wanted.file)))  # before the work of hours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._tracer is not None:
            # Errors of a step and of its numbers are those of all ranks.
            self._tracer.finish(error, together=isinstance(error, PipelineError | FloatingPointError))

    def before(self, step: int) -> None:
        """Begin where `step`, which comes now, is one to trace, also the first one after others were resumed from."""
        if self._wanted is None or self._tracer is not None or step < self._wanted.first:
            return
        if step > self._wanted.last:
            self._say(f"no trace is taken: the run goes on behind step {self._wanted.last}, the last one to trace")
            self._wanted = None
            return
        # By its own first step: what was traced before an early end stays.
        self._path = Path(self._wanted.file or self._run.folder / f"trace-{step}-{self._wanted.last}.json")
        self._tracer = self._run.pipeline.trace(self._path, group=self._run.job.group)
        self._tracer.__enter__()

    @property
    def is_taking(self) -> bool:
        """Whether the step that is under way is in the trace."""
        return self._tracer is not None

    def ends(self, step: int) -> bool:
        """Whether `step`, which was done, is the last one of the trace that is being taken."""
        return self.is_taking and self._wanted is not None and step >= self._wanted.last

    def after(self) -> None:
        """Write the file after the last step to trace, or where the run ends before; say so where that cannot be."""
        run = self._run
        ends = run.status or run.done == run.config.train.steps or self.ends(run.done)
        if self._tracer is not None and ends:
            tracer, self._tracer, self._wanted = self._tracer, None, None
            try:
                tracer.finish()
                self._say(f"trace: {self._path} (see it in ui.perfetto.dev, or by dualpipe trace summary)")
            except ValueError as error:  # on all ranks: such as a full disk, which the run can do without
                self._say(f"WARNING: {error}")

    def loads(self, step: int, loads: Sequence[float]) -> None:
        """Note the tokens that the experts of each rank got in a step, where they are known."""
        if self._tracer is not None and any(loads):
            self._tracer.loads[step] = list(loads)

    def _say(self, text: str) -> None:
        if self._run.job.rank == 0:
            say(text)
