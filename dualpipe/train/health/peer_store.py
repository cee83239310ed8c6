"""Messages between the watchdogs of a job's ranks, through the job's store and apart from collectives.

They use a board of their own: its thread may hang with the host of the store.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from dualpipe.runtime.ranks.board import Board
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
        neighbours: process ids of the ranks on this host, by rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.asked = 0
        self.neighbours: dict[int, int] = {}
        self._rank = rank
        self._host = f"host {socket.gethostname()}"
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
        """Look for requests and faults of other ranks every `ASK` seconds; does not wait for the answer."""
        now = time.monotonic()
        if now - self._last_read >= ASK and self.asked < FAULT:
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
