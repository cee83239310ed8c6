"""Which rank this process is, and starting the ranks of one machine where nobody else did.

A rank started here, by torchrun or by SLURM takes the same path: it finds its number in the environment. Imports no
torch, so that the launching process stays small and starts its ranks at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dualpipe.errors import PLAIN, error_line, exit_status
from dualpipe.lifetime import die_with
from dualpipe.train.machine import check_machine
from dualpipe.train.tables import ParallelConfig

LAUNCHER = "DUALPIPE_LAUNCHER"  # its process
ERROR_FILE = "DUALPIPE_ERROR_FILE"  # where a rank leaves its error for the process that started it
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True)
class RankInfo:
    """This process among all ranks of the job, and among those of its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


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


def set_rendezvous() -> None:
    """MASTER_ADDR and MASTER_PORT of a rank that SLURM started."""
    if "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(os.environ))


def slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT where they are not set: the step's first node, a port made of the job's number."""
    found = {}
    if "MASTER_ADDR" not in environment:
        if int(environment.get("SLURM_STEP_NUM_NODES", 1)) == 1:
            found["MASTER_ADDR"] = "127.0.0.1"
        else:
            found["MASTER_ADDR"] = _first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if "MASTER_PORT" not in environment:
        found["MASTER_PORT"] = str(20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000)
    return found


def _first_host(nodes: str) -> str:
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise ValueError(f"cannot tell the first node of SLURM_STEP_NODELIST = {nodes!r}; set MASTER_ADDR") from error


def run_on_ranks(arguments: Sequence[str], layout: ParallelConfig, body: Callable[[RankInfo], int]) -> int:
    """Run `body` as one of the ranks of `layout` and return its exit status; start the ranks where nobody has.

    arguments: the command line after `dualpipe` that leads a new process back here.

    Raises ValueError for more ranks than this machine can serve.
    """
    info = rank_from_environment(os.environ)
    if info is None and layout.world_size > 1:
        check_machine(arguments, layout.world_size, layout.device)
        return start_ranks(arguments, layout.world_size)
    if info is None:
        return body(RankInfo(0, 1, 0, 1))
    set_rendezvous()
    _follow_launcher()
    try:
        status = body(info)
        if status:
            _tell_launcher("", status)
    except BaseException as error:
        status = _fail(error, info.rank)
    with suppress(OSError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    if info.world_size > 1:
        # Not through the destructors of process groups: after a failure they wait for the others, and after success
        # torch 2.11 was once seen to abort in them.
        os._exit(status)
    return status


def start_ranks(arguments: Sequence[str], world_size: int) -> int:
    """Run `dualpipe *arguments` as `world_size` ranks on this machine; return the exit status.

    When one rank fails, or this process is interrupted or terminated, all are stopped. The error of the rank that
    failed first is printed; its status is returned (128 + number where a signal ended it).
    """
    command = [sys.executable, "-P", "-m", "dualpipe", *arguments]  # -P: the working directory is not imported from
    with tempfile.TemporaryDirectory(prefix="dualpipe-") as folder:
        errors = [Path(folder, f"rank{rank}.json") for rank in range(world_size)]
        ranks: list[subprocess.Popen] = []
        previous = signal.signal(signal.SIGTERM, _terminated)
        try:
            ranks.extend(subprocess.Popen(command, env=e) for e in _environments(world_size, errors))
            statuses = _wait(ranks)
        except KeyboardInterrupt:
            print("\ninterrupted: all ranks are stopped", file=sys.stderr)
            return 128 + signal.SIGINT
        finally:
            _stop(ranks)
            _show_cursor()
            signal.signal(signal.SIGTERM, previous)
        return _report(statuses, errors) if any(statuses) else 0


def _environments(world_size: int, errors: Sequence[Path]) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        LAUNCHER: str(os.getpid()),
    }
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # else every rank takes all cores
    return [
        {**os.environ, **threads, **shared, "RANK": str(r), "LOCAL_RANK": str(r), ERROR_FILE: str(errors[r])}
        for r in range(world_size)
    ]


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _wait(ranks: Sequence[subprocess.Popen]) -> list[int | None]:
    """Wait until all ranks are done or one has failed; their exit statuses, None for one that still runs."""
    while True:
        statuses = [rank.poll() for rank in ranks]
        if any(statuses):
            time.sleep(2 * POLL_SECONDS)  # a rank that was killed brings others down: see who else has ended
            return [rank.poll() for rank in ranks]
        if None not in statuses:
            return statuses
        time.sleep(POLL_SECONDS)


def _stop(ranks: Sequence[subprocess.Popen]) -> None:
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in running:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _show_cursor() -> None:
    """A rank that is stopped in the middle of its live line leaves the terminal's cursor hidden."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


def _report(statuses: Sequence[int | None], errors: Sequence[Path]) -> int:
    """Print the cause: ranks that a signal ended, otherwise the earliest error that a rank wrote down."""
    killed = {rank: signal.Signals(-status) for rank, status in enumerate(statuses) if status and status < 0}
    for rank, number in killed.items():
        hint = " (out of memory?)" if number is signal.SIGKILL else ""
        print(f"error: rank {rank} was ended by {number.name}{hint}", file=sys.stderr)
    if killed:
        return 128 + next(iter(killed.values()))
    written = [json.loads(path.read_text()) for path in errors if path.exists()]
    if written:
        first = min(written, key=lambda error: error["time"])
        if first["text"]:
            print(first["text"], file=sys.stderr)
        return first["status"]
    rank, status = next((rank, status) for rank, status in enumerate(statuses) if status)
    print(f"error: rank {rank} ended with exit status {status}", file=sys.stderr)
    return status


def _follow_launcher() -> None:
    """In a rank that `start_ranks` started: die with the launcher, and leave Ctrl-C to it."""
    if ERROR_FILE not in os.environ:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(int(os.environ[LAUNCHER]))


def _fail(error: BaseException, rank: int) -> int:
    """Report `error` to the launcher, or on stderr where there is none; return the exit status."""
    status = exit_status(error)
    if isinstance(error, PLAIN):
        text = error_line(error)
    else:
        text = "".join(traceback.format_exception(error)) + f"error: rank {rank}: {type(error).__name__}: {error}"
    if not _tell_launcher(text, status):
        print(text, file=sys.stderr)
    return status


def _tell_launcher(text: str, status: int) -> bool:
    """Leave a record for the launcher; False where there is none."""
    target = os.environ.get(ERROR_FILE)
    if target is None:
        return False
    temporary = Path(target + ".part")
    temporary.write_text(json.dumps({"time": time.time(), "text": text, "status": status}))
    temporary.rename(target)
    return True
