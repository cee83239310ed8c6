"""This process as a rank of a job: its rank, and the report of its end to the process that started it.

Does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dualpipe.runtime.errors import ONE_LINE_ERRORS, PipelineError, RankLost, die_with, error_line, exit_status
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


def restart_count() -> int:
    """Return the number of restarts of the job after failures, from torchrun's variable."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def process_age(pid: int | str = "self") -> float:
    """Return the seconds since the start of a process; without /proc, since this module was loaded."""
    with suppress(OSError, IndexError, ValueError, AttributeError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])  # starttime of proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - _loaded_at


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
    text = ""
    from_another_rank = False
    try:
        yield ending
    except BaseException as error:
        ending.status = exit_status(error)
        from_another_rank = is_from_another_rank(error)
        text = _error_text(error, rank_name(info.rank, sizes or {}), from_another_rank)
    report_exit(text, ending.status, from_another_rank=from_another_rank)
    with suppress(OSError):  # the reader of the output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    # The destructors of process groups are skipped: after a failure they wait for other ranks, and after success torch
    # 2.11 was once seen to abort in them.
    os._exit(ending.status)


def _error_text(error: BaseException, name: str, from_another_rank: bool) -> str:
    """Return the text of a rank's error: with a traceback if the error is unexpected. name: of the rank."""
    if from_another_rank or isinstance(error, ONE_LINE_ERRORS):
        return error_line(error)
    trace = "".join(traceback.format_exception(error))
    if re.match(r"ranks? \d", str(error)):  # an error that the ranks have agreed on names the rank that has failed
        return f"{trace}error: {error}"
    return f"{trace}error: {name}: {type(error).__name__}: {error}"


def is_from_another_rank(error: BaseException) -> bool:
    """Return True if an error comes from another rank: a lost rank, or the published failure of one."""
    cause = error.__cause__
    if isinstance(error, RankLost) or isinstance(cause, RankLost):
        return True
    return isinstance(error, PipelineError) and cause is None


def report_exit(text: str, status: int, *, from_another_rank: bool = False) -> None:
    """Report the end of this rank to the launcher; without one, print its error to stderr.

    Args:
        text: the error, or "" if it has been printed.
        status: the exit status.
        from_another_rank: the error is the consequence of another rank's, and so not the cause.
    """
    file = os.environ.get(ERROR_FILE)
    if status and file is not None:
        report = {"time": time.time(), "text": text, "status": status, "lost": from_another_rank}
        replace_file(Path(file), json.dumps(report))
    elif text:
        print(text, file=sys.stderr, flush=True)
