"""Looking into some steps or the memory of a run by torch's own tools: `dualpipe train --profile steps=10..12` and
`--memory-snapshot`. Each rank writes files of its own into output.dir."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from dualpipe.runtime import device as devices
from dualpipe.train.metrics import say
from dualpipe.train.tracing import Steps, parse_steps

if TYPE_CHECKING:
    from dualpipe.train.trainer import Run


def parse(text: str, steps: int) -> Steps | None:
    """Parse --profile of a run of so many steps; None where it is empty. Raises ValueError for what cannot be."""
    return parse_steps(text, steps, "--profile")


class ProfiledSteps:
    """Profiles some steps of a run, if any are `wanted`, by torch.profiler. For a `with` around all steps: an error
    ends the profile, and what there is until then is written."""

    def __init__(self, run: Run, wanted: Steps | None) -> None:
        self._run, self._wanted = run, wanted
        self._profiler: profile | None = None
        self._path = Path()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is not None:
            self._finish()

    def before(self, step: int) -> None:
        """Begin where `step`, which comes now, is the first one to profile or behind it."""
        if self._profiler is not None:
            self._profiler.step_num = step - 1  # a run may have gone back
            self._profiler.step()
            return
        if self._wanted is None or step < self._wanted.first:
            return
        if step > self._wanted.last:
            self._say(f"no profile is taken: the run goes on behind step {self._wanted.last}, the last one to profile")
            self._wanted = None
            return
        name = f"profile-{step}-{self._wanted.last}-rank{self._run.job.rank}.json"
        self._path = self._run.folder / name
        activities = [ProfilerActivity.CPU]
        if self._run.job.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Without a schedule torch does not name the steps.
        self._profiler = profile(activities=activities, schedule=lambda step: ProfilerAction.RECORD)
        self._profiler.step_num = step  # which names its first step
        self._profiler.start()

    def after(self) -> None:
        """Write the file after the last step to profile, or where the run ends before."""
        if self._profiler is None or self._wanted is None:
            return
        run = self._run
        if run.status or run.done == run.config.train.steps or run.done >= self._wanted.last:
            self._finish()

    def _finish(self) -> None:
        profiler, self._profiler, self._wanted = self._profiler, None, None
        assert profiler is not None, "it is running"
        try:
            profiler.stop()  # which may fail after an error of the device, and must not hide that
            self._path.parent.mkdir(parents=True, exist_ok=True)  # on nodes that do not share it
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:  # such as a full disk, which the run can do without
            say(f"WARNING: rank {self._run.job.rank} cannot write the profile {self._path}: {error}")
            return
        self._say(f"profile: {self._path}, and such a file of each rank (see them in ui.perfetto.dev)")

    def _say(self, text: str) -> None:
        if self._run.job.rank == 0:
            say(text)


def check_memory_snapshot(device: torch.device) -> None:
    """Raise ValueError on a device whose memory torch does not record."""
    if device.type != "cuda":
        raise ValueError(f"--memory-snapshot is for the memory of a CUDA device, and the ranks run on {device.type}; "
                         "leave it out, or see `dualpipe memory CONFIG --timeline FILE`")


@contextmanager
def memory_snapshot(folder: Path, rank: int) -> Iterator[None]:
    """Record what allocates the current CUDA device's memory inside a `with`; at its end, also by an error such as one
    for want of memory, write memory-rankN.pickle into the folder, for pytorch.org/memory_viz."""
    path = folder / f"memory-rank{rank}.pickle"
    devices.record_memory()
    try:
        yield
    finally:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            devices.dump_memory(path)
            if rank == 0:
                say(f"memory: {path}, and such a file of each rank (see them in pytorch.org/memory_viz)")
        except (OSError, RuntimeError) as error:  # which must not hide the one that has ended the run
            say(f"WARNING: rank {rank} cannot write the memory snapshot {path}: {error}")
