"""Start of the ranks on one machine without torchrun or SLURM: their processes, signals, and restarts after a failure.

Does not import torch, except to count CUDA devices when they seem too few, so that this process stays small and starts
its ranks at once.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from dualpipe.runtime.background import run_with_timeout
from dualpipe.runtime.errors import USER_ERROR
from dualpipe.runtime.files import lock
from dualpipe.runtime.rank_process import (
    CONFIG_FILE,
    ERROR_FILE,
    INTERRUPTED,
    LAUNCHER,
    LISTENER,
    STOPPING,
    ExitReport,
    allow_open_files,
)
from dualpipe.runtime.storage import Location, RemotePath
from dualpipe.trace.file import TRACED
from dualpipe.train.config.schema import Config
from dualpipe.train.launch.cause import NO_FAILURE, Evidence, count_oom_kills, describe_waits, find_cause, read_text
from dualpipe.train.launch.diagnose import FOLDER, process_state, state_file

CRASH_LOOP = 3  # the launcher gives up if this many launches in a row complete no more steps than the first of them
RANKS_PER_CORE = 4  # maximum CPU ranks per core; CPU ranks are for tests and lessons
_USUAL_GPUS = 8  # GPUs of a node in the suggested commands, if this machine has none
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for a killed rank to end; in disk sleep it may never end
STATE_SECONDS = 3.0  # for ranks to write their states after one has failed
# For ranks that have lost another one to write their traces and end. They first wait `ranks.failure.GRACE`, 0.5 s, for
# a rank to report the cause of the loss.
LAST_SECONDS = 2.0
_STOP_CHECK = 20  # polls between two checks for stopped processes


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
    allow_open_files()
    number = 0  # restarts so far
    most_steps = -1
    causes: list[str] = []  # of the last launch that got further than all before it, and of those since
    with _recorded_signals() as received:
        while True:
            outcome = _launch(arguments, config, number, received, watched)
            for line in outcome.lines:
                print(line, file=sys.stderr)
            if not outcome.failed or outcome.status == USER_ERROR or received or not restarts:
                return outcome.status
            steps = _completed_steps(Path(config.output.dir))
            if steps > most_steps:
                most_steps = steps
                causes = []
            causes.append(outcome.lines[0] if outcome.lines else "")
            if len(causes) == CRASH_LOOP:
                shown = "".join(f"\n  {cause}" for cause in dict.fromkeys(causes))
                print(f"error: {CRASH_LOOP} starts in a row have ended without a step more than the {most_steps} that "
                      f"were done: starting again does not help; they ended by{shown}", file=sys.stderr)
                return outcome.status
            if number == restarts:
                return outcome.status
            number += 1
            print(f"restart {number} of {restarts}, after step {most_steps}", file=sys.stderr, flush=True)


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


class Outcome(NamedTuple):
    """The outcome of one launch of all ranks. After a failure, the first line is the cause."""

    status: int
    lines: Sequence[str] = ()
    failed: bool = False


def _launch(arguments: Sequence[str], config: Config, number: int, received: list[int], watched: bool) -> Outcome:
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


class RankProcesses:
    """The processes of one launch of all ranks.

    Args:
        folder: for the configuration that the ranks read and the reports that they leave.
        watched: the ranks have watchdogs, which handle signals and write states.
    """

    def __init__(self, config: Config, folder: Path, watched: bool) -> None:
        layout = config.parallel
        self._sizes = layout.sizes
        self._report_files = [folder / f"rank{rank}.json" for rank in range(layout.world_size)]
        self._config_file = folder / "config.json"
        self._config_file.write_text(json.dumps(asdict(config)), encoding="utf-8")
        self._output = Path(config.output.dir)
        self._timeout = layout.timeout
        self._watched = watched
        self._processes: list[subprocess.Popen] = []
        self._oom_kills = count_oom_kills()

    def start(self, command: Sequence[str], number: int) -> None:
        """Start `command` on every rank. number: restarts before this launch."""
        # Rank 0 inherits the listening socket: no other process can take its port, and only this machine reaches it.
        listener = socket.create_server(("127.0.0.1", 0))
        with listener:
            world_size = f"{len(self._report_files)}"
            shared = {
                "OMP_NUM_THREADS": "1",  # by default every rank would use all cores
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # by default ranks print pages of warnings when another one is lost
                **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{listener.getsockname()[1]}",
                "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RESTART_COUNT": f"{number}",
                LAUNCHER: f"{os.getpid()}", CONFIG_FILE: f"{self._config_file}",
            }
            for rank, report_file in enumerate(self._report_files):
                environment = {**shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", ERROR_FILE: f"{report_file}"}
                inherited = []
                if rank == 0:
                    environment[LISTENER] = f"{listener.fileno()}"
                    inherited.append(listener.fileno())
                self._processes.append(subprocess.Popen(command, pass_fds=inherited, env=environment))
                # Once rank 0 has it: otherwise ranks that connect after the end of rank 0 would wait for this process.
                listener.close()

    def wait(self, received: list[int]) -> Outcome:
        """Wait until all ranks have ended, one has failed, or a signal ends all at once.

        received: signals to this process, a list that grows.
        """
        passed_on = 0  # the signal that was sent to the ranks
        stopped_seconds = 0.0  # since a process was first seen stopped
        polls = 0
        while True:
            statuses = [process.poll() for process in self._processes]
            # A rank that does not handle signals yet is ended by the one that was passed on.
            ended_a_rank = bool(passed_on) and -passed_on in statuses
            if len(received) > 1 or (received and not self._watched) or ended_a_rank:
                return Outcome(128 + received[0], ["\ninterrupted: all ranks are stopped"])
            if any(status not in NO_FAILURE for status in statuses) or stopped_seconds >= self._timeout:
                return self._report_failure()
            if None not in statuses:
                status = max(status or 0 for status in statuses)
                return Outcome(128 + received[0] if status and received else status)
            if received and not passed_on:
                passed_on = INTERRUPTED if received[0] == signal.SIGINT else received[0]
                self._send(passed_on)
            polls += 1
            if polls % _STOP_CHECK == 0:
                is_stopped = bool({"T", "t"} & set(self._process_states().values()))
                # Counted in polls, not by the clock: this process may have been stopped too.
                stopped_seconds = stopped_seconds + _STOP_CHECK * POLL_SECONDS if is_stopped else 0.0
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Kill ranks that still run: to end by themselves, they would have to wait for each other."""
        self._send(signal.SIGKILL)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _send(self, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self._processes:
            process.send_signal(number)

    def _process_states(self) -> dict[int, str]:
        """Return the state letters in /proc of the running ranks, by rank."""
        letters = {rank: process_state(process.pid) for rank, process in enumerate(self._processes)
                   if process.poll() is None}
        return {rank: letter for rank, letter in letters.items() if letter}

    # -- after a failure

    def _report_failure(self) -> Outcome:
        """Return the outcome with the cause, the waits of other ranks, and the traces that they have written."""
        evidence = self._gather_evidence()
        cause = find_cause(evidence)
        if evidence.has_own_error:
            return Outcome(cause.status, cause.lines, failed=True)
        lines = list(cause.lines)
        if len(cause.lines) == 1:
            lines += describe_waits(evidence, cause)
        self._await_ends()
        shown = cause.report.traces if cause.report is not None else ()
        for report in self._read_reports().values():
            lines += [f"{TRACED}{path}" for path in report.traces if path not in shown]
        if evidence.states:
            lines.append(f"what each rank was doing: dualpipe why {shlex.quote(str(self._output))}")
        return Outcome(cause.status, lines, failed=True)

    def _gather_evidence(self) -> Evidence:
        """Return the information about a failure that has just occurred."""
        since = time.time()
        time.sleep(2 * POLL_SECONDS)  # a rank that was killed brings others down: see which of them have ended
        statuses = [process.poll() for process in self._processes]
        letters = self._process_states()
        states: dict[int, Any] = {}
        if self._watched:
            with suppress(OSError):  # a hanging disk gives no states
                states = run_with_timeout(partial(self._request_states, letters, since), 2 * STATE_SECONDS) or {}
        # Only states that last are evidence: disk sleep, for example, is usually short.
        lasting = {rank: letter for rank, letter in self._process_states().items() if letters.get(rank) == letter}
        return Evidence(
            sizes=self._sizes, statuses=statuses, letters=lasting, reports=self._read_reports(), states=states,
            folder=self._output / FOLDER, out_of_memory=count_oom_kills() != self._oom_kills,
        )

    def _read_reports(self) -> dict[int, ExitReport]:
        """Return the reports that failed ranks have left, by rank."""
        reports = {rank: ExitReport.read(file) for rank, file in enumerate(self._report_files) if file.exists()}
        return {rank: report for rank, report in reports.items() if report.status not in NO_FAILURE}

    def _await_ends(self) -> None:
        """Wait a moment for running ranks: after the loss of another they write their traces and end."""
        running = [self._processes[rank] for rank, letter in self._process_states().items() if letter not in "Tt"]
        deadline = time.monotonic() + LAST_SECONDS
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _request_states(self, letters: Mapping[int, str], since: float) -> dict[int, Any]:
        """Request states from running ranks and return the states of all ranks that have written one, by rank.

        letters: see `_process_states`. since: time of the failure.
        """
        asked = [rank for rank, letter in letters.items() if letter not in "TtZX"]
        for rank in asked:
            self._processes[rank].send_signal(signal.SIGUSR2)
        files = {rank: state_file(self._output / FOLDER, rank) for rank in range(len(self._processes))}
        deadline = time.monotonic() + STATE_SECONDS
        while True:
            written = {rank: file.stat().st_mtime for rank, file in files.items() if file.exists()}
            missing = [rank for rank in asked
                       if written.get(rank, 0.0) < since and self._processes[rank].poll() is None]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        states = {}
        for rank, write_time in written.items():
            # A rank may have ended before it could answer the request. Its watchdog wrote a state seconds before that.
            is_running = self._processes[rank].poll() is None
            margin = 0.0 if is_running else 2 * GRACE_SECONDS
            if write_time >= since - margin:
                with suppress(ValueError):
                    states[rank] = json.loads(read_text(files[rank]))
        return states


# -- the end of a launch


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


# -- the number of ranks that this machine can run


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
