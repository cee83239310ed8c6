"""The thread of a rank that looks after it while it trains: it takes signals, and tells and hears of lost ranks.

It holds no lock of training and takes part in no collective, so it goes on while the main thread waits for a rank that
will never come. Python's own signal handlers run on the main thread, between two of its instructions: not while that is
in a collective. So the numbers of signals come through a pipe, into which the interpreter writes them at once.

Ranks tell each other by the job's store, over a connection of a thread of its own, as its calls may hang with rank 0's
host: that one of them is lost, which ends all, and that all shall write what they do and wait for.
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
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from dualpipe.device import flight_recorder
from dualpipe.recorder import Recorder
from dualpipe.train.launch import ERROR_FILE, RankInfo, leave_word
from dualpipe.train.why import FOLDER, diagnose, halted, stack_file, state_file

if TYPE_CHECKING:
    from torch.distributed import Store

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # after the step; the second one at once
_ANSWER = timedelta(seconds=5)  # for one of the store
_COLLECT = 1.5  # for other ranks to write their states
_LAST_CHANCE = 2.0  # for the main thread to end by itself where a rank is lost
_LATE = 2.0  # beyond its limit, of a wait that does not end by itself
_FAULT = 2**32  # of the counter in the store: a rank is lost; what is less is how often states were asked for
_FRAMES = 40
_TICK, _ASK = 0.25, 1.0  # seconds between two looks at this rank, and into the store
TOGETHER = 1.0  # seconds in which several count as one: a terminal tells ranks of Ctrl-C, and so does what started them


class Watchdog:
    """For a `with` around training, entered in the main thread; elsewhere it takes no signals.

    stop: the number of the first signal that asked for an end, 0 before.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.stop = recorder, 0
        self._ended = threading.Event()
        self._previous: dict[int, Any] = {}
        self._watching = False  # whether `watch` has said how
        self._told = False  # whether the others know that a rank is lost
        self._reported = False  # whether states were asked for since something was begun or ended
        self._asked = 0  # how often, by the store
        self._writing: threading.Thread | None = None  # what writes a state, which may hang with the disk

    def __enter__(self) -> Self:
        self._signals, out = os.pipe()
        os.set_blocking(out, False)
        self._out = out
        self._handlers: dict[int, Callable[[int], None]] = dict.fromkeys(map(int, STOPPING), self._asked_to_stop)
        self._handlers[signal.SIGUSR2] = self._asked_for_states
        if threading.current_thread() is threading.main_thread():
            for number in self._handlers:
                # One that is ignored stays so: of a rank Ctrl-C is for the launcher, of `nohup` SIGHUP for nobody.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, _noted)
            self._wakeup = signal.set_wakeup_fd(out, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
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
        os.close(self._out)
        if kind is not None and (lost := self._lost()):  # the thread may not have looked since
            self._tell(lost)
            self._store.flush()
        if self._watching:
            self._store.stop()
            if kind is None:
                self._clear()

    def watch(self, store: Store | None, info: RankInfo, output: Path, *, patience: float, limit: float) -> None:
        """Tell and hear of other ranks by the store, and write states below `output`.

        patience: seconds in which nothing is begun or ended, until all write their states; limit: of a wait for another
        rank, which is lost then.
        """
        self._info, self._folder, self._patience, self._limit = info, output / FOLDER, patience, limit + _LATE
        self._store = _Store(store, info.rank)
        self._moved, self._progress = time.monotonic(), self.recorder.progress()
        self._clear()
        self._watching = True

    def _watch(self) -> None:
        """The thread."""
        dumping = False
        while not self._ended.is_set():
            if select.select([self._signals], [], [], _TICK)[0]:
                for number in os.read(self._signals, 64):
                    self._handlers.get(number, lambda _: None)(number)
            if self._watching:
                if not dumping and self.recorder.step:  # now the folder is this run's alone, and all have met
                    dumping = True
                    self._dump_without_the_lock()
                    self._store.find_neighbours()
                self._look()

    def _look(self) -> None:
        """See how this rank and the others are."""
        now, asked = time.monotonic(), self._store.asked
        if (progress := self.recorder.progress()) != self._progress:
            self._progress, self._moved, self._reported = progress, now, False
        idle = now - self._moved
        if (lost := self._lost()) or asked >= _FAULT:
            self._leave(lost)
        elif idle > self._limit and (entry := self._innermost()).get("ranks") and entry["kind"] != "save":
            # It does not end by itself, as others' do. That of a save goes by the progress of all ranks.
            others = ", ".join(self.recorder.name(rank) for rank in entry["ranks"] if rank != self._info.rank)
            self._leave(f"waited {entry['seconds']:.3g} s for {entry['what']} from {others}")
        elif self._store.gone and now - self._store.gone > self._limit:
            self._leave("the store of the job is gone, with rank 0, and this rank goes on")
        elif asked > self._asked:
            self._asked = asked
            self._reported |= idle > self._patience / 2  # the one that asked says what there is to say
            self._write_state()
        elif idle > self._patience and self.recorder.depth and not self._reported:
            self._reported = True
            self._write_state()
            if self._store.is_first(f"stall {asked}"):
                self._store.ask()
                self._say(f"watchdog: nothing has gone on for {idle:.0f} s: ")

    # -- signals

    def _asked_to_stop(self, number: int) -> None:
        if not self.stop:
            self.stop, self._one_until = number, time.monotonic() + TOGETHER
        elif time.monotonic() > self._one_until:
            os._exit(128 + number)

    def _asked_for_states(self, number: int) -> None:
        if self._watching:
            self._write_state()
            self._store.ask()

    def _dump_without_the_lock(self) -> None:
        """Have SIGUSR2 write Python stacks too where the thread cannot, because an extension holds Python's lock."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            stacks = stack_file(self._folder, self._info.rank).open("a")  # for as long as it lives
            faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=True)

    # -- a rank is lost

    def _lost(self) -> str:
        """What is said of the first rank that did not come here."""
        return next((each.lost for each in self.recorder.threads() if each.lost), "")

    def _tell(self, lost: str) -> None:
        """Tell all ranks, once. Where no launcher reads the states, the first one says whom all wait for, and till then
        the others stay: what has started them ends all when one has gone, and the store goes with rank 0."""
        if not self._told:
            self._told = True
            self._store.fault()
            self._write_state()
            if ERROR_FILE in os.environ:
                return
            is_first = bool(lost) and self._store.is_first("fault")
            if is_first or (not self._store.wait_said() and lost):
                self._say("error: ")
                self._store.set_said()

    def _leave(self, lost: str) -> None:
        """End this process, unless the main thread does so by itself."""
        deadline = time.monotonic() + _LAST_CHANCE
        self._tell(lost)
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            leave_word(f"error: {lost}" if lost else "", 1, lost=True)
            os._exit(1)

    # -- states

    def _innermost(self) -> dict[str, Any]:
        return next(reversed(self.recorder.state()["open"]), {})

    def _state(self) -> dict[str, Any]:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {names.get(ident, f"{ident}"): _frames(frame) for ident, frame in sys._current_frames().items()}
        return self.recorder.state() | {
            "world_size": self._info.world_size, "asked": self._store.asked, "stacks": stacks,
            "flight": flight_recorder(), "halted": halted(self._store.neighbours),
        }

    def _write_state(self) -> None:
        """To the store, and to the folder, as far as that can be written; without waiting for a disk that hangs."""
        state = json.dumps(self._state())
        self._store.put(state)
        if self._writing is None or not self._writing.is_alive():
            self._writing = threading.Thread(target=self._to_folder, args=(state,), name="watchdog's disk", daemon=True)
            self._writing.start()
            self._writing.join(_ASK)

    def _to_folder(self, state: str) -> None:
        with suppress(OSError):
            file, stacks = (of(self._folder, self._info.rank) for of in (state_file, stack_file))
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".tmp")
            temporary.write_text(state)  # not flushed
            os.replace(temporary, file)
            if stacks.exists():
                os.truncate(stacks, 0)  # the state has them

    def _say(self, first: str) -> None:
        """Print what the states of all ranks tell, once they have been written."""
        states = self._store.states(self._info.world_size) | {self._info.rank: self._state()}
        print(first + "\n".join(diagnose(states).lines), file=sys.stderr, flush=True)

    def _clear(self) -> None:
        """Take away what an earlier run of this rank has left, or this one, which has ended well."""
        with suppress(OSError):
            for file in (state_file(self._folder, self._info.rank), stack_file(self._folder, self._info.rank)):
                file.unlink(missing_ok=True)
            self._folder.rmdir()  # by the last one


class _Store:
    """What ranks tell each other by the job's store, over a connection of its own, on a thread of its own: a call may
    hang with the store's host. None of these methods does, or raises for a store that is gone.

    asked: how often states were asked for, as far as this rank has heard, and `_FAULT` more where a rank is lost;
    gone: since when it is, with rank 0 (time.monotonic), 0 while it is there; neighbours: the processes of the ranks on
    this host.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.asked, self.gone, self.neighbours, self._silent = 0, 0.0, dict[int, int](), store is None
        self._rank, self._host = rank, f"host {socket.gethostname()}"
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._store = store
        if self._store is not None:
            before = _sockets()
            self._store = self._store.clone()
            self._socket = next((socket.socket(fileno=os.dup(each)) for each in _sockets() - before), None)
            self._store.set_timeout(_ANSWER)
            self._call(lambda: self._store.append(self._host, f"{rank} {os.getpid()} "))
            threading.Thread(target=self._work, name="watchdog's store", daemon=True).start()

    def ask(self) -> None:
        """Have all ranks write their states."""
        self._call(lambda: self._count(1))

    def fault(self) -> None:
        """Tell all that a rank is lost."""
        self._call(lambda: self._count(_FAULT))

    def put(self, state: str) -> None:
        """Hand in this rank's state."""
        self._call(lambda: self._store.set(f"state {self._rank}", state))

    def is_first(self, what: str) -> bool:
        """Whether no other rank has asked so before; where the store says nothing, whether none on this host is."""
        number = self._answer(lambda: self._store.add(what, 1), 0)
        if number or self.gone:
            return number == 1
        return self._rank == min(self.neighbours.keys() - halted(self.neighbours), default=self._rank)

    def set_said(self) -> None:
        """Let `wait_said` end on all ranks."""
        self._answer(lambda: self._store.set("said", "1"), None)

    def wait_said(self) -> bool:
        """Wait for a rank to call `set_said`, for as long as that may take; whether one may have: a store that is gone
        does not tell."""
        deadline = time.monotonic() + _COLLECT + _ASK
        while time.monotonic() < deadline:
            if self._answer(lambda: self._get("said"), b""):
                time.sleep(2 * _TICK * (self._rank == 0))  # with which the store goes that the others still ask
                return True
            time.sleep(_TICK / 5)
        return self._silent

    def find_neighbours(self) -> None:
        """Learn the processes of this host's ranks, which have all met."""
        def find() -> None:
            words = iter(self._store.get(self._host).split())
            self.neighbours = {int(rank): int(process) for rank, process in zip(words, words)}

        self._call(find)

    def states(self, world_size: int) -> dict[int, Any]:
        """The states that ranks hand in after the last `ask` or `fault`, None of those that do not in time."""
        if self._silent:
            return {}
        found: dict[int, Any] = dict.fromkeys(range(world_size))
        deadline = time.monotonic() + _COLLECT
        wanted = self._answer(lambda: self._store.add("asked", 0), 0)
        while (left := deadline - time.monotonic()) > 0 and None in found.values() and not self._silent:
            for rank in [rank for rank, state in found.items() if state is None and rank != self._rank]:
                text = self._answer(partial(self._get, f"state {rank}"), b"", left)
                if text and (state := json.loads(text))["asked"] >= wanted:
                    found[rank] = state
            time.sleep(_TICK / 5)
        return {} if self._silent else found

    def _get(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def flush(self) -> None:
        """Wait for what was to be told, a moment."""
        self._answer(int, 0)

    def stop(self) -> None:
        """Ask for nothing any more."""
        self._call(_stop)

    def _count(self, more: int) -> None:
        self.asked = self._store.add("asked", more)

    def _call(self, call: Callable[[], object]) -> None:
        if self._store is not None:
            self._calls.put(call)

    def _answer(self, call: Callable[[], Any], default: Any, seconds: float = _ASK) -> Any:
        if self._silent:
            return default
        answers: SimpleQueue[Any] = SimpleQueue()
        self._call(lambda: answers.put(call()))
        try:
            return answers.get(timeout=seconds)
        except Empty:
            self._silent = True  # waited for once, not for every question
            return default

    def _work(self) -> None:
        """The thread."""
        with suppress(RuntimeError):
            heard = 0.0
            while not self._closed():
                with suppress(Empty):
                    self._calls.get(timeout=_ASK)()
                if time.monotonic() - heard >= _ASK and self.asked < _FAULT and not self._closed():
                    self._count(0)
                    heard = time.monotonic()
                self._silent = False
        self.gone = self.gone or time.monotonic()
        self._silent = True

    def _closed(self) -> bool:
        """Whether the store's process has ended: torch would log a stack for a call."""
        try:
            return self._socket is not None and not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _sockets() -> set[int]:
    """The descriptors of this process that are sockets, where the system tells."""
    found = set()
    for each in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            if os.readlink(each).startswith("socket:"):
                found.add(int(each.name))
    return found


def _frames(frame: Any) -> list[str]:
    """The innermost frames of a thread, without their lines, as a disk may be what hangs."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return [f"{each.filename}:{each.lineno} in {each.name}" for each in reversed(stack[:_FRAMES])]


def _stop() -> None:
    raise RuntimeError("the end of the thread")


def _noted(number: int, frame: object) -> None:
    """What a handler does: the thread hears of the signal through the pipe."""
