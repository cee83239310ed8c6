"""Work of several ranks whose failure on one raises on all, so that no rank waits for one that has given up.

`RankSync` is the one way to agree. Objects of any size go through a collective, over a process group or the store of
the job (`gather`, `agree`, `first`, ...). Small records go from the host of every rank to every other, so a missing
rank is known by its number (`exchange`, `compare`).

`compare` is for the arguments of every step of a pipeline. In a step whose records equal those of an earlier one, each
of N ranks sends ceil(log2 N) small messages in the pipeline, and as many among its data-parallel replicas
(`HostMessages.combine`). If anything is new, wrong or different, the ranks of the pipeline exchange their records once,
and all draw the same conclusion from the same records. Conclusions are cached with the records of all ranks; a rank
tells the others which cached records fit its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.runtime.background import run_in_background
from dualpipe.runtime.errors import RankLost, describe_error, mark_names_ranks, names_ranks
from dualpipe.runtime.ranks.objects import GroupObjects, Objects
from dualpipe.runtime.ranks.process_groups import backends, new_gloo_group
from dualpipe.runtime.ranks.records import KNOWN_BITS, MAX_TEXT, Failure, HostMessages, Record, Summary
from dualpipe.runtime.recorder import Recorder, rank_ranges

TURN = 2.0  # seconds of one wait for long work: less than any timeout of a group
_MAX_TEXT = 20_000  # characters of an error's text in an object

T = TypeVar("T")
R = TypeVar("R")  # record: a dataclass that ranks compare
C = TypeVar("C")  # conclusion from the records of all ranks


class _Result(NamedTuple):
    """Result of a rank's work, or a description of its error; a tuple, which JSON can hold.

    Attributes:
        value: the result.
        error: text of the error; None without one.
        names_ranks: the text names the failed ranks.
        is_value_error: the error was a ValueError.
    """

    value: Any
    error: str | None = None
    names_ranks: bool = False
    is_value_error: bool = False

    @staticmethod
    def of_error(error: BaseException) -> _Result:
        """Return the description of an error."""
        return _Result(None, describe_error(error)[:_MAX_TEXT], names_ranks(error), isinstance(error, ValueError))


class Outcome(NamedTuple, Generic[C]):
    """Conclusion of all ranks, or a problem with the same text on every rank.

    cause: the error of this rank, if it has failed.
    """

    conclusion: C | None
    problem: str | None
    cause: BaseException | None = None

    def raise_problem(self) -> None:
        """Raise ValueError if there is a problem; on an interrupted rank, raise the interrupt."""
        if self.cause is not None and not isinstance(self.cause, Exception):
            raise self.cause
        if self.problem is not None:
            raise ValueError(self.problem) from self.cause


class RankSync:
    """Ranks that do things together, each in the same order; a failure on one raises on all.

    Args:
        group: a process group that can carry objects (gloo); None: this process alone.
        members: the group's ranks in another order, which numbers the ranks of this object (default: the group's).
        replicas: process groups of ranks in other pipelines that take every step together with this rank.
        objects: carries objects in place of `group`; then only the methods for objects can be called.
    """

    def __init__(
        self, group: ProcessGroup | None, members: Sequence[int] = (), *, replicas: Iterable[ProcessGroup] = (),
        objects: Objects | None = None,
    ) -> None:
        self._objects: Objects = objects or GroupObjects(group, members)
        self.size = self._objects.size
        self.rank = self._objects.rank
        self.global_ranks = self._objects.global_ranks
        self._host = HostMessages(group, members)
        host_groups = [replica if "cpu" in backends(replica) else new_gloo_group(replica) for replica in replicas]
        self._replicas = [HostMessages(replica) for replica in host_groups]
        self._replicas_differ = True  # the number of replicas differs between ranks; set by `compare_replicas`
        self._known: list[tuple[list[Any], Any]] = []  # records of all ranks, and their conclusion

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

    @property
    def groups(self) -> list[ProcessGroup]:
        """Return the process groups in which this object waits for other ranks."""
        return [messages.group for messages in (self._host, *self._replicas) if messages.group is not None]

    # -- objects of any size

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return the (picklable) results by rank.

        If any rank fails, all raise, naming the failed ranks: ValueError if all failures are ValueErrors, otherwise
        RuntimeError. A failed rank raises from its own error; an interrupted rank raises the interrupt.
        """
        return self._results(work, everywhere=True)

    def agree(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return the result of this rank. Raises like `gather`."""
        result: list[T] = []
        self.gather(lambda: result.append(work()))
        return result[0]

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others wait, and return its (picklable) result on all ranks.

        If it fails, all ranks raise: a ValueError with the same text, or for any other error a RuntimeError naming it.
        """
        return self._results(work, everywhere=False)[0]

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

    def _results(self, work: Callable[[], T], *, everywhere: bool) -> list[T]:
        """Run `work` on all ranks, or on rank 0 alone; return the results."""
        if self.size == 1:
            return [work()]
        result = _Result(None)
        error: BaseException | None = None
        try:
            if everywhere or self.rank == 0:
                result = _Result(work())
        except BaseException as raised:  # sent to the other ranks before it is raised here
            error = raised
            result = _Result.of_error(raised)
        try:
            received = self._objects.all_gather(result) if everywhere else [self._objects.broadcast(result)]
            results = [_Result(*fields) for fields in received]
            if error is not None and not isinstance(error, Exception):
                raise error
            failed = [result for result in results if result.error is not None]
            if not failed:
                return [result.value for result in results]
            are_value_errors = all(result.is_value_error for result in failed)
            if are_value_errors and not everywhere:  # rank 0's, which need not be named
                raise ValueError(failed[0].error) from error
            failures = [
                None if result.error is None else Failure(result.error, result.names_ranks) for result in results
            ]
            kind = ValueError if are_value_errors else RuntimeError
            raise mark_names_ranks(kind(_join_failures(self.global_ranks, failures))) from error
        finally:
            error = None  # this frame is in the error's traceback: the cycle would keep all its tensors

    def collect(self, value: T) -> list[T] | None:
        """Return the (picklable) values of all ranks on rank 0, and None on others, which save the memory."""
        return [value] if self.size == 1 else self._objects.gather(value)

    def scatter(self, values: Sequence[T] | None) -> T:
        """Scatter (picklable) values of rank 0, one per rank, and return this rank's. Other ranks pass None."""
        if self.size == 1 and values is not None:
            return values[0]
        value: T = self._objects.scatter(values)
        return value

    # -- small records

    def exchange(self, value: Any, kind: type[Exception] = ValueError) -> list[Any]:
        """Return the JSON values of all ranks.

        value: of this rank; or its error, for which all ranks raise `kind`. Raises RankLost if a rank is gone.
        """
        answers = self._send_to_all(value)
        failures = [
            Failure(f"cannot be reached: {answer}") if isinstance(answer, RankLost) else answer.failure
            for answer in answers
        ]
        if any(failures):
            waits = [answer.wait for answer in answers if isinstance(answer, RankLost) and answer.wait is not None]
            text = _join_failures(self.global_ranks, failures)
            error: Exception = kind(text)
            if waits:
                error = RankLost(text, waits[0]._replace(ranks=[rank for wait in waits for rank in wait.ranks]))
            raise mark_names_ranks(error) from (value if isinstance(value, Exception) else None)
        return [answer.value for answer in _raise_lost(answers)]

    def _send_to_all(self, value: Any) -> list[Record | RankLost]:
        """Return the records of all ranks with their JSON values, or with failures in place of errors."""
        record = Record(Failure.of(value)) if isinstance(value, BaseException) else Record(value=value)
        if self.size == 1:
            return [record]
        assert self._host.size == self.size, "small records need a process group"
        try:
            return self._host.exchange(record)
        except (TypeError, ValueError) as raised:  # no JSON, or too long, on this rank alone: the others are told
            return self._host.exchange(Record(Failure.of(raised)))

    # -- the arguments of a step

    def compare_replicas(self) -> None:
        """Find out whether all ranks of the pipeline have the same number of replicas.

        If not, because a stage is not sharded, a replica's failure reaches only some ranks of the pipeline: these then
        tell the others.
        """
        # First over connections that exist: if a rank is gone, all notice it. See `process_groups`.
        self._host.combine(Summary())
        sizes = [replica.size for replica in self._replicas]
        self._replicas_differ = any(record.value != sizes for record in _raise_lost(self._send_to_all(sizes)))

    def lowest(self, number: int) -> int:
        """Return the lowest of the numbers that all ranks and their replicas pass."""
        return self._combine_everywhere(Summary(key=number)).key

    def wait_for_all(self, flags: Sequence[bool] = ()) -> list[bool]:
        """Wait until all ranks and their replicas have called this; return the flags that all replicas have set.

        flags: as many on a rank as on its replicas. Up to KNOWN_BITS of them travel in the messages of the wait; with
        more, several share a bit, and a bit that all replicas have set takes one more round of messages.
        """
        shared_bits = 0
        for index, flag in enumerate(flags):
            shared_bits |= flag << index % KNOWN_BITS
        combined = self._host.combine(Summary())
        shared_bits = self._in_all_replicas(shared_bits)
        if self._replicas_differ:
            self._host.combine(combined)
        agreed = [bool(shared_bits >> index % KNOWN_BITS & 1) for index in range(len(flags))]
        if len(flags) > KNOWN_BITS:
            for first in range(KNOWN_BITS):
                if agreed[first]:
                    agreed[first::KNOWN_BITS] = self._agree_on_flags(flags[first::KNOWN_BITS])
        return agreed

    def _agree_on_flags(self, flags: Sequence[bool]) -> list[bool]:
        """Return the flags that all replicas have set."""
        bits = self._in_all_replicas(sum(flag << index for index, flag in enumerate(flags)))
        return [bool(bits >> index & 1) for index in range(len(flags))]

    def _in_all_replicas(self, bits: int) -> int:
        """Return the bits that are set on this rank and on all its replicas."""
        for replica in self._replicas:
            bits = replica.combine(Summary(known=bits)).known
        return bits

    def compare(
        self, kind: type[R], record: R | BaseException, conclude: Callable[[list[R]], C], *, same_everywhere: Any = None
    ) -> Outcome[C]:
        """Compare the records of all ranks and their replicas; return the conclusion from them or a problem.

        A problem is an error in place of the record of any rank, a ValueError of `conclude`, or a difference between
        replicas. Raises RankLost if a rank is gone.

        Args:
            kind: the type of the record, a dataclass of JSON values.
            record: the record of this rank, or the error that it has in its place.
            conclude: returns the conclusion from the records of all ranks, or raises ValueError.
            same_everywhere: a JSON value that must be the same on a rank and its replicas.
        """
        conclusion, problem = self._compare_in_pipeline(kind, record, conclude)
        problem = self._compare_replicas(problem, same_everywhere)
        return Outcome(None if problem else conclusion, problem, record if isinstance(record, BaseException) else None)

    def _compare_in_pipeline(
        self, kind: type[R], record: R | BaseException, conclude: Callable[[list[R]], C]
    ) -> tuple[C | None, str | None]:
        """Return the conclusion from the records of the pipeline's ranks, or a problem."""
        has_error = isinstance(record, BaseException)
        matches = 0  # bits: cached records that fit this rank's
        for index, (records, _) in enumerate(self._known):
            if not has_error and records[self._host.rank] == record:
                matches |= 1 << index
        combined = self._host.combine(Summary(has_error=has_error, known=matches))
        if combined.known and not combined.has_error:
            index = combined.known.bit_length() - 1
            return self._known[index][1], None
        answers = _raise_lost(self._send_to_all(record if has_error else vars(record)))
        failures = [answer.failure for answer in answers]
        if any(failures):
            return None, _join_failures(self.global_ranks, failures)
        records = [kind(**answer.value) for answer in answers]
        try:
            conclusion = conclude(records)
        except ValueError as disagreement:  # with the same text on every rank
            return None, str(disagreement)
        if len(self._known) == KNOWN_BITS:
            self._known.clear()
        self._known.append((records, conclusion))
        return conclusion, None

    def _compare_replicas(self, problem: str | None, same_everywhere: Any) -> str | None:
        """Return the problem of this pipeline, or else that of a replica."""
        for replica in self._replicas:
            digest = int.from_bytes(blake2b(repr(same_everywhere).encode(), digest_size=8).digest(), "little")
            combined = replica.combine(Summary(has_error=problem is not None, lowest=digest, highest=digest))
            if combined.has_error or combined.lowest != combined.highest:
                answers = _raise_lost(replica.exchange(Record(_failure(problem), same_everywhere)))
                problem = problem or _problem_of_replicas(answers)
        if self._replicas_differ:
            combined = self._host.combine(Summary(has_error=problem is not None))
            if combined.has_error:
                problem = _first_failure(_raise_lost(self._host.exchange(Record(_failure(problem)))))
        return problem

    def _combine_everywhere(self, summary: Summary) -> Summary:
        """Return the combined summary of all ranks of the pipeline and their replicas."""
        combined = self._host.combine(summary)
        for replica in self._replicas:
            combined = replica.combine(combined)
        return self._host.combine(combined) if self._replicas_differ else combined


def _join_failures(global_ranks: Sequence[int], failures: Sequence[Failure | None]) -> str:
    """Join the distinct failures of ranks, with the numbers of the failed ranks in front unless the text names them."""
    ranks_of: dict[Failure, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks_of.setdefault(failure, []).append(rank)
    return "; ".join(
        failure.text if failure.is_named else f"{_name([global_ranks[rank] for rank in ranks])}: {failure.text}"
        for failure, ranks in ranks_of.items()
    )


def _name(global_ranks: Sequence[int]) -> str:
    """Return the name of one rank with its place in the mesh, or the global numbers of several."""
    return rank_ranges(global_ranks) if len(global_ranks) > 1 else Recorder.current().name(global_ranks[0])


def _failure(problem: str | None) -> Failure | None:
    """Return the failure that tells other ranks of a problem, whose text names the failed ranks."""
    return None if problem is None else Failure(problem[:MAX_TEXT], is_named=True)


def _first_failure(answers: Sequence[Record]) -> str | None:
    """Return the problem of the first rank that has one."""
    return next((answer.failure.text for answer in answers if answer.failure is not None), None)


def _problem_of_replicas(answers: Sequence[Record]) -> str:
    """Return the problem of the first replica that has one, or the difference between replicas."""
    differing = f"data-parallel ranks disagree: by rank {[answer.value for answer in answers]}"
    return _first_failure(answers) or differing


def _raise_lost(answers: Sequence[Record | RankLost]) -> list[Record]:
    """Return the answers. Raises RankLost if one is missing."""
    records = []
    for answer in answers:
        if isinstance(answer, RankLost):
            raise answer
        records.append(answer)
    return records
