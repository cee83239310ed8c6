"""A save that is under way: how far the ranks are with it, and whether it may still be committed.

What a rank has to do for it, such as writing its files, may take as long as it likes, as long as it goes on. While it
works, a thread beside it meets those of the other ranks in rounds, at once when it has done, else every few seconds,
and tells for how long it has not gone on. So all ranks come to know of one that is stuck, and of one that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeVar

from dualpipe.runtime.errors import PipelineError, RankLost
from dualpipe.runtime.rank_sync import RankSync
from dualpipe.runtime.recorder import Recorder

_ROUND = 5.0  # seconds, at most, after which ranks that work meet again

T = TypeVar("T")


class GivenUp(RuntimeError):
    """A save does not go on, or is not wanted any more."""


class PendingSave:
    """One save of this rank.

    ranks: all, in a group that nothing else uses meanwhile. timeout: seconds after which a rank that does not go on, or
    does not come, is given up: the group's.
    """

    def __init__(self, step: int, ranks: RankSync, timeout: float) -> None:
        self.step = step
        self.ended: Future[Path] = Future()  # its path, or what it failed of, even where the work here never ends
        self.folder: Path | None = None  # where it is written, on rank 0
        self.refused = ""  # why it may not be committed any more
        self._ranks, self._timeout = ranks, timeout
        self._moved = time.monotonic()
        self._committing = Lock()
        self._recorder = Recorder.current()  # of the thread that saves

    # -- for the thread that works

    def first(self, work: Callable[[], T]) -> T:
        """As `RankSync.first`, and as long as rank 0 goes on with `work`."""
        return self._ranks.first(self._carry_out(work if self._ranks.rank == 0 else lambda: None))  # type: ignore

    def agree(self, work: Callable[[], T]) -> T:
        """As `RankSync.agree`, and as long as all ranks go on with `work`."""
        return self._ranks.agree(self._carry_out(work))

    def moved(self) -> None:
        """The work goes on."""
        self._went_on("commit", 0)

    def wrote(self, size: int) -> None:
        """So many bytes more are written; raises GivenUp where they are not wanted any more."""
        self._went_on("write", size)
        self._check()

    def _went_on(self, kind: str, size: int) -> None:
        self._moved = time.monotonic()
        recorder = Recorder.current()  # for who looks whether anything goes on here
        recorder.begin(kind, "a part of it", (), size)
        recorder.end()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Around the one call that commits; raises GivenUp instead of beginning where that is not wanted."""
        with self._committing:
            self._check()
            yield

    def _carry_out(self, work: Callable[[], T]) -> Callable[[], T]:
        """Do `work` while the other ranks do theirs; returns what gives its result, or raises its error.

        Raises GivenUp where a rank does not go on, and RankLost where one is gone.
        """
        done: Future[T] = Future()
        met: Future[None] = Future()
        self._moved = time.monotonic()
        # Not of an executor, which takes nothing more when the process ends, when a save may still go on.
        Thread(target=self._meet, args=(done, met), name="checkpoint rounds", daemon=True).start()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        with Recorder.current().wait("save", f"the checkpoint of step {self.step}", range(self._ranks.size)):
            try:
                met.result()
            except KeyboardInterrupt as interrupt:  # of this wait: told to the others like one of the work
                done = Future()
                done.set_exception(interrupt)
                met.result()
        return done.result

    # -- for the thread that talks

    def _meet(self, work: Future[Any], met: Future[None]) -> None:
        saves = self._recorder
        try:
            with Recorder(saves.rank, saves.sizes).activate():  # no lane: that rounds go on says nothing of the work
                while not self._round(work):
                    pass
            met.set_result(None)
        except BaseException as error:
            self.refuse(str(error))
            self.end(error)
            met.set_exception(error)

    def _round(self, work: Future[Any]) -> bool:
        """Meet all ranks; whether all have done."""
        wait([work], min(self._timeout / 4, _ROUND))
        try:
            with self._ranks.together(GivenUp) as told:
                self._check()
                told.value = None if work.done() else time.monotonic() - self._moved
        except PipelineError as gone:
            raise RankLost(str(gone)) from gone
        idle = [seconds or 0.0 for seconds in told.conclusion]
        if (longest := max(idle)) > self._timeout:
            name = Recorder.current().name(idle.index(longest))
            raise GivenUp(f"{name} has not gone on with it for {longest:.0f} s: its disk gives no answer")
        return all(seconds is None for seconds in told.conclusion)

    # -- for all

    def _check(self) -> None:
        if self.refused:
            raise GivenUp(self.refused)

    def refuse(self, why: str) -> None:
        """Let nobody commit it from now on; what is being written stops soon."""
        is_free = self._committing.acquire(timeout=1.0)  # else the disk hangs, in the middle of a commit
        self.refused = self.refused or why
        if is_free:
            self._committing.release()

    def end(self, outcome: Path | BaseException) -> None:
        """Its path, or what it failed of; the first time counts."""
        if isinstance(outcome, RankLost):  # which the thread that saves may not come to know of for long
            self._recorder.lost = self._recorder.lost or str(outcome)
        with suppress(InvalidStateError):
            if isinstance(outcome, BaseException):
                self.ended.set_exception(outcome)
            else:
                self.ended.set_result(outcome)
