"""The board of a job: its store, in which ranks read and write entries for each other apart from all collectives.

A call of the store may hang with the rank that hosts it, which may be the one that stopped. So a thread of its own
makes the calls of a board.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch.distributed import Store

ANSWER = 2.0  # seconds that the store has for an answer
# Maximum of regular requests a second of all ranks together, for one purpose. Rank 0 spends about 10 us of a core on
# each.
_STEADY_LOAD = 5000
_IDLE = 3.0  # seconds without requests after which the thread ends

T = TypeVar("T")


def request_interval(seconds: float, num_ranks: int) -> float:
    """Return the seconds between two regular requests of a rank: `seconds`, or more in a job of thousands of ranks."""
    return max(seconds, num_ranks / _STEADY_LOAD)


class _Request(NamedTuple):
    """A call that gets the store, and its answer."""

    call: Callable[[Any], Any]
    answer: Future[Any]


class Board:
    """A connection of one rank to the job's store.

    No method waits for long, or raises if the store is gone.

    Args:
        open_store: opens a connection that nothing else uses; called at the first request. None: a job of one rank,
            whose board never answers.
        connection: the socket of the connection, if it is known: its end is noticed without a call.

    Attributes:
        is_silent: the store has not answered a request in time. Requests do not wait any more until it answers one.
        gone: time (time.monotonic) when the store, which ends with its host, was found gone. 0: it exists.
    """

    def __init__(self, open_store: Callable[[], Store] | None, connection: socket.socket | None = None) -> None:
        self.is_silent = open_store is None
        self.gone = 0.0
        self._open_store = open_store
        self._connection = connection
        self._store: Store | None = None
        self._requests: SimpleQueue[_Request] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of `_thread`

    def post(self, call: Callable[[Any], T]) -> Future[T]:
        """Queue a call that gets the store; return its answer. Calls are made in their order."""
        answer: Future[T] = Future()
        if self._open_store is None or self.gone:
            return answer
        self._requests.put(_Request(call, answer))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="board", daemon=True)
                self._thread.start()
        return answer

    def ask(self, call: Callable[[Any], T], default: T, seconds: float | None = None) -> T:
        """Return the answer of a call, or `default` if it takes longer than `seconds` (default: ANSWER)."""
        if self.is_silent:
            return default
        try:
            return self.post(call).result(ANSWER if seconds is None else seconds)
        except Exception:  # no answer in time, or the store is gone
            self.is_silent = True
            return default

    def _work(self) -> None:
        """Make the calls until there are none for a while, or the store is gone (the thread's function)."""
        while not self._is_closed():
            try:
                request = self._requests.get(timeout=_IDLE)
            except Empty:
                with self._lock:
                    if self._requests.empty():
                        self._thread = None
                        return
                continue
            self._answer(request)
        self._end()

    def _answer(self, request: _Request) -> None:
        """Make a call. An error of it means that the store is gone."""
        if self._is_closed():
            self._end()
            request.answer.cancel()
            return
        try:
            if self._store is None:
                assert self._open_store is not None, "nothing is queued without a store"
                self._store = self._open_store()
            answer = request.call(self._store)
        except Exception as error:
            self._end()
            request.answer.set_exception(error)
            return
        self.is_silent = False
        request.answer.set_result(answer)

    def _end(self) -> None:
        """Record that the store is gone; nobody waits for an answer any more."""
        self.gone = self.gone or time.monotonic()
        self.is_silent = True
        with suppress(Empty):
            while True:
                self._requests.get_nowait().answer.cancel()

    def _is_closed(self) -> bool:
        """Return True if the store is gone: torch would log a stack for a call of one whose process has ended."""
        if self.gone:
            return True
        try:
            peeked = socket.MSG_PEEK | socket.MSG_DONTWAIT
            return self._connection is not None and not self._connection.recv(1, peeked)
        except BlockingIOError:
            return False
        except OSError:
            return True
