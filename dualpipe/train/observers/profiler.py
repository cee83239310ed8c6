"""Torch's own tools on some steps or the memory of a run: `dualpipe train --profile steps=10..12`, `--memory-snapshot`.

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
from dualpipe.train.observers.step_window import Steps, StepWindow, parse_steps


def parse(text: str, steps: int) -> Steps | None:
    """Parse --profile of a run of so many steps; None where it is empty. Raises ValueError for what cannot be."""
    return parse_steps(text, steps, "--profile")


class ProfiledSteps(StepWindow):
    """Profiles each rank by torch.profiler, into `folder`. What there is when an error ends the run is written."""

    product = "profile"

    def __init__(self, wanted: Steps | None, rank: int, device: torch.device, folder: Path) -> None:
        super().__init__(wanted, rank)
        self._device, self._folder = device, folder
        self._profiler: profile | None = None
        self._path = Path()

    @property
    def is_open(self) -> bool:
        """Return True if the step that is under way is profiled."""
        return self._profiler is not None

    def before(self, step: int) -> None:
        """Open the profiler if `step` is wanted; where it is open, begin its next step."""
        if self._profiler is not None:
            self._profiler.step_num = step - 1  # a run may have gone back
            self._profiler.step()
        super().before(step)

    def _open(self, step: int, last: int) -> None:
        self._path = self._folder / f"profile-{step}-{last}-rank{self._rank}.json"
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # Without a schedule torch does not name the steps.
        self._profiler = profile(activities=activities, schedule=lambda step: ProfilerAction.RECORD)
        self._profiler.step_num = step  # which names its first step
        self._profiler.start()

    def _close(self) -> None:
        profiler, self._profiler, self._wanted = self._profiler, None, None
        assert profiler is not None, "it is open"
        try:
            profiler.stop()  # which may fail after an error of the device, and must not hide that
            self._path.parent.mkdir(parents=True, exist_ok=True)  # on nodes that do not share it
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:  # such as a full disk, which the run can do without
            say(f"WARNING: rank {self._rank} cannot write the profile {self._path}: {error}")
            return
        self._say(f"profile: {self._path}, and such a file of each rank (see them in ui.perfetto.dev)")

    def __exit__(self, *_: object) -> None:
        if self.is_open:
            self._close()


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
