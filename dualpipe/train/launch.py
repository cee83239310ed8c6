"""Which rank this process is, and starting the ranks of one machine where nobody else did.

A rank started here, by torchrun or by SLURM takes the same path: it finds its number in the environment. Imports torch
only to refuse, so that the launching process stays small and starts its ranks at once.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

from dualpipe.errors import PLAIN, die_with, error_line, exit_status
from dualpipe.train.config import load_config
from dualpipe.train.tables import Config, ParallelConfig

LAUNCHER = "DUALPIPE_LAUNCHER"  # its process
ERROR_FILE = "DUALPIPE_ERROR_FILE"  # where a rank leaves its error for the process that started it
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
RANKS_PER_CORE = 4  # of CPU ranks: for tests and lessons
_USUAL_GPUS = 8  # of a node, where this machine has none


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
            from dualpipe.train.job import PATIENCE, agree, connect  # loads torch

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
    """MASTER_ADDR and MASTER_PORT where they are not set: the step's first node, a port made of the job's number."""
    address, port = "127.0.0.1", 20000 + int(environment.get("SLURM_JOB_ID", 0)) % 20000
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


@contextmanager
def as_rank(info: RankInfo) -> Iterator[SimpleNamespace]:
    """Do what is in a `with` block as a rank of a job. Where the job has others, the process ends with the block.

    It ends with the `status` of what this gives, 0 unless set, or with that of an error, which is told to the launcher,
    which says the first one, and on stderr where this process has none.
    """
    ending = SimpleNamespace(status=0)
    if info.world_size == 1:
        yield ending
        return
    text, report = "", os.environ.get(ERROR_FILE)
    if report is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
        die_with(int(os.environ[LAUNCHER]))
    try:
        yield ending
    except BaseException as error:
        ending.status, text = exit_status(error), error_line(error)
        if not isinstance(error, PLAIN):
            trace = "".join(traceback.format_exception(error))
            text = f"{trace}error: rank {info.rank}: {type(error).__name__}: {error}"
    if ending.status and report is not None:
        from dualpipe.files import replace_file  # not at the top: for a rank that has failed

        replace_file(Path(report), json.dumps({"time": time.time(), "text": text, "status": ending.status}))
    elif text:
        print(text, file=sys.stderr)
    with suppress(OSError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    # Not through the destructors of process groups: after a failure they wait for the others, and after success torch
    # 2.11 was once seen to abort in them.
    os._exit(ending.status)


# -- the process that starts ranks


def start_ranks(arguments: Sequence[str], layout: ParallelConfig) -> int:
    """Run `dualpipe *arguments` as the ranks of `layout` on this machine; return the exit status.

    When one rank fails, or this process is interrupted or terminated, all are stopped. The error of the rank that
    failed first is printed; its status is returned (128 + number where a signal ended it).

    Raises ValueError for more ranks than this machine can serve.
    """
    check_machine(arguments, layout.world_size, layout.device)
    command = [sys.executable, "-P", "-m", "dualpipe", *arguments]  # -P: the working directory is not imported from
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world_size, launcher = f"{layout.world_size}", f"{os.getpid()}"
    with TemporaryDirectory(prefix="dualpipe-") as folder:
        errors = [Path(folder, f"rank{rank}.json") for rank in range(layout.world_size)]
        ranks: list[subprocess.Popen] = []
        previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            for rank, file in enumerate(errors):
                ranks.append(subprocess.Popen(command, env={
                    "OMP_NUM_THREADS": "1",  # else every rank takes all cores
                    **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "RANK": f"{rank}",
                    "LOCAL_RANK": f"{rank}", "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                    LAUNCHER: launcher, ERROR_FILE: f"{file}",
                }))
            while None in (statuses := [each.poll() for each in ranks]) and not any(statuses):
                time.sleep(POLL_SECONDS)
            if any(statuses):
                time.sleep(2 * POLL_SECONDS)  # a rank that was killed brings others down: see who else has ended
                statuses = [each.poll() for each in ranks]
        except KeyboardInterrupt:
            print("\ninterrupted: all ranks are stopped", file=sys.stderr)
            return 128 + signal.SIGINT
        finally:
            for each in ranks:
                each.terminate()
            deadline = time.monotonic() + GRACE_SECONDS
            for each in ranks:
                with suppress(subprocess.TimeoutExpired):
                    each.wait(max(0.0, deadline - time.monotonic()))
                each.kill()
                each.wait()
            if sys.stdout.isatty():  # a rank that is stopped in the middle of its live line leaves the cursor hidden
                print("\x1b[?25h", end="", flush=True)
            signal.signal(signal.SIGTERM, previous)
        return _report(statuses, errors) if any(statuses) else 0


def _report(statuses: Sequence[int | None], errors: Sequence[Path]) -> int:
    """Print the cause: ranks that a signal ended, otherwise the earliest error that a rank wrote down."""
    killed = {rank: signal.Signals(-status) for rank, status in enumerate(statuses) if status and status < 0}
    for rank, number in killed.items():
        hint = " (out of memory?)" if number is signal.SIGKILL else ""
        print(f"error: rank {rank} was ended by {number.name}{hint}", file=sys.stderr)
    if killed:
        return 128 + next(iter(killed.values()))
    if written := [json.loads(path.read_text()) for path in errors if path.exists()]:
        first = min(written, key=lambda error: error["time"])
        if first["text"]:
            print(first["text"], file=sys.stderr)
        return first["status"]
    rank, status = next((rank, status) for rank, status in enumerate(statuses) if status)
    print(f"error: rank {rank} ended with exit status {status}", file=sys.stderr)
    return status


def check_machine(arguments: Sequence[str], world_size: int, device: str) -> None:
    """Raise ValueError where this machine cannot serve `world_size` ranks of `dualpipe *arguments`.

    Its notes are lines that start them, by torchrun, run on every machine, and by SLURM. device: as in parallel.device.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = 0 if device == "cpu" else _device_files(os.environ)

    def serves() -> bool:
        return world_size <= (gpus if gpus or device == "cuda" else RANKS_PER_CORE * cores)

    if not serves() and device != "cpu":
        from dualpipe import device as cuda  # not at the top: it loads torch, whose count is the one that holds

        gpus = cuda.count()
    if serves():
        return
    if gpus or device == "cuda":
        reason = f"{world_size} ranks need as many GPUs, and this machine has {gpus}"
    else:
        reason = f"{world_size} ranks are more than {RANKS_PER_CORE} for each of this machine's {cores} cores"
    remedy = ", or set parallel.device = 'cpu'" if world_size <= RANKS_PER_CORE * cores else ""
    error = ValueError(f"{reason}; lower parallel.pp, dp or ep{remedy}, or start them on several machines:")
    each = cores if device == "cpu" else gpus or _USUAL_GPUS  # ranks that a machine takes; one of CPU gets a core
    local = max(n for n in range(1, each + 1) if world_size % n == 0)
    nodes, command = world_size // local, shlex.join(arguments)
    per_node = "" if device == "cpu" else f" --gpus-per-node {local}"
    error.add_note(f"  torchrun --nnodes {nodes} --nproc-per-node {local} --rdzv-backend c10d --rdzv-endpoint "
                   f"FIRST_HOST:29500 -m dualpipe {command}")
    error.add_note(f"  srun --nodes {nodes} --ntasks-per-node {local}{per_node} dualpipe {command}")
    raise error


def _device_files(environment: Mapping[str, str]) -> int:
    """NVIDIA's device files, of which CUDA_VISIBLE_DEVICES may leave some out."""
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return files if visible is None else min(files, len([name for name in visible.split(",") if name.strip()]))
