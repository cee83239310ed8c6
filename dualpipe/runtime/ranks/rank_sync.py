"""Work whose failure on one rank raises on all, so that nobody waits for a rank that has given up.

Objects of any size go through a collective (`gather`, `first`, ...). Small records go from each rank to each, so that a
rank that is gone is known by its number (`together`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.runtime.background import run_in_background
from dualpipe.runtime.errors import PipelineError, RankLost, mark_names_ranks
from dualpipe.runtime.ranks.agreement import join_failures
from dualpipe.runtime.ranks.records import Failure, HostMessages, Record
from dualpipe.runtime.recorder import Recorder

TURN = 2.0  # seconds for which ranks wait at a time for what takes long: less than any timeout of theirs
_LONGEST = 20_000  # characters of an error's text that travel to the other ranks
_LAST_WORD = timedelta(seconds=1)  # for the others, where this rank has lost one

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome:
    """The result of a rank's work, or its failure. is_refusal: whether that was a ValueError."""

    value: Any
    failure: Failure | None
    is_refusal: bool


class RankSync:
    """The ranks of a process group that can carry objects (gloo); None: this process alone.

    members: those of the group in another order, by which they are numbered here (default: the group's).
    """

    def __init__(self, group: ProcessGroup | None, members: Sequence[int] = ()) -> None:
        self._messages = HostMessages(group, members)
        self._members = list(members) or list(range(self._messages.size))
        self._group: Any = group
        self.size = self._messages.size
        self.rank = self._messages.rank
        if isinstance(group, ProcessGroup):
            Recorder.current().rank = dist.get_rank()
        self._cut_short = False

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh | None, group: ProcessGroup | None = None) -> RankSync:
        """All ranks of a mesh that spans the default process group; None: this process alone.

        They talk in `group`, of the same ranks in the same order (default: the default one). Raises ValueError for a
        part of a mesh.
        """
        if mesh is None:
            return cls(None)
        if mesh.size() != dist.get_world_size():
            raise ValueError(f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks; pass the whole one, from "
                             "build_mesh")
        return cls(group or dist.group.WORLD)

    # -- objects of any size

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return what it gave (picklable), by rank.

        Raises ValueError where it did on some rank, and RuntimeError for any other error; on the rank itself from its
        own error, or an interrupt as it is.
        """
        return self._outcomes(work, everywhere=True)

    def agree(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank and return what it gave here; raises as `gather` does."""
        result: list[T] = []
        self.gather(lambda: result.append(work()))
        return result[0]

    def first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 while the others wait, and return what it gave (picklable) on all.

        Raises everywhere what it raised: a ValueError as such, any other error as a RuntimeError that names it.
        """
        return self._outcomes(work, everywhere=False)[0]

    def first_in_turns(self, work: Callable[[], T]) -> T:
        """Like `first`, for work that may take longer than the group's timeout.

        Rank 0 does it in a thread, and the ranks meet every `TURN` seconds until it is done. A rank that fails
        meanwhile does not wait for it.
        """
        if self.size == 1:
            return work()
        doing = run_in_background(work) if self.rank == 0 else Future[T]()

        def look() -> list[T]:
            try:
                return [doing.result(TURN)]
            except NotYet:
                if doing.done():  # a TimeoutError of its own
                    raise
                return []

        found: list[T] = []
        while not found:
            found = self.first(look)
        return found[0]

    def _outcomes(self, work: Callable[[], T], *, everywhere: bool) -> list[T]:
        """Return the results of `work` on all ranks, or on rank 0 alone."""
        if self.size == 1:
            return [work()]
        value = error = failure = None
        try:
            if everywhere or self.rank == 0:
                value = work()
        except BaseException as raised:  # told to the other ranks before it is raised here
            error = raised
            failure = Failure.of(raised, _LONGEST)
        own = _Outcome(value, failure, isinstance(error, ValueError))
        outcomes = [own]
        if everywhere:
            outcomes *= self.size
            self._collective(dist.all_gather_object, outcomes, own)
        else:
            source, cpu = self._members[0], torch.device("cpu")
            self._collective(dist.broadcast_object_list, outcomes, group_src=source, device=cpu)
        if error is not None and not isinstance(error, Exception):
            raise error
        failures = [outcome.failure for outcome in outcomes]
        first = next(filter(None, failures), None)
        if first is not None:
            is_refusal = all(outcome.is_refusal for outcome in outcomes if outcome.failure is not None)
            kind = ValueError if is_refusal else RuntimeError
            if is_refusal and not everywhere:  # rank 0's own, which need not be named
                raise kind(first.text) from error
            raise mark_names_ranks(kind(join_failures(self._messages, failures))) from error
        return [outcome.value for outcome in outcomes]

    def collect(self, value: T) -> list[T] | None:
        """The (picklable) values of all ranks, on rank 0 alone: for what would be too much to hold on each."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._collective(dist.gather_object, value, values, group_dst=0)
        return values

    def scatter(self, values: Sequence[T] | None) -> T:
        """To each rank its own of rank 0's (picklable) values."""
        if self.size == 1 and values is not None:
            return values[0]
        mine: list[Any] = [None]
        self._collective(dist.scatter_object_list, mine, None if values is None else list(values), src=0)
        return mine[0]

    def _collective(self, call: Callable[..., object], *args: Any, **options: Any) -> None:
        """After one that did not come to its end the next would take its messages for others."""
        if self._cut_short:
            raise RuntimeError("an earlier exchange between the ranks was cut short, by an interrupt, a timeout or the "
                               "loss of a rank; they can agree on nothing any more")
        self._cut_short = True
        with Recorder.current().collective("agree", f"all in {call.__name__}", self._messages.global_ranks):
            call(*args, group=self._group, **options)
        self._cut_short = False

    # -- small records

    @contextmanager
    def together(self, kind: type[Exception]) -> Iterator[SimpleNamespace]:
        """Raise `kind` on all ranks where what is done inside fails on one, or PipelineError where one is gone.

        Inside, `told.value` is set to a JSON value for the others; afterwards `told.values` has everybody's, by rank.
        """
        told = SimpleNamespace(value=None, values=None)
        error: BaseException | None = None
        try:
            yield told
        except BaseException as raised:  # told to the other ranks before it is raised here
            error = raised
        try:
            own = Record(None if error is None else Failure.of(error), told.value)
            timeout = _LAST_WORD if isinstance(error, RankLost) else None
            answers: list[Record | RankLost] = [own]
            if self.size > 1:
                try:
                    answers = self._messages.exchange(own, timeout)
                except (TypeError, ValueError) as unfit:  # no JSON, or too long: the others hear of that
                    error = error or unfit
                    answers = self._messages.exchange(Record(Failure.of(unfit)), timeout)
            if error is not None and not isinstance(error, Exception):
                raise error
            records = [answer for answer in answers if isinstance(answer, Record)]
            failures = [
                answer.failure if isinstance(answer, Record) else Failure(f"cannot be reached: {answer}")
                for answer in answers
            ]
            if any(failures):
                failed = kind if len(records) == len(answers) else PipelineError
                raise mark_names_ranks(failed(join_failures(self._messages, failures))) from error
            told.values = [answer.value for answer in records]
        finally:
            error = None  # this frame is in the error's traceback: the cycle would keep all its tensors
