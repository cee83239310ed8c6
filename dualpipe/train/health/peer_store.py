"""Messages between the watchdogs of a job's ranks, through the job's store and apart from collectives.

They use a connection and a thread of their own: a call may hang with the host of the store.
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

FAULT = 2**32  # added to the counter in the store when a rank is lost; a request for states adds 1
TICK = 0.25  # seconds between two checks of this rank
ASK = 1.0  # seconds between two reads of the store
_ANSWER = timedelta(seconds=5)  # for an answer of the store
_COLLECT = 3.0  # seconds for other ranks to write their states


class PeerStore:
    """A rank's messages to the watchdogs of the other ranks, and theirs to it.

    No method waits for long, or raises if the store is gone.

    Args:
        store: of the job; None for a single rank.

    Attributes:
        asked: number of requests for states that this rank knows of, plus `FAULT` if a rank is lost.
        gone: time (time.monotonic) when the store, which ends with rank 0, was found gone. 0: it exists.
        neighbours: process ids of the ranks on this host, by rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.asked = 0
        self.gone = 0.0
        self.neighbours: dict[int, int] = {}
        self._rank = rank
        self._is_silent = store is None  # the store does not answer
        self._host = f"host {socket.gethostname()}"
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._store = store
        if self._store is not None:
            sockets_before = _sockets()
            self._store = self._store.clone()
            new_sockets = _sockets() - sockets_before
            self._socket = next((socket.socket(fileno=os.dup(number)) for number in new_sockets), None)
            self._store.set_timeout(_ANSWER)
            self._call(lambda: self._store.append(self._host, f"{rank} {os.getpid()} "))
            threading.Thread(target=self._work, name="watchdog's store", daemon=True).start()

    def ask(self) -> None:
        """Request the states of all ranks."""
        self._call(lambda: self._count(1))

    def fault(self) -> None:
        """Announce that a rank is lost."""
        self._call(lambda: self._count(FAULT))

    def put(self, state: str) -> None:
        """Publish this rank's state."""
        self._call(lambda: self._store.set(f"state {self._rank}", state))

    def is_first(self, event: str) -> bool:
        """Return True if no other rank has called this for `event`.

        If the store does not answer, return True on one rank of each host.
        """
        number = self._answer(lambda: self._store.add(event, 1), 0)
        if number or self.gone:
            return number == 1
        return self._rank == min(self.neighbours.keys() - halted(self.neighbours), default=self._rank)

    def set_said(self) -> None:
        """Announce that the diagnosis is printed; ends `wait_said` on all ranks."""
        self._answer(lambda: self._store.set("said", "1"), None)

    def wait_said(self) -> bool:
        """Wait until a rank has called `set_said`, for a few seconds at most; return True if one has.

        Also return True if the store does not answer: a rank may have called it.
        """
        deadline = time.monotonic() + _COLLECT + ASK
        while time.monotonic() < deadline:
            if self._answer(lambda: self._get("said"), b""):
                if self._rank == 0:
                    time.sleep(2 * TICK)  # the store ends with rank 0, and the other ranks still read it
                return True
            time.sleep(TICK / 5)
        return self._is_silent

    def find_neighbours(self) -> None:
        """Look up the processes of the ranks on this host, once all ranks have joined."""
        def find() -> None:
            numbers = iter(self._store.get(self._host).split())
            self.neighbours = {int(rank): int(pid) for rank, pid in zip(numbers, numbers)}

        self._call(find)

    def states(self, world_size: int) -> dict[int, Any]:
        """Return the states that ranks publish after the last `ask` or `fault`; None for a rank without one in time.

        If the store stops answering, return the states read until then.
        """
        if self._is_silent:
            return {}
        states: dict[int, Any] = dict.fromkeys(range(world_size))
        deadline = time.monotonic() + _COLLECT
        # Several ranks may announce a fault, and each adds FAULT. A state written after the first of them is enough.
        request = min(FAULT, self._answer(lambda: self._store.add("asked", 0), 0))
        not_awaited = {self._rank, *halted(self.neighbours)}  # their states are looked for once
        while not self._is_silent:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                break
            for rank in [rank for rank, state in states.items() if state is None and rank != self._rank]:
                text = self._answer(partial(self._get, f"state {rank}"), b"", seconds_left)
                state = json.loads(text) if text else None
                if state is not None and state["asked"] >= request:
                    states[rank] = state
            if all(state is not None or rank in not_awaited for rank, state in states.items()):
                break
            time.sleep(TICK / 5)
        return {rank: state for rank, state in states.items() if state is not None or not self._is_silent}

    def _get(self, key: str) -> bytes:
        """Return the value of a key, b"" if there is none."""
        return self._store.get(key) if self._store.check([key]) else b""

    def flush(self) -> None:
        """Wait a moment until all messages so far are sent."""
        self._answer(int, 0)

    def stop(self) -> None:
        """End the thread."""
        self._call(_stop)

    def _count(self, increment: int) -> None:
        self.asked = self._store.add("asked", increment)

    def _call(self, call: Callable[[], object]) -> None:
        """Queue a call for the thread."""
        if self._store is not None:
            self._calls.put(call)

    def _answer(self, call: Callable[[], Any], default: Any, seconds: float = ASK) -> Any:
        """Return the result of a call on the thread, or `default` if it takes longer than `seconds`."""
        if self._is_silent:
            return default
        answers: SimpleQueue[Any] = SimpleQueue()
        self._call(lambda: answers.put(call()))
        try:
            return answers.get(timeout=seconds)
        except Empty:
            self._is_silent = True  # later calls do not wait
            return default

    def _work(self) -> None:
        """Run the calls and read the counter (the thread's function)."""
        with suppress(RuntimeError):
            last_read = 0.0
            while not self._is_closed():
                with suppress(Empty):
                    self._calls.get(timeout=ASK)()
                if time.monotonic() - last_read >= ASK and self.asked < FAULT and not self._is_closed():
                    self._count(0)
                    last_read = time.monotonic()
                self._is_silent = False
        self.gone = self.gone or time.monotonic()
        self._is_silent = True

    def _is_closed(self) -> bool:
        """Return True if the store's process has ended; torch would log a stack for a call then."""
        try:
            return self._socket is not None and not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _sockets() -> set[int]:
    """Return the file descriptors of this process that are sockets; an empty set without /proc."""
    descriptors = set()
    for path in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                descriptors.add(int(path.name))
    return descriptors


def _stop() -> None:
    raise RuntimeError("the thread ends")
