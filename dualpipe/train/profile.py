"""Observers of a run's steps: traces of all ranks, torch.profiler, and snapshots of CUDA memory."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from dualpipe.runtime import device as devices
from dualpipe.runtime.errors import PipelineError
from dualpipe.runtime.printing import say
from dualpipe.trace.tracer import Tracer, check_path
from dualpipe.train.step import StepRunner


class Steps(NamedTuple):
    """Steps of a run to observe, counted from 1. last: included; file: output path, "" for the tool's default."""

    first: int
    last: int
    file: str = ""


def parse_steps(text: str, steps: int, option: str, *, with_file: bool = False) -> Steps | None:
    """Parse the value of an option such as "steps=10..12"; return None for "".

    Args:
        steps: number of steps of the run.
        option: name of the option, for errors.
        with_file: accept ",file=PATH" at the end.

    Raises ValueError for other text, and for steps that the run does not have.
    """
    if not text:
        return None
    match = re.fullmatch(r"steps=(\d{1,12})(?:\.\.(\d{1,12}))?(?:,file=(.+))?", text)
    if match is None or (match[3] and not with_file):
        file_option = ", optionally with ,file=PATH at the end" if with_file else ""
        raise ValueError(f"{option}: {text!r} is not understood; give steps=10..12, or steps=10{file_option}")
    first = int(match[1])
    last = int(match[2] or match[1])
    if not 1 <= first <= last <= steps:
        raise ValueError(f"{option}: steps={first}..{last} are not steps of this run, which has 1 to {steps}; give "
                         "some of these, the first one first")
    return Steps(first, last, match[3] or "")


class StepWindow(ABC):
    """Opens a tool before the first of some steps and closes it after the last. All ranks make the same calls.

    A context manager around all steps: an error inside closes the tool too.
    """

    output: ClassVar[str]  # name of what the tool writes, such as "trace"

    def __init__(self, steps: Steps | None, rank: int) -> None:
        """steps: to observe, None for none. rank: of this process; rank 0 prints."""
        self._steps = steps
        self._rank = rank

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True while the tool observes."""

    @abstractmethod
    def _open(self, step: int, last: int) -> None:
        """Begin to observe the steps from `step` to `last`."""

    @abstractmethod
    def _close(self) -> None:
        """End observing and write the file."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the tool if it is still open."""

    def before(self, step: int) -> None:
        """Open the tool if `step`, which runs next, is in the window. A run may resume in the middle of a window."""
        if self._steps is None or self.is_open or step < self._steps.first:
            return
        last = self._steps.last
        if step <= last:
            self._open(step, last)
            return
        self._say(f"no {self.output} is taken: the run resumes after step {last}, the last one to {self.output}")
        self._steps = None

    def after(self, step: int, *, run_ends: bool) -> None:
        """Close the tool after the last step of the window, or if the run ends before it."""
        is_last = self._steps is not None and step >= self._steps.last
        if self.is_open and (run_ends or is_last):
            self._close()

    def _say(self, text: str) -> None:
        """Print `text` on rank 0."""
        if self._rank == 0:
            say(text)


class TracedSteps(StepWindow):
    """Traces all ranks of the job, to `steps.file` if given, else to a file in `folder`."""

    output = "trace"

    def after(self, step: int, *, run_ends: bool) -> None:
        """Add the number of tokens of this rank's experts in the step, then close the trace if it is due."""
        if self._tracer is not None:
            place = self._runner.job.place
            self._tracer.loads[step] = self._runner.routers.load(place.rank("ep"), place.size("ep"))
        super().after(step, run_ends=run_ends)

    def __init__(self, steps: Steps | None, runner: StepRunner, folder: Path) -> None:
        """Check the file. Raises ValueError, on all ranks, if it cannot be written."""
        job = runner.job
        super().__init__(steps, job.rank)
        self._runner = runner
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
        self._tracer = self._runner.pipeline.trace(self._path, group=self._runner.job.group)
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


class ProfiledSteps(StepWindow):
    """Profiles each rank with torch.profiler, to a file in `folder`. After an error it writes the steps until then."""

    output = "profile"

    def __init__(self, steps: Steps | None, rank: int, device: torch.device, folder: Path) -> None:
        super().__init__(steps, rank)
        self._device = device
        self._folder = folder
        self._profiler: profile | None = None
        self._path = Path()

    @property
    def is_open(self) -> bool:
        """True if the current step is profiled."""
        return self._profiler is not None

    def before(self, step: int) -> None:
        """Open the profiler if `step` is the first in the window; if it is open, begin its next step."""
        if self._profiler is not None:
            self._profiler.step_num = step - 1  # set again, because a run may go back to an earlier step
            self._profiler.step()
        super().before(step)

    def _open(self, step: int, last: int) -> None:
        self._path = self._folder / f"profile-{step}-{last}-rank{self._rank}.json"
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Torch names the steps only with a schedule.
        self._profiler = profile(activities=activities, schedule=lambda step: ProfilerAction.RECORD)
        self._profiler.step_num = step  # names the first step
        self._profiler.start()

    def _close(self) -> None:
        profiler = self._profiler
        assert profiler is not None, "a window is closed only while it is open"
        self._profiler = None
        self._steps = None
        try:
            profiler.stop()  # may fail after an error of the device, and must not hide that error
            self._path.parent.mkdir(parents=True, exist_ok=True)  # on nodes that do not share output.dir
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:  # training continues without a profile, for example on a full disk
            say(f"WARNING: rank {self._rank} cannot write the profile {self._path}: {error}")
            return
        self._say(f"profile: {self._path}, and one file per rank (see them in ui.perfetto.dev)")

    def __exit__(self, *_: object) -> None:
        if self.is_open:
            self._close()


def check_memory_snapshot(device: torch.device) -> None:
    """Raise ValueError unless `device` is a CUDA device: torch records the memory of no other."""
    if device.type != "cuda":
        raise ValueError(f"--memory-snapshot: the ranks run on {device.type}, but torch records the memory of CUDA "
                         "devices only; leave it out, or see `dualpipe memory CONFIG --timeline FILE`")


@contextmanager
def memory_snapshot(folder: Path, rank: int) -> Iterator[None]:
    """Record the allocations on the current CUDA device inside a `with` block, for pytorch.org/memory_viz.

    At its end, also after an error such as out of memory, writes memory-rankN.pickle into `folder`.
    """
    path = folder / f"memory-rank{rank}.pickle"
    devices.record_memory()
    try:
        yield
    finally:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            devices.dump_memory(path)
            if rank == 0:
                say(f"memory: {path}, and one file per rank (see them in pytorch.org/memory_viz)")
        except (OSError, RuntimeError) as error:  # must not hide an error that has ended the run
            say(f"WARNING: rank {rank} cannot write the memory snapshot {path}: {error}")
