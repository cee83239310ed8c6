"""This process as a rank of a job: its number, and how it reports its end to the process that started it.

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
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from dualpipe.runtime.errors import PLAIN, PipelineError, RankLost, die_with, error_line, exit_status
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.recorder import rank_name

LAUNCHER = "DUALPIPE_LAUNCHER"  # its process
LISTENER = "DUALPIPE_LISTEN_FD"  # of rank 0: where its store is to listen
CONFIG_FILE = "DUALPIPE_CONFIG_FILE"  # the configuration as the process that started this rank has parsed it
ERROR_FILE = "DUALPIPE_ERROR_FILE"  # where a rank leaves its error for the process that started it
# What the launcher sends a rank for Ctrl-C: a terminal sends SIGINT to ranks as well, so they ignore that.
INTERRUPTED = getattr(signal, "SIGRTMIN", signal.SIGTERM)
_loaded = time.monotonic()


class RankInfo(NamedTuple):
    """This process among all ranks of the job, and among those of its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def starts_before() -> int:
    """Return the number of earlier starts of the job, after failures, by torchrun's variable."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def process_age(pid: int | str = "self") -> float:
    """The seconds since a process was started; since this module was loaded where /proc does not tell."""
    with suppress(OSError, IndexError, ValueError, AttributeError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])  # starttime of proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - _loaded


@contextmanager
def as_rank(info: RankInfo, sizes: Mapping[str, int] | None = None) -> Iterator[SimpleNamespace]:
    """Do what is in a `with` block as a rank of a job. Where the job has others, the process ends with the block.

    sizes: of the mesh's dimensions, by which the rank is named.

    It ends with the `status` of what this gives, 0 unless set, or with that of an error, which is told to the launcher,
    which says the first one that is no other rank's, and on stderr where this process has none.
    """
    ending = SimpleNamespace(status=0)
    text, lost, report = "", False, os.environ.get(ERROR_FILE)
    if info.world_size == 1 and report is None:
        yield ending
        return
    if report is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
        signal.signal(signal.SIGUSR2, lambda *_: None)  # of which a rank would die that has left its watchdog
        die_with(int(os.environ[LAUNCHER]))
    try:
        yield ending
    except BaseException as error:
        ending.status, text, lost = exit_status(error), error_line(error), is_victim(error)
        if not lost and not isinstance(error, PLAIN):
            trace = "".join(traceback.format_exception(error))
            # What ranks agree on says by itself on which one it failed.
            name = "" if re.match(r"ranks? \d", str(error)) else f"{rank_name(info.rank, sizes or {})}: "
            text = f"{trace}error: {name}{type(error).__name__ + ': ' if name else ''}{error}"
    leave_word(text, ending.status, lost=lost)
    with suppress(OSError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    # Not through the destructors of process groups: after a failure they wait for the others, and after success torch
    # 2.11 was once seen to abort in them.
    os._exit(ending.status)


def is_victim(error: BaseException) -> bool:
    """Return True if an error comes from another rank: one that was lost, or one that says what failed there."""
    cause = error.__cause__
    return isinstance(error, RankLost) or isinstance(cause, RankLost) or (
        isinstance(error, PipelineError) and cause is None)


def leave_word(text: str, status: int, *, lost: bool = False) -> None:
    """Tell the process that started this rank how it ends, or say it on stderr where there is none.

    text: empty where all is said. lost: for want of another rank, and so not the cause.
    """
    if status and (report := os.environ.get(ERROR_FILE)) is not None:
        word = {"time": time.time(), "text": text, "status": status, "lost": lost}
        replace_file(Path(report), json.dumps(word))
    elif text:
        print(text, file=sys.stderr, flush=True)
