"""Agreement of the ranks of a pipeline, and of their data-parallel replicas, on the arguments of a call.

Every rank describes its arguments in a record. In a step whose records equal those of an earlier one, each of N ranks
sends ceil(log2 N) small messages in the pipeline, and as many among its replicas (`HostMessages.combine`). If anything
is new, wrong or different, the ranks of the pipeline exchange their records once, and all draw the same conclusion from
the same records. Conclusions are cached with the records of all ranks; a rank tells the others which cached records fit
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from torch.distributed import ProcessGroup

from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.ranks.process_groups import backends, new_gloo_group
from dualpipe.runtime.ranks.records import KNOWN_BITS, MAX_TEXT, Failure, HostMessages, Record, Summary
from dualpipe.runtime.recorder import Recorder, rank_ranges

R = TypeVar("R")  # record: a dataclass that ranks compare
C = TypeVar("C")  # conclusion from the records of all ranks


@dataclass(frozen=True)
class Outcome(Generic[C]):
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


class Agreement:
    """Compares the arguments of a pipeline's ranks, and shares failures with their replicas.

    pipeline: messages between the ranks of the pipeline. replicas: process groups of ranks in other pipelines that take
    every step together with this rank.
    """

    def __init__(self, pipeline: HostMessages, replicas: Iterable[ProcessGroup] = ()) -> None:
        self.pipeline = pipeline
        host_groups = [group if "cpu" in backends(group) else new_gloo_group(group) for group in replicas]
        self._replicas = [HostMessages(group) for group in host_groups]
        self._replicas_differ = True  # the number of replicas differs between ranks; set by `compare_replicas`
        self._known: list[tuple[list[Any], Any]] = []  # records of all ranks, and their conclusion

    @property
    def groups(self) -> list[ProcessGroup]:
        """Return the process groups in which this object waits for other ranks."""
        return [messages.group for messages in (self.pipeline, *self._replicas) if messages.group is not None]

    def compare_replicas(self) -> None:
        """Find out whether all ranks of the pipeline have the same number of replicas.

        If not, because a stage is not sharded, a replica's failure reaches only some ranks of the pipeline: these then
        tell the others.
        """
        sizes = [replica.size for replica in self._replicas]
        self._replicas_differ = any(record.value != sizes for record in self._exchange(Record(value=sizes)))

    def lowest(self, number: int) -> int:
        """Return the lowest of the numbers that all ranks and their replicas pass."""
        return self._combine_everywhere(Summary(key=number)).key

    def wait_for_all(self) -> None:
        """Wait until all ranks and their replicas have called this."""
        self._combine_everywhere(Summary())

    def compare(
        self, kind: type[R], record: Callable[[], R], conclude: Callable[[list[R]], C], *, same_everywhere: Any = None
    ) -> Outcome[C]:
        """Compare the records of all ranks, and return the conclusion from them or a problem.

        A problem is an error of `record` on any rank, a ValueError of `conclude`, or a difference between replicas.
        Raises RankLost if a rank is gone.

        Args:
            kind: the type of the record.
            record: returns the record of this rank.
            conclude: returns the conclusion from the records of all ranks, or raises ValueError.
            same_everywhere: a JSON value that must be the same on a rank and its replicas.
        """
        own_record: R | None = None
        error: BaseException | None = None
        try:
            own_record = record()
        except BaseException as raised:  # sent to the other ranks before it is raised here
            error = raised
        try:
            conclusion, problem = self._compare_in_pipeline(kind, own_record, error, conclude)
            problem = self._compare_replicas(problem, same_everywhere)
            return Outcome(None if problem else conclusion, problem, error)
        finally:
            del error  # this frame is in its traceback: the cycle would keep all its tensors

    def _compare_in_pipeline(
        self, kind: type[R], own_record: R | None, error: BaseException | None, conclude: Callable[[list[R]], C]
    ) -> tuple[C | None, str | None]:
        """Return the conclusion from the records of the pipeline's ranks, or a problem."""
        matches = 0  # bits: cached records that fit this rank's
        for index, (records, _) in enumerate(self._known):
            if own_record is not None and records[self.pipeline.rank] == own_record:
                matches |= 1 << index
        combined = self.pipeline.combine(Summary(has_error=error is not None, known=matches))
        if combined.known and not combined.has_error:
            index = combined.known.bit_length() - 1
            return self._known[index][1], None
        failure = None if error is None else Failure.of(error)
        try:
            fields = None if own_record is None else asdict(own_record)  # type: ignore[call-overload]
            answers = self._exchange(Record(failure, fields))
        except (TypeError, ValueError) as raised:  # no JSON, or too long, on this rank alone: the others are told
            answers = self._exchange(Record(Failure.of(raised)))
        failures = [answer.failure for answer in answers]
        if any(failures):
            return None, join_failures(self.pipeline, failures)
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
            combined = self.pipeline.combine(Summary(has_error=problem is not None))
            if combined.has_error:
                problem = _first_failure(self._exchange(Record(_failure(problem))))
        return problem

    def _combine_everywhere(self, summary: Summary) -> Summary:
        """Return the combined summary of all ranks of the pipeline and their replicas."""
        combined = self.pipeline.combine(summary)
        for replica in self._replicas:
            combined = replica.combine(combined)
        return self.pipeline.combine(combined) if self._replicas_differ else combined

    def _exchange(self, record: Record) -> list[Record]:
        """Return the records of all ranks of the pipeline. Raises RankLost if one is gone."""
        if self.pipeline.size == 1:
            return [record]
        return _raise_lost(self.pipeline.exchange(record))


def join_failures(messages: HostMessages, failures: Sequence[Failure | None]) -> str:
    """Join the distinct failures of ranks, with the numbers of the failed ranks in front unless the text names them."""
    ranks_of: dict[Failure, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks_of.setdefault(failure, []).append(rank)
    return "; ".join(
        failure.text if failure.is_named else f"{_name(messages, ranks)}: {failure.text}"
        for failure, ranks in ranks_of.items()
    )


def _name(messages: HostMessages, ranks: Sequence[int]) -> str:
    """Return the name of one rank with its place in the mesh, or the global numbers of several."""
    numbers = [messages.global_ranks[rank] for rank in ranks]
    return rank_ranges(numbers) if len(numbers) > 1 else Recorder.current().name(numbers[0])


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
