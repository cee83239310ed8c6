"""A save in progress: the progress of all ranks, and permission to commit it.

The work of a rank for a save, such as writing its files, may take any time as long as it makes progress. While it runs,
a second thread holds rounds with the same thread of the other ranks: every few seconds, and at once when the work of
the rank is done. In each round, the ranks exchange the time since their last progress. So every rank learns that a rank
is stuck or lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any, TypeVar

from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder
from dualpipe.runtime.storage import Location

_ROUND_SECONDS = 5.0  # longest time between two rounds

T = TypeVar("T")


class SaveAbandoned(RuntimeError):
    """A save makes no progress, or may not be committed any more."""


class PendingSave:
    """A save in progress on this rank.

    Two threads use it: the saving thread does the work, and the rounds thread talks to the other ranks.

    Args:
        step: the step of the checkpoint.
        ranks: all ranks, in a group that nothing else uses meanwhile.
        timeout: seconds without progress after which a rank is given up. It is also the timeout of the group.
    """

    def __init__(self, step: int, ranks: RankSync, timeout: float) -> None:
        self.step = step
        self.ended: Future[Location] = Future()  # the path or the error, even if the work on this rank never ends
        self.folder: Location | None = None  # folder or URL that it is written to, on rank 0
        self.refused = ""  # reason that it may not be committed any more
        self._ranks = ranks
        self._timeout = timeout
        self._last_progress = time.monotonic()
        self._committing = Lock()
        self._recorder = Recorder.current()  # of the thread that calls save

    # -- called by the saving thread

    def first(self, work: Callable[[], T]) -> T:
        """Like `RankSync.first`, but waits as long as rank 0 makes progress with `work`."""
        return self._ranks.first(self._carry_out(work if self._ranks.rank == 0 else lambda: None))  # type: ignore

    def agree(self, work: Callable[[], T]) -> T:
        """Like `RankSync.agree`, but waits as long as all ranks make progress with `work`."""
        return self._ranks.agree(self._carry_out(work))

    def report_progress(self) -> None:
        """Report that the work makes progress."""
        self._record_progress("commit", 0)

    def report_written(self, size: int) -> None:
        """Report that `size` more bytes are written; raise SaveAbandoned if the save may not be committed any more."""
        self._record_progress("write", size)
        self._check()

    def _record_progress(self, kind: str, size: int) -> None:
        self._last_progress = time.monotonic()
        recorder = Recorder.current()  # shows the progress to the watchdog
        recorder.begin(kind, "a part of it", (), size)
        recorder.end()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Guard the one call that commits: raise SaveAbandoned before it if the save may not be committed any more."""
        with self._committing:
            self._check()
            yield

    def _carry_out(self, work: Callable[[], T]) -> Callable[[], T]:
        """Do `work` while the other ranks do theirs; return a function that returns its result or raises its error.

        Raises SaveAbandoned if a rank makes no progress, and RankLost if a rank is lost.
        """
        done: Future[T] = Future()
        met: Future[None] = Future()
        self._last_progress = time.monotonic()
        # Not in an executor: that accepts no work when the interpreter shuts down, and a save may still be in progress.
        Thread(target=self._meet, args=(done, met), name="checkpoint rounds", daemon=True).start()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        with Recorder.current().wait("save", f"the checkpoint of step {self.step}", range(self._ranks.size)):
            try:
                met.result()
            except KeyboardInterrupt as interrupt:
                # Finish the rounds, and let the returned function raise the interrupt, which tells the other ranks.
                done = Future()
                done.set_exception(interrupt)
                met.result()
        return done.result

    # -- called by the rounds thread

    def _meet(self, work: Future[Any], met: Future[None]) -> None:
        """Hold rounds until all ranks are done, and then complete `met`."""
        recorder = self._recorder
        try:
            # A separate recorder, not a lane of this rank's. The watchdog would take the rounds of a lane for progress
            # of the work.
            with Recorder(recorder.rank, recorder.sizes).activate():
                while not self._round(work):
                    pass
            met.set_result(None)
        except BaseException as error:
            self.forbid_commit(str(error))
            self.end(error)
            met.set_exception(error)

    def _round(self, work: Future[Any]) -> bool:
        """Exchange the progress of all ranks; return True if all of them are done."""
        wait([work], min(self._timeout / 4, _ROUND_SECONDS))
        report: float | SaveAbandoned | None = None if work.done() else time.monotonic() - self._last_progress
        if self.refused:
            report = SaveAbandoned(self.refused)
        reports = self._ranks.exchange(report, SaveAbandoned)
        idle = [seconds or 0.0 for seconds in reports]
        longest = max(idle)
        if longest > self._timeout:
            name = Recorder.current().name(idle.index(longest))
            raise SaveAbandoned(f"{name} has made no progress for {longest:.0f} s: its disk does not respond")
        return all(seconds is None for seconds in reports)

    # -- called by any thread

    def _check(self) -> None:
        if self.refused:
            raise SaveAbandoned(self.refused)

    def forbid_commit(self, reason: str) -> None:
        """Prevent the save from being committed. Writing stops soon."""
        is_free = self._committing.acquire(timeout=1.0)  # not free: the disk hangs in the middle of a commit
        self.refused = self.refused or reason
        if is_free:
            self._committing.release()

    def end(self, outcome: Location | BaseException) -> None:
        """Complete `ended` with the path or the error. Only the first call has an effect."""
        if isinstance(outcome, RankLost):  # the saving thread may learn of the loss much later
            self._recorder.lost = self._recorder.lost or outcome.wait
        with suppress(InvalidStateError):
            if isinstance(outcome, BaseException):
                self.ended.set_exception(outcome)
            else:
                self.ended.set_result(outcome)
