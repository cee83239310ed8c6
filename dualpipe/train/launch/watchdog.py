"""The watchdog of a rank: a thread that handles signals, detects hangs and lost ranks, and writes states.

It holds no lock of training and takes part in no collective, so it runs on while the main thread waits for a rank that
never comes. Python runs signal handlers in the main thread, between two of its instructions: not while that is inside a
collective. So the numbers of signals reach the thread through a pipe that the interpreter writes at once.

Through a `PeerStore` the watchdogs announce the loss of a rank, which ends all ranks, and request states: descriptions
of what each rank does and waits for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dualpipe.runtime.device import flight_recorder
from dualpipe.runtime.errors import Wait
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.rank_process import (
    ERROR_FILE,
    INTERRUPTED,
    STOPPING,
    ExitReport,
    Kind,
    RankInfo,
    report_exit,
)
from dualpipe.runtime.ranks.board import Board, request_interval
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.launch.diagnose import FOLDER, diagnose, halted, stack_file, state_file

if TYPE_CHECKING:
    from torch.distributed import Store

FAULT = 2**32  # added to the counter in the store when a rank is lost; a request for states adds 1
TICK = 0.25  # seconds between two checks of this rank
ASK = 1.0  # seconds between two reads of the store, if ranks are few
# Seconds in which several signals count as one: Ctrl-C reaches a rank from the terminal and from its launcher.
TOGETHER = 1.0
_ANSWER = timedelta(seconds=5)  # for an answer of the store
_COLLECT = 3.0  # seconds for other ranks to write their states
_LAST_CHANCE = 2.0  # seconds for the main thread to end by itself after the loss of a rank
_LATE = 2.0  # seconds beyond its limit, after which the watchdog no longer expects a wait to end by itself
_FRAMES = 100  # of a stack; a layer has 40, with those of torch


class Watchdog:
    """The watchdog thread, for a `with` block around training. It handles signals if the main thread enters the block.

    stop: number of the first signal that requested a stop, 0 before.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.stop = 0
        self._ended = threading.Event()
        self._previous: dict[int, Any] = {}  # signal handlers
        self._is_watching = False  # `watch` was called
        self._has_announced = False  # the other ranks know that a rank is lost
        self._has_reported = False  # this rank or another has reported the hang, since the last progress
        self._asked = 0  # requests for states that were answered
        # Two threads that may hang with a disk: one opens a file, one writes a state.
        self._opening: threading.Thread | None = None
        self._writing: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._signals, self._signals_input = os.pipe()
        os.set_blocking(self._signals_input, False)
        self._handlers: dict[int, Callable[[int], None]] = dict.fromkeys(map(int, STOPPING), self._request_stop)
        self._handlers[signal.SIGUSR2] = self._request_states
        self._handlers.setdefault(int(INTERRUPTED), lambda _: self._request_stop(signal.SIGINT))
        if threading.current_thread() is threading.main_thread():
            for number in self._handlers:
                # Ignored signals stay ignored: Ctrl-C in a rank with a launcher, SIGHUP under `nohup`.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, _do_nothing)
            self._wakeup = signal.set_wakeup_fd(self._signals_input, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._ended.set()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._thread.join()
        os.close(self._signals)
        os.close(self._signals_input)
        if not self._is_watching:
            return
        if kind is None:
            if self._opening is not None:
                self._opening.join(ASK)
            self._remove_files()
            return
        if self._find_loss() is not None:  # the thread may not have seen it
            self._announce_loss(is_known=True)
        elif ERROR_FILE not in os.environ:  # without a launcher, a rank that finds this one lost waits for its state
            self._store.put(json.dumps(self._state() | {"asked": FAULT}))
        self._store.flush()

    def watch(self, store: Store | None, info: RankInfo, output: Path, *, patience: float, limit: float) -> None:
        """Exchange messages with other ranks through `store`, and write states below `output`.

        Args:
            patience: seconds without progress after which all ranks write their states.
            limit: seconds to wait for another rank before it counts as lost.
        """
        self._info = info
        self._folder = output / FOLDER
        self._patience = patience
        self._limit = limit + _LATE
        self._store = PeerStore(store, info.rank, info.world_size)
        self._progress = self.recorder.progress()
        self._progress_time = time.monotonic()
        self._remove_files()
        self._is_watching = True

    def _run(self) -> None:
        """Handle signals and check the ranks until the block ends (the thread's function)."""
        while not self._ended.is_set():
            if select.select([self._signals], [], [], TICK)[0]:
                for number in os.read(self._signals, 64):
                    if number in self._handlers:
                        self._handlers[number](number)
            if self._is_watching:
                # In a step, all ranks have joined, and output.dir is locked by this job.
                if self._opening is None and self.recorder.step:
                    self._opening = threading.Thread(target=self._register_stack_dump, daemon=True)
                    self._opening.start()
                    self._store.find_neighbours()
                self._check()

    def _check(self) -> None:
        """Check this rank for a loss or a hang, and the store for messages."""
        now = time.monotonic()
        self._store.read()
        asked = self._store.asked
        progress = self.recorder.progress()
        if progress != self._progress:
            self._progress = progress
            self._progress_time = now
            self._has_reported = False
        idle = now - self._progress_time
        overdue: dict[str, Any] = {}
        if idle > self._limit:  # most waits end by themselves before
            overdue = next(reversed(self.recorder.state()["open"]), {})  # the innermost open entry
        loss = self._find_loss()
        if loss is not None or asked >= FAULT:
            self._leave(loss)
        elif overdue.get("ranks") and overdue["kind"] != "save":  # ranks in a save compare their progress themselves
            self._leave(self._overdue_wait(overdue))
        elif self._store.gone and now - self._store.gone > self._limit:
            self._leave(None, "the store of the job is gone, with rank 0, but this rank still runs")
        elif asked > self._asked:
            self._asked = asked
            if idle > self._patience / 2:  # this rank hangs too: the report of the rank that asked covers it
                self._has_reported = True
            self._write_state()
        elif idle > self._patience and self.recorder.depth and not self._has_reported:
            self._has_reported = True
            self._write_state()
            if self._store.is_first(f"stall {asked}"):
                self._store.ask()
                self._print_diagnosis(f"watchdog: no progress for {idle:.0f} s: ")

    def _overdue_wait(self, entry: dict[str, Any]) -> Wait:
        """Return the wait of an open entry."""
        others = [rank for rank in entry["ranks"] if rank != self._info.rank]
        names = ", ".join(map(self.recorder.name, others))
        return Wait(self._info.rank, others, f"waited {entry['seconds']:.3g} s for {entry['what']} from {names}")

    # -- signals

    def _request_stop(self, number: int) -> None:
        """Stop after the current step at the first signal, and at once at a second one."""
        if not self.stop:
            self.stop = number
            self._one_until = time.monotonic() + TOGETHER  # signals until then count as the first
        elif time.monotonic() > self._one_until:
            os._exit(128 + number)

    def _request_states(self, number: int) -> None:
        """Write the states of all ranks."""
        if self._is_watching:
            self._write_state()
            self._store.ask()

    def _register_stack_dump(self) -> None:
        """Make SIGUSR2 write Python stacks even while an extension holds the interpreter lock and no thread can run."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            stacks = stack_file(self._folder, self._info.rank).open("a")  # stays open as long as the process lives
            faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=True)

    # -- the loss of a rank

    def _find_loss(self) -> Wait | None:
        """Return the first wait of this rank that ended with the loss of another, None if there is none."""
        return next((thread.lost for thread in self.recorder.threads() if thread.lost is not None), None)

    def _announce_loss(self, *, is_known: bool) -> None:
        """Announce to all ranks, once, that a rank is lost. is_known: this rank has lost it, and was not only told.

        Without a launcher that reads the states, the first rank to announce it prints the diagnosis. The others stay
        until then: torchrun or srun ends all ranks when one has ended, and the store ends with rank 0.
        """
        if self._has_announced:
            return
        self._has_announced = True
        self._store.fault()
        self._store.flush()  # before the state, which contains the number of requests
        self._write_state()
        if ERROR_FILE in os.environ:
            return
        is_first = is_known and self._store.is_first("fault")
        if is_first or (not self._store.wait_said() and is_known):
            self._print_diagnosis("error: ")
            self._store.set_said()

    def _leave(self, wait: Wait | None, message: str = "") -> None:
        """End this process, unless the main thread does so by itself.

        wait: of this rank, if that is why. message: another reason; "" if other ranks have announced a loss.
        """
        deadline = time.monotonic() + _LAST_CHANCE
        message = wait.text if wait is not None else message
        self._announce_loss(is_known=bool(message))
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            report_exit(ExitReport(self._info.rank, 1, Kind.WATCHDOG, message, wait=wait))
            os._exit(1)

    # -- states

    def _state(self) -> dict[str, Any]:
        """Return the state of this rank: its recorder's, with stacks, torch's flight recorder and halted neighbours."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {names.get(ident, f"{ident}"): _frames(frame) for ident, frame in sys._current_frames().items()}
        return self.recorder.state() | {
            "world_size": self._info.world_size, "asked": self._store.asked, "stacks": stacks,
            "flight": flight_recorder(), "halted": halted(self._store.neighbours),
        }

    def _write_state(self) -> None:
        """Write the state to the store and, if possible, to the folder. Does not wait for a disk that hangs."""
        state = json.dumps(self._state())
        self._store.put(state)
        if self._writing is None or not self._writing.is_alive():
            self._writing = threading.Thread(
                target=self._write_file, args=(state,), name="watchdog's disk", daemon=True)
            self._writing.start()
            self._writing.join(ASK)

    def _write_file(self, state: str) -> None:
        """Write the state to the folder, if possible."""
        with suppress(OSError):
            stacks = stack_file(self._folder, self._info.rank)
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(state_file(self._folder, self._info.rank), state, flush=False)
            if stacks.exists():
                os.truncate(stacks, 0)  # the state contains them

    def _print_diagnosis(self, prefix: str) -> None:
        """Print a diagnosis of the states of all ranks, once they are written."""
        states = self._store.states(self._info.world_size) | {self._info.rank: self._state()}
        print(prefix + "\n".join(diagnose(states).lines), file=sys.stderr, flush=True)

    def _remove_files(self) -> None:
        """Remove the files of this rank, left by an earlier run or not needed after a successful one."""
        with suppress(OSError):
            for file in (state_file(self._folder, self._info.rank), stack_file(self._folder, self._info.rank)):
                file.unlink(missing_ok=True)
            self._folder.rmdir()  # succeeds on the last rank


def _frames(frame: Any) -> list[str]:
    """Return the innermost frames of a thread, without source lines: reading them could hang with a disk."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return [f"{summary.filename}:{summary.lineno} in {summary.name}" for summary in reversed(stack[:_FRAMES])]


def _do_nothing(number: int, frame: object) -> None:
    """Handle a signal in the main thread: the watchdog thread reads its number from the pipe."""


# -- messages


class PeerStore:
    """Messages between the watchdogs of a job's ranks, through the job's store and apart from collectives.

    They use a board of their own: its thread may hang with the host of the store. No method waits for long, or raises
    if the store is gone.

    Args:
        store: of the job; None for a single rank.

    Attributes:
        asked: number of requests for states that this rank knows of, plus `FAULT` if a rank is lost.
        neighbours: process ids of the ranks on this host, by rank.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int = 1) -> None:
        self.asked = 0
        self.neighbours: dict[int, int] = {}
        self._rank = rank
        self._host = f"host {socket.gethostname()}"
        self._interval = request_interval(ASK, num_ranks)
        self._last_read = time.monotonic()
        self._board = Board(None)
        if store is not None:
            sockets_before = _sockets()
            connection = store.clone()
            new_sockets = _sockets() - sockets_before
            connection.set_timeout(_ANSWER)
            self._board = Board(
                lambda: connection, next((socket.socket(fileno=os.dup(number)) for number in new_sockets), None))
            self._board.post(lambda store: store.append(self._host, f"{rank} {os.getpid()} "))

    @property
    def gone(self) -> float:
        """Return the time (time.monotonic) when the store, which ends with rank 0, was found gone; 0: it exists."""
        return self._board.gone

    def read(self) -> None:
        """Look for requests and faults of other ranks at each interval; does not wait for the answer."""
        now = time.monotonic()
        if now - self._last_read >= self._interval and self.asked < FAULT:
            self._last_read = now
            self._count(0)

    def ask(self) -> None:
        """Request the states of all ranks."""
        self._count(1)

    def fault(self) -> None:
        """Announce that a rank is lost."""
        self._count(FAULT)

    def put(self, state: str) -> None:
        """Publish this rank's state."""
        self._board.post(lambda store: store.set(f"state {self._rank}", state))

    def is_first(self, event: str) -> bool:
        """Return True if no other rank has called this for `event`.

        If the store does not answer, return True on one rank of each host.
        """
        number = self._board.ask(lambda store: store.add(event, 1), 0, ASK)
        if number or self.gone:
            return number == 1
        return self._rank == min(self.neighbours.keys() - halted(self.neighbours), default=self._rank)

    def set_said(self) -> None:
        """Announce that the diagnosis is printed; ends `wait_said` on all ranks."""
        self._board.ask(lambda store: store.set("said", "1"), None, ASK)

    def wait_said(self) -> bool:
        """Wait until a rank has called `set_said`, for a few seconds at most; return True if one has.

        Also return True if the store does not answer: a rank may have called it.
        """
        deadline = time.monotonic() + _COLLECT + ASK
        while time.monotonic() < deadline:
            if self._board.ask(partial(_get, "said"), b"", ASK):
                if self._rank == 0:
                    time.sleep(2 * TICK)  # the store ends with rank 0, and the other ranks still read it
                return True
            time.sleep(TICK / 5)
        return self._board.is_silent

    def find_neighbours(self) -> None:
        """Look up the processes of the ranks on this host, once all ranks have joined."""
        def find(store: Any) -> None:
            numbers = iter(store.get(self._host).split())
            self.neighbours = {int(rank): int(pid) for rank, pid in zip(numbers, numbers)}

        self._board.post(find)

    def states(self, world_size: int) -> dict[int, Any]:
        """Return the states that ranks publish after the last `ask` or `fault`; None for a rank without one in time.

        If the store stops answering, return the states read until then.
        """
        if self._board.is_silent:
            return {}
        states: dict[int, Any] = dict.fromkeys(range(world_size))
        deadline = time.monotonic() + _COLLECT
        # Several ranks may announce a fault, and each adds FAULT. A state written after the first of them is enough.
        request = min(FAULT, self._board.ask(lambda store: store.add("asked", 0), 0, ASK))
        not_awaited = {self._rank, *halted(self.neighbours)}  # their states are looked for once
        while not self._board.is_silent:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                break
            for rank in [rank for rank, state in states.items() if state is None and rank != self._rank]:
                text = self._board.ask(partial(_get, f"state {rank}"), b"", seconds_left)
                state = json.loads(text) if text else None
                if state is not None and state["asked"] >= request:
                    states[rank] = state
            if all(state is not None or rank in not_awaited for rank, state in states.items()):
                break
            time.sleep(TICK / 5)
        return {rank: state for rank, state in states.items() if state is not None or not self._board.is_silent}

    def flush(self) -> None:
        """Wait a moment until all messages so far are sent."""
        self._board.ask(lambda store: None, None, ASK)

    def _count(self, increment: int) -> None:
        def count(store: Any) -> None:
            self.asked = store.add("asked", increment)

        self._board.post(count)


def _get(key: str, store: Any) -> bytes:
    """Return the value of a key, b"" if there is none."""
    return store.get(key) if store.check([key]) else b""


def _sockets() -> set[int]:
    """Return the file descriptors of this process that are sockets; an empty set without /proc."""
    descriptors = set()
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                descriptors.add(int(path.name))
    return descriptors
