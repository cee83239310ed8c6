"""What fails on one rank raises on all, so that nobody waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_CHARACTERS = 20_000  # of an error's text that travel to the other ranks

T = TypeVar("T")


class RankSync:
    """The ranks of a process group that can carry objects (gloo); None: this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self._group, self._cut_short = group, False

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh | None, group: dist.ProcessGroup | None = None) -> RankSync:
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
        with self._whole():
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
        """Do `work` on rank 0 while the others wait, and return what it gave (picklable) on all.

        Raises everywhere what it raised: a ValueError as such, any other error as a RuntimeError that names it.
        """
        if self.size == 1:
            return work()
        outcome: list[Any] = [(None, None)]
        error = None
        if self.rank == 0:
            try:
                outcome = [(work(), None)]
            except BaseException as raised:  # told to the other ranks before it is raised here
                error = raised
                outcome = [(None, (isinstance(raised, ValueError), _text(raised)))]
        with self._whole():
            dist.broadcast_object_list(outcome, group_src=0, group=self._group, device=torch.device("cpu"))
        result, failure = outcome[0]
        if error is not None and not isinstance(error, Exception):
            raise error
        if failure is not None:
            is_value_error, text = failure
            raise (ValueError(text) if is_value_error else RuntimeError(f"rank 0: {text}")) from error
        return result

    def collect(self, value: T) -> list[T] | None:
        """The (picklable) values of all ranks, on rank 0 alone: for what would be too much to hold on each."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._whole():
            dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def hand_out(self, values: Sequence[T] | None) -> T:
        """To each rank its own of rank 0's (picklable) values."""
        if self.size == 1:
            return values[0]
        mine: list[Any] = [None]
        with self._whole():
            dist.scatter_object_list(mine, None if values is None else list(values), src=0, group=self._group)
        return mine[0]

    @contextmanager
    def _whole(self) -> Iterator[None]:
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
