"""Takes a trace: what the recorders of all ranks hold of some steps, gathered on the first one and written as one file.

Little is recorded for it that is not recorded anyway: details of communications and, where there is a device, an event
at the begin and the end of each entry. Until the end no host waits for a device because of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, Self

import torch
from torch.distributed import ProcessGroup

from dualpipe.runtime import device as devices
from dualpipe.runtime.errors import PipelineError
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import BEGAN, ENDED, KIND, RANKS, WHAT, Entry, Observer, Recorder
from dualpipe.trace.file import COMMUNICATION, COMPUTE, DEVICE, TRACED, Slice, Trace, training_runs

_TRIPS = 32  # of a message, there and back, to compare two clocks
_TAG = 16  # gloo's, of these; any that nothing else uses


class PipelinePlace(NamedTuple):
    """Where a rank is in its pipeline, whose ranks are `members` (global numbers); the name of the schedule, and the
    ranks of its stages."""

    place: int
    members: tuple[int, ...]
    schedule: str
    placement: tuple[int, ...]


class Clock(NamedTuple):
    """A time of this rank's clock; what to add to it for the first rank's, and by how much that can be wrong. In ns."""

    at: int
    offset: float = 0.0
    error: float = 0.0


class Tracer(Observer):
    """For a `with` around steps of a pipeline, which all ranks of `group` enter and leave at the same place; the first
    of them writes the file `path` at the end.

    An error inside goes on, with a note that names the file of what was traced until then: `path` after an error of a
    step, which all ranks of the pipeline raise, where they are those of `group`. After any other, or where a rank is
    lost, nobody is waited for: each rank writes a file of its own, `path` with its number.

    group: one that can carry host tensors, and that a step which fails does not end. running: the number of the run of
    the pipeline that is under way, 0 where none is; what other pipelines do is in the trace, but in none of its runs.

    Raises ValueError where a trace is being taken already, and on every rank where the file cannot be written.
    """

    def __init__(
        self, path: Path, group: ProcessGroup | None, device: torch.device, place: PipelinePlace,
        running: Callable[[], int],
    ) -> None:
        self._path, self._device, self._place, self._running = path, device, place, running
        self._group: Any = group
        self._recorder = Recorder.current()
        self.loads: dict[int, list[float]] = {}
        """tokens that each rank's experts got, by optimizer step: for who knows them to fill in"""

    def __enter__(self) -> Self:
        if self._recorder.whole:
            raise ValueError(f"a trace is being taken already; leave that one before that for {self._path}")
        self._open: list[Entry] = []
        self._runs: dict[int, int] = {}  # their numbers by the ids of actions' entries
        self._events: dict[int, list[Any]] = {}  # by an entry's id: it, its stream, events at its begin and end
        self._memory: list[tuple[int, int]] = []
        self._ranks = RankSync(self._group)
        self._clocks = [self._compare_clocks()]
        self._ranks.first(partial(check_path, self._path))  # and so all begin at once
        if self._device.type == "cuda":
            devices.synchronize(self._device)  # orders: the host knows when the event comes that others are timed by
        zero, self._since = devices.record(self._device, timed=True), perf_counter_ns()
        self._zero: Any = zero  # None on the CPU
        self._recorder.keep(True)
        self._recorder.subscribe(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        of_step = isinstance(error, PipelineError) and self._ranks.size == len(self._place.members)
        self.finish(error, together=error is None or of_step)

    def finish(self, error: BaseException | None = None, *, together: bool = True) -> None:
        """Write what there is. together: whether all ranks do so now, unless they have lost one."""
        self._recorder.unsubscribe(self)
        entries, until = self._recorder.since(self._since), perf_counter_ns()
        self._recorder.keep(False)
        if isinstance(error, PipelineError) and error.is_loss:
            together = False
        path, rank = self._path, self._recorder.rank
        try:
            # Not after an error: the device may wait for what never comes.
            if error is None and self._device.type == "cuda":
                devices.synchronize(self._device)  # orders: all events, then the host, which reads their times
            if together:
                self._clocks.append(self._compare_clocks())
            own = self._own(entries, until)
            if together:
                found = self._ranks.collect(own)
                self._ranks.first(partial(self._write, found or (), path))
            else:
                path = path.with_stem(f"{path.stem}-rank{rank}") if self._ranks.size > 1 else path
                self._write([own], path)
        except (ValueError, RuntimeError) as failure:
            if error is None:
                raise
            error.add_note(f"there is no trace: {failure}")
        else:
            if error is not None:
                error.add_note(f"{TRACED}{path}")

    def _own(self, entries: dict[str, list[Entry]], until: int) -> Trace:
        """Return this rank's part of the trace, on the first rank's clock."""
        rank, offset, error = self._recorder.rank, self._clocks[-1].offset, max(clock.error for clock in self._clocks)
        told = {"name": self._recorder.name(rank), "clock_offset_us": round(offset / 1e3, 3),
                "clock_error_us": round(error / 1e3, 3), **self._place._asdict()}
        slices = [*self._of_host(entries, until)]
        with suppress(RuntimeError):  # of a device that has failed
            slices += self._of_device()
        memory = [(rank, self._common(at), size) for at, size in self._memory]
        return Trace(slices, memory, {"ranks": {f"{rank}": told}})

    def _write(self, found: Sequence[Trace], path: Path) -> None:
        zero = min((each.start for own in found for each in own.slices), default=0)
        slices = [each._replace(start=each.start - zero, end=each.end - zero) for own in found for each in own.slices]
        memory = [(rank, at - zero, size) for own in found for rank, at, size in own.memory]
        ranks = {rank: told for own in found for rank, told in own.info["ranks"].items()}
        info = {"ranks": ranks, "schedule": _schedule(ranks, slices), "loads": self.loads}
        try:
            Trace(slices, memory, info).write(path)
        except OSError as error:
            raise ValueError(f"the trace {path} cannot be written: {error.strerror}") from error

    # -- what is recorded

    def began(self, recorder: Recorder, entry: Entry) -> None:
        """Note the run that an action is of and, where there is a device, its time there."""
        self._open.append(entry)
        if hasattr(entry[WHAT], "actions") and (number := self._running()):
            self._runs[id(entry)] = number
        if self._zero is not None:
            begin = devices.record(self._device, timed=True)
            self._events[id(entry)] = [entry, devices.stream(self._device), begin]

    def ended(self, recorder: Recorder, entry: Entry) -> None:
        """Note its end on the device and, outside of all others, the memory that is in use."""
        if not self._open:  # it was begun before
            return
        self._open.pop()
        if self._zero is not None:
            self._events[id(entry)].append(devices.record(self._device, timed=True))
        if not self._open and not entry[RANKS]:
            self._memory.append((perf_counter_ns(), devices.memory_in_use(self._device)))

    # -- what that comes to

    def _of_host(self, lanes: dict[str, list[Entry]], until: int) -> Iterator[Slice]:
        for lane, entries in lanes.items():
            messages = Counter[str]()
            for entry in entries:
                beside = entry[RANKS] or entry[KIND] == "exchange"
                thread = lane or (COMMUNICATION if beside else COMPUTE)
                yield self._slice(entry, thread, entry[BEGAN], entry[ENDED] or until, messages)

    def _of_device(self) -> Iterator[Slice]:
        rows: dict[Any, str] = {}  # by stream; the first one that is given anything computes
        messages = Counter[str]()
        for entry, stream, *events in self._events.values():
            if len(events) == 2 and all(event.query() for event in events):  # else it has not ended
                row = rows.setdefault(stream, f"{DEVICE}, stream {len(rows)}" if rows else DEVICE)
                start, end = (self._since + round(1e6 * self._zero.elapsed_time(event)) for event in events)
                yield self._slice(entry, row, start, end, messages)

    def _slice(self, entry: Entry, thread: str, start: int, end: int, messages: Counter[str]) -> Slice:
        """An entry, by this rank's clock. messages: how many of each there were before."""
        rank = self._recorder.rank
        _, _, step, kind, what, ranks, nbytes, number = entry
        name, args = str(what) or kind, {"step": step} if step else {}
        if actions := getattr(what, "actions", ()):
            args |= {"actions": list(map(str, actions))}
            args |= {"run": self._runs[id(entry)]} if id(entry) in self._runs else {}
            args |= {"stage": actions[0].stage, "microbatch": actions[0].microbatch} if len(actions) == 1 else {}
        elif kind == "segment":
            args |= {key: value for key, value in what._asdict().items() if key != "kind"}
        elif kind == "wgrad":
            args |= dict(zip(("stage", "microbatch"), what))
            name = f"weight gradients of stage {what[0]}, micro-batch {what[1]}"
        if ranks:
            args |= {"ranks": list(ranks), "number": number}
        if nbytes:
            args["bytes"] = nbytes
        if nbytes and kind in ("send", "receive"):
            message = f"{name} from {rank} to {ranks[0]}" if kind == "send" else f"{name} from {ranks[0]} to {rank}"
            messages[message] += 1
            args["flow"] = f"{message}, {messages[message]}"
        return Slice(rank, thread, kind, name, self._common(start), self._common(end), args)

    # -- one clock

    def _compare_clocks(self) -> Clock:
        """This rank's clock against the first one's, rank after rank: of many messages there and back the fastest. The
        first rank's time was that of some moment on the way; it is taken for the middle. Collective.

        Method: Cristian, "Probabilistic clock synchronization", 1989.
        """
        best, word = Clock(perf_counter_ns()), torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._recorder.collective("agree", "the clocks of all ranks", self._recorder.members(self._group)):
            for peer, trip in ((peer, trip) for peer in range(1, self._ranks.size) for trip in range(_TRIPS)):
                if self._ranks.rank == 0:
                    self._group.recv([word], peer, _TAG).wait()
                    self._group.send([word.fill_(perf_counter_ns())], peer, _TAG).wait()
                elif self._ranks.rank == peer:
                    sent = perf_counter_ns()
                    self._group.send([word], 0, _TAG).wait()
                    self._group.recv([word], 0, _TAG).wait()
                    half = (perf_counter_ns() - sent) / 2
                    if not trip or half < best.error:
                        best = Clock(sent, int(word) - sent - half, half)
        return best

    def _common(self, at: int) -> int:
        """A time on the first rank's clock: between two comparisons by both, as clocks differ in speed."""
        first, last = self._clocks[0], self._clocks[-1]
        drift = (last.offset - first.offset) / max(1, last.at - first.at)
        return at + round(first.offset + drift * (at - first.at))


def check_path(path: Path) -> None:
    """Raise ValueError where there can be no file `path`."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for the trace {path.name}; make it")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file for the trace")


def _schedule(ranks: dict[str, dict[str, Any]], slices: list[Slice]) -> dict[str, Any] | None:
    """The schedule of the pipeline of the first rank, as it was run; None where not all of its ranks have trained."""
    first = ranks[min(ranks, key=int)]
    runs = [training_runs(each for each in slices if (each.rank, each.thread) == (member, COMPUTE))
            for member in first["members"]]
    if not all(runs):
        return None
    whole = [max(own.values(), key=len) for own in runs]  # of one that failed there is less
    microbatches = {action.microbatch for own in whole for each in own for action in each.step}
    return {"name": first["schedule"], "num_microbatches": len(microbatches), "placement": first["placement"],
            "ranks": [[";".join(each.args["actions"]) for each in own] for own in whole]}
