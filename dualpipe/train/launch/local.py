"""Starting the ranks of one machine where nobody else did: signals, the rank at fault, and starting again.

Does not import torch, but to refuse, so that this process stays small and starts its ranks at once.
"""

from __future__ import annotations

import json
import os
import re
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
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from dualpipe.runtime.background import limited
from dualpipe.runtime.errors import USER_ERROR
from dualpipe.runtime.files import lock
from dualpipe.runtime.rank_process import CONFIG_FILE, ERROR_FILE, INTERRUPTED, LAUNCHER, LISTENER
from dualpipe.runtime.recorder import rank_name
from dualpipe.runtime.storage import Location, RemotePath
from dualpipe.trace.file import TRACED
from dualpipe.train.config.schema import Config
from dualpipe.train.health.diagnose import FOLDER, HALTED, diagnose, letter_of, read_stuck, state_file

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for a rank that is killed to be gone; in disk sleep it may never be
STATE_SECONDS = 3.0  # for ranks to write what they wait for, where one has failed
LAST_SECONDS = 2.0  # for ranks to end by themselves then, with what they have traced: they await the cause for 0.5 s
CRASH_LOOP = 3  # starts without progress, after which there is no other
RANKS_PER_CORE = 4  # of CPU ranks: for tests and lessons
_USUAL_GPUS = 8  # of a node, where this machine has none
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_ENDED_WELL = (None, 0, os.EX_TEMPFAIL, *(128 + number for number in _STOPPING))  # statuses: so far, or when asked to


class Ending(NamedTuple):
    """The end of a start of all ranks. The first line is the cause, with a failure."""

    status: int
    lines: Sequence[str] = ()
    failed: bool = False


def start_ranks(arguments: Sequence[str], config: Config, *, restarts: int = 0, watched: bool = False) -> int:
    """Run `dualpipe *arguments` as the ranks of `config.parallel` on this machine; return the exit status.

    When a rank fails, all are stopped, and what is said begins with the one at fault, whose status is returned (128 +
    number where a signal ended it). restarts: how often they are started again then, unless by an error of the user's,
    or where `CRASH_LOOP` starts in a row do no step more. watched: the ranks take signals: a first one to this process
    is passed on, for them to stop after a step, and states are asked for. Without, and by a second one, all are stopped
    at once.

    Raises ValueError for more ranks than this machine can serve.
    """
    if restarts < 0:
        raise ValueError(f"--max-restarts {restarts} must be at least 0")
    check_machine(arguments, config.parallel.world_size, config.parallel.device)
    best, causes = -1, [""]
    with _signals() as received:
        for number in count():
            ending = _start(arguments, config, number, received, watched)
            for line in ending.lines:
                print(line, file=sys.stderr)
            if not ending.failed or ending.status == USER_ERROR or received or not restarts:
                return ending.status
            done = _steps_done(Path(config.output.dir))
            causes = [*(causes if done <= best else ()), *(ending.lines or [""])[:1]]
            best = max(best, done)
            if len(causes) == CRASH_LOOP:
                each = "".join(f"\n  {cause}" for cause in dict.fromkeys(causes))
                print(f"error: {CRASH_LOOP} starts in a row have ended without a step more than the {best} that were "
                      f"done: starting again does not help; they ended by{each}", file=sys.stderr)
            if len(causes) == CRASH_LOOP or number == restarts:
                return ending.status
            print(f"restart {number + 1} of {restarts}, after step {best}", file=sys.stderr, flush=True)
    raise AssertionError("counted without end")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that have come meanwhile, which end nothing by themselves: what is open here is always closed."""
    received: list[int] = []
    # One that is ignored stays so, as SIGHUP under `nohup`.
    taken = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = [signal.signal(number, lambda number, frame: received.append(number)) for number in taken]
    try:
        yield received
    finally:
        for number, handler in zip(taken, previous):
            signal.signal(number, handler)


def _start(arguments: Sequence[str], config: Config, number: int, received: list[int], watched: bool) -> Ending:
    """Start all ranks once, the `number`th time from 0, and wait for their end."""
    with TemporaryDirectory(prefix="dualpipe-") as folder:
        ranks = _Ranks(config, Path(folder), watched)
        try:
            ranks.start([sys.executable, "-P", "-m", "dualpipe", *arguments], number)  # -P: not from the directory
            return ranks.wait(received)
        finally:
            ranks.end()
            # A disk that hangs may be what has ended them.
            limited(partial(remove_unfinished, config.checkpoint_directory), GRACE_SECONDS)
            if sys.stdout.isatty():  # a rank that is stopped in the middle of its live line leaves the cursor hidden
                print("\x1b[?25h", end="", flush=True)


def remove_unfinished(checkpoints: Location) -> None:
    """Remove what ranks that have ended left of a checkpoint, unless another job saves there.

    Of a remote one, the next save or `dualpipe checkpoint clean` removes it: to reach a store takes too long here.
    """
    if isinstance(checkpoints, RemotePath):
        return
    with suppress(ValueError, OSError):
        left = [*checkpoints.glob(".tmp-step-*"), *checkpoints.glob(".del-step-*")]
        if left and (held := lock(checkpoints / ".lock", patience=1.0)) is not None:
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)
            held.release()


class _Ranks:
    """The processes of one start. folder: where they leave their errors."""

    def __init__(self, config: Config, folder: Path, watched: bool) -> None:
        layout = config.parallel
        self._sizes = layout.sizes
        self._words = [folder / f"rank{rank}.json" for rank in range(layout.world_size)]
        self._config_file = folder / "config.json"
        self._config_file.write_text(json.dumps(asdict(config)), encoding="utf-8")
        self._output, self._timeout, self._watched = Path(config.output.dir), layout.timeout, watched
        self._processes: list[subprocess.Popen] = []
        self._oom_kills = _oom_kills()

    def start(self, command: Sequence[str], number: int) -> None:
        # Rank 0 takes the socket over: nobody else can have its port, and only this machine reaches it.
        listener = socket.create_server(("127.0.0.1", 0))
        port, world_size = listener.getsockname()[1], f"{len(self._words)}"
        with listener:
            for rank, word in enumerate(self._words):
                first = {LISTENER: f"{listener.fileno()}"} if rank == 0 else {}
                self._processes.append(subprocess.Popen(command, pass_fds=[listener.fileno()] * len(first), env={
                    "OMP_NUM_THREADS": "1",  # else every rank takes all cores
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a rank that is lost makes pages of warnings on the others
                    **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "RANK": f"{rank}",
                    "LOCAL_RANK": f"{rank}", "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                    "TORCHELASTIC_RESTART_COUNT": f"{number}", LAUNCHER: f"{os.getpid()}", ERROR_FILE: f"{word}",
                    CONFIG_FILE: f"{self._config_file}",
                    **first,
                }))
                listener.close()  # here, or a client would wait where rank 0 has gone

    def wait(self, received: list[int]) -> Ending:
        """Until all have ended, one has failed, or a signal wants an end at once."""
        passed_on, halted = 0, 0.0
        for turn in count(1):
            statuses = [each.poll() for each in self._processes]
            # Those that do not take it yet are ended by it.
            at_once = not self._watched or len(received) > 1 or (passed_on and -passed_on in statuses)
            if received and at_once:
                return Ending(128 + received[0], ["\ninterrupted: all ranks are stopped"])
            if any(status not in _ENDED_WELL for status in statuses) or halted >= self._timeout:
                return self._failure()
            if None not in statuses:
                status = max(each or 0 for each in statuses)
                return Ending(128 + received[0] if status and received else status)
            if received and not passed_on:
                passed_on = INTERRUPTED if received[0] == signal.SIGINT else received[0]
                self._send(passed_on)
            if turn % 20 == 0:  # counted, as this process may have been stopped too
                halted = halted + 20 * POLL_SECONDS if {"T", "t"} & {*self._states_of_processes().values()} else 0.0
            time.sleep(POLL_SECONDS)
        raise AssertionError("counted without end")

    def end(self) -> None:
        """End those that still run: what they could do in answer to a signal would wait for others."""
        self._send(signal.SIGKILL)
        deadline = time.monotonic() + GRACE_SECONDS
        for each in self._processes:
            with suppress(subprocess.TimeoutExpired):
                each.wait(max(0.0, deadline - time.monotonic()))

    def _send(self, number: int) -> None:
        for each in self._processes:
            each.send_signal(number)

    def _states_of_processes(self) -> dict[int, str]:
        """By rank the letter of a process that has not ended, by /proc."""
        running = {rank: each.pid for rank, each in enumerate(self._processes) if each.poll() is None}
        return {rank: letter for rank, pid in running.items() if (letter := letter_of(pid))}

    # -- which rank is at fault

    def _failure(self) -> Ending:
        since = time.time()
        time.sleep(2 * POLL_SECONDS)  # a rank that was killed brings others down: see who else has ended
        statuses = [each.poll() for each in self._processes]
        letters = self._states_of_processes()
        states: dict[int, Any] = {}
        if self._watched:
            with suppress(OSError):  # none where the disk hangs, either
                states = limited(partial(self._ask, letters, since), 2 * STATE_SECONDS) or {}
        letters = {rank: letter for rank, letter in self._states_of_processes().items() if letters.get(rank) == letter}
        words = self._last_words()
        cause = self._cause(statuses, letters, words, states)
        if not all(word["lost"] for word in words.values()):  # an error says it all
            return Ending(*cause, failed=True)
        others: dict[str, str] = {}  # what lost ranks waited for, each text once, where the cause does not say it
        for rank, word in words.items() if len(cause[1]) == 1 else ():
            if (waited := re.search("waited .*?(?=; |$)", word["text"], re.MULTILINE)):
                others.setdefault(waited[0], f"  {rank_name(rank, self._sizes)}: {waited[0]}")
        hint = [f"what each rank was doing: dualpipe why {shlex.quote(str(self._output))}"] if states else []
        said = [line for text, line in others.items() if text not in "".join(cause[1])]
        self._await_ends()
        said += [line for word in self._last_words().values() for line in word["text"].splitlines()
                 if line.startswith(TRACED) and line not in "".join(cause[1])]
        return Ending(cause[0], [*cause[1], *said, *hint], failed=True)

    def _last_words(self) -> dict[int, Any]:
        """Return the errors that ranks have left, by rank: of those that failed, or lost another."""
        words = {rank: json.loads(path.read_text()) for rank, path in enumerate(self._words) if path.exists()}
        return {rank: word for rank, word in words.items() if word["status"] not in _ENDED_WELL}

    def _await_ends(self) -> None:
        """Wait a moment for ranks that run: where one was lost, the others write what they have traced and end."""
        running = [self._processes[rank] for rank, letter in self._states_of_processes().items() if letter not in "Tt"]
        deadline = time.monotonic() + LAST_SECONDS
        while any(each.poll() is None for each in running) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _ask(self, letters: Mapping[int, str], since: float) -> dict[int, Any]:
        """Return the states that ranks have written: by now those that have ended, and in a moment those that run."""
        asked = [rank for rank, letter in letters.items() if letter not in "TtZX"]
        for rank in asked:
            self._processes[rank].send_signal(signal.SIGUSR2)
        files = {rank: state_file(self._output / FOLDER, rank) for rank in range(len(self._processes))}
        deadline = time.monotonic() + STATE_SECONDS
        while True:
            written = {rank: file.stat().st_mtime for rank, file in files.items() if file.exists()}
            late = [rank for rank in asked
                    if written.get(rank, 0.0) < since and self._processes[rank].poll() is None]
            if not late or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        found = {}
        for rank, when in written.items():
            with suppress(ValueError):
                # Of one that has ended, also after it was asked, its watchdog has, seconds before.
                is_running = self._processes[rank].poll() is None
                if when >= since - (0.0 if is_running else 2 * GRACE_SECONDS):
                    found[rank] = json.loads(_read(files[rank]))
        return found

    def _cause(
        self, statuses: Sequence[int | None], letters: Mapping[int, str], words: Mapping[int, Any], states: Mapping
    ) -> tuple[int, list[str]]:
        """The exit status and what is said of the rank at fault: what is known of processes is surer than their words,
        and an error of a rank's own than that it lost another."""

        def say(rank: int, text: str) -> str:
            return f"error: {rank_name(rank, self._sizes)} {text}"

        killed = [(number is signal.SIGABRT, number is not signal.SIGKILL, rank, number)
                  for rank, status in enumerate(statuses) if status and status < 0
                  for number in [signal.Signals(-status)]]
        if killed:  # others may abort after it
            *_, rank, number = min(killed)
            no_memory = number is signal.SIGKILL and _oom_kills() != self._oom_kills
            return 128 + number, [say(rank, f"was killed{': out of memory' if no_memory else f' by {number.name}'}")]
        for rank, letter in letters.items():
            if letter in "Tt":
                return 1, [say(rank, HALTED[letter])]
        if own := [(word["time"], rank) for rank, word in words.items() if not word["lost"]]:
            word = words[min(own)[1]]
            return word["status"], [word["text"]] * bool(word["text"])
        # What others say of a rank that has failed and has not said so yet.
        told = [word for _, word in sorted(words.items()) if re.match(r"error: ranks? \d", word["text"])]
        if told := [word for word in told if not re.search("waited|cannot be reached", word["text"])]:
            return told[0]["status"], [told[0]["text"]]
        for rank, letter in letters.items():
            if letter == "D":
                return 1, [say(rank, HALTED[letter])]
        for rank, status in enumerate(statuses):
            if status is not None and rank not in words and rank not in states:  # 0 too: the others went on
                return status or 1, [say(rank, f"ended with exit status {status}, without a word")]
        if states:
            at = {rank: HALTED[letter] for rank, letter in letters.items() if letter in HALTED}
            stuck = {rank: text for rank, text in read_stuck(self._output / FOLDER).items() if rank not in states}
            found = diagnose({rank: states.get(rank) for rank in range(len(statuses))}, {**stuck, **at})
            return 1, [f"error: {found.lines[0]}", *found.lines[1:]]
        _, first = min(((word["time"], rank) for rank, word in words.items()), default=(0.0, 0))
        word = words.get(first, {"status": 1, "text": "error: ended by its watchdog"})
        return word["status"], [say(first, word["text"].partition("error: ")[2])]


def _read(path: str | Path) -> str:
    """The text of a file; none where it cannot be read."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def _oom_kills() -> list[int]:
    """Count the processes that were killed for lack of memory: on this machine, and in its control groups."""
    files = ["/proc/vmstat"]
    for line in _read("/proc/self/cgroup").splitlines():
        _, kinds, group = line.split(":", 2)
        if not kinds:
            files.append(f"/sys/fs/cgroup/{group}/memory.events")
        elif "memory" in kinds.split(","):
            files.append(f"/sys/fs/cgroup/memory/{group}/memory.oom_control")
    return [int(text) for file in files for text in re.findall(r"^oom_kill (\d+)$", _read(file), re.MULTILINE)]


def _steps_done(output: Path) -> int:
    """The steps that a run has done, by its metrics and by what its ranks wrote of themselves."""
    steps = [0]
    for path in (output / "metrics.jsonl", *sorted((output / FOLDER).glob("rank-*.json"))):
        last = (_read(path).splitlines() or [""])[-1]
        with suppress(ValueError, KeyError, TypeError):
            steps.append(json.loads(last)["step"] - (path.parent != output))  # a state has the one under way
    return max(steps)


# -- what a machine can serve


def check_machine(arguments: Sequence[str], world_size: int, device: str) -> None:
    """Raise ValueError where this machine cannot serve `world_size` ranks of `dualpipe *arguments`.

    Its notes are lines that start them, by torchrun, run on every machine, and by SLURM. device: as in parallel.device.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = 0 if device == "cpu" else _device_files(os.environ)

    def serves() -> bool:
        return world_size <= (gpus if gpus or device == "cuda" else RANKS_PER_CORE * cores)

    if not serves() and device != "cpu":
        from dualpipe.runtime import device as cuda  # not at the top: it loads torch, whose count is the one that holds

        gpus = cuda.count()
    if serves():
        return
    if gpus or device == "cuda":
        reason = f"{world_size} ranks need as many GPUs, and this machine has {gpus}"
    else:
        reason = f"{world_size} ranks are more than {RANKS_PER_CORE} for each of this machine's {cores} cores"
    remedy = ", or set parallel.device = 'cpu'" if world_size <= RANKS_PER_CORE * cores else ""
    error = ValueError(f"{reason}; lower parallel.pp, dp, cp or ep{remedy}, or start them on several machines:")
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
