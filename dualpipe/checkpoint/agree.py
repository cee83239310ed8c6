"""What fails on one rank raises on all, so that nobody waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_CHARACTERS = 20_000  # of an error's text that travel to the other ranks

T = TypeVar("T")


class Ranks:
    """All ranks of a mesh that spans the default process group; None: this process alone.

    They talk in `group`, of the same ranks in the same order (None: the default one).
    """

    def __init__(self, mesh: DeviceMesh | None, group: dist.ProcessGroup | None = None) -> None:
        self.size = 1 if mesh is None else dist.get_world_size()
        self.rank = 0 if self.size == 1 else dist.get_rank()
        self._group, self._cut_short = group, False
        if mesh is not None and mesh.size() != self.size:
            raise ValueError(f"the mesh has {mesh.size()} of {self.size} ranks; pass the whole one, from build_mesh")

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every rank and return what it gave (picklable), by rank.

        Raises ValueError where it did on some rank, and RuntimeError for any other error; on the rank itself from its
        own error, or an interrupt as it is.
        """
        if self.size == 1:
            return [work()]
        value = error = None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        outcomes: list[Any] = [None] * self.size
        mine = None if error is None else (isinstance(error, ValueError), _text(error))
        with self._exchange():
            dist.all_gather_object(outcomes, (mine, value), group=self._group)
        if error is not None and not isinstance(error, Exception):
            raise error
        failed = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure is not None}
        if failed:
            kind = ValueError if all(is_value_error for is_value_error, _ in failed.values()) else RuntimeError
            raise kind(_joined({rank: text for rank, (_, text) in failed.items()})) from error
        return [value for _, value in outcomes]

    def agree(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank and return what it gave here; raises as `gather` does."""
        result: list[T] = []
        self.gather(lambda: result.append(work()))
        return result[0]

    def first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and return what it gave (picklable) on all; raises as `gather` does."""
        result = self.agree(lambda: work() if self.rank == 0 else None)
        if self.size > 1:
            shared = [result]
            with self._exchange():
                dist.broadcast_object_list(shared, src=0, group=self._group)
            result = shared[0]
        return result

    def collect(self, value: T) -> list[T] | None:
        """The (picklable) values of all ranks, on rank 0 alone: for what would be too much to hold on each."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._exchange():
            dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def hand_out(self, values: Sequence[T] | None) -> T:
        """To each rank its own of rank 0's (picklable) values."""
        if self.size == 1:
            return values[0]
        mine: list[Any] = [None]
        with self._exchange():
            dist.scatter_object_list(mine, None if values is None else list(values), src=0, group=self._group)
        return mine[0]

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """After one that did not come to its end the next would take its messages for others."""
        if self._cut_short:
            raise RuntimeError("an earlier exchange between the ranks was cut short, by an interrupt, a timeout or the "
                               "loss of a rank; they can agree on nothing any more")
        self._cut_short = True
        yield
        self._cut_short = False


def _text(error: BaseException) -> str:
    return (f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")[:_CHARACTERS]


def _joined(texts: dict[int, str]) -> str:
    """Each text once, with the ranks that it comes from."""
    by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())
