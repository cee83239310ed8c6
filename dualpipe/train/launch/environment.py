"""Which rank this process is, and how it ends.

A rank started by `dualpipe` itself (`start`), by torchrun or by SLURM takes the same path: it finds its number in the
environment. Does not import torch, for the process that starts ranks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from dualpipe.runtime.background import in_background
from dualpipe.runtime.errors import PLAIN, PipelineError, RankLost, UpstreamFailed, die_with, error_line, exit_status
from dualpipe.runtime.recorder import rank_name
from dualpipe.train.config.load import load_config
from dualpipe.train.config.schema import Config

T = TypeVar("T")
LAUNCHER = "DUALPIPE_LAUNCHER"  # its process
LISTENER = "DUALPIPE_LISTEN_FD"  # of rank 0: where its store is to listen
ERROR_FILE = "DUALPIPE_ERROR_FILE"  # where a rank leaves its error for the process that started it
# What the launcher sends a rank for Ctrl-C: a terminal sends SIGINT to ranks as well, so they ignore that.
INTERRUPTED = getattr(signal, "SIGRTMIN", signal.SIGTERM)


class RankInfo(NamedTuple):
    """This process among all ranks of the job, and among those of its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def load_everywhere(path: str, overrides: Sequence[str]) -> tuple[Config, RankInfo | None]:
    """The configuration, and which rank of its job this process is; None where its ranks are still to be started.

    Raises ValueError where either is wrong; if on this rank alone, the others are told, for 30 s at most, instead of
    waiting for it.
    """
    info = rank_from_environment(os.environ)
    if info is not None and "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(os.environ))
    try:
        config = load_config(path, overrides)
    except ValueError as error:
        if info is not None and info.world_size > 1:
            from dualpipe.train.launch.distributed import PATIENCE, agree  # loads torch
            from dualpipe.train.launch.store import connect

            def fail(settings: dict[str, Any], error: ValueError = error) -> None:
                raise error

            with suppress(ValueError, TimeoutError):  # it is raised here in any case
                agree(connect(info, PATIENCE), info, fail, PATIENCE)
        raise
    if info is None and config.parallel.world_size == 1:
        info = RankInfo(0, 1, 0, 1)
    return config, info


def rank_from_environment(environment: Mapping[str, str]) -> RankInfo | None:
    """This process's place as torchrun or SLURM (`srun` with several tasks) tells it; None where neither started it.

    A batch script that SLURM runs is no task of `srun`, though it too has SLURM_PROCID = 0 and the job's SLURM_NTASKS.

    Raises ValueError for half of torchrun's variables, for what is no number, and for a rank that cannot be.
    """

    def number(name: str, default: object = "") -> int:
        text = environment.get(name, f"{default}")
        if not text.isdecimal():
            raise ValueError(f"{name} = {text!r} must be a number from 0; start the job by torchrun, or set RANK and "
                             "WORLD_SIZE, both, on every rank")
        return int(text)

    if "RANK" in environment or "WORLD_SIZE" in environment:
        rank, world = number("RANK"), number("WORLD_SIZE")
        info = RankInfo(rank, world, number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", world))
    elif "SLURM_PROCID" in environment and number("SLURM_STEP_NUM_TASKS", 1) > 1:
        world, nodes = number("SLURM_STEP_NUM_TASKS"), number("SLURM_STEP_NUM_NODES", 1)
        info = RankInfo(number("SLURM_PROCID"), world, number("SLURM_LOCALID", 0), -(-world // max(1, nodes)))
    else:
        return None
    if info.rank >= info.world_size or info.local_rank >= info.local_world_size:
        raise ValueError(f"rank {info.rank} of {info.world_size}, on its machine {info.local_rank} of "
                         f"{info.local_world_size}, cannot be: ranks count from 0; see RANK, WORLD_SIZE, LOCAL_RANK "
                         "and LOCAL_WORLD_SIZE")
    return info


def slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT where they are not set: the step's first node, a port made of the numbers of job and
    step, as several steps of a job may run on one node at once."""
    address = "127.0.0.1"
    # Multiplied by a prime, so that the steps of one job have ports that are far from those of the next jobs.
    number = int(environment.get("SLURM_JOB_ID", 0)) + 7919 * int(environment.get("SLURM_STEP_ID", 0))
    port = 20000 + number % 20000
    if "MASTER_ADDR" not in environment and int(environment.get("SLURM_STEP_NUM_NODES", 1)) > 1:
        nodes = environment.get("SLURM_STEP_NODELIST", "")
        command = ["scontrol", "show", "hostnames", nodes]
        try:
            address = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError) as error:
            raise ValueError(f"cannot tell the first node of SLURM_STEP_NODELIST = {nodes!r}; set MASTER_ADDR"
                             ) from error
    found = {"MASTER_ADDR": address, "MASTER_PORT": f"{port}"}
    return {name: value for name, value in found.items() if name not in environment}


def limited(work: Callable[[], T], seconds: float, name: str = "") -> T | None:
    """What `work` gives, which may hang; None where it has not come after so many seconds."""
    found = in_background(work, name)
    wait([found], seconds)
    return found.result() if found.done() else None


def starts_before() -> int:
    """How often what has started this rank has started the job before, after failures; by torchrun's variable."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


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
    """Whether it came from another rank, which was lost, or says itself what has failed there."""
    cause = error.__cause__
    return isinstance(error, RankLost) or isinstance(cause, RankLost) or (
        isinstance(error, PipelineError) and (cause is None or isinstance(cause, UpstreamFailed)))


def leave_word(text: str, status: int, *, lost: bool = False) -> None:
    """Tell the process that started this rank how it ends, or say it on stderr where there is none.

    text: empty where all is said. lost: for want of another rank, and so not the cause.
    """
    if status and (report := os.environ.get(ERROR_FILE)) is not None:
        from dualpipe.runtime.files import replace_file  # not at the top: for a rank that has failed

        word = {"time": time.time(), "text": text, "status": status, "lost": lost}
        replace_file(Path(report), json.dumps(word))
    elif text:
        print(text, file=sys.stderr, flush=True)
