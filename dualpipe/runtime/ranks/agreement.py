"""Agreement of the ranks of a pipeline, and of the data-parallel replicas of each, before they go on.

In a step that is like an earlier one, each rank sends ceil(log2 N) small messages in the pipeline and as many among the
replicas (`HostMessages.combine`). Where anything is new, wrong or different, the ranks of the pipeline exchange their
records, once, and all come to the same conclusion from the same records: a conclusion is remembered by the records that
it follows from, and each rank says which of those it knows fit its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from torch.distributed import ProcessGroup

from dualpipe.runtime.errors import RankLost
from dualpipe.runtime.ranks.process_groups import backends, new_gloo_group
from dualpipe.runtime.ranks.records import KNOWN_BITS, LONGEST, Failure, HostMessages, Record, Summary
from dualpipe.runtime.recorder import Recorder, rank_ranges

R = TypeVar("R")  # a dataclass that ranks compare
C = TypeVar("C")  # what follows from everybody's


@dataclass(frozen=True)
class Outcome(Generic[C]):
    """The conclusion of all ranks, or the problem, with the same text on every rank.

    cause: the error of this rank, where it is one that has failed.
    """

    conclusion: C | None
    problem: str | None
    cause: BaseException | None = None

    def raise_problem(self) -> None:
        """Raise ValueError if there is a problem; on a rank that was interrupted, the interrupt."""
        if self.cause is not None and not isinstance(self.cause, Exception):
            raise self.cause
        if self.problem is not None:
            raise ValueError(self.problem) from self.cause


class Agreement:
    """Compares what the ranks of a pipeline are given, and hears of failures among their replicas.

    replicas: process groups of ranks outside the pipeline that take every step together with this one.
    """

    def __init__(self, pipeline: HostMessages, replicas: Iterable[ProcessGroup] = ()) -> None:
        self.pipeline = pipeline
        self._replicas = [HostMessages(group if "cpu" in backends(group) else new_gloo_group(group)) for group in replicas]
        self._replicas_differ = True  # in number, from rank to rank; until `compare_replicas` knows better
        self._known: list[tuple[list[Any], Any]] = []  # records of all ranks, and what followed

    @property
    def groups(self) -> list[ProcessGroup]:
        """The process groups in which ranks wait for one another here."""
        return [messages.group for messages in (self.pipeline, *self._replicas) if messages.group is not None]

    def compare_replicas(self) -> None:
        """Find out whether every rank hears of a failure among the replicas by itself: where these differ in number,
        because a stage is not sharded, one tells the others here."""
        sizes = [replica.size for replica in self._replicas]
        self._replicas_differ = any(record.value != sizes for record in self._exchange(Record(value=sizes)))

    def lowest(self, number: int) -> int:
        """Return the lowest of the numbers of all ranks and their replicas."""
        return self._everywhere(Summary(key=number)).key

    def wait_for_all(self) -> None:
        """Wait until all ranks and their replicas are here."""
        self._everywhere(Summary())

    def compare(
        self, kind: type[R], record: Callable[[], R], conclude: Callable[[list[R]], C], *, same_everywhere: Any = None
    ) -> Outcome[C]:
        """Compare what `record` returns on each rank; return what `conclude` makes of it, or what is wrong.

        An error of `record` on any rank, or a ValueError of `conclude`, is what is wrong. same_everywhere: must be the
        same among the replicas, too. Raises RankLost where a rank is gone.
        """
        own: R | None = None
        error: BaseException | None = None
        try:
            own = record()
        except BaseException as raised:  # the other ranks hear of it before it is raised here
            error = raised
        try:
            conclusion, problem = self._compare_in_pipeline(kind, own, error, conclude)
            problem = self._compare_replicas(problem, same_everywhere)
            return Outcome(None if problem else conclusion, problem, error)
        finally:
            del error  # this frame is in its traceback: the cycle would keep all its tensors

    def _compare_in_pipeline(
        self, kind: type[R], own: R | None, error: BaseException | None, conclude: Callable[[list[R]], C]
    ) -> tuple[C | None, str | None]:
        fitting = 0
        for number, (records, _) in enumerate(self._known):
            if own is not None and records[self.pipeline.rank] == own:
                fitting |= 1 << number
        together = self.pipeline.combine(Summary(has_error=error is not None, known=fitting))
        if together.known and not together.has_error:
            number = together.known.bit_length() - 1
            return self._known[number][1], None
        failure = None if error is None else Failure.of(error)
        try:
            fields = None if own is None else asdict(own)  # type: ignore[call-overload]
            answers = self._exchange(Record(failure, fields))
        except (TypeError, ValueError) as unfit:  # no JSON, or too long, on this rank alone: the others hear of that
            answers = self._exchange(Record(Failure.of(unfit)))
        failures = [answer.failure for answer in answers]
        if any(failures):
            return None, join_failures(self.pipeline, failures)
        records = [kind(**answer.value) for answer in answers]
        try:
            conclusion = conclude(records)
        except ValueError as disagreement:  # the same on every rank
            return None, str(disagreement)
        if len(self._known) == KNOWN_BITS:
            self._known.clear()
        self._known.append((records, conclusion))
        return conclusion, None

    def _compare_replicas(self, problem: str | None, same_everywhere: Any) -> str | None:
        """Return the problem of this pipeline, or of a replica."""
        for replica in self._replicas:
            digest = int.from_bytes(blake2b(repr(same_everywhere).encode(), digest_size=8).digest(), "little")
            together = replica.combine(Summary(has_error=problem is not None, lowest=digest, highest=digest))
            if together.has_error or together.lowest != together.highest:
                answers = _raise_lost(replica.exchange(Record(_failure(problem), same_everywhere)))
                problem = problem or _problem_of_replicas(answers)
        if self._replicas_differ:
            together = self.pipeline.combine(Summary(has_error=problem is not None))
            if together.has_error:
                problem = _first_failure(self._exchange(Record(_failure(problem))))
        return problem

    def _everywhere(self, own: Summary) -> Summary:
        """Combine with all ranks of the pipeline and their replicas."""
        together = self.pipeline.combine(own)
        for replica in self._replicas:
            together = replica.combine(together)
        return self.pipeline.combine(together) if self._replicas_differ else together

    def _exchange(self, record: Record) -> list[Record]:
        if self.pipeline.size == 1:
            return [record]
        return _raise_lost(self.pipeline.exchange(record))


def join_failures(messages: HostMessages, failures: Sequence[Failure | None]) -> str:
    """Join the failures of ranks, in their order, each once, with the ranks that it comes from unless it names them."""
    ranks_of: dict[Failure, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            ranks_of.setdefault(failure, []).append(rank)
    return "; ".join(
        failure.text if failure.is_named else f"{_name(messages, ranks)}: {failure.text}"
        for failure, ranks in ranks_of.items()
    )


def _name(messages: HostMessages, ranks: Sequence[int]) -> str:
    """Return the name of a rank with its place in the mesh, or the numbers of several."""
    numbers = [messages.global_ranks[rank] for rank in ranks]
    return rank_ranges(numbers) if len(numbers) > 1 else Recorder.current().name(numbers[0])


def _failure(problem: str | None) -> Failure | None:
    """Return a problem, which names its ranks, as other ranks are told of it."""
    return None if problem is None else Failure(problem[:LONGEST], is_named=True)


def _first_failure(answers: Sequence[Record]) -> str | None:
    """Return what the first rank with a problem says."""
    return next((answer.failure.text for answer in answers if answer.failure is not None), None)


def _problem_of_replicas(answers: Sequence[Record]) -> str:
    """Return what the first replica with a problem says, or how they differ."""
    differing = f"data-parallel ranks disagree: by rank {[answer.value for answer in answers]}"
    return _first_failure(answers) or differing


def _raise_lost(answers: Sequence[Record | RankLost]) -> list[Record]:
    """Return the answers; raise RankLost where one is missing."""
    records = []
    for answer in answers:
        if isinstance(answer, RankLost):
            raise answer
        records.append(answer)
    return records
