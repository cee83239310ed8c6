"""This process as a rank of a job: its rank, and the report of its end to the process that started it.

Does not import torch.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import NamedTuple

from dualpipe.runtime.errors import (
    ONE_LINE_ERRORS,
    PipelineError,
    RankLost,
    Wait,
    die_with,
    exit_status,
    names_ranks,
)
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.recorder import rank_name

# Environment variables from the launcher, the process that starts the ranks of a machine.
LAUNCHER = "DUALPIPE_LAUNCHER"  # its process id
LISTENER = "DUALPIPE_LISTEN_FD"  # file descriptor of the socket of rank 0's store
CONFIG_FILE = "DUALPIPE_CONFIG_FILE"  # file of the configuration that the launcher has parsed
ERROR_FILE = "DUALPIPE_ERROR_FILE"  # file for the error of this rank
# The signals that stop a run: the first one after its current step, a second one at once.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# The launcher's signal to the ranks for Ctrl-C. A terminal sends SIGINT to the ranks as well, which ignore it.
INTERRUPTED = getattr(signal, "SIGRTMIN", signal.SIGTERM)
_loaded_at = time.monotonic()


class RankInfo(NamedTuple):
    """Rank of this process in the job and on its machine, with the numbers of ranks. By default a single rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def allow_open_files() -> int:
    """Raise the limit of open files as far as this process may, and return it: each connection is an open file.

    The usual soft limit of 1,024 ends a job of a few hundred ranks; gloo then says "Connection was likely closed".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may have a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def restart_count() -> int:
    """Return the number of restarts of the job after failures, from torchrun's variable."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def process_age(pid: int | str = "self") -> float:
    """Return the seconds since the start of a process; without /proc, since this module was loaded."""
    with suppress(OSError, IndexError, ValueError, AttributeError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])  # starttime of proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - _loaded_at


class Kind(StrEnum):
    """The kind of an error, by the rank that it comes from."""

    OWN = auto()  # this rank failed by itself
    TOLD = auto()  # another rank failed, and published its error
    LOST = auto()  # a wait of this rank, or of another that published it, ended with the loss of a rank
    WATCHDOG = auto()  # the watchdog ended this rank, in a wait that did not end by itself or after a loss elsewhere

    @classmethod
    def of(cls, error: BaseException) -> Kind:
        """Return the kind of an error that ends this rank."""
        cause = error.__cause__
        has_lost = isinstance(error, RankLost) or isinstance(cause, RankLost)
        if isinstance(error, PipelineError) and (has_lost or cause is None):
            return cls.LOST if error.is_loss else cls.TOLD
        return cls.LOST if has_lost else cls.OWN


@dataclass
class ExitReport:
    """The end of a rank before its work is done, as the launcher reads it.

    rank: its global rank.
    status: its exit status.
    kind: where its error comes from.
    message: the error, in one line if it is expected; "" if there is none, or it has been printed.
    traceback: lines that are printed before the message, for an unexpected error.
    notes: lines that are printed after it.
    wait: the wait that ended with the loss of a rank, if that is the error.
    traces: the files of traces that the error ended.
    time: when the rank ended (time.time).
    """

    rank: int
    status: int
    kind: Kind = Kind.OWN
    message: str = ""
    traceback: str = ""
    notes: Sequence[str] = ()
    wait: Wait | None = None
    traces: Sequence[str] = ()
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, info: RankInfo, sizes: Mapping[str, int]) -> ExitReport:
        """Describe the error that ends a rank. sizes: see `as_rank`."""
        report = cls(info.rank, exit_status(error), Kind.of(error), traces=getattr(error, "traces", ()))
        report.message = str(error) or type(error).__name__
        lost = error if isinstance(error, PipelineError) else error.__cause__
        if isinstance(lost, PipelineError):
            report.wait = lost.wait
        if report.kind is not Kind.OWN or isinstance(error, ONE_LINE_ERRORS):
            report.notes = getattr(error, "__notes__", ())
            return report
        report.traceback = "".join(traceback.format_exception(error))  # with the notes
        if not (isinstance(error, PipelineError) or names_ranks(error)):
            report.message = f"{rank_name(info.rank, sizes)}: {type(error).__name__}: {error}"
        return report

    @classmethod
    def read(cls, path: Path) -> ExitReport:
        """Read the report of a rank from its file."""
        fields = json.loads(path.read_text())
        report = cls(**fields)
        report.kind = Kind(fields["kind"])
        report.wait = None if fields["wait"] is None else Wait(*fields["wait"])
        return report

    @property
    def text(self) -> str:
        """The printed lines, "" if there are none."""
        if not self.message and not self.traceback:
            return ""
        return "\n".join([f"{self.traceback}error: {self.message}", *self.notes])


def report_exit(report: ExitReport) -> None:
    """Report the end of this rank to the launcher; without one, print its error to stderr."""
    file = os.environ.get(ERROR_FILE)
    if report.status and file is not None:
        replace_file(Path(file), json.dumps(asdict(report)))
    elif report.text:
        print(report.text, file=sys.stderr, flush=True)


@dataclass
class Ending:
    """The exit status of a rank that ends without an error."""

    status: int = 0


@contextmanager
def as_rank(info: RankInfo, sizes: Mapping[str, int] | None = None) -> Iterator[Ending]:
    """Run the work inside of a `with` as a rank of a job, then end the process, unless the job has one rank.

    The exit status is that of the returned `Ending`, or that of an error. An error is reported to the launcher, which
    prints the first one that does not come from another rank; without a launcher it is printed to stderr. A process
    that is the only rank, and has no launcher, goes on after the `with`, and errors are raised.

    sizes: sizes of the mesh's dimensions, outermost first, for the name of the rank.
    """
    ending = Ending()
    has_launcher = ERROR_FILE in os.environ
    if info.world_size == 1 and not has_launcher:
        yield ending
        return
    if has_launcher:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
        # The launcher requests states by SIGUSR2. The default handler would kill a rank whose watchdog has ended.
        signal.signal(signal.SIGUSR2, lambda *_: None)
        die_with(int(os.environ[LAUNCHER]))
    try:
        yield ending
        report = ExitReport(info.rank, ending.status)
    except BaseException as error:
        report = ExitReport.of(error, info, sizes or {})
    report_exit(report)
    with suppress(OSError):  # the reader of the output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    # The destructors of process groups are skipped: after a failure they wait for other ranks, and after success torch
    # 2.11 was once seen to abort in them.
    os._exit(report.status)
