"""Takes a trace: what the recorders of all ranks hold of some steps, gathered on the first one and written as one file.

Nothing is recorded for it that is not recorded anyway, but for details of communications and, where there is a device,
events at the begin and the end of every entry. No host waits for a device before the end.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dualpipe import device as devices
from dualpipe.ranks import RankSync, backends, gloo_beside
from dualpipe.recorder import BEGAN, RANKS, Entry, Recorder
from dualpipe.trace.file import COMMUNICATION, COMPUTE, DEVICE, Slice, Trace, training_runs

_TRIPS = 32  # of a message, there and back, to compare two clocks
_TAG = 16  # gloo's, of these; any that nothing else uses


class Place(NamedTuple):
    """Where a rank is in its pipeline: `members`, global numbers in order, and whose `place` this is; and what the
    pipeline runs: the name of its schedule and the ranks of its stages."""

    place: int
    members: tuple[int, ...]
    schedule: str
    placement: tuple[int, ...]


class Clock(NamedTuple):
    """Nanoseconds of this rank's clock, what to add to them for the first rank's, and by how much that can be wrong."""

    at: int
    offset: float
    error: float


class Tracer:
    """For a `with` around steps of a pipeline, which every rank of `group` enters and leaves at the same place.

    path: the file, which the group's first rank writes at the end; place: of this rank. An error inside goes on as it
    is: then nothing is gathered nor written. Where it is raised on one rank alone, the others wait for that one at the
    end as they do in any collective, until the group's timeout.

    Raises ValueError, on every rank, where there is no folder for the file.
    """

    def __init__(self, path: Path, group: ProcessGroup | None, device: torch.device, place: Place) -> None:
        self._path, self._device, self._place = path, device, place
        self._group: Any = group if group is None or "cpu" in backends(group) else gloo_beside(group)
        self._recorder = Recorder.current()
        self._events: dict[int, tuple[Entry, Any, Any, Any]] = {}  # by the entry's id: it, its stream, begin and end
        self._open: list[Entry] = []
        self._memory: list[tuple[int, int]] = []
        self.loads: dict[int, list[float]] = {}
        """tokens that each rank's experts got, by optimizer step, for who knows them to fill in"""

    def __enter__(self) -> Self:
        self._ranks = RankSync(self._group)
        self._clocks = [self._clock()]
        self._ranks.first(self._check_folder)  # and so all begin at once
        if self._device.type == "cuda":
            devices.synchronize(self._device)  # orders: an event that is over at once, to know when it was
        self._first, self._since = devices.record(self._device, timed=True), perf_counter_ns()
        self._recorder.keep(True)
        # On the object and not as another recorder, which the watchdog and others would not look at.
        self._begin, self._end = self._recorder.begin, self._recorder.end
        vars(self._recorder).update(begin=self._begin_timed, end=self._end_timed)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *raised: object) -> None:
        for name in ("begin", "end"):
            del vars(self._recorder)[name]
        lanes, until = self._recorder.since(self._since), perf_counter_ns()
        self._recorder.keep(False)
        if kind is not None:
            return
        if self._device.type == "cuda":
            devices.synchronize(self._device)  # orders: all events, then the host, which reads them
        self._clocks.append(self._clock())
        slices = [*self._on_host(lanes, until), *self._on_device()]
        memory = [(self._recorder.rank, self._common(at), used) for at, used in self._memory]
        error = max(clock.error for clock in self._clocks)
        told = {"name": self._recorder.name(self._recorder.rank), "clock_error_us": round(error / 1e3, 3),
                **self._place._asdict()}
        found = self._ranks.collect((self._recorder.rank, told, slices, memory))
        self._ranks.first(partial(self._write, found))

    def _check_folder(self) -> None:
        if not self._path.parent.is_dir():
            raise ValueError(f"there is no folder {self._path.parent} for the trace {self._path.name}; make it")

    def _write(self, found: list[tuple[int, dict[str, Any], list[Slice], list[tuple[int, float, int]]]] | None) -> None:
        assert found is not None, "the first rank collects"
        slices = [each for _, _, own, _ in found for each in own]
        origin = min((each.start for each in slices), default=0.0)
        slices = [each._replace(start=round((each.start - origin) / 1e3, 3), end=round((each.end - origin) / 1e3, 3))
                  for each in slices]
        memory = [(rank, round((at - origin) / 1e3, 3), used) for *_, own in found for rank, at, used in own]
        info = {"ranks": {f"{rank}": told for rank, told, *_ in found}, "loads": self.loads}
        Trace(slices, memory, {**info, "schedule": _schedule(info["ranks"], slices)}).write(self._path)

    # -- what is recorded

    def _begin_timed(self, kind: str, what: object = "", ranks: Sequence[int] = (), nbytes: int = 0) -> Entry:
        entry = self._begin(kind, what, ranks, nbytes)
        self._open.append(entry)
        if self._first is not None:
            stream = devices.stream(self._device)
            self._events[id(entry)] = entry, stream, devices.record(self._device, timed=True), None
        return entry

    def _end_timed(self) -> None:
        self._end()
        entry = self._open.pop() if self._open else []  # or one that began before
        if found := self._events.get(id(entry)):
            self._events[id(entry)] = *found[:3], devices.record(self._device, timed=True)
        if entry and not self._open and not entry[RANKS]:
            self._memory.append((perf_counter_ns(), devices.memory_in_use(self._device)))

    # -- what that comes to

    def _on_host(self, lanes: dict[str, list[Entry]], until: int) -> Iterator[Slice]:
        for lane, entries in lanes.items():
            messages: Counter[str] = Counter()
            for entry in entries:
                began, ended = entry[:2]
                kind, name, args = _described(entry, self._recorder.rank, messages)
                thread = lane or (COMMUNICATION if "ranks" in args or kind == "exchange" else COMPUTE)
                yield Slice(self._recorder.rank, thread, kind, name, self._common(began),
                            self._common(ended or until), args)

    def _on_device(self) -> Iterator[Slice]:
        rows: dict[Any, str] = {}  # by stream; the one that computes is the first to which anything is given
        messages: Counter[str] = Counter()
        for entry, stream, begin, end in self._events.values():
            if end is not None and entry[BEGAN] >= self._since:
                row = rows.setdefault(stream, f"{DEVICE}, stream {len(rows)}" if rows else DEVICE)
                at = [self._common(self._since + round(self._first.elapsed_time(event) * 1e6)) for event in (begin, end)]
                kind, name, args = _described(entry, self._recorder.rank, messages)
                yield Slice(self._recorder.rank, row, kind, name, *at, args)

    # -- one clock

    def _clock(self) -> Clock:
        """Compare this rank's clock with the first one's: of several messages there and back the fastest; the first
        rank's time was that of the middle, by at most half the way (Cristian, "Probabilistic clock synchronization",
        1989). Collective; rank after rank."""
        best = Clock(perf_counter_ns(), 0.0, 0.0)
        if self._ranks.size == 1:
            return best
        members = self._recorder.members(self._group)
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._recorder.collective("agree", "the clocks of all ranks", members):
            for peer in range(1, self._ranks.size):
                for _ in range(_TRIPS):
                    if self._ranks.rank == 0:
                        self._group.recv([word], peer, _TAG).wait()
                        self._group.send([word.fill_(perf_counter_ns())], peer, _TAG).wait()
                    elif self._ranks.rank == peer:
                        sent = perf_counter_ns()
                        self._group.send([word], 0, _TAG).wait()
                        self._group.recv([word], 0, _TAG).wait()
                        half = (perf_counter_ns() - sent) / 2
                        if not best.error or half < best.error:
                            best = Clock(sent, int(word) - sent - half, half)
        return best

    def _common(self, at: int) -> float:
        """A time on the first rank's clock: clocks run at different speeds, so between two comparisons by both."""
        first, last = self._clocks
        if last.at == first.at:
            return at + first.offset
        return at + first.offset + (last.offset - first.offset) * (at - first.at) / (last.at - first.at)


def _described(entry: Entry, rank: int, messages: Counter[str]) -> tuple[str, str, dict[str, Any]]:
    """Kind, name and arguments of a `Slice`. messages: how often there was one like it until now, by its flow."""
    _, _, step, kind, what, ranks, nbytes, number = entry
    args: dict[str, Any] = {"step": step} if step else {}
    name = str(what) or kind
    if (actions := getattr(what, "actions", None)) is not None:
        args |= {"actions": list(map(str, actions))}
        if len(actions) == 1:
            args |= {"stage": actions[0].stage, "microbatch": actions[0].microbatch}
    elif hasattr(what, "_asdict"):
        args |= {key: value for key, value in what._asdict().items() if key != "kind"}
    elif kind == "wgrad" and isinstance(what, tuple):
        name, args = f"weight gradients of stage {what[0]}, micro-batch {what[1]}", args | dict(
            zip(("stage", "microbatch"), what))
    if ranks:
        args |= {"ranks": list(ranks), "number": number}
    if nbytes:
        args["bytes"] = nbytes
        if kind in ("send", "receive"):
            ends = (rank, ranks[0]) if kind == "send" else (ranks[0], rank)
            flow = f"{name} from {ends[0]} to {ends[1]}"
            messages[flow] += 1
            args["flow"] = f"{flow}, {messages[flow]}"
    return kind, name, args


def _schedule(ranks: dict[str, dict[str, Any]], slices: list[Slice]) -> dict[str, Any] | None:
    """The schedule of the pipeline of the first rank, as its ranks have run it; None where they have not trained."""
    first = ranks[min(ranks, key=int)]
    steps = []
    for member in first["members"]:
        runs = training_runs([each for each in slices if each.rank == member and each.thread == COMPUTE])
        if not runs:
            return None
        steps.append([";".join(each.args["actions"]) for each in runs[0]])
    microbatches = {action.microbatch for each in slices for action in each.step}
    return {"name": first["schedule"], "num_microbatches": len(microbatches), "placement": first["placement"],
            "ranks": steps}
