"""A failure on one rank ends a step on all: the cause is published, then the process groups are ended.

A rank that fails publishes the cause in the job's store and hangs up: it ends the process groups that its peers may
wait in. With gloo its connections close, with NCCL its communicators are aborted; the peers' waits end with an error.
They find the published cause, hang up in turn, for those who wait for them, and raise. A rank whose process died
publishes nothing: those that waited for it name it, after a moment in which the cause may come.

Nothing is sent after a failure, so no message can meet a receive that was posted for another. Groups that have ended
cannot be used again.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dualpipe.runtime.background import run_with_timeout
from dualpipe.runtime.errors import PipelineError, RankLost, describe_error, names_ranks
from dualpipe.runtime.ranks.process_groups import backends
from dualpipe.runtime.recorder import Recorder

# Seconds in which the cause is awaited, after a connection has closed or a wait has timed out: ranks that wait for one
# another time out one after the other.
GRACE = 0.5
ANSWER = 2.0  # seconds that the store has for an answer
WATCH = 0.25  # seconds between two looks of the watching thread
# Seconds between a failure and the end of gloo's connections, in which messages on their way arrive. gloo (torch 2.13)
# never wakes a wait for a message that is partly written or read when its connection closes.
_LINGER = 0.02
_POLL = 0.02  # seconds between two looks where the cause is awaited
_NEVER_SENT = 16  # gloo's tag, of a message that is waited for in vain on purpose
_LONGEST = 20_000  # characters of a cause


T = TypeVar("T")


class Cause(NamedTuple):
    """Why a step ended. is_loss: a rank did not come or has left, and published nothing itself."""

    text: str
    is_loss: bool = False


class FailureBoard:
    """The place in the job's store where ranks publish why a step ended.

    store: returns the store, at the first failure: a connection that is opened only then. key: common to all ranks that
    share a process group, and new for each pipeline. No call waits for a store that does not answer: the rank that has
    it may be the one that stopped.
    """

    def __init__(self, store: Callable[[], dist.Store], key: str) -> None:
        self._open = store
        self._key = f"dualpipe/failure/{key}"
        self._opened: dist.Store | None = None
        self._is_silent = False

    def publish(self, cause: Cause) -> Cause:
        """Publish a cause, and return the first that was published; this one where the store does not answer."""
        record = json.dumps(cause)
        first = self._ask(lambda store: store.compare_set(self._key, "", record))
        return cause if first is None else Cause(*json.loads(first))

    def cause(self) -> Cause | None:
        """Return the published cause, or None."""
        record = self._ask(lambda store: store.get(self._key) if store.check([self._key]) else None)
        return None if record is None else Cause(*json.loads(record))

    def say_waiting(self, rank: int) -> None:
        """Say that a rank is alive and has lost those it waited for."""
        self._ask(lambda store: store.set(f"{self._key}/waiting/{rank}", "yes"))

    def are_waiting(self, ranks: Iterable[int]) -> bool:
        """Return True if any of these ranks is alive and has lost others itself."""
        keys = [f"{self._key}/waiting/{rank}" for rank in ranks]
        return bool(self._ask(lambda store: any(store.check([key]) for key in keys)))

    def is_answered(self) -> bool:
        """Return True as long as the store has answered."""
        return not self._is_silent

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """Return what the store answers; None where it does not, and from then on."""
        if self._is_silent:
            return None

        def ask() -> tuple[T]:
            if self._opened is None:
                self._opened = self._open()
            return (question(self._opened),)

        answer = None
        with suppress(Exception):  # the store is gone
            answer = run_with_timeout(ask, ANSWER, "failure board")
        self._is_silent = answer is None
        return None if answer is None else answer[0]


class StepFailure:
    """Ends a step, and the process groups that it uses, where it fails on this rank or on another.

    groups: all process groups in which ranks of the step wait for this one.
    """

    def __init__(self, board: FailureBoard, groups: Iterable[ProcessGroup | None]) -> None:
        self._board = board
        self._groups = [group for group in dict.fromkeys(groups) if group is not None and group.size() > 1]
        self._cause: Cause | None = None
        self._lock = threading.Lock()
        if any("nccl" in backends(group).values() for group in self._groups if isinstance(group, ProcessGroup)):
            # The host may wait for a device that waits for a rank that has failed.
            watch(self, board)

    @property
    def has_peers(self) -> bool:
        """Return True if other ranks take part in the steps."""
        return bool(self._groups)

    def check(self) -> None:
        """Raise PipelineError if an earlier step has failed."""
        if self._cause is not None:
            raise PipelineError("an earlier step failed and ended the pipeline's process groups; start the processes "
                                f"again. It failed with: {self._cause.text}", is_loss=True)

    @contextmanager
    def ending_step(self, running: Callable[[], str]) -> Iterator[None]:
        """End the step on all ranks where what is done inside fails; raise PipelineError, naming the rank.

        running: returns the error prefix that names the running action. An interrupt goes on as itself.
        """
        try:
            yield
        except BaseException as raised:
            error = raised
        else:
            return
        try:
            cause, is_own = self._end(error, running)
            if not isinstance(error, Exception):
                raise error
            # A rank that was lost is no error of this rank's, but says how long it was waited for.
            is_told = is_own or isinstance(error, RankLost)
            raise PipelineError(cause.text, is_loss=cause.is_loss) from (error if is_told else None)
        finally:
            del error  # this frame is in its traceback: the cycle would keep all tensors of the step

    def _end(self, error: BaseException, running: Callable[[], str]) -> tuple[Cause, bool]:
        """Hang up; return the cause, and whether it is this rank's."""
        recorder = Recorder.current()
        if isinstance(error, RankLost) and self.has_peers:
            cause = self._cause_of_loss(error, recorder)
            return cause, False
        text = str(error) if names_ranks(error) else (
            f"{recorder.name(recorder.rank)}: {running()}{describe_error(error)}")
        own = Cause(text[:_LONGEST])
        cause = self._board.publish(own) if self.has_peers else own
        self.hang_up(cause)
        return cause, cause == own

    def _cause_of_loss(self, error: RankLost, recorder: Recorder) -> Cause:
        """Return why those that this rank waited for have left, and hang up."""
        cause = self._board.cause()
        self.hang_up(cause or Cause(str(error), is_loss=True))
        if cause is None:
            self._board.say_waiting(recorder.rank)
            cause = self._await_cause(GRACE)
        if cause is None and self._board.are_waiting(error.ranks):
            cause = self._await_cause(GRACE)  # they know better, as they are no cause
        if cause is None:
            cause = self._board.publish(Cause(f"{recorder.name(recorder.rank)}: {error}", is_loss=True))
        self._cause = cause
        return cause

    def _await_cause(self, seconds: float) -> Cause | None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            cause = self._board.cause()
            if cause is not None:
                return cause
            time.sleep(_POLL)
        return None

    def hang_up(self, cause: Cause) -> None:
        """End the process groups: peers that wait in them for this rank raise at once."""
        with self._lock:
            if self._cause is not None or not self.has_peers:
                return
            self._cause = cause
            hang_up(self._groups)


def watch(failure: StepFailure, board: FailureBoard) -> None:
    """Have a thread hang up when another rank publishes a cause, so that waits of the host for the device end.

    It ends with `failure`, with the store, or with the process: a thread that is inside a call of the store when Python
    is finalized would abort the process.
    """
    ended = threading.Event()
    reference = weakref.ref(failure, lambda _: ended.set())

    def look() -> None:
        while not ended.wait(WATCH) and board.is_answered():
            cause = board.cause()
            watched = reference()
            if cause is not None and watched is not None:
                watched.hang_up(cause)
                return
            del watched

    thread = threading.Thread(target=look, name="failure watch", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join(ANSWER)

    atexit.register(end)


def hang_up(groups: Iterable[ProcessGroup]) -> None:
    """End groups after a failure of this rank alone, so that a rank which waits there raises now, not at its timeout.

    NCCL's communicator is aborted on this rank.
    """
    time.sleep(_LINGER)
    for group in groups:
        if not isinstance(group, ProcessGroup):
            group.abort()  # a stand-in of the tests
            continue
        with suppress(Exception):  # it has ended already
            if "nccl" in backends(group).values():
                group.abort()
        if "cpu" in backends(group):
            _close_connections(group)


def _close_connections(group: ProcessGroup) -> None:
    """Close the connections of a gloo group, whose `abort` does nothing (torch 2.13).

    gloo closes all connections of a group where a wait times out: here one of a millisecond, for a message that nobody
    sends. A connection that has closed already fails at once and closes no other, so each peer is tried.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(Exception):
                nothing = torch.empty(8, dtype=torch.uint8, device="cpu")
                group.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def default_store(group: ProcessGroup | None) -> dist.Store:
    """Return the store of the job by a new connection; one of this process where there is no job."""
    if group is None:
        return dist.HashStore()
    default: Any = dist.distributed_c10d._get_default_store()
    return default.clone()
