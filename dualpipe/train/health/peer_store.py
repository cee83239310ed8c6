"""Messages between the ranks of a job beside their collectives, by the job's store.

Over a connection of its own, on a thread of its own: a call may hang with the host of the store.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from dualpipe.train.health.diagnose import halted

FAULT = 2**32  # of the counter in the store: a rank is lost; what is less is how often states were asked for
TICK, ASK = 0.25, 1.0  # seconds between two looks at this rank, and into the store
_ANSWER = timedelta(seconds=5)  # for one of the store
_COLLECT = 3.0  # for other ranks to write their states


class PeerStore:
    """A rank's messages to the others, and theirs. store: the job's, None where the rank is the only one. No
    method waits for long, or raises for a store that is gone.

    asked: how often states were asked for, as far as this rank has heard, and `FAULT` more where a rank is lost;
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
        self._call(lambda: self._count(FAULT))

    def put(self, state: str) -> None:
        """Hand in this rank's state."""
        self._call(lambda: self._store.set(f"state {self._rank}", state))

    def is_first(self, what: str) -> bool:
        """Return True if no other rank has asked so before; where the store is silent, if none of this host has."""
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
        deadline = time.monotonic() + _COLLECT + ASK
        while time.monotonic() < deadline:
            if self._answer(lambda: self._get("said"), b""):
                time.sleep(2 * TICK * (self._rank == 0))  # with which the store goes that the others still ask
                return True
            time.sleep(TICK / 5)
        return self._silent

    def find_neighbours(self) -> None:
        """Learn the processes of this host's ranks, which have all met."""
        def find() -> None:
            words = iter(self._store.get(self._host).split())
            self.neighbours = {int(rank): int(process) for rank, process in zip(words, words)}

        self._call(find)

    def states(self, world_size: int) -> dict[int, Any]:
        """The states that ranks hand in after the last `ask` or `fault`, None of those that do not in time. Where the
        store goes before, those that it has given until then."""
        if self._silent:
            return {}
        found: dict[int, Any] = dict.fromkeys(range(world_size))
        deadline = time.monotonic() + _COLLECT
        wanted = min(FAULT, self._answer(lambda: self._store.add("asked", 0), 0))  # several ranks tell of a fault
        dumb = {self._rank, *halted(self.neighbours)}  # what these have handed in is looked for once
        while (left := deadline - time.monotonic()) > 0 and not self._silent:
            for rank in [rank for rank, state in found.items() if state is None and rank != self._rank]:
                text = self._answer(partial(self._get, f"state {rank}"), b"", left)
                if text and (state := json.loads(text))["asked"] >= wanted:
                    found[rank] = state
            if all(state is not None or rank in dumb for rank, state in found.items()):
                break
            time.sleep(TICK / 5)
        return {rank: state for rank, state in found.items() if state is not None or not self._silent}

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

    def _answer(self, call: Callable[[], Any], default: Any, seconds: float = ASK) -> Any:
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
                    self._calls.get(timeout=ASK)()
                if time.monotonic() - heard >= ASK and self.asked < FAULT and not self._closed():
                    self._count(0)
                    heard = time.monotonic()
                self._silent = False
        self.gone = self.gone or time.monotonic()
        self._silent = True

    def _closed(self) -> bool:
        """Return True if the store's process has ended: torch would log a stack for a call."""
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


def _stop() -> None:
    raise RuntimeError("the end of the thread")
