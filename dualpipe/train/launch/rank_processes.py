"""The processes of the ranks on this machine: starting them, waiting, and reporting a failure.

Does not import torch.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from dualpipe.runtime.background import run_with_timeout
from dualpipe.runtime.rank_process import CONFIG_FILE, ERROR_FILE, INTERRUPTED, LAUNCHER, LISTENER
from dualpipe.trace.file import TRACED
from dualpipe.train.config.schema import Config
from dualpipe.train.health.diagnose import FOLDER, process_state, state_file
from dualpipe.train.launch.failure import (
    NO_FAILURE,
    Cause,
    Ending,
    Evidence,
    count_oom_kills,
    describe_waits,
    find_cause,
    read_text,
)

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for a killed rank to end; in disk sleep it may never end
STATE_SECONDS = 3.0  # for ranks to write their states after one has failed
# For ranks that have lost another one to write their traces and end. They first wait `ranks.failure.GRACE`, 0.5 s, for
# a rank to report the cause of the loss.
LAST_SECONDS = 2.0
_STOP_CHECK = 20  # polls between two checks for stopped processes


class RankProcesses:
    """The processes of one launch of all ranks.

    Args:
        folder: for the configuration that the ranks read and the errors that they leave.
        watched: the ranks have watchdogs, which handle signals and write states.
    """

    def __init__(self, config: Config, folder: Path, watched: bool) -> None:
        layout = config.parallel
        self._sizes = layout.sizes
        self._error_files = [folder / f"rank{rank}.json" for rank in range(layout.world_size)]
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
        port = listener.getsockname()[1]
        with listener:
            for rank in range(len(self._error_files)):
                environment = self._environment(rank, port, number)
                inherited = []
                if rank == 0:
                    environment[LISTENER] = f"{listener.fileno()}"
                    inherited.append(listener.fileno())
                self._processes.append(subprocess.Popen(command, pass_fds=inherited, env=environment))
                # Once rank 0 has it: otherwise ranks that connect after the end of rank 0 would wait for this process.
                listener.close()

    def _environment(self, rank: int, port: int, number: int) -> dict[str, str]:
        """Return the environment variables of a rank."""
        world_size = f"{len(self._error_files)}"
        return {
            "OMP_NUM_THREADS": "1",  # by default every rank would use all cores
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # by default ranks print pages of warnings when another one is lost
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}", "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
            "TORCHELASTIC_RESTART_COUNT": f"{number}", LAUNCHER: f"{os.getpid()}",
            ERROR_FILE: f"{self._error_files[rank]}", CONFIG_FILE: f"{self._config_file}",
        }

    def wait(self, received: list[int]) -> Ending:
        """Wait until all ranks have ended, one has failed, or a signal ends all at once.

        received: signals to this process, a list that grows.
        """
        passed_on = 0  # the signal that was sent to the ranks
        stopped_seconds = 0.0  # since a process was first seen stopped
        for poll in count(1):
            statuses = [process.poll() for process in self._processes]
            if received and self._ends_at_once(received, passed_on, statuses):
                return Ending(128 + received[0], ["\ninterrupted: all ranks are stopped"])
            if any(status not in NO_FAILURE for status in statuses) or stopped_seconds >= self._timeout:
                return self._report_failure()
            if None not in statuses:
                status = max(status or 0 for status in statuses)
                return Ending(128 + received[0] if status and received else status)
            if received and not passed_on:
                passed_on = INTERRUPTED if received[0] == signal.SIGINT else received[0]
                self._send(passed_on)
            if poll % _STOP_CHECK == 0:
                is_stopped = bool({"T", "t"} & set(self._process_states().values()))
                # Counted in polls, not by the clock: this process may have been stopped too.
                stopped_seconds = stopped_seconds + _STOP_CHECK * POLL_SECONDS if is_stopped else 0.0
            time.sleep(POLL_SECONDS)
        raise AssertionError("count() is infinite")

    def _ends_at_once(self, received: Sequence[int], passed_on: int, statuses: Sequence[int | None]) -> bool:
        """Return True if a signal ends all ranks now, instead of after a step."""
        # A rank that does not handle signals yet is ended by the one that was passed on.
        ended_a_rank = bool(passed_on) and -passed_on in statuses
        return not self._watched or len(received) > 1 or ended_a_rank

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

    def _report_failure(self) -> Ending:
        """Return the ending with the cause, the waits of other ranks, and the traces that they have written."""
        evidence = self._gather_evidence()
        cause = find_cause(evidence)
        if not evidence.all_lost:  # an error that is not the loss of another rank explains everything
            return Ending(cause.status, cause.lines, failed=True)
        lines = list(cause.lines)
        if len(cause.lines) == 1:
            lines += describe_waits(evidence, cause)
        self._await_ends()
        lines += self._trace_lines(cause)
        if evidence.states:
            lines.append(f"what each rank was doing: dualpipe why {shlex.quote(str(self._output))}")
        return Ending(cause.status, lines, failed=True)

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
            sizes=self._sizes, statuses=statuses, letters=lasting, errors=self._read_errors(), states=states,
            folder=self._output / FOLDER, out_of_memory=count_oom_kills() != self._oom_kills,
        )

    def _read_errors(self) -> dict[int, Any]:
        """Return the errors that failed ranks have recorded, by rank; see `Evidence`."""
        errors = {rank: json.loads(path.read_text()) for rank, path in enumerate(self._error_files) if path.exists()}
        return {rank: error for rank, error in errors.items() if error["status"] not in NO_FAILURE}

    def _trace_lines(self, cause: Cause) -> list[str]:
        """Return the lines about traces in the errors of ranks, apart from those in the cause."""
        cause_text = "".join(cause.lines)
        return [line for error in self._read_errors().values() for line in error["text"].splitlines()
                if line.startswith(TRACED) and line not in cause_text]

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
