"""The rank at fault when the ranks of one machine have failed. Does not import torch.

A rank loses another when their connection closes or a wait for it times out. This loss is not the training loss.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.runtime.rank_process import STOPPING
from dualpipe.runtime.recorder import rank_name
from dualpipe.train.launch.diagnose import HALTED, diagnose, is_consequence, read_stuck

# Statuses of a rank that has not failed: still running, finished, or stopped on request.
NO_FAILURE = (None, 0, os.EX_TEMPFAIL, *(128 + number for number in STOPPING))


class Ending(NamedTuple):
    """The outcome of one launch of all ranks. After a failure, the first line is the cause."""

    status: int
    lines: Sequence[str] = ()
    failed: bool = False


class Cause(NamedTuple):
    """The exit status of the rank at fault, and the lines that name it and describe what it did."""

    status: int
    lines: list[str]


@dataclass(frozen=True)
class Evidence:
    """The information about a failure.

    Attributes:
        sizes: of the mesh dimensions, to name ranks.
        statuses: exit status of each rank, negative after a signal; None for a running one.
        letters: process state in /proc of running ranks (see `dualpipe.train.launch.diagnose.HALTED`).
        errors: records that failed ranks have left, by rank: "status", "text", "time", and "lost", True if the rank
            ended because it lost another one.
        states: of the recorders of ranks (`Recorder.state`), by rank.
        folder: with the files of those states.
        out_of_memory: a process on this machine was killed for lack of memory.
    """

    sizes: Mapping[str, int]
    statuses: Sequence[int | None]
    letters: Mapping[int, str]
    errors: Mapping[int, Any]
    states: Mapping[int, Any]
    folder: Path
    out_of_memory: bool

    @property
    def all_lost(self) -> bool:
        """True if every recorded error is the loss of another rank, so none explains the failure."""
        return all(error["lost"] for error in self.errors.values())

    def describe(self, rank: int, text: str) -> str:
        """Return an error line about a rank."""
        return f"error: {rank_name(rank, self.sizes)} {text}"


def find_cause(evidence: Evidence) -> Cause:
    """Return the cause of a failure.

    A rank that was killed or is stopped comes first, then an error that a rank has recorded and that is not the loss of
    another rank. The other searches are for a rank that recorded no error. If none finds a cause, it is the
    earliest recorded loss of a rank.
    """
    searches = (_killed, _stopped, _own_error, _error_about_rank, _in_disk_sleep, _silent_end, _diagnosis)
    for search in searches:
        cause = search(evidence)
        if cause is not None:
            return cause
    first = min(evidence.errors, key=lambda rank: (evidence.errors[rank]["time"], rank), default=0)
    error = evidence.errors.get(first, {"status": 1, "text": "error: ended by its watchdog"})
    return Cause(error["status"], [evidence.describe(first, error["text"].partition("error: ")[2])])


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
    """Look for the first error that is not the loss of another rank."""
    ranks = [rank for rank, error in evidence.errors.items() if not error["lost"]]
    if not ranks:
        return None
    error = evidence.errors[min(ranks, key=lambda rank: (evidence.errors[rank]["time"], rank))]
    return Cause(error["status"], [error["text"]] if error["text"] else [])


def _error_about_rank(evidence: Evidence) -> Cause | None:
    """Look for an error that other ranks report about a failed rank, which has not recorded the error itself."""
    for _, error in sorted(evidence.errors.items()):
        names_rank = re.match(r"error: ranks? \d", error["text"])
        if names_rank and not re.search("waited|cannot be reached", error["text"]):
            return Cause(error["status"], [error["text"]])
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
        if status is not None and rank not in evidence.errors and rank not in evidence.states:
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


def describe_waits(evidence: Evidence, cause: Cause) -> Iterator[str]:
    """Yield a line for each thing that ranks waited for when they lost another rank, unless the cause names it."""
    lines_by_wait: dict[str, str] = {}
    for rank, error in evidence.errors.items():
        wait = re.search("waited .*?(?=; |$)", error["text"], re.MULTILINE)
        if wait is not None:
            lines_by_wait.setdefault(wait[0], f"  {rank_name(rank, evidence.sizes)}: {wait[0]}")
    cause_text = "".join(cause.lines)
    for wait_text, line in lines_by_wait.items():
        if wait_text not in cause_text:
            yield line


def read_text(path: str | Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""


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
