"""Work whose failure on one rank raises on all ranks, so that no rank waits for one that has given up.

Objects of any size go through a collective (`gather`, `first`, ...). Small records go from every rank to every other,
so a missing rank is known by its number (`together`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
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

TURN = 2.0  # seconds of one wait for long work: less than any timeout of a group
_MAX_TEXT = 20_000  # characters of an error's text for other ranks
_TIMEOUT_AFTER_LOSS = timedelta(seconds=1)  # of the last exchange, if this rank has lost another rank

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome:
    """Result of a rank's work, or its failure. is_value_error: the failure was a ValueError."""

    value: Any
    failure: Failure | None
    is_value_error: bool


@dataclass
class Exchange:
    """Values that ranks exchange in `RankSync.together`: this rank's JSON value, and afterwards those of all ranks."""

    value: Any = None
    values: list[Any] = field(default_factory=list)


class RankSync:
    """Ranks of a process group that can carry objects (gloo).

    Args:
        group: the process group; None: this process alone.
        members: the group's ranks in another order, which numbers the ranks of this object (default: the group's).
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
        """Return the ranks of a mesh that spans the default process group; for None, this process alone.

        group: carries the messages, with the same ranks in the same order (default: the default group). Raises
        ValueError for a part of a mesh.
        """
        if mesh is None:
            return cls(None)
        if mesh.size() != dist.get_world_size():
            raise ValueError(f"the mesh has {mesh.size()} of {dist.get_world_size()} ranks; pass the whole one, from "
                             "build_mesh")
        return cls(group or dist.group.WORLD)

    # -- objects of any size

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the (picklable) results by rank.

        If any rank fails, all raise, naming the failed ranks: ValueError if all failures are ValueErrors, otherwise
        RuntimeError. A failed rank raises from its own error; an interrupted rank raises the interrupt.
        """
        return self._outcomes(work, everywhere=True)

    def agree(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return the result of this rank. Raises like `gather`."""
        result: list[T] = []
        self.gather(lambda: result.append(work()))
        return result[0]

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others wait, and return its (picklable) result on all ranks.

        If it fails, all ranks raise: a ValueError with the same text, or for any other error a RuntimeError naming it.
        """
        return self._outcomes(work, everywhere=False)[0]

    def first_in_turns(self, work: Callable[[], T]) -> T:
        """Like `first`, for work that may take longer than the group's timeout.

        Rank 0 runs it on a thread, and the ranks synchronize every `TURN` seconds until it is done. A rank that fails
        meanwhile raises without waiting for the work.
        """
        if self.size == 1:
            return work()
        future = run_in_background(work) if self.rank == 0 else Future[T]()

        def poll() -> list[T]:
            """Return the result in a list, which is empty if the work is not done after `TURN` seconds."""
            try:
                return [future.result(TURN)]
            except NotYet:
                if future.done():  # the work has raised a TimeoutError
                    raise
                return []

        results: list[T] = []
        while not results:
            results = self.first(poll)
        return results[0]

    def _outcomes(self, work: Callable[[], T], *, everywhere: bool) -> list[T]:
        """Run `work` on all ranks, or on rank 0 alone; return the results."""
        if self.size == 1:
            return [work()]
        value: T | None = None
        error: BaseException | None = None
        failure: Failure | None = None
        try:
            if everywhere or self.rank == 0:
                value = work()
        except BaseException as raised:  # sent to the other ranks before it is raised here
            error = raised
            failure = Failure.of(raised, _MAX_TEXT)
        own_outcome = _Outcome(value, failure, is_value_error=isinstance(error, ValueError))
        outcomes = [own_outcome]
        if everywhere:
            outcomes *= self.size
            self._collective(dist.all_gather_object, outcomes, own_outcome)
        else:
            source = self._members[0]
            self._collective(dist.broadcast_object_list, outcomes, group_src=source, device=torch.device("cpu"))
        if error is not None and not isinstance(error, Exception):
            raise error
        failures = [outcome.failure for outcome in outcomes]
        first = next(filter(None, failures), None)
        if first is None:
            return [outcome.value for outcome in outcomes]
        are_value_errors = all(outcome.is_value_error for outcome in outcomes if outcome.failure is not None)
        if are_value_errors and not everywhere:  # rank 0's, which need not be named
            raise ValueError(first.text) from error
        kind = ValueError if are_value_errors else RuntimeError
        raise mark_names_ranks(kind(join_failures(self._messages, failures))) from error

    def collect(self, value: T) -> list[T] | None:
        """Return the (picklable) values of all ranks on rank 0, and None on others, which save the memory."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._collective(dist.gather_object, value, values, group_dst=0)
        return values

    def scatter(self, values: Sequence[T] | None) -> T:
        """Scatter (picklable) values of rank 0, one per rank, and return this rank's. Other ranks pass None."""
        if self.size == 1 and values is not None:
            return values[0]
        received: list[Any] = [None]
        self._collective(dist.scatter_object_list, received, None if values is None else list(values), src=0)
        return received[0]

    def _collective(self, call: Callable[..., object], *args: Any, **options: Any) -> None:
        """Run a collective of the group.

        Raises RuntimeError if an earlier one was cut short: this one could receive messages of that one.
        """
        if self._cut_short:
            raise RuntimeError("an earlier exchange between the ranks was cut short, by an interrupt, a timeout or the "
                               "loss of a rank, so that they can exchange nothing more; restart the processes")
        self._cut_short = True
        with Recorder.current().collective("agree", f"all in {call.__name__}", self._messages.global_ranks):
            call(*args, group=self._group, **options)
        self._cut_short = False

    # -- small records

    @contextmanager
    def together(self, kind: type[Exception]) -> Iterator[Exchange]:
        """Raise `kind` on all ranks if the work inside of a `with` fails on one, or PipelineError if a rank is gone.

        The work may set `value` of the `Exchange` to a JSON value; afterwards, `values` are those of all ranks.
        """
        exchange = Exchange()
        error: BaseException | None = None
        try:
            yield exchange
        except BaseException as raised:  # sent to the other ranks before it is raised here
            error = raised
        try:
            own_record = Record(None if error is None else Failure.of(error), exchange.value)
            timeout = _TIMEOUT_AFTER_LOSS if isinstance(error, RankLost) else None
            answers: list[Record | RankLost] = [own_record]
            if self.size > 1:
                try:
                    answers = self._messages.exchange(own_record, timeout)
                except (TypeError, ValueError) as raised:  # no JSON, or too long: the others are told
                    error = error or raised
                    answers = self._messages.exchange(Record(Failure.of(raised)), timeout)
            if error is not None and not isinstance(error, Exception):
                raise error
            records = [answer for answer in answers if isinstance(answer, Record)]
            failures = [
                answer.failure if isinstance(answer, Record) else Failure(f"cannot be reached: {answer}")
                for answer in answers
            ]
            if any(failures):
                raised_kind = kind if len(records) == len(answers) else PipelineError
                raise mark_names_ranks(raised_kind(join_failures(self._messages, failures))) from error
            exchange.values = [answer.value for answer in records]
        finally:
            error = None  # this frame is in the error's traceback: the cycle would keep all its tensors
