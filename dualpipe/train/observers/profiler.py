"""Torch's profiler and memory snapshots of a run: `dualpipe train --profile steps=10..12` and `--memory-snapshot`.

Each rank writes files of its own into output.dir.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from dualpipe.runtime import device as devices
from dualpipe.runtime.printing import say
from dualpipe.train.observers.step_window import Steps, StepWindow


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
