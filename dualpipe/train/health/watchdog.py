"""The thread of a rank that looks after it while it trains: it takes signals, and tells and hears of lost ranks.

It holds no lock of training and takes part in no collective, so it goes on while the main thread waits for a rank that
will never come. Python's own signal handlers run on the main thread, between two of its instructions: not while that is
in a collective. So the numbers of signals come through a pipe, into which the interpreter writes them at once.

Ranks tell each other, by a `PeerStore`, that one of them is lost, which ends all, and that all shall write what they
do and wait for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dualpipe.runtime.device import flight_recorder
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.rank_process import ERROR_FILE, INTERRUPTED, RankInfo, leave_word
from dualpipe.runtime.recorder import Recorder
from dualpipe.train.health.diagnose import FOLDER, diagnose, halted, stack_file, state_file
from dualpipe.train.health.peer_store import ASK, FAULT, TICK, PeerStore
from dualpipe.train.health.signals import STOPPING

if TYPE_CHECKING:
    from torch.distributed import Store

_LAST_CHANCE = 2.0  # for the main thread to end by itself where a rank is lost
_LATE = 2.0  # beyond its limit, of a wait that does not end by itself
_FRAMES = 100  # a layer has 40, with those of torch
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
        # What opens a file, and what writes a state: either may hang with the disk.
        self._opening: threading.Thread | None = None
        self._writing: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._signals, out = os.pipe()
        os.set_blocking(out, False)
        self._out = out
        self._handlers: dict[int, Callable[[int], None]] = dict.fromkeys(map(int, STOPPING), self._asked_to_stop)
        self._handlers[signal.SIGUSR2] = self._asked_for_states
        self._handlers.setdefault(int(INTERRUPTED), lambda _: self._asked_to_stop(signal.SIGINT))
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
        if self._watching:
            if kind is not None:
                if lost := self._lost():  # the thread may not have looked since
                    self._tell(lost)
                elif ERROR_FILE not in os.environ:  # another rank may have told this one that it has lost one
                    self._store.put(json.dumps(self._state() | {"asked": FAULT}))
                self._store.flush()
            self._store.stop()
            if kind is None:
                if self._opening is not None:
                    self._opening.join(ASK)
                self._clear()

    def watch(self, store: Store | None, info: RankInfo, output: Path, *, patience: float, limit: float) -> None:
        """Tell and hear of other ranks by the store, and write states below `output`.

        patience: seconds in which nothing is begun or ended, until all write their states; limit: of a wait for another
        rank, which is lost then.
        """
        self._info, self._folder, self._patience, self._limit = info, output / FOLDER, patience, limit + _LATE
        self._store = PeerStore(store, info.rank)
        self._moved, self._progress = time.monotonic(), self.recorder.progress()
        self._clear()
        self._watching = True

    def _watch(self) -> None:
        """The thread."""
        while not self._ended.is_set():
            if select.select([self._signals], [], [], TICK)[0]:
                for number in os.read(self._signals, 64):
                    self._handlers.get(number, lambda _: None)(number)
            if self._watching:
                if self._opening is None and self.recorder.step:  # the folder is this run's alone, and all have met
                    self._opening = threading.Thread(target=self._dump_without_the_lock, daemon=True)
                    self._opening.start()
                    self._store.find_neighbours()
                self._look()

    def _look(self) -> None:
        """See how this rank and the others are."""
        now, asked = time.monotonic(), self._store.asked
        if (progress := self.recorder.progress()) != self._progress:
            self._progress, self._moved, self._reported = progress, now, False
        idle = now - self._moved
        if (lost := self._lost()) or asked >= FAULT:
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
        """Return the text about the first rank that did not come here; "" where all came."""
        return next((each.lost for each in self.recorder.threads() if each.lost), "")

    def _tell(self, lost: str) -> None:
        """Tell all ranks, once. Where no launcher reads the states, the first one says whom all wait for, and till then
        the others stay: what has started them ends all when one has gone, and the store goes with rank 0."""
        if not self._told:
            self._told = True
            self._store.fault()
            self._store.flush()  # a state says how often was asked before it
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
            self._writing.join(ASK)

    def _to_folder(self, state: str) -> None:
        with suppress(OSError):
            file, stacks = (of(self._folder, self._info.rank) for of in (state_file, stack_file))
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(file, state, flush=False)
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


def _frames(frame: Any) -> list[str]:
    """The innermost frames of a thread, without their lines, as a disk may be what hangs."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return [f"{each.filename}:{each.lineno} in {each.name}" for each in reversed(stack[:_FRAMES])]


def _noted(number: int, frame: object) -> None:
    """Handle a signal by nothing: the thread hears of it through the pipe."""
