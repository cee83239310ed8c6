"""The rank at fault when the ranks of one machine have failed. Does not import torch.

A rank loses another when their connection closes or a wait for it times out. This loss is not the training loss.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.runtime.rank_process import STOPPING, ExitReport, Kind
from dualpipe.runtime.recorder import rank_name
from dualpipe.train.launch.diagnose import HALTED, diagnose, is_consequence, read_stuck

# Statuses of a rank that has not failed: still running, finished, or stopped on request.
NO_FAILURE = (None, 0, os.EX_TEMPFAIL, *(128 + number for number in STOPPING))


class Cause(NamedTuple):
    """The exit status of the rank at fault, and the lines that name it and describe what it did.

    report: the report that the lines are from, if they are from one.
    """

    status: int
    lines: list[str]
    report: ExitReport | None = None


@dataclass(frozen=True)
class Evidence:
    """The information about a failure.

    Attributes:
        sizes: of the mesh dimensions, to name ranks.
        statuses: exit status of each rank, negative after a signal; None for a running one.
        letters: process state in /proc of running ranks (see `dualpipe.train.launch.diagnose.HALTED`).
        reports: of failed ranks, by rank.
        states: of the recorders of ranks (`Recorder.state`), by rank.
        folder: with the files of those states.
        out_of_memory: a process on this machine was killed for lack of memory.
    """

    sizes: Mapping[str, int]
    statuses: Sequence[int | None]
    letters: Mapping[int, str]
    reports: Mapping[int, ExitReport]
    states: Mapping[int, Any]
    folder: Path
    out_of_memory: bool

    @property
    def has_own_error(self) -> bool:
        """True if a rank has reported an error of its own, which explains the failure."""
        return any(report.kind is Kind.OWN for report in self.reports.values())

    def describe(self, rank: int, text: str) -> str:
        """Return an error line about a rank."""
        return f"error: {rank_name(rank, self.sizes)} {text}"


def find_cause(evidence: Evidence) -> Cause:
    """Return the cause of a failure.

    A rank that was killed or is stopped comes first, then an error that a rank has reported as its own. The other
    searches are for a rank that reported no error. If none finds a cause, it is the first loss that was reported.
    """
    searches = (_killed, _stopped, _own_error, _told_error, _in_disk_sleep, _silent_end, _diagnosis, _first_loss)
    for search in searches:
        cause = search(evidence)
        if cause is not None:
            return cause
    return Cause(1, [evidence.describe(0, "ended by its watchdog")])


def _killed(evidence: Evidence) -> Cause | None:
    """Look for a rank that was ended by a signal: SIGKILL first, SIGABRT last, as others may abort because of it."""
    killed = [(rank, signal.Signals(-status)) for rank, status in enumerate(evidence.statuses) if status and status < 0]
    if not killed:
        return None

    def priority(item: tuple[int, signal.Signals]) -> tuple[bool, bool, int]:
        rank, number = item
        return number is signal.SIGABRT, number is not signal.SIGKILL, rank

    rank, number = min(killed, key=priority)
    if number is signal.SIGKILL and evidence.out_of_memory:
        return Cause(128 + number, [evidence.describe(rank, "was killed: out of memory")])
    return Cause(128 + number, [evidence.describe(rank, f"was killed by {number.name}")])


def _stopped(evidence: Evidence) -> Cause | None:
    """Look for a rank that is stopped, by SIGSTOP or a debugger."""
    for rank, letter in evidence.letters.items():
        if letter in "Tt":
            return Cause(1, [evidence.describe(rank, HALTED[letter])])
    return None


def _own_error(evidence: Evidence) -> Cause | None:
    """Look for the first error that a rank has reported as its own."""
    report = _earliest(report for report in evidence.reports.values() if report.kind is Kind.OWN)
    if report is None:
        return None
    return Cause(report.status, [report.text] if report.text else [], report)


def _told_error(evidence: Evidence) -> Cause | None:
    """Look for the error of a rank that it has published to other ranks, and not reported itself."""
    for report in evidence.reports.values():
        if report.kind is Kind.TOLD:
            return Cause(report.status, [report.text], report)
    return None


def _in_disk_sleep(evidence: Evidence) -> Cause | None:
    """Look for a rank that waits for a disk."""
    for rank, letter in evidence.letters.items():
        if letter == "D" and not is_consequence(HALTED[letter], evidence.states.get(rank)):
            return Cause(1, [evidence.describe(rank, HALTED[letter])])
    return None


def _silent_end(evidence: Evidence) -> Cause | None:
    """Look for a rank that ended and left nothing. Its status may be 0, while the others continued."""
    for rank, status in enumerate(evidence.statuses):
        if status is not None and rank not in evidence.reports and rank not in evidence.states:
            text = f"ended with exit status {status} and no error message"
            return Cause(status or 1, [evidence.describe(rank, text)])
    return None


def _diagnosis(evidence: Evidence) -> Cause | None:
    """Diagnose which rank the others wait for, if there are states."""
    states = evidence.states
    if not states:
        return None
    halted = {rank: HALTED[letter] for rank, letter in evidence.letters.items() if letter in HALTED}
    stuck = {rank: text for rank, text in read_stuck(evidence.folder).items() if rank not in states}
    all_states = {rank: states.get(rank) for rank in range(len(evidence.statuses))}
    lines = diagnose(all_states, {**stuck, **halted}).lines
    return Cause(1, [f"error: {lines[0]}", *lines[1:]])


def _first_loss(evidence: Evidence) -> Cause | None:
    """Look for the first report of a loss."""
    report = _earliest(evidence.reports.values())
    if report is None:
        return None
    if report.wait is not None:
        line = evidence.describe(report.wait.rank, report.wait.text)
    else:
        line = evidence.describe(report.rank, report.message or "was ended by its watchdog")
    return Cause(report.status, ["\n".join([line, *report.notes])], report)


def _earliest(reports: Iterable[ExitReport]) -> ExitReport | None:
    return min(reports, key=lambda report: (report.time, report.rank), default=None)


def describe_waits(evidence: Evidence, cause: Cause) -> Iterator[str]:
    """Yield a line for each wait that ended with the loss of a rank, unless it is the cause."""
    described = set()
    if cause.report is not None and cause.report.wait is not None:
        described.add(cause.report.wait.text)
    for report in evidence.reports.values():
        wait = report.wait
        if wait is not None and wait.text not in described:
            described.add(wait.text)
            yield f"  {rank_name(wait.rank, evidence.sizes)}: {wait.text}"


def count_oom_kills() -> list[int]:
    """Return the numbers of processes killed for lack of memory: on this machine, and in its control groups."""
    files = ["/proc/vmstat"]
    for line in read_text("/proc/self/cgroup").splitlines():
        _, kinds, group = line.split(":", 2)
        if not kinds:
            files.append(f"/sys/fs/cgroup/{group}/memory.events")
        elif "memory" in kinds.split(","):
            files.append(f"/sys/fs/cgroup/memory/{group}/memory.oom_control")
    return [int(text) for file in files for text in re.findall(r"^oom_kill (\d+)$", read_text(file), re.MULTILINE)]


def read_text(path: str | Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""
