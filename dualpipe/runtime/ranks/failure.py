"""How a failure on one rank ends a step on all: the cause is published, then the process groups are ended.

A rank that fails publishes the cause in the job's store and hangs up: it ends the process groups that its peers may
wait in. With gloo its connections close, with NCCL its communicators are aborted; the peers' waits end with an error.
They find the published cause, hang up in turn, for those who wait for them, and raise. A rank whose process died
publishes nothing: those that waited for it name it, after a moment in which the cause may come.

Nothing is sent after a failure, so no message can meet a receive that was posted for another. Groups that have ended
cannot be used again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dualpipe.runtime.errors import PipelineError, RankLost, describe_error, names_ranks
from dualpipe.runtime.ranks.process_groups import backends
from dualpipe.runtime.recorder import Recorder

# Seconds in which the cause is awaited, after a connection has closed or a wait has timed out: ranks that wait for one
# another time out one after the other.
GRACE = 0.5
_POLL = 0.02  # seconds between two looks at the store
_STORE_TIMEOUT = timedelta(seconds=5)
_NEVER_SENT = 16  # gloo's tag, of a message that is waited for in vain on purpose
_LONGEST = 20_000  # characters of a cause


class Cause(NamedTuple):
    """Why a step ended. is_loss: a rank did not come or has left, and published nothing itself."""

    text: str
    is_loss: bool = False


class FailureBoard:
    """Where the ranks of a job publish why a step ended.

    key: common to all ranks that share a process group, and new for each pipeline.
    """

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store = store
        self._key = f"dualpipe/failure/{key}"

    def publish(self, cause: Cause) -> Cause:
        """Publish a cause, and return the first that was published; this one where the store is gone."""
        record = json.dumps([cause.text[:_LONGEST], cause.is_loss])
        try:
            return Cause(*json.loads(self._store.compare_set(self._key, "", record)))
        except Exception:  # the rank that has the store may be the one that died
            return cause

    def cause(self) -> Cause | None:
        """Return the published cause, or None."""
        try:
            if self._store.check([self._key]):
                return Cause(*json.loads(self._store.get(self._key)))
        except Exception:  # as in `publish`
            return None
        return None

    def say_waiting(self, rank: int) -> None:
        """Say that a rank is alive and has lost those it waited for."""
        with suppress(Exception):
            self._store.set(f"{self._key}/waiting/{rank}", "yes")

    def are_waiting(self, ranks: Iterable[int]) -> bool:
        """Return True if any of these ranks is alive and has lost others itself."""
        with suppress(Exception):
            return any(self._store.check([f"{self._key}/waiting/{rank}"]) for rank in ranks)
        return False

    def wait(self) -> Cause | None:
        """Wait until a cause is published; None where the store is gone. For a thread with a connection of its own."""
        while True:
            with suppress(Exception):  # not yet
                self._store.wait([self._key], timedelta(hours=1))
            try:
                if self._store.check([self._key]):
                    return self.cause()
            except Exception:
                return None

    def clone(self) -> FailureBoard:
        """Return the same board by a connection of its own."""
        store: Any = self._store
        board = FailureBoard(store.clone(), "")
        board._key = self._key
        return board


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
            thread = threading.Thread(target=self._watch, args=(board.clone(),), name="failure watch", daemon=True)
            thread.start()

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
        if names_ranks(error):
            own = Cause(str(error))
        else:
            own = Cause(f"{recorder.name(recorder.rank)}: {running()}{describe_error(error)}")
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

    def _watch(self, board: FailureBoard) -> None:
        """Hang up when another rank has published a cause, so that waits of the host for the device end."""
        cause = board.wait()
        if cause is not None:
            self.hang_up(cause)


def hang_up(groups: Iterable[ProcessGroup]) -> None:
    """End groups after a failure of this rank alone, so that a rank which waits there raises now, not at its timeout.

    NCCL's communicator is aborted on this rank.
    """
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
    """Return the store of the job, with a short timeout; one of this process where there is no job."""
    if group is None:
        return dist.HashStore()
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(_STORE_TIMEOUT)
    return store
