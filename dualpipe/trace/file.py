"""Trace files: Chrome's trace event format, which ui.perfetto.dev opens, with the schedule in the metadata.

A process is a rank. Its threads are the computation of its host, its communication, its lanes (other threads of the
host) and the streams of its device. A flow leads from a send to its receive. Imports no torch.

Source of the format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.runtime.files import replace_file
from dualpipe.schedule.types import Action, Schedule, Step
from dualpipe.schedule.validate import validate

FORMAT = "dualpipe trace 1"
TRACED = "trace until the error: "  # begins the note of an error that ended a trace, before the file's path
COMPUTE = "compute"
COMMUNICATION = "communication"
DEVICE = "device"
THREADS = (COMPUTE, COMMUNICATION, DEVICE)
_MAX_RANKS = 10**6  # of a trace; the numbers of two threads of a rank differ by multiples of it

Sample = tuple[int, int, int]  # rank, nanoseconds, bytes


class Slice(NamedTuple):
    """An interval of work on a thread of a rank, from `start` to `end` in nanoseconds.

    `args` holds, where they apply:

    - of actions: `actions`, such as ["0F1", "3B0"]; the number of the `run`, which is one `Pipeline.step`, unless the
      actions belong to another pipeline than the traced one; and of a single action `stage` and `microbatch`;
    - of a segment: `stage` and `microbatch`;
    - of a communication: `bytes`, `ranks`, and its sequence `number` among those of its kind;
    - of a send and its receive: the same `flow`;
    - of all: `step`, the optimizer step.
    """

    rank: int
    thread: str
    kind: str
    name: str
    start: int
    end: int
    args: dict[str, Any]

    @property
    def step(self) -> Step:
        """Actions of the slice; empty if it is something else."""
        return tuple(map(Action.read, self.args.get("actions", ())))


@dataclass(frozen=True)
class Trace:
    """Slices and memory samples of all ranks.

    Args:
        slices: the slices.
        memory: samples of (rank, nanoseconds, bytes).
        info: the metadata. `ranks` holds, by the rank's number as text, its `name`, the ranks of its pipeline
            (`members`), its `place` among them, the time added to its clock (`clock_offset_us`) and the possible error
            of its clock then (`clock_error_us`). `schedule` is the schedule that was run, or None. `loads` holds the
            tokens of experts by optimizer step and rank, where they are known.
    """

    slices: list[Slice]
    memory: list[Sample]
    info: dict[str, Any]

    @cached_property
    def schedule(self) -> Schedule:
        """Schedule of the steps. Raises ValueError if the trace has none, or an invalid one."""
        content = self.info["schedule"]
        if not content:
            raise ValueError("the trace holds no step of training by a whole pipeline; trace one, on all of its ranks")
        ranks = tuple(tuple(tuple(map(Action.read, step.split(";"))) for step in steps) for steps in content["ranks"])
        placement = tuple(content["placement"])
        schedule = Schedule(content["name"], len(ranks), len(placement), content["num_microbatches"], ranks, placement,
                            content["messages_in_flight"])
        validate(schedule)
        return schedule

    @cached_property
    def rows(self) -> dict[int, list[Slice]]:
        """Slices that make up the time of each rank, outer ones first.

        They are those of the stream that computes if the rank has a device, else those of the host.
        """
        device_ranks = {item.rank for item in self.slices if item.thread == DEVICE}
        rows: dict[int, list[Slice]] = {int(rank): [] for rank in self.info["ranks"]}
        for item in sorted(self.slices, key=lambda item: (item.start, -item.end)):
            if item.thread == DEVICE or (item.rank not in device_ranks and item.thread in THREADS):
                rows[item.rank].append(item)
        return rows

    def name(self, rank: int) -> str:
        """Return the name of a rank, such as "rank 3 (pp 1, dp 1)"."""
        return self.info["ranks"][str(rank)]["name"]

    def write(self, path: Path) -> None:
        """Write the file, with one event per line. The file is written whole or not at all."""
        head = json.dumps({"displayTimeUnit": "ms", "otherData": {"format": FORMAT, **self.info}})
        events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in self._events())
        replace_file(path, f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n')

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the trace events."""
        ids = self._thread_ids()
        for rank in sorted({rank for rank, _ in ids}):
            yield {"ph": "M", "name": "process_name", "pid": rank + 1, "args": {"name": self.name(rank)}}
        for (_, thread), thread_id in ids.items():
            yield {"ph": "M", "name": "thread_name", **thread_id, "args": {"name": thread}}
        flows = [item.args["flow"] for item in self.slices if item.thread == COMMUNICATION and "flow" in item.args]
        num_ends = Counter(flows)
        flow_ids = {flow: number for number, flow in enumerate(dict.fromkeys(flows))}
        for item in self.slices:
            thread_id = ids[item.rank, item.thread]
            yield {"ph": "X", "cat": item.kind, "name": item.name, "ts": _us(item.start),
                   "dur": _us(item.end - item.start), **thread_id, "args": item.args}
            flow = item.args.get("flow", "")
            if item.thread == COMMUNICATION and num_ends[flow] == 2:
                yield _flow_event(item, flow_ids[flow], thread_id)
        for rank, time, size in self.memory:
            yield {"ph": "C", "name": "memory", "pid": rank + 1, "ts": _us(time), "args": {"bytes": size}}

    def _thread_ids(self) -> dict[tuple[int, str], dict[str, int]]:
        """Return the process and thread number of each (rank, thread).

        Numbers begin at 1, as Perfetto merges 0 with others. No two threads of any ranks share a number, as Perfetto
        sometimes goes by the thread number alone. The host's computation has the number of its process, which makes it
        the main thread.
        """
        other_threads = sorted({item.thread for item in self.slices} - {*THREADS})
        order = {thread: position for position, thread in enumerate((*THREADS, *other_threads))}
        return {(rank, thread): {"pid": rank + 1, "tid": rank + 1 + order[thread] * _MAX_RANKS}
                for rank, thread in sorted({(item.rank, item.thread) for item in self.slices})}


def _flow_event(item: Slice, flow_id: int, thread_id: Mapping[str, int]) -> dict[str, Any]:
    """Return the event that starts a flow at a send, or ends it at a receive."""
    if item.kind == "send":
        return {"ph": "s", "cat": "message", "name": "message", "id": flow_id, "ts": _us(item.start), **thread_id}
    end = max(item.start, item.end - 1)
    bind_to_enclosing_slice = {"bp": "e"}
    return {"ph": "f", "cat": "message", "name": "message", "id": flow_id, "ts": _us(end), **thread_id,
            **bind_to_enclosing_slice}


def _us(nanoseconds: int) -> float:
    """Convert nanoseconds to microseconds, rounded up slightly so that Perfetto reads back the same nanosecond.

    Perfetto truncates to whole nanoseconds. One nanosecond too early, a slice could overlap the slice before it, and
    Perfetto drops overlapping slices (CoerceToTs of its JSON importer; slice_drop_overlapping_complete_event).
    """
    return (nanoseconds + 0.25) / 1e3


def read(path: str | Path) -> Trace:
    """Read a trace file.

    Raises:
        ValueError: the file cannot be read, is not a trace of this library, or is cut off. The message is one line.
    """
    try:
        trace = _parse(json.loads(Path(path).read_bytes()))
        _ = trace.rows, trace.schedule  # computed here, where their errors can name the file
        return trace
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a trace, or is cut off: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a trace of this library ({type(error).__name__}: {error}); take one by "
                         "dualpipe train --trace steps=10..12, or Pipeline.trace") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse(content: Any) -> Trace:
    """Return the trace in the content of a JSON file."""
    info = content["otherData"]
    events = content["traceEvents"]
    version = info.pop("format")
    if version != FORMAT:
        raise ValueError(f"the format is {version!r}, but this version reads only {FORMAT!r}; take the trace again")
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events
               if event["name"] == "thread_name"}
    slices = []
    memory = []
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e3)
            end = start + round(event["dur"] * 1e3)
            thread = threads[event["pid"], event["tid"]]
            slices.append(Slice(event["pid"] - 1, thread, event["cat"], event["name"], start, end, event["args"]))
        elif event["ph"] == "C":
            memory.append((event["pid"] - 1, round(event["ts"] * 1e3), event["args"]["bytes"]))
    return Trace(slices, memory, info)


def training_runs(row: Iterable[Slice]) -> dict[int, list[Slice]]:
    """Return the actions of a rank by the number of the run (one `Pipeline.step`), without forward-only runs."""
    runs: defaultdict[int, list[Slice]] = defaultdict(list)
    for item in row:
        if "run" in item.args:
            runs[item.args["run"]].append(item)
    return {number: run for number, run in runs.items()
            if any(action.kind != "F" for item in run for action in item.step)}
