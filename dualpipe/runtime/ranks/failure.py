"""End of a step on all ranks after a failure on one: publish the cause, then end the process groups.

A rank that fails publishes the cause in the job's store and hangs up: it ends the process groups in which its peers may
wait. With gloo its connections close, with NCCL its communicators are aborted, and the peers' waits end with an error.
The peers read the published cause, hang up in turn, which ends the waits of their own peers, and raise. A rank whose
process died publishes nothing: its peers wait a moment for a cause, then name the dead rank.

Nothing is sent after a failure, so no receive can get a message that was meant for another receive. Ended groups cannot
be used again.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dualpipe.runtime.errors import PipelineError, RankLost, Wait, describe_error, names_ranks
from dualpipe.runtime.ranks.board import ANSWER, Board, request_interval
from dualpipe.runtime.ranks.process_groups import backends, connected_ranks
from dualpipe.runtime.recorder import Recorder

# Seconds to wait for a cause after a connection has closed or a wait has timed out. Ranks that wait in a chain do not
# time out together, but one after another.
GRACE = 0.5
WATCH = 0.25  # seconds between two reads of the store by the watching thread, if ranks are few
# Seconds between a failure and the end of gloo's connections, in which messages in flight arrive. gloo (torch 2.13)
# never wakes a wait for a message that is partly written or read when its connection closes.
_LINGER = 0.02
_POLL = 0.02  # seconds between two reads of the store in a wait for a cause
_NEVER_SENT = 16  # gloo tag of a message that no rank sends
_MAX_LENGTH = 20_000  # characters of a cause


class Cause(NamedTuple):
    """Cause of the end of a step.

    is_loss: a rank did not reach a communication in time or has left, and published no cause itself.
    wait: the wait that ended with the loss.
    """

    text: str
    is_loss: bool = False
    wait: Wait | None = None

    @classmethod
    def of_json(cls, record: str | bytes) -> Cause:
        """Read a cause that was written as JSON."""
        text, is_loss, wait = json.loads(record)
        return cls(text, is_loss, None if wait is None else Wait(*wait))


class FailureBoard:
    """Entries on the job's board by which ranks publish the cause of the end of a step.

    Args:
        board: is asked at the first failure, or by `watch`.
        key: the same on all ranks that share a process group, such as a pipeline and its replicas; another `Pipeline`
            has another key.
    """

    def __init__(self, board: Board, key: str) -> None:
        self._board = board
        self._key = f"dualpipe/failure/{key}"

    def publish(self, cause: Cause) -> Cause:
        """Publish a cause, and return the first one that any rank published; `cause` if the store does not answer."""
        record = json.dumps(cause)
        first = self._board.ask(lambda store: store.compare_set(self._key, "", record), None)
        return cause if first is None else Cause.of_json(first)

    def cause(self) -> Cause | None:
        """Return the published cause; None if there is none, or the store does not answer."""
        record = self._board.ask(lambda store: store.get(self._key) if store.check([self._key]) else None, None)
        return None if record is None else Cause.of_json(record)

    def mark_waiting(self, rank: int) -> None:
        """Publish that a rank is alive and has lost the ranks that it waited on."""
        self._board.ask(lambda store: store.set(f"{self._key}/waiting/{rank}", "yes"), None)

    def is_any_waiting(self, ranks: Iterable[int]) -> bool:
        """Return True if any of the ranks is alive and has lost other ranks itself."""
        keys = [f"{self._key}/waiting/{rank}" for rank in ranks]
        return self._board.ask(lambda store: any(store.check([key]) for key in keys), default=False)

    def is_reachable(self) -> bool:
        """Return False if the store does not answer."""
        return not self._board.is_silent


class StepFailure:
    """Ends a step and its process groups when the step fails on this rank or on another.

    groups: all process groups in which ranks of the step wait for this one.
    """

    def __init__(self, board: FailureBoard, groups: Iterable[ProcessGroup | None]) -> None:
        self._board = board
        self._groups = [group for group in dict.fromkeys(groups) if group is not None and group.size() > 1]
        self._cause: Cause | None = None
        self._lock = threading.Lock()
        if any("nccl" in backends(group).values() for group in self._groups if isinstance(group, ProcessGroup)):
            # The host may wait for the device, and the device for a failed rank.
            watch(self, board)

    @property
    def has_peers(self) -> bool:
        """Return True if other ranks take part in the steps."""
        return bool(self._groups)

    def check(self) -> None:
        """Raise PipelineError if an earlier step has failed."""
        if self._cause is not None:
            raise PipelineError("an earlier step failed and ended the pipeline's process groups; restart the "
                                f"processes. It failed with: {self._cause.text}", is_loss=True,
                                wait=self._cause.wait)

    def ending_step(self, running: Callable[[], str]) -> AbstractContextManager[None]:
        """End the step on all ranks if the work inside of a `with` fails; raise PipelineError, naming the rank.

        An interrupt is raised as itself.

        running: returns the error prefix that names the running action.
        """
        return _EndingStep(self, running)

    def end(self, error: BaseException, running: Callable[[], str]) -> tuple[Cause, bool]:
        """Hang up; return the cause, and True if it is this rank's own error."""
        recorder = Recorder.current()
        if isinstance(error, RankLost) and self.has_peers:
            cause = self._cause_of_loss(error, recorder)
            return cause, False
        if names_ranks(error):
            text = str(error)
        else:
            text = f"{recorder.name(recorder.rank)}: {running()}{describe_error(error)}"
        own_cause = Cause(text[:_MAX_LENGTH])
        cause = self._board.publish(own_cause) if self.has_peers else own_cause
        self.hang_up(cause)
        return cause, cause == own_cause

    def _cause_of_loss(self, error: RankLost, recorder: Recorder) -> Cause:
        """Hang up, and return the cause of the loss of the ranks that this rank waited on."""
        cause = self._board.cause()
        self.hang_up(cause or Cause(str(error), is_loss=True, wait=error.wait))
        if cause is None:
            self._board.mark_waiting(recorder.rank)
            cause = self._await_cause(GRACE)
        if cause is None and self._board.is_any_waiting(error.ranks):
            cause = self._await_cause(GRACE)  # the awaited ranks have lost others, and publish those as the cause
        if cause is None:
            text = f"{recorder.name(recorder.rank)}: {error}"
            cause = self._board.publish(Cause(text, is_loss=True, wait=error.wait))
        self._cause = cause
        return cause

    def _await_cause(self, seconds: float) -> Cause | None:
        """Wait for a published cause; return None if there is none after `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            cause = self._board.cause()
            if cause is not None:
                return cause
            time.sleep(_POLL)
        return None

    def hang_up(self, cause: Cause) -> None:
        """End the process groups: peers that wait for this rank raise. Later calls do nothing."""
        with self._lock:
            if self._cause is not None or not self.has_peers:
                return
            self._cause = cause
            hang_up(self._groups)


class _EndingStep(AbstractContextManager[None]):
    """Context manager of `StepFailure.ending_step`; a class, as every step enters it."""

    def __init__(self, failure: StepFailure, running: Callable[[], str]) -> None:
        self._failure = failure
        self._running = running

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        try:
            cause, is_own = self._failure.end(error, self._running)
            if not isinstance(error, Exception):
                return
            # A loss is not this rank's own error; it is shown because its text has the duration of the wait.
            is_shown = is_own or isinstance(error, RankLost)
            raise PipelineError(cause.text, is_loss=cause.is_loss, wait=cause.wait) from (error if is_shown else None)
        finally:
            del error, trace  # this frame is in the traceback: the cycle would keep all tensors of the step


def watch(failure: StepFailure, board: FailureBoard) -> None:
    """Start a thread that hangs up when another rank publishes a cause, so that the host's waits for the device end.

    The thread ends with `failure`, when the store stops answering, and before the end of the process: a thread inside a
    call of the store would abort the process when Python is finalized.
    """
    ended = threading.Event()
    seconds = request_interval(WATCH, dist.get_world_size() if dist.is_initialized() else 1)
    reference = weakref.ref(failure, lambda _: ended.set())

    def watch_board() -> None:
        """Hang up at a published cause. Holds no reference to `failure` while it waits."""
        while not ended.wait(seconds) and board.is_reachable():
            cause = board.cause()
            watched = reference()
            if cause is not None and watched is not None:
                watched.hang_up(cause)
                return
            del watched

    thread = threading.Thread(target=watch_board, name="failure watch", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join(ANSWER)

    atexit.register(end)


def hang_up(groups: Iterable[ProcessGroup]) -> None:
    """End groups on this rank after its failure, so that ranks waiting in them raise now, not at their timeouts.

    Communicators of NCCL are aborted, connections of gloo closed.
    """
    time.sleep(_LINGER)
    for group in groups:
        if not isinstance(group, ProcessGroup):
            group.abort()  # a stand-in of tests
            continue
        with suppress(Exception):  # the group has ended already
            if "nccl" in backends(group).values():
                group.abort()
        if "cpu" in backends(group):
            _close_connections(group)


def _close_connections(group: ProcessGroup) -> None:
    """Close the connections of a gloo group, whose `abort` does nothing (torch 2.13).

    gloo closes all connections of a group when a wait times out: so wait a millisecond for a message that no rank
    sends. A receive on a closed connection fails at once and closes no other, so every peer is tried. One from a rank
    that this rank is not connected with could wait for the group's timeout.
    """
    for peer in connected_ranks(group):
        with suppress(Exception):
            buffer = torch.empty(8, dtype=torch.uint8, device="cpu")
            group.recv([buffer], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def default_store(group: ProcessGroup | None) -> dist.Store:
    """Return a new connection to the job's store; a store of this process for no group."""
    if group is None:
        return dist.HashStore()
    default: Any = dist.distributed_c10d._get_default_store()
    return default.clone()
