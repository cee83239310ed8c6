"""Early stops, after a signal or at a time limit: all ranks stop after the same step.

In every step each rank reports whether it requests a stop, in one all-reduce of two numbers on the device, whatever the
number of ranks. The host reads the result together with the values of the step, so the reports add no wait.

The way of a signal: `Watchdog._request_stop`, in a thread of the rank -> `RankReports.gather` in `Trainer._step`, where
all ranks learn of it -> `Trainer._read` sets `Trainer.status` -> `Trainer._save_at_stop` -> `train` returns
128 + the signal -> `as_rank` in runtime/rank_process.py ends the process with it -> `RankProcesses.wait` in
launch/start.py, for which it is no failure. The launcher passes its own signal on to all ranks. Before a rank has its
watchdog, a signal kills it.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dualpipe.runtime.rank_process import LAUNCHER, process_age
from dualpipe.runtime.recorder import Recorder
from dualpipe.runtime.storage import Location
from dualpipe.train.config.schema import Config
from dualpipe.train.launch.join import Job

_STEPS = 16  # latest steps whose times predict the next one
_MIN_DATA_WAIT = 1e-3  # seconds; a batch that was read ahead takes less
# A wait and its rank are one number, whose maximum is that of the longest wait: microseconds * _RANKS + rank. It is
# below 2^53, so that a float64 holds it exactly.
_RANKS = 2**20
_MAX_WAIT = 2**33 - 1  # microseconds


class Report(NamedTuple):
    """The combined reports of all ranks on a step.

    exit_status: the highest one with which a rank requests a stop after this step; 0 to continue. data_wait: the
    longest time, in seconds, that a rank waited for its batch; 0 for less than `_MIN_DATA_WAIT`. starved: the rank that
    waited so long.
    """

    exit_status: int
    data_wait: float
    starved: int


class RankReports:
    """Combines the reports of all ranks of a job.

    A rank requests a stop after a signal that its watchdog received; rank 0 also at `time_limit`, in seconds.
    """

    def __init__(self, job: Job, time_limit: float) -> None:
        self._job = job
        self._recorder = Recorder.current()
        self._ranks = self._recorder.members(job.group)
        # On CUDA, steps are queued before the host reads the reports of an earlier step.
        self._time_limit = TimeLimit(time_limit, 1 if job.device.type == "cpu" else 3)

    def gather(self, data_wait: float) -> Tensor:
        """Return the combined reports of all ranks for `decode`: (2,) float64 on the device.

        Collective. The host does not wait for a device. data_wait: seconds that this rank waited for its batch.
        """
        wait_and_rank = 0
        if data_wait >= _MIN_DATA_WAIT:
            microseconds = min(round(data_wait * 1e6), _MAX_WAIT)
            wait_and_rank = microseconds * _RANKS + self._job.rank
        report = torch.zeros(2, dtype=torch.float64, device=self._job.device)
        for number, value in zip(report.unbind(), (self._exit_status(), wait_and_rank)):
            if value:  # skip zeros: every number launches a kernel
                number.fill_(value)
        if self._job.group is not None:
            with self._recorder.collective("vote", "the reports of all ranks", self._ranks, report.nbytes):
                dist.all_reduce(report, dist.ReduceOp.MAX, group=self._job.group)
        return report

    def _exit_status(self) -> int:
        """Return the exit status with which this rank requests a stop, 0 to continue."""
        if self._job.watchdog is not None and self._job.watchdog.stop:
            return 128 + self._job.watchdog.stop
        if self._job.rank == 0 and self._time_limit.reached():
            return os.EX_TEMPFAIL
        return 0

    @staticmethod
    def decode(numbers: Sequence[float]) -> Report:
        """Return the combined reports that `gather` returned."""
        exit_status, wait_and_rank = map(int, numbers)
        microseconds, rank = divmod(wait_and_rank, _RANKS)
        return Report(exit_status, microseconds / 1e6, rank)


class TimeLimit:
    """A time limit for a run. Call `reached` once per step.

    The next step is predicted to take as long as the longest of the last steps. The time of a step includes everything
    up to the next one, such as an evaluation or a checkpoint.

    Args:
        limit: seconds since the start of the launcher; 0: no limit.
        queued: steps that begin before a stop can take effect, including the next one.
    """

    def __init__(self, limit: float, queued: int) -> None:
        self._limit = limit
        self._queued = queued
        self._ages: deque[float] = deque(maxlen=_STEPS + 1)

    def reached(self) -> bool:
        """Return True if the job is predicted to exceed the limit with the queued steps."""
        if not self._limit:
            return False
        self._ages.append(process_age(os.environ.get(LAUNCHER, "self")))
        longest = max((after - before for before, after in pairwise(self._ages)), default=0.0)
        return self._ages[-1] + self._queued * longest > self._limit


def stop_message(config: Config, status: int, step: int, checkpoint: Location | None) -> str:
    """Return the last message of a run that stopped early: the cause, and how to continue.

    Args:
        status: exit status with which the stop was requested.
        step: last completed step.
        checkpoint: the one saved at the stop, or None.
    """
    if status == os.EX_TEMPFAIL:
        cause = f"train.time_limit = {config.train.time_limit:g}"
    else:
        cause = signal.Signals(status - 128).name
    stopped = f"stopped by {cause} after step {step}"
    if checkpoint is None:
        option = "mode = 'off'" if config.checkpoint.mode == "off" else "interval = 0"
        return f"{stopped}; nothing is saved: checkpoint.{option}; the same command starts anew"
    resume = "with checkpoint.resume = 'auto' " if config.checkpoint.resume == "never" else ""
    return f"{stopped}; saved: {checkpoint}; {resume}the same command goes on from there"
