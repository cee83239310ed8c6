"""The record of a rank's work and waits: a ring of its last entries, and those that are open.

Always on: an entry costs the host less than a microsecond. Everything that takes time on a rank, or may wait for
another one, is between `begin` and `end`; so whoever looks from outside, as a watchdog does, can tell what a rank is at
and since when, and the states of all ranks together tell which one the others wait for. An `Observer` subscribes to the
same places: a trace to entries, a check of numbers to results.
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
from typing import TYPE_CHECKING, Any, Self

from dualpipe.runtime.errors import RankLost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ENTRIES = 2**12  # that are kept
_SHOWN = 64  # of these, in a state
_running: ContextVar[Recorder | None] = ContextVar("dualpipe_recorder", default=None)


# An entry, a list as that is made fastest: nanoseconds of time.perf_counter_ns, 0 for not yet; the optimizer step; the
# ranks that are waited for (global numbers); of a collective the how manyth it is on its channel, as on all its ranks.
BEGAN, ENDED, STEP, KIND, WHAT, RANKS, BYTES, NUMBER = range(8)
Entry = list[Any]


class Observer:
    """Interface of a subscriber to a recorder's entries and results. Every method does nothing here."""

    lanes = False  # whether it observes the recorders of threads that work beside this one, too

    def before(self, recorder: Recorder, kind: str, what: object) -> None:
        """An entry is about to begin; what is raised here is so before there is one."""

    def began(self, recorder: Recorder, entry: Entry) -> None:
        """An entry has begun."""

    def ended(self, recorder: Recorder, entry: Entry) -> None:
        """An entry has ended."""

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Results were just made, not all of them tensors; nothing has read them yet."""


class Recorder:
    """The entries of one thread of a rank.

    rank: the global number; sizes: of the mesh's dimensions, outermost first, by which ranks are named.
    """

    def __init__(self, rank: int = 0, sizes: Mapping[str, int] | None = None) -> None:
        self.rank, self.sizes = rank, dict(sizes or {})
        self.step = 0  # the optimizer step that is under way, from 1
        self.lost: str | None = None  # what is said of the first rank that did not come or is gone
        self._lost_in: Entry | None = None  # the wait that ended so,
        self._before: tuple[list[Entry], Counter[Any]] | None = None  # and the entries and numbers until then
        self.whole = False  # whether nothing falls out of the ring, and details are recorded
        self._ring: deque[Entry] = deque(maxlen=ENTRIES)
        self._open: list[Entry] = []
        self._numbers: Counter[tuple[str, Sequence[int]]] = Counter()  # of collectives, by kind and ranks
        self._members: dict[str, tuple[int, ...]] = {}
        self._lanes: dict[str, Recorder] = {}
        self._observers: tuple[Observer, ...] = ()
        self.is_observed = False  # whether anybody subscribes

    @staticmethod
    def current() -> Recorder:
        """The recorder of this thread, made where there is none."""
        if (found := _running.get()) is None:
            found = Recorder()
            _running.set(found)
        return found

    @contextmanager
    def activate(self) -> Iterator[Self]:
        """Make this the one that `current` finds in this thread."""
        token = _running.set(self)
        try:
            yield self
        finally:
            _running.reset(token)

    def lane(self, name: str) -> Recorder:
        """The recorder of a thread that works beside this one, under a name of its own; to be made active there."""
        if name not in self._lanes:
            self._lanes[name] = Recorder(self.rank, self.sizes)
            self._lanes[name].keep(self.whole)
        lane = self._lanes[name]
        lane.step = self.step
        lane._observers = tuple(observer for observer in self._observers if observer.lanes)
        lane.is_observed = bool(lane._observers)
        return lane

    def subscribe(self, observer: Observer) -> None:
        """Tell `observer` of everything from now on, after those that subscribed before."""
        self._observers += (observer,)
        self.is_observed = True

    def unsubscribe(self, observer: Observer) -> None:
        """Tell `observer` nothing more."""
        self._observers = tuple(other for other in self._observers if other is not observer)
        self.is_observed = bool(self._observers)

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Tell `observer` of everything while the `with` lasts."""
        self.subscribe(observer)
        try:
            yield
        finally:
            self.unsubscribe(observer)

    # -- what is recorded

    def begin(self, kind: str, what: object = "", ranks: Sequence[int] = (), nbytes: int = 0) -> Entry:
        """Open an entry. what: its text is only made when somebody looks; ranks: those that are waited for."""
        for observer in self._observers:
            observer.before(self, kind, what)
        entry = [perf_counter_ns(), 0, self.step, kind, what, ranks, nbytes, 0]
        self._ring.append(entry)
        self._open.append(entry)
        for observer in self._observers:
            observer.began(self, entry)
        return entry

    def end(self) -> None:
        """Close the innermost entry."""
        entry = self._open.pop()
        entry[ENDED] = perf_counter_ns()
        for observer in self._observers:
            observer.ended(self, entry)

    def made(self, what: object, *results: object) -> None:
        """Tell observers of results that were just made, not all of them tensors, before anything reads them."""
        for observer in self._observers:
            observer.made(self, what, results)

    @property
    def depth(self) -> int:
        """The number of open entries."""
        return len(self._open)

    def unwind(self, depth: int) -> None:
        """Close what an error has left open, down to `depth` entries."""
        while len(self._open) > depth:
            self.end()

    @contextmanager
    def doing(self, kind: str, what: object = "") -> Iterator[None]:
        """Record the work inside of a `with` as an entry."""
        depth = len(self._open)
        self.begin(kind, what)
        try:
            yield
        finally:
            self.unwind(depth)

    def wait(
        self, kind: str, what: object, ranks: Sequence[int] = (), nbytes: int = 0, *, since: int = 0
    ) -> Waiting:
        """For a `with`, in which this rank waits for what `ranks` (global numbers) send. An error there of the backend,
        a RuntimeError, is raised as RankLost, which says what was waited for, how long, and from whom.

        since: when the wait began (ns), where other ranks were waited for before.
        """
        return Waiting(self, self.begin(kind, what, ranks, nbytes), since)

    def end_wait(self, entry: Entry, error: BaseException | None, *, since: int = 0) -> None:
        """Close the entry of a wait, and what `error` has left open inside of it.

        error: what ended the wait, if it failed; since: see `wait`.

        Raises RankLost from an `error` of the backend.
        """
        while not entry[ENDED]:
            self.end()
        if error is None or not entry[RANKS] or not _of_backend(error):
            return
        lost = [rank for rank in entry[RANKS] if rank != self.rank]
        seconds = (entry[ENDED] - (since or entry[BEGAN])) / 1e9
        waited = f"{seconds:.3g} s" if seconds >= 0.001 else "less than 1 ms"
        reason = _reason(error)
        left = ""
        if _CLOSED.search(reason):
            left = ", which has left" if len(lost) == 1 else ", of which one has left"
        text = f"waited {waited} for {entry[WHAT]} from {', '.join(map(self.name, lost))}{left} ({reason})"
        if self.lost is None:
            self.lost = text
            self._lost_in = entry
            self._before = list(self._ring)[-_SHOWN:], Counter(self._numbers)
        raise RankLost(text, lost) from error

    def collective(self, kind: str, what: object, ranks: Sequence[int], nbytes: int = 0) -> Waiting:
        """Like `wait`, for all ranks of a group, counted."""
        entry = self.begin(kind, what, ranks, nbytes)
        entry[NUMBER] = self.count(kind, ranks)
        return Waiting(self, entry)

    def count(self, kind: str, ranks: Sequence[int] = ()) -> int:
        """One more of a kind, which these ranks count alike; the how manyth it is."""
        self._numbers[kind, ranks] = number = self._numbers[kind, ranks] + 1
        return number

    def members(self, group: ProcessGroup | None) -> tuple[int, ...]:
        """The global numbers of a group's ranks; none where there is no group."""
        if group is None:
            return ()
        name = group.group_name
        if name not in self._members:
            import torch.distributed as dist  # not at the top: for processes that load no torch

            self._members[name] = tuple(dist.get_process_group_ranks(group))
        return self._members[name]

    def entries(self) -> list[Entry]:
        """Return the entries of the current step, in the order of their beginnings, as far as they are kept."""
        found = list(takewhile(lambda entry: entry[STEP] == self.step, reversed(self._ring)))
        return found[::-1]

    def keep(self, whole: bool) -> None:
        """Have nothing fall out from now on, as while a trace is taken, or again all but the last `ENTRIES`."""
        for each in self.threads():
            each.whole, each._ring = whole, deque(each._ring, maxlen=None if whole else ENTRIES)

    def since(self, began: int) -> dict[str, list[Entry]]:
        """Return the entries since `began` (ns): of this thread by the name "", of its lanes by theirs."""
        threads = {"": self, **self._lanes}
        return {name: [entry for entry in list(each._ring) if entry[BEGAN] >= began] for name, each in threads.items()}

    # -- what is said of it

    def name(self, rank: int) -> str:
        """Such as "rank 3 (pp 1, dp 1)": a global number with its place in the mesh, dimensions of one left out."""
        return rank_name(rank, self.sizes)

    def threads(self) -> list[Recorder]:
        """This one and those of its lanes."""
        return [self, *(each for lane in list(self._lanes.values()) for each in lane.threads())]

    def progress(self) -> tuple[int, ...]:
        """Return a value that differs from an earlier one if an entry was begun or ended since."""
        last = self._ring[-1] if self._ring else [0, 0]
        lanes = [number for lane in list(self._lanes.values()) for number in lane.progress()]
        return last[BEGAN], last[ENDED], len(self._open), *lanes

    def state(self) -> dict[str, Any]:
        """Return the state for a reader outside, as JSON; of open entries the outermost comes first."""
        now = perf_counter_ns()
        last, numbers = self._before or (list(self._ring)[-_SHOWN:], self._numbers)
        return {
            "rank": self.rank, "name": self.name(self.rank), "sizes": self.sizes, "step": self.step,
            "pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), "lost": self.lost,
            "open": [_to_dict(entry, now) for entry in list(self._open)],
            "last": [_to_dict(entry, now) for entry in last],
            "lost_in": self._lost_in and _to_dict(self._lost_in, now),
            "counts": [[kind, list(ranks), number] for (kind, ranks), number in list(numbers.items()) if ranks],
            "lanes": {name: lane.state() for name, lane in list(self._lanes.items())},
        }


class Waiting:
    """An entry that is open inside of a `with`; see `Recorder.wait`."""

    __slots__ = ("_entry", "_recorder", "_since")

    def __init__(self, recorder: Recorder, entry: Entry, since: int = 0) -> None:
        self._recorder, self._entry, self._since = recorder, entry, since

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._recorder.end_wait(self._entry, error, since=self._since)


def rank_name(rank: int, sizes: Mapping[str, int]) -> str:
    """See `Recorder.name`."""
    places, rest = [], rank
    for name, size in reversed(list(sizes.items())):
        rest, place = divmod(rest, size)
        if size > 1:
            places.append(f"{name} {place}")
    return f"rank {rank} ({', '.join(reversed(places))})" if places and not rest else f"rank {rank}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    ordered = sorted(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda at: at[1] - at[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"


_CLOSED = re.compile("closed by peer|reset by peer|Broken pipe")  # what gloo says where the other end is gone


def _reason(error: BaseException) -> str:
    """The first sentence of what gloo says, without the place in its source."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[[^]]*\.(cc|h|cpp):\d+\] ", "", line).partition(". ")[0].rstrip(".")


def _of_backend(error: BaseException) -> bool:
    """Return True if a communication failed: gloo raises plain RuntimeErrors, which name a place in its source."""
    of_torch = isinstance(error, RuntimeError) and type(error).__name__.startswith("Dist")  # of torch.distributed
    return of_torch or (type(error) is RuntimeError and "gloo" in str(error))


def _to_dict(entry: Entry, now: int) -> dict[str, Any]:
    """Return an entry as JSON: the seconds that it took, or has taken until `now`, and how many ago it began."""
    began, ended, step, kind, what, ranks, nbytes, number = entry
    found = {"kind": kind, "what": str(what), "step": step, "bytes": nbytes, "done": bool(ended),
             "seconds": ((ended or now) - began) / 1e9, "ago": (now - began) / 1e9}
    return found | ({"ranks": list(ranks), "number": number} if ranks else {})
