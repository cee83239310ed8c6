"""Objects of any size between ranks: over a process group, or, before there is one, through the store of the job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dualpipe.runtime.ranks.records import GroupMembers
from dualpipe.runtime.recorder import RecordedWait, Recorder, rank_ranges

_HOST = torch.device("cpu")
_ANSWER = timedelta(seconds=5)  # other ranks wait this much longer than rank 0, for it to name the missing rank


class Objects(Protocol):
    """Collectives for objects; all ranks call the same ones in the same order.

    global_ranks: names the ranks in errors.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, and None on others."""

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's of the values that rank 0 passes, one per rank."""


class GroupObjects(GroupMembers):
    """Picklable objects over a process group that can carry host tensors (gloo).

    `gather` and `scatter` follow a binomial tree with rank 0 at its root, whose edges are connections that the group
    has: gloo's own would connect rank 0 with every other rank. A rank's place is its distance from rank 0 in the group.
    The children of place p are p + 1, p + 2, p + 4, ... below its lowest bit; each is the root of a tree of places.
    """

    def __init__(self, group: ProcessGroup | None, members: Sequence[int] = ()) -> None:
        super().__init__(group, members)
        self._place = (self._members[self.rank] - self._members[0]) % self.size
        if isinstance(group, ProcessGroup):
            Recorder.current().rank = dist.get_rank()  # names this rank in errors
        self._is_cut_short = False

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [value] * self.size
        with self._collective("all_gather_object"):
            dist.all_gather_object(values, value, group=self.group)
        return [values[member] for member in self._members]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        values = [value]
        with self._collective("broadcast_object_list"):
            dist.broadcast_object_list(values, group=self.group, group_src=self._members[0], device=_HOST)
        return values[0]

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, and None on others, which save the memory."""
        values = {self._place: value}
        with self._collective("gather"):
            for distance in self._child_distances():
                values |= self._receive(self._place + distance)
            if self._place:
                self._send(values, self._parent())
        if self._place:
            return None
        return [values[self._place_of(member)] for member in self._members]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's of the values that rank 0 passes, one per rank."""
        by_place: dict[int, Any] = {}
        if values is not None:
            by_place = {self._place_of(member): value for member, value in zip(self._members, values)}
        with self._collective("scatter"):
            if self._place:
                by_place = self._receive(self._parent())
            for distance in reversed(self._child_distances()):
                child = self._place + distance
                self._send({place: by_place[place] for place in range(child, child + distance) if place in by_place},
                           child)
        return by_place[self._place]

    def _child_distances(self) -> list[int]:
        """Return the distances from this place to its children in the tree, ascending."""
        distances = []
        distance = 1
        while self._place + distance < self.size and not self._place & distance:
            distances.append(distance)
            distance *= 2
        return distances

    def _parent(self) -> int:
        """Return the place of the parent: this one without its lowest bit."""
        return self._place & (self._place - 1)

    def _place_of(self, member: int) -> int:
        return (member - self._members[0]) % self.size

    def _send(self, values: dict[int, Any], place: int) -> None:
        """Send values by place to the rank at a place."""
        peer = (self._members[0] + place) % self.size
        with self._wait_for(peer):
            dist.send_object_list([values], group=self.group, group_dst=peer, device=_HOST)

    def _receive(self, place: int) -> dict[int, Any]:
        """Return the values by place that the rank at a place sends."""
        peer = (self._members[0] + place) % self.size
        received: list[Any] = [None]
        with self._wait_for(peer):
            dist.recv_object_list(received, group=self.group, group_src=peer, device=_HOST)
        values: dict[int, Any] = received[0]
        return values

    def _wait_for(self, peer: int) -> RecordedWait:
        """Return a context manager for a message to or from a rank of the group."""
        return Recorder.current().wait("agree", "gathered values", [self.global_ranks[self._members.index(peer)]])

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        """Run a collective of the group inside of a `with`. name: for errors and traces.

        Raises RuntimeError if an earlier one was cut short: this one could receive messages of that one.
        """
        if self._is_cut_short:
            raise RuntimeError("an earlier exchange between the ranks was cut short, by an interrupt, a timeout or the "
                               "loss of a rank, so that they can exchange nothing more; restart the processes")
        self._is_cut_short = True
        with Recorder.current().collective("agree", f"all in {name}", self.global_ranks):
            yield
        self._is_cut_short = False


class StoreObjects:
    """JSON values of ranks that have no process group yet, through a store.

    No pickles: the store has no passwords, and a pickle can run any code. A wait that ends without the values raises
    TimeoutError: on rank 0 it names the missing ranks, and other ranks refer to rank 0.

    Args:
        store: of the job.
        rank: of this process.
        size: number of ranks.
        topic: names the values in keys and errors, such as "settings".
        timeout: of every wait for other ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, topic: str, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.global_ranks = tuple(range(size))
        self._store = store
        self._topic = topic
        self._timeout = timeout
        self._calls = 0  # the same on all ranks

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values: list[Any] = self.broadcast(self.gather(value))
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        key = self._next_key()
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        # Longer than rank 0 waits for others: rank 0 names the missing rank, and its message must come first.
        seconds = self._timeout + _ANSWER
        try:
            self._store.wait([key], seconds)
            return json.loads(self._store.get(key))
        except dist.DistError as lost:
            raise TimeoutError(f"rank {self.rank} lost rank 0, or waited {seconds.total_seconds():g} s for it, while "
                               f"all ranks compared their {self._topic}; see what rank 0 printed") from lost

    def gather(self, value: Any, timeout: timedelta | None = None) -> list[Any] | None:
        """Return the values of all ranks on rank 0, and None on others, which do not wait.

        timeout: another one for this call.
        """
        timeout = timeout or self._timeout
        key = self._next_key()
        self._store.set(f"{key}/{self.rank}", json.dumps(value, sort_keys=True, default=str))
        if self.rank != 0:
            return None
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, timeout)
        except dist.DistError as error:
            missing = rank_ranges([rank for rank, key in enumerate(keys) if not self._store.check([key])])
            raise TimeoutError(f"rank 0 waited {timeout.total_seconds():g} s for {missing} of {self.size}; they were "
                               "not started or have failed: see what they printed") from error
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's of the values that rank 0 passes, one per rank."""
        return self.broadcast(values)[self.rank]

    def _next_key(self) -> str:
        self._calls += 1
        return f"{self._topic}/{self._calls}"
