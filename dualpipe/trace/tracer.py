"""Tracing: the recorders' entries of some steps on all ranks, gathered on the first rank and written as one file.

The recorder of each rank is always on. A trace adds details of communication and, with a device, an event at the start
and at the end of each entry. Between the start and the end of the trace, no host waits for a device because of it.
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
from torch import Tensor
from torch.distributed import ProcessGroup

from dualpipe.runtime import device as devices
from dualpipe.runtime.errors import PipelineError
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.runtime.recorder import BEGAN, ENDED, KIND, RANKS, WHAT, Entry, Observer, Recorder
from dualpipe.trace.file import COMMUNICATION, COMPUTE, DEVICE, TRACED, Slice, Trace, training_runs

_ROUND_TRIPS = 32  # of a message, to compare two clocks
_TAG = 16  # of these messages for gloo; nothing else uses it


class PipelinePlace(NamedTuple):
    """Place of a rank in its pipeline.

    Args:
        place: index of the rank in its pipeline.
        members: global ranks of the pipeline.
        schedule: name of the schedule.
        placement: index of the rank of each stage.
        messages_in_flight: as in `Schedule`.
    """

    place: int
    members: tuple[int, ...]
    schedule: str
    placement: tuple[int, ...]
    messages_in_flight: int


class Clock(NamedTuple):
    """Comparison of this rank's clock with that of the first rank, in nanoseconds.

    Args:
        at: time of the comparison on this rank's clock.
        offset: add it to a time of this rank's clock to get the first rank's.
        error: largest possible error of the offset.
    """

    at: int
    offset: float = 0.0
    error: float = 0.0


class Tracer(Observer):
    """Context manager that traces steps of a pipeline. All ranks of `group` enter and leave it at the same place.

    At the end, the first rank writes the file `path`. An error inside ends the trace, which is written up to the error;
    a note on the error names the file. All ranks of a pipeline raise the error of a step: if they are the ranks of
    `group`, they write `path` together. After any other error, or if a rank is lost, no rank waits for others: each
    writes its own file, which is `path` with its rank's number.

    Args:
        path: file to write.
        group: process group that can carry host tensors and that stays usable after a failed step.
        device: device of the pipeline.
        place: place of this rank in its pipeline.
        running: returns the number of the pipeline's current run, which is one `Pipeline.step`; 0 outside of a run.
            Actions of other pipelines are traced too, without the number of a run.

    Raises:
        ValueError: a trace is being taken already, or, on every rank, the file cannot be written.
    """

    def __init__(
        self, path: Path, group: ProcessGroup | None, device: torch.device, place: PipelinePlace,
        running: Callable[[], int],
    ) -> None:
        self._path = path
        self._group: Any = group
        self._device = device
        self._place = place
        self._running = running
        self._recorder = Recorder.current()
        self.loads: dict[int, Tensor] = {}
        """tokens of this rank's experts by optimizer step: scalars on the device; filled in by the caller"""

    def __enter__(self) -> Self:
        if self._recorder.keeps_all:
            raise ValueError(f"a trace is being taken already; end it before the trace {self._path} begins")
        self._open: list[Entry] = []
        self._runs: dict[int, int] = {}  # number of the run by the id of an action's entry
        self._events: dict[int, list[Any]] = {}  # by the entry's id: entry, stream, begin event, end event
        self._memory: list[tuple[int, int]] = []  # nanoseconds, bytes
        self._ranks = RankSync(self._group)
        self._clocks = [self._compare_clocks()]
        self._ranks.first(partial(check_path, self._path))  # also makes all ranks begin at once
        if self._device.type == "cuda":
            # orders: earlier work, then the zero event. So the event happens at `_since`, and times are relative to it.
            devices.synchronize(self._device)
        zero_event = devices.record(self._device, timed=True)
        self._since = perf_counter_ns()
        self._zero_event: Any = zero_event  # None on CPU
        self._recorder.keep_all(True)
        self._recorder.subscribe(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_on_all_ranks = isinstance(error, PipelineError) and self._ranks.size == len(self._place.members)
        self.finish(error, together=error is None or is_on_all_ranks)

    def finish(self, error: BaseException | None = None, *, together: bool = True) -> None:
        """End the trace and write it.

        Args:
            error: the error that ended the trace; gets a note that names the file.
            together: all ranks call this now; ignored if a rank is lost.
        """
        self._recorder.unsubscribe(self)
        entries = self._recorder.since(self._since)
        until = perf_counter_ns()
        self._recorder.keep_all(False)
        if isinstance(error, PipelineError) and error.is_loss:
            together = False
        try:
            path = self._collect_and_write(entries, until, has_failed=error is not None, together=together)
        except (ValueError, RuntimeError) as failure:
            if error is None:
                raise
            error.add_note(f"the trace was not written: {failure}")
        else:
            if error is not None:
                error.add_note(f"{TRACED}{path}")
                error.traces = [*getattr(error, "traces", ()), str(path)]  # type: ignore[attr-defined]

    def _collect_and_write(
        self, entries: dict[str, list[Entry]], until: int, *, has_failed: bool, together: bool
    ) -> Path:
        """Write one file for all ranks together, or a file of this rank. Return its path."""
        # Not after an error: the device may wait for work that never comes.
        if not has_failed and self._device.type == "cuda":
            devices.synchronize(self._device)  # orders: all events, then the host, which reads their times
        if together:
            self._clocks.append(self._compare_clocks())
        # After an error a device may never have the loads. A file of one rank has none: loads are compared.
        has_loads = together and (self._device.type == "cpu" or not has_failed)
        part = self._part_of_rank(entries, until, has_loads=has_loads)
        if together:
            parts = self._ranks.collect(part)
            self._ranks.first(partial(self._write, parts or (), self._path))
            return self._path
        path = self._path
        if self._ranks.size > 1:
            path = path.with_stem(f"{path.stem}-rank{self._recorder.rank}")
        self._write([part], path)
        return path

    def _part_of_rank(self, entries: dict[str, list[Entry]], until: int, *, has_loads: bool) -> Trace:
        """Return this rank's part of the trace, on the first rank's clock."""
        rank = self._recorder.rank
        clock_error = max(clock.error for clock in self._clocks)
        rank_info = {
            "name": self._recorder.name(rank),
            "clock_offset_us": round(self._clocks[-1].offset / 1e3, 3),
            "clock_error_us": round(clock_error / 1e3, 3),
            **self._place._asdict(),
        }
        if has_loads:
            rank_info["loads"] = {step: float(load) for step, load in self.loads.items()}
        slices = [*self._host_slices(entries, until)]
        with suppress(RuntimeError):  # of a device that has failed
            slices += self._device_slices()
        memory = [(rank, self._on_first_clock(at), size) for at, size in self._memory]
        return Trace(slices, memory, {"ranks": {f"{rank}": rank_info}})

    def _write(self, parts: Sequence[Trace], path: Path) -> None:
        """Write the parts of all ranks as one trace that begins at 0."""
        zero = min((item.start for part in parts for item in part.slices), default=0)
        slices = [item._replace(start=item.start - zero, end=item.end - zero) for part in parts for item in part.slices]
        memory = [(rank, at - zero, size) for part in parts for rank, at, size in part.memory]
        ranks = {rank: rank_info for part in parts for rank, rank_info in part.info["ranks"].items()}
        loads = [rank_info.pop("loads", {}) for rank_info in ranks.values()]
        common_steps = [step for step in loads[0] if all(step in of_rank for of_rank in loads)]
        info = {
            "ranks": ranks, "schedule": _schedule(ranks, slices),
            "loads": {step: [of_rank[step] for of_rank in loads] for step in common_steps},
        }
        try:
            Trace(slices, memory, info).write(path)
        except OSError as error:
            raise ValueError(f"the trace {path} cannot be written: {error.strerror}") from error

    # -- recording

    def began(self, recorder: Recorder, entry: Entry) -> None:
        """Note the run of an action and, with a device, record an event at the start of the entry."""
        self._open.append(entry)
        if hasattr(entry[WHAT], "actions"):
            run = self._running()
            if run:
                self._runs[id(entry)] = run
        if self._zero_event is not None:
            begin_event = devices.record(self._device, timed=True)
            self._events[id(entry)] = [entry, devices.stream(self._device), begin_event]

    def ended(self, recorder: Recorder, entry: Entry) -> None:
        """With a device, record an event at the end of the entry; after an outermost entry, note the memory in use."""
        if not self._open:  # the entry began before the trace
            return
        self._open.pop()
        if self._zero_event is not None:
            self._events[id(entry)].append(devices.record(self._device, timed=True))
        if not self._open and not entry[RANKS]:
            self._memory.append((perf_counter_ns(), devices.memory_in_use(self._device)))

    # -- slices

    def _host_slices(self, lanes: dict[str, list[Entry]], until: int) -> Iterator[Slice]:
        """Yield the slices of the host by lane; entries that are still open end at `until`."""
        for lane, entries in lanes.items():
            num_messages = Counter[str]()
            for entry in entries:
                is_communication = entry[RANKS] or entry[KIND] == "exchange"
                thread = lane or (COMMUNICATION if is_communication else COMPUTE)
                yield self._slice(entry, thread, entry[BEGAN], entry[ENDED] or until, num_messages)

    def _device_slices(self) -> Iterator[Slice]:
        """Yield the slices of the device's streams. The first stream that is used is the one that computes."""
        threads: dict[Any, str] = {}  # by stream
        num_messages = Counter[str]()
        for entry, stream, *events in self._events.values():
            if len(events) == 2 and all(event.query() for event in events):  # else it has not ended
                name = f"{DEVICE}, stream {len(threads)}" if threads else DEVICE
                thread = threads.setdefault(stream, name)
                start, end = (self._since + round(1e6 * self._zero_event.elapsed_time(event)) for event in events)
                yield self._slice(entry, thread, start, end, num_messages)

    def _slice(self, entry: Entry, thread: str, start: int, end: int, num_messages: Counter[str]) -> Slice:
        """Return the slice of an entry, on the first rank's clock.

        Args:
            entry: the entry.
            thread: thread of the slice.
            start: start on this rank's clock.
            end: end on this rank's clock.
            num_messages: number of earlier messages by name, source and destination; updated in place.
        """
        _, _, step, kind, what, ranks, num_bytes, number = entry
        name = str(what) or kind
        args: dict[str, Any] = {}
        if step:
            args["step"] = step
        actions = getattr(what, "actions", ())
        if actions:
            args["actions"] = list(map(str, actions))
            if id(entry) in self._runs:
                args["run"] = self._runs[id(entry)]
            if len(actions) == 1:
                args |= {"stage": actions[0].stage, "microbatch": actions[0].microbatch}
        elif kind == "segment":
            args |= {key: value for key, value in what._asdict().items() if key != "kind"}
        elif kind == "wgrad":
            stage, microbatch = what
            args |= {"stage": stage, "microbatch": microbatch}
            name = f"weight gradients of stage {stage}, micro-batch {microbatch}"
        if ranks:
            args |= {"ranks": list(ranks), "number": number}
        if num_bytes:
            args["bytes"] = num_bytes
        rank = self._recorder.rank
        if num_bytes and kind in ("send", "receive"):
            src, dst = (rank, ranks[0]) if kind == "send" else (ranks[0], rank)
            message = f"{name} from {src} to {dst}"
            num_messages[message] += 1
            args["flow"] = f"{message}, {num_messages[message]}"
        return Slice(rank, thread, kind, name, self._on_first_clock(start), self._on_first_clock(end), args)

    # -- one clock

    def _compare_clocks(self) -> Clock:
        """Compare this rank's clock with that of the first rank, one rank after the other. Collective.

        Only the fastest of many round trips of a message is used. The first rank reads its clock at some moment of the
        round trip, which is assumed to be the middle; the error is at most half of the round trip.

        Method: Cristian, "Probabilistic clock synchronization", 1989.
        """
        best = Clock(perf_counter_ns())
        message = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._recorder.collective("agree", "the clocks of all ranks", self._recorder.members(self._group)):
            for peer in range(1, self._ranks.size):
                for trip in range(_ROUND_TRIPS):
                    if self._ranks.rank == 0:
                        self._answer(message, peer)
                    elif self._ranks.rank == peer:
                        clock = self._ask_first_rank(message)
                        if trip == 0 or clock.error < best.error:
                            best = clock
        return best

    def _answer(self, message: torch.Tensor, peer: int) -> None:
        """Send the time of this rank's clock to `peer`, which has asked for it."""
        self._group.recv([message], peer, _TAG).wait()
        self._group.send([message.fill_(perf_counter_ns())], peer, _TAG).wait()

    def _ask_first_rank(self, message: torch.Tensor) -> Clock:
        """Ask the first rank for the time of its clock, and compare it with this rank's."""
        asked_at = perf_counter_ns()
        self._group.send([message], 0, _TAG).wait()
        self._group.recv([message], 0, _TAG).wait()
        half_trip = (perf_counter_ns() - asked_at) / 2
        return Clock(asked_at, int(message) - asked_at - half_trip, half_trip)

    def _on_first_clock(self, at: int) -> int:
        """Return a time on the first rank's clock, interpolated between two comparisons, as clocks differ in speed."""
        first = self._clocks[0]
        last = self._clocks[-1]
        drift = (last.offset - first.offset) / max(1, last.at - first.at)
        return at + round(first.offset + drift * (at - first.at))


def check_path(path: Path) -> None:
    """Raise ValueError if a file `path` cannot be created."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for the trace {path.name}; create it")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file for the trace")


def _schedule(ranks: dict[str, dict[str, Any]], slices: list[Slice]) -> dict[str, Any] | None:
    """Return the schedule of the first rank's pipeline as it was run; None unless all of its ranks have trained.

    The steps of a rank are those of its run with the most actions: a run that failed has fewer.
    """
    first_rank = ranks[min(ranks, key=int)]
    longest_runs = []
    for member in first_rank["members"]:
        runs = training_runs(item for item in slices if (item.rank, item.thread) == (member, COMPUTE))
        if not runs:
            return None
        longest_runs.append(max(runs.values(), key=len))
    microbatches = {action.microbatch for run in longest_runs for item in run for action in item.step}
    return {
        "name": first_rank["schedule"],
        "num_microbatches": len(microbatches),
        "placement": first_rank["placement"],
        "messages_in_flight": first_rank["messages_in_flight"],
        "ranks": [[";".join(item.args["actions"]) for item in run] for run in longest_runs],
    }
