"""Recorder of a rank's work and waits: a ring of its latest entries, and the open ones.

It is always on: an entry costs the host less than a microsecond. All work that takes time on a rank, or may wait for
another rank, is between `begin` and `end`. So an outside reader such as the watchdog knows the running work of a rank
and its start, and the states of all ranks together show which rank is being waited on. An `Observer` is called at the
same places: a trace uses the entries, and a check of numbers the results.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby, takewhile
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from dualpipe.runtime.errors import RankLost, Wait

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ENTRIES = 2**12  # size of the ring
_STATE_ENTRIES = 64  # latest entries in a state
_running: ContextVar[Recorder | None] = ContextVar("dualpipe_recorder", default=None)


# Indices into an entry, which is a list because that is the fastest to make. Times are nanoseconds of perf_counter_ns;
# ENDED is 0 before the end. STEP is the optimizer step, RANKS the global ranks being waited on. NUMBER is the sequence
# number of a collective among those of its kind and ranks, the same on all its ranks.
BEGAN, ENDED, STEP, KIND, WHAT, RANKS, BYTES, NUMBER = range(8)
Entry = list[Any]


class Observer:
    """Interface of a subscriber to a recorder's entries and results. Every method of this class does nothing."""

    lanes = False  # True: also observes lanes, the recorders of the rank's other threads

    def before(self, recorder: Recorder, kind: str, what: object) -> None:
        """Called before an entry begins; an error raised here leaves no entry."""

    def began(self, recorder: Recorder, entry: Entry) -> None:
        """Called after an entry has begun."""

    def ended(self, recorder: Recorder, entry: Entry) -> None:
        """Called after an entry has ended."""

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Called with new results, tensors or not, before anything has read them."""


class Recorder:
    """Entries of one thread of a rank. Its lanes are the recorders of the rank's other threads, by name.

    rank: the global rank. sizes: sizes of the mesh's dimensions, outermost first, for the names of ranks.
    """

    def __init__(self, rank: int = 0, sizes: Mapping[str, int] | None = None) -> None:
        self.rank = rank
        self.sizes = dict(sizes or {})
        self.step = 0  # the current optimizer step, from 1
        self.is_observed = False  # True if there are observers
        self.lost: Wait | None = None  # the first wait that ended with the loss of a rank
        self._loss: _Loss | None = None
        # True while a trace is recorded: no entry falls out of the ring, and details are recorded.
        self.keeps_all = False
        self._ring: deque[Entry] = deque(maxlen=ENTRIES)
        self._open: list[Entry] = []
        self._numbers: Counter[tuple[str, Sequence[int]]] = Counter()  # latest sequence numbers, by kind and ranks
        self._members: dict[str, tuple[int, ...]] = {}  # global ranks by name of the group
        self._lanes: dict[str, Recorder] = {}
        self._observers: tuple[Observer, ...] = ()

    @staticmethod
    def current() -> Recorder:
        """Return the active recorder of this thread; make one if there is none."""
        recorder = _running.get()
        if recorder is None:
            recorder = Recorder()
            _running.set(recorder)
        return recorder

    @contextmanager
    def activate(self) -> Iterator[Self]:
        """Make this the active recorder of the thread inside of a `with`."""
        token = _running.set(self)
        try:
            yield self
        finally:
            _running.reset(token)

    def lane(self, name: str) -> Recorder:
        """Return the recorder of another thread of this rank, by its name; the thread activates it."""
        if name not in self._lanes:
            self._lanes[name] = Recorder(self.rank, self.sizes)
            self._lanes[name].keep_all(self.keeps_all)
        lane = self._lanes[name]
        lane.step = self.step
        lane._observers = tuple(observer for observer in self._observers if observer.lanes)
        lane.is_observed = bool(lane._observers)
        return lane

    def subscribe(self, observer: Observer) -> None:
        """Call an observer from now on, after the earlier ones."""
        self._observers += (observer,)
        self.is_observed = True

    def unsubscribe(self, observer: Observer) -> None:
        """Stop calling an observer."""
        self._observers = tuple(other for other in self._observers if other is not observer)
        self.is_observed = bool(self._observers)

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Call an observer inside of a `with`."""
        self.subscribe(observer)
        try:
            yield
        finally:
            self.unsubscribe(observer)

    # -- recording

    def begin(self, kind: str, what: object = "", ranks: Sequence[int] = (), nbytes: int = 0) -> Entry:
        """Open an entry.

        what: converted to text only when the entry is read. ranks: the global ranks being waited on.
        """
        for observer in self._observers:
            observer.before(self, kind, what)
        entry = [perf_counter_ns(), 0, self.step, kind, what, ranks, nbytes, 0]
        self._ring.append(entry)
        self._open.append(entry)
        for observer in self._observers:
            observer.began(self, entry)
        return entry

    def end(self) -> None:
        """Close the innermost open entry."""
        entry = self._open.pop()
        entry[ENDED] = perf_counter_ns()
        for observer in self._observers:
            observer.ended(self, entry)

    def made(self, what: object, *results: object) -> None:
        """Show new results, tensors or not, to the observers, before anything reads them."""
        for observer in self._observers:
            observer.made(self, what, results)

    @property
    def depth(self) -> int:
        """Return the number of open entries."""
        return len(self._open)

    def unwind(self, depth: int) -> None:
        """Close the entries that an error has left open, down to `depth`."""
        while len(self._open) > depth:
            self.end()

    @contextmanager
    def doing(self, kind: str, what: object = "") -> Iterator[None]:
        """Record the work inside of a `with` as one entry."""
        depth = len(self._open)
        self.begin(kind, what)
        try:
            yield
        finally:
            self.unwind(depth)

    def wait(
        self, kind: str, what: object, ranks: Sequence[int] = (), nbytes: int = 0, *, since: int = 0
    ) -> RecordedWait:
        """Return a context manager for a wait on other ranks.

        An error of the communication backend inside of it is raised as RankLost, which names `what`, the duration and
        the ranks.

        Args:
            kind: the kind of the entry.
            what: the awaited object, such as "the activation".
            ranks: the global ranks being waited on.
            nbytes: the size of the awaited data.
            since: start of the wait (ns), if that is before the entry: receives from several ranks start together, and
                are then waited for one after another.
        """
        return RecordedWait(self, self.begin(kind, what, ranks, nbytes), since)

    def end_wait(self, entry: Entry, error: BaseException | None, *, since: int = 0) -> None:
        """Close the entry of a wait, and those left open inside of it.

        error: the error that ended the wait, or None. since: see `wait`. Raises RankLost for an error of the
        communication backend.
        """
        while not entry[ENDED]:
            self.end()
        if error is None or not entry[RANKS] or not _is_backend_error(error):
            return
        ranks = [rank for rank in entry[RANKS] if rank != self.rank]
        text = self._describe_loss(entry, ranks, error, since)
        wait = Wait(self.rank, ranks, text)
        if self.lost is None:
            self.lost = wait
            self._loss = _Loss(entry, self._latest(), Counter(self._numbers))
        raise RankLost(text, wait) from error

    def _describe_loss(self, entry: Entry, ranks: Sequence[int], error: BaseException, since: int) -> str:
        """Return the text of a wait on `ranks` that an error of the backend has ended."""
        seconds = (entry[ENDED] - (since or entry[BEGAN])) / 1e9
        duration = f"{seconds:.3g} s" if seconds >= 0.001 else "less than 1 ms"
        reason = _reason(error)
        left = ""
        if _CLOSED.search(reason):
            left = ", which has left" if len(ranks) == 1 else ", of which one has left"
        return f"waited {duration} for {entry[WHAT]} from {', '.join(map(self.name, ranks))}{left} ({reason})"

    def collective(self, kind: str, what: object, ranks: Sequence[int], nbytes: int = 0) -> RecordedWait:
        """Return a context manager like `wait`, for a collective of `ranks`; gives the entry a sequence number."""
        entry = self.begin(kind, what, ranks, nbytes)
        entry[NUMBER] = self.count(kind, ranks)
        return RecordedWait(self, entry)

    def count(self, kind: str, ranks: Sequence[int] = ()) -> int:
        """Return the next sequence number of a kind, counted alike by all of `ranks`."""
        self._numbers[kind, ranks] = number = self._numbers[kind, ranks] + 1
        return number

    def members(self, group: ProcessGroup | None) -> tuple[int, ...]:
        """Return the global ranks of a group; () for None."""
        if group is None:
            return ()
        name = group.group_name
        if name not in self._members:
            import torch.distributed as dist  # not at the top: some processes load no torch

            self._members[name] = tuple(dist.get_process_group_ranks(group))
        return self._members[name]

    def entries(self) -> list[Entry]:
        """Return the entries of the current step that are still in the ring, in the order of their beginnings."""
        newest_first = list(takewhile(lambda entry: entry[STEP] == self.step, reversed(self._ring)))
        return newest_first[::-1]

    def keep_all(self, keeps_all: bool) -> None:
        """Keep all entries from now on, for a trace; or only the latest `ENTRIES` again."""
        for recorder in self.threads():
            recorder.keeps_all = keeps_all
            recorder._ring = deque(recorder._ring, maxlen=None if keeps_all else ENTRIES)

    def since(self, began: int) -> dict[str, list[Entry]]:
        """Return the entries that began at `began` (ns) or later, by lane; those of this thread have the name ""."""
        recorders = {"": self, **self._lanes}
        return {
            name: [entry for entry in list(recorder._ring) if entry[BEGAN] >= began]
            for name, recorder in recorders.items()
        }

    # -- state

    def name(self, rank: int) -> str:
        """Return a global rank with its place in the mesh; see `rank_name`."""
        return rank_name(rank, self.sizes)

    def threads(self) -> list[Recorder]:
        """Return this recorder and those of its lanes."""
        return [self, *(recorder for lane in list(self._lanes.values()) for recorder in lane.threads())]

    def progress(self) -> tuple[int, ...]:
        """Return a value that changes whenever an entry begins or ends."""
        last = self._ring[-1] if self._ring else [0, 0]
        lanes = [number for lane in list(self._lanes.values()) for number in lane.progress()]
        return last[BEGAN], last[ENDED], len(self._open), *lanes

    def _latest(self) -> list[Entry]:
        """Return the latest entries, as many as a state has."""
        return list(self._ring)[-_STATE_ENTRIES:]

    def state(self) -> dict[str, Any]:
        """Return the state as JSON for an outside reader. The outermost open entry comes first.

        After the loss of a rank, the latest entries and the sequence numbers are those at that moment.
        """
        now = perf_counter_ns()
        loss = self._loss
        latest = self._latest() if loss is None else loss.latest
        numbers = self._numbers if loss is None else loss.numbers
        lost = None if self.lost is None else self.lost.text
        return {
            "rank": self.rank, "name": self.name(self.rank), "sizes": self.sizes, "step": self.step,
            "pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), "lost": lost,
            "open": [_to_dict(entry, now) for entry in list(self._open)],
            "last": [_to_dict(entry, now) for entry in latest],
            "lost_in": None if loss is None else _to_dict(loss.wait, now),
            "counts": [[kind, list(ranks), number] for (kind, ranks), number in list(numbers.items()) if ranks],
            "lanes": {name: lane.state() for name, lane in list(self._lanes.items())},
        }


class _Loss(NamedTuple):
    """The recorder's content at the loss of a rank."""

    wait: Entry  # the wait that ended with the loss
    latest: list[Entry]
    numbers: Counter[tuple[str, Sequence[int]]]  # latest sequence numbers


class RecordedWait:
    """Context manager of an open entry; see `Recorder.wait`."""

    __slots__ = ("_entry", "_recorder", "_since")

    def __init__(self, recorder: Recorder, entry: Entry, since: int = 0) -> None:
        self._recorder = recorder
        self._entry = entry
        self._since = since

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._recorder.end_wait(self._entry, error, since=self._since)


def rank_name(rank: int, sizes: Mapping[str, int]) -> str:
    """Return a global rank with its place in the mesh, such as "rank 3 (pp 1, dp 1)".

    Dimensions of size 1 are left out; a rank outside of the mesh has no place.

    sizes: sizes of the mesh's dimensions, outermost first.
    """
    places = []
    rest = rank
    for name, size in reversed(list(sizes.items())):
        rest, place = divmod(rest, size)
        if size > 1:
            places.append(f"{name} {place}")
    if not places or rest:
        return f"rank {rank}"
    return f"rank {rank} ({', '.join(reversed(places))})"


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks as text: [0, 1, 2, 5] -> "ranks 0-2, 5"."""
    ordered = sorted(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda at: at[1] - at[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"


_CLOSED = re.compile("closed by peer|reset by peer|Broken pipe")  # in gloo's errors when the other end is gone


def _reason(error: BaseException) -> str:
    """Return the first sentence of an error of gloo, without the place in its source."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[[^]]*\.(cc|h|cpp):\d+\] ", "", line).partition(". ")[0].rstrip(".")


def _is_backend_error(error: BaseException) -> bool:
    """Return True for an error of the communication backend.

    torch.distributed's errors have names such as DistBackendError; gloo raises plain RuntimeErrors, which name a place
    in its source; a wait with a timeout of its own raises a plain "Operation timed out!".
    """
    if type(error) is RuntimeError:
        return "gloo" in str(error) or str(error).startswith("Operation timed out")
    return isinstance(error, RuntimeError) and type(error).__name__.startswith("Dist")


def _to_dict(entry: Entry, now: int) -> dict[str, Any]:
    """Return an entry as JSON: with its duration, until `now` if it is open, and the seconds since its beginning."""
    began, ended, step, kind, what, ranks, nbytes, number = entry
    fields = {"kind": kind, "what": str(what), "step": step, "bytes": nbytes, "done": bool(ended),
              "seconds": ((ended or now) - began) / 1e9, "ago": (now - began) / 1e9}
    if ranks:
        fields |= {"ranks": list(ranks), "number": number}
    return fields
