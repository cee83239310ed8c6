"""Stopping a run before its last step, after a signal or at a time limit: all ranks after the same step.

Each rank votes on every step, and all learn the votes with the step's numbers: one small all-reduce, on the device. No
host waits for it but where it waits for the numbers anyway.
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
from dualpipe.train.launch.distributed import Job

_STEPS = 16  # by whose times the next one's is guessed


class Vote(NamedTuple):
    """A rank's word on a step: numbers, or scalars on the device, 0 unless there is something to say.

    status: the exit status with which it asks for an end after this step. load: tokens that its experts got, where a
    trace is taken.
    """

    status: float | Tensor = 0.0
    load: float | Tensor = 0.0


class StopVotes:
    """The words of all ranks of a job, in which a rank asks for an end when its watchdog or `time_limit` says so."""

    def __init__(self, job: Job, time_limit: float) -> None:
        self._job, self._recorder = job, Recorder.current()
        self._ranks = self._recorder.members(job.group)
        self._time_limit = TimeLimit(time_limit, 1 if job.device.type == "cpu" else 3)

    def cast(self, load: Tensor | float) -> Tensor:
        """All ranks' votes, for `read`: (ranks * fields,) float64 on the device. Collective; the host does not wait
        for a device."""
        vote = Vote(self._status(), load)
        votes = torch.zeros(self._job.ranks.size, len(vote), dtype=torch.float64, device=self._job.device)
        for number, value in enumerate(vote):
            if isinstance(value, Tensor) or value:  # each is a launch
                votes[self._job.rank, number] = value
        if self._job.group is not None:
            with self._recorder.collective("vote", "the words of all ranks on the step", self._ranks, votes.nbytes):
                dist.all_reduce(votes, group=self._job.group)
        return votes.flatten()

    def _status(self) -> int:
        """The exit status with which this rank asks for an end, 0 to go on."""
        if self._job.watchdog is not None and self._job.watchdog.stop:
            return 128 + self._job.watchdog.stop
        return os.EX_TEMPFAIL if self._job.rank == 0 and self._time_limit.reached() else 0

    @staticmethod
    def read(numbers: Sequence[float]) -> list[Vote]:
        """Return the votes that were cast, by rank."""
        fields = len(Vote._fields)
        return [Vote(*numbers[first : first + fields]) for first in range(0, len(numbers), fields)]


class TimeLimit:
    """The time limit of a run, of `limit` seconds; 0: none. To be asked once a step.

    A step takes as long as the longest of the last ones, with what came between them, an evaluation or a checkpoint.
    queued: steps that begin before anybody can stop, with the next one.
    """

    def __init__(self, limit: float, queued: int) -> None:
        self._limit, self._queued = limit, queued
        self._ages: deque[float] = deque(maxlen=_STEPS + 1)

    def reached(self) -> bool:
        """Return True if the job, counted from its launcher's start, would be older than that after the next step."""
        if not self._limit:
            return False
        self._ages.append(process_age(os.environ.get(LAUNCHER, "self")))
        longest = max((after - before for before, after in pairwise(self._ages)), default=0.0)
        return self._ages[-1] + self._queued * longest > self._limit


def farewell(config: Config, status: int, step: int, saved: Location | None) -> str:
    """Return the text for a run that a vote has ended after `step`, with the checkpoint that was saved for it."""
    limit = f"train.time_limit = {config.train.time_limit:g}"
    stopped = f"stopped by {limit if status == os.EX_TEMPFAIL else signal.Signals(status - 128).name} after step {step}"
    if saved is None:
        off = "mode = 'off'" if config.checkpoint.mode == "off" else "interval = 0"
        return f"{stopped}; nothing is saved: checkpoint.{off}; the same command starts anew"
    how = "with checkpoint.resume = 'auto' " if config.checkpoint.resume == "never" else ""
    return f"{stopped}; saved: {saved}; {how}the same command goes on from there"
