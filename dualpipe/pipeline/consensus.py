"""What fails on one rank raises on all, so that nobody waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dualpipe.errors import PipelineError, UpstreamFailed
from dualpipe.pipeline.transport import Replicas, Transport

ERROR_CHARACTERS = 1200  # of an error's text that travel to the other ranks

_REMEDIES = {  # for errors of torch that say nothing of a pipeline
    "leaf Variable that requires grad": " A stage must not begin with an operation in place: its input is a leaf, from "
    "which the stage before gets its gradient, and so are parameters. Write x = x + 1 instead of x += 1.",
}

T, U = TypeVar("T"), TypeVar("U")


class Consensus:
    """The ranks of a pipeline and those of the data-parallel pipelines beside it."""

    def __init__(self, transport: Transport, replicas: Replicas) -> None:
        self._transport, self._replicas = transport, replicas
        self._tell_back = True

    def compare_replicas(self) -> None:
        """Find out whether every rank hears of a failure in another pipeline by itself: where their replicas differ in
        number, because a stage is not sharded, one tells the others of its own pipeline."""
        sizes = self._transport.exchange(self._replicas.sizes)
        self._tell_back = any(other != sizes[0] for other in sizes)

    def reach(
        self,
        kind: type[Exception],
        attempt: Callable[[], tuple[T, Any]],
        conclude: Callable[[list[Any]], U] = lambda values: None,
        *,
        where: Callable[[], str] = str,
        same_everywhere: Any = None,
    ) -> tuple[T, U]:
        """Do something on every rank; where it fails on one, all raise `kind`, or PipelineError where one is gone.

        `attempt` gives (own result, JSON value to share), `conclude` makes something of the values of the pipeline's
        ranks or raises ValueError; returned are the own result and the conclusion. `where()` says what an error came
        from; `same_everywhere` must be the same in all pipelines. An interrupt is told to the others like any error,
        and goes on as itself here.
        """
        error = own = value = text = None
        try:
            own, value = attempt()
        except BaseException as raised:
            error = raised
            text = None if isinstance(raised, UpstreamFailed) else f"{where()}{_text(raised)}"
        try:
            failure, conclusion = self._compare(kind, text, value, conclude, same_everywhere)
            if error is not None and not isinstance(error, Exception):
                raise error
            if failure is None and error is not None:
                failure = PipelineError("a rank failed and could not report why")
            if failure is not None:
                raise failure from error
            return own, conclusion
        finally:
            error = failure = None  # this frame is in the error's traceback: the cycle would keep all its tensors

    def _compare(
        self,
        kind: type[Exception],
        text: str | None,
        value: Any,
        conclude: Callable[[list[Any]], U],
        same_everywhere: Any,
    ) -> tuple[Exception | None, U | None]:
        """What went wrong anywhere, and the conclusion where nothing did."""
        records = self._transport.exchange([_short(text), value])
        failure, conclusion = _failure(records, kind), None
        if failure is None:
            try:
                conclusion = conclude([value for _, value in records])
            except ValueError as disagreement:
                failure = disagreement
        elsewhere = self._replicas.agree(_short(failure and str(failure)), same_everywhere)
        if self._tell_back:
            told = _failure(self._transport.exchange([_short(elsewhere), None]), kind)
            elsewhere = elsewhere or (told and str(told))
        if failure is None and elsewhere is not None:
            failure = kind(elsewhere)
        return failure, conclusion


def _failure(records: list[Any], kind: type[Exception]) -> Exception | None:
    """`kind`, with the same text on every rank, where a record tells of an error or a rank is gone."""
    lost = {rank: f"cannot be reached: {r}" for rank, r in enumerate(records) if isinstance(r, RuntimeError)}
    errors = {rank: r[0] for rank, r in enumerate(records) if rank not in lost and r[0] is not None} | lost
    if not errors:
        return None
    return (PipelineError if lost else kind)("; ".join(f"rank {r}: {errors[r]}" for r in sorted(errors)))


def _short(text: str | None) -> str | None:
    return text and text[:ERROR_CHARACTERS]


def _text(error: BaseException) -> str:
    """A ValueError speaks for itself; others are named by their type."""
    try:
        text = str(error)
    except Exception as raised:
        text = f"(its text raised {type(raised).__name__})"
    text += next((remedy for phrase, remedy in _REMEDIES.items() if phrase in text), "")
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"
