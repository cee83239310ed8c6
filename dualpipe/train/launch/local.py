"""Start of the ranks on one machine without torchrun or SLURM: their number, signals, and restarts after a failure.

Does not import torch, except to count CUDA devices when they seem too few, so that this process stays small and starts
its ranks at once.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from dualpipe.runtime.background import run_with_timeout
from dualpipe.runtime.errors import USER_ERROR
from dualpipe.runtime.files import lock
from dualpipe.runtime.rank_process import STOPPING
from dualpipe.runtime.storage import Location, RemotePath
from dualpipe.train.config.schema import Config
from dualpipe.train.health.diagnose import FOLDER
from dualpipe.train.launch.failure import Ending, read_text
from dualpipe.train.launch.rank_processes import GRACE_SECONDS, RankProcesses

CRASH_LOOP = 3  # the launcher gives up if this many launches in a row complete no more steps than the first of them
RANKS_PER_CORE = 4  # maximum CPU ranks per core; CPU ranks are for tests and lessons
_USUAL_GPUS = 8  # GPUs of a node in the suggested commands, if this machine has none


def start_ranks(arguments: Sequence[str], config: Config, *, restarts: int = 0, watched: bool = False) -> int:
    """Run `dualpipe *arguments` as the ranks of `config.parallel` on this machine and return the exit status.

    When a rank fails, all ranks are stopped. The first line printed then names the rank at fault, whose exit status is
    returned (128 + number if a signal ended it).

    Args:
        restarts: maximum number of restarts after failures. A user error, or `CRASH_LOOP` launches in a row that
            complete no further step, end the restarts.
        watched: the ranks have watchdogs. They are asked for their states after a failure, and the first signal to this
            process is passed on to them, so that they stop after a step. Otherwise, and at a second signal, all ranks
            are stopped at once.

    Raises ValueError for a negative `restarts`, or for more ranks than this machine can run.
    """
    if restarts < 0:
        raise ValueError(f"--max-restarts {restarts} must be at least 0")
    check_machine(arguments, config.parallel.world_size, config.parallel.device)
    most_steps = -1
    causes: list[str] = []  # of the last launch that got further than all before it, and of those since
    with _recorded_signals() as received:
        for number in count():
            ending = _start(arguments, config, number, received, watched)
            for line in ending.lines:
                print(line, file=sys.stderr)
            if not ending.failed or ending.status == USER_ERROR or received or not restarts:
                return ending.status
            steps = _completed_steps(Path(config.output.dir))
            if steps > most_steps:
                causes = []
            causes += list(ending.lines[:1]) or [""]
            most_steps = max(most_steps, steps)
            if len(causes) == CRASH_LOOP:
                _print_crash_loop(causes, most_steps)
                return ending.status
            if number == restarts:
                return ending.status
            print(f"restart {number + 1} of {restarts}, after step {most_steps}", file=sys.stderr, flush=True)
    raise AssertionError("count() is infinite")


def _print_crash_loop(causes: Sequence[str], steps: int) -> None:
    """Print why the ranks are not started again."""
    lines = "".join(f"\n  {cause}" for cause in dict.fromkeys(causes))
    print(f"error: {CRASH_LOOP} starts in a row have ended without a step more than the {steps} that were done: "
          f"starting again does not help; they ended by{lines}", file=sys.stderr)


@contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Record signals in the list that is yielded, instead of ending this process, so that everything is cleaned up."""
    received: list[int] = []
    # An ignored signal stays ignored, such as SIGHUP under `nohup`.
    handled = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = [signal.signal(number, lambda number, frame: received.append(number)) for number in handled]
    try:
        yield received
    finally:
        for number, handler in zip(handled, previous):
            signal.signal(number, handler)


def _start(arguments: Sequence[str], config: Config, number: int, received: list[int], watched: bool) -> Ending:
    """Start all ranks and wait for their end. number: restarts before this launch."""
    with TemporaryDirectory(prefix="dualpipe-") as folder:
        ranks = RankProcesses(config, Path(folder), watched)
        try:
            # -P keeps the current directory off sys.path.
            ranks.start([sys.executable, "-P", "-m", "dualpipe", *arguments], number)
            return ranks.wait(received)
        finally:
            ranks.end()
            # With a time limit: a hanging disk may have ended the ranks.
            run_with_timeout(partial(remove_unfinished, config.checkpoint_directory), GRACE_SECONDS)
            if sys.stdout.isatty():  # a rank that is killed while it prints its live line leaves the cursor hidden
                print("\x1b[?25h", end="", flush=True)


def remove_unfinished(checkpoints: Location) -> None:
    """Remove unfinished checkpoints of ranks that have ended, unless another job saves to this folder.

    Leaves those in a store, which takes too long to reach, to the next save or `dualpipe checkpoint clean`.
    """
    if isinstance(checkpoints, RemotePath):
        return
    with suppress(ValueError, OSError):
        unfinished = [*checkpoints.glob(".tmp-step-*"), *checkpoints.glob(".del-step-*")]
        if not unfinished:
            return
        file_lock = lock(checkpoints / ".lock", patience=1.0)
        if file_lock is None:
            return
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        file_lock.release()


def _completed_steps(output: Path) -> int:
    """Return the number of completed steps of a run, from its metrics and the states of its ranks."""
    steps = [0]
    states = sorted((output / FOLDER).glob("rank-*.json"))
    for path in (output / "metrics.jsonl", *states):
        last_line = (read_text(path).splitlines() or [""])[-1]
        with suppress(ValueError, KeyError, TypeError):
            step = json.loads(last_line)["step"]
            steps.append(step - 1 if path in states else step)  # the step in a state is not completed
    return max(steps)


def check_machine(arguments: Sequence[str], world_size: int, device: str) -> None:
    """Raise ValueError if this machine cannot run `world_size` ranks of `dualpipe *arguments`.

    The notes of the error are the commands for several machines: torchrun, to run on each of them, and srun. device:
    see parallel.device.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = 0 if device == "cpu" else _count_device_files(os.environ)
    if world_size <= _capacity(gpus, cores, device):
        return
    if device != "cpu":
        from dualpipe.runtime import device as cuda  # imported late: it loads torch, whose count is the right one

        gpus = cuda.count()
        if world_size <= _capacity(gpus, cores, device):
            return
    if gpus or device == "cuda":
        reason = f"{world_size} ranks need as many GPUs, and this machine has {gpus}"
    else:
        reason = f"{world_size} ranks are more than {RANKS_PER_CORE} for each of this machine's {cores} cores"
    remedy = ", or set parallel.device = 'cpu'" if world_size <= RANKS_PER_CORE * cores else ""
    error = ValueError(f"{reason}; lower parallel.pp, dp, cp or ep{remedy}, or start them on several machines:")
    for command in _cluster_commands(arguments, world_size, device, cores if device == "cpu" else gpus or _USUAL_GPUS):
        error.add_note(f"  {command}")
    raise error


def _capacity(gpus: int, cores: int, device: str) -> int:
    """Return the number of ranks that this machine can run: one per GPU, or `RANKS_PER_CORE` on CPU."""
    if gpus or device == "cuda":
        return gpus
    return RANKS_PER_CORE * cores


def _cluster_commands(arguments: Sequence[str], world_size: int, device: str, ranks_per_node: int) -> list[str]:
    """Return the torchrun and the srun command for `world_size` ranks, at most `ranks_per_node` of them on a node."""
    local_ranks = max(number for number in range(1, ranks_per_node + 1) if world_size % number == 0)
    nodes = world_size // local_ranks
    command = shlex.join(arguments)
    gpu_option = "" if device == "cpu" else f" --gpus-per-node {local_ranks}"
    return [
        f"torchrun --nnodes {nodes} --nproc-per-node {local_ranks} --rdzv-backend c10d --rdzv-endpoint "
        f"FIRST_HOST:29500 -m dualpipe {command}",
        f"srun --nodes {nodes} --ntasks-per-node {local_ranks}{gpu_option} dualpipe {command}",
    ]


def _count_device_files(environment: Mapping[str, str]) -> int:
    """Return the number of NVIDIA device files, limited by CUDA_VISIBLE_DEVICES."""
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return files
    return min(files, len([name for name in visible.split(",") if name.strip()]))
