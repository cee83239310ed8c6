"""The file of a trace: Chrome's trace event format, which ui.perfetto.dev opens, with the schedule in its metadata.

A process is a rank. Its threads are what its host computes, its communication, its lanes (other threads of the host)
and the streams of its device; flows lead from a send to its receive. Imports no torch.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.runtime.files import replace_file
from dualpipe.schedule.types import Action, Schedule, Step
from dualpipe.schedule.validate import validate

FORMAT = "dualpipe trace 2"
TRACED = "what was traced until then: "  # with the file, in a note of the error that has ended a trace
COMPUTE, COMMUNICATION, DEVICE = THREADS = ("compute", "communication", "device")


class Slice(NamedTuple):
    """One piece of work of a thread of a rank, from `start` to `end`, in nanoseconds.

    args: of an action `actions`, such as ["0F1", "3B0"], and, unless another pipeline's, the number of the `run` of the
    pipeline that it is part of; of one alone, and of a segment, `stage` and `microbatch`; of a communication `bytes`,
    `ranks` and its `number` among those of its kind; of a send and its receive the same `flow`; the optimizer's `step`.
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
        """The actions that it is; none where it is something else."""
        return tuple(map(Action.read, self.args.get("actions", ())))


@dataclass(frozen=True)
class Trace:
    """memory: samples (rank, nanoseconds, bytes). info: `ranks`, by number as text, each with its `name`, the ranks of
    its pipeline (`members`), its `place` there, what was added to its clock (`clock_offset_us`) and how wrong it can be
    then (`clock_error_us`); `schedule`; tokens of experts by step and rank (`loads`), where they are known."""

    slices: list[Slice]
    memory: list[tuple[int, int, int]]
    info: dict[str, Any]

    @cached_property
    def schedule(self) -> Schedule:
        """Return the schedule of the steps. Raises ValueError where there is none, or no valid one."""
        if not (given := self.info["schedule"]):
            raise ValueError("the trace holds no step of training by a whole pipeline; trace one, on all of its ranks")
        ranks = tuple(tuple(tuple(map(Action.read, step.split(";"))) for step in steps) for steps in given["ranks"])
        schedule = Schedule(given["name"], len(ranks), len(given["placement"]), given["num_microbatches"], ranks,
                            tuple(given["placement"]))
        validate(schedule)
        return schedule

    @cached_property
    def rows(self) -> dict[int, list[Slice]]:
        """By rank the slices that its time is made of, outer ones first: of the stream that computes, where there is a
        device, else of the host."""
        timed = {each.rank for each in self.slices if each.thread == DEVICE}
        rows: dict[int, list[Slice]] = {int(rank): [] for rank in self.info["ranks"]}
        for each in sorted(self.slices, key=lambda each: (each.start, -each.end)):
            if each.thread == DEVICE or (each.rank not in timed and each.thread in THREADS):
                rows[each.rank].append(each)
        return rows

    def name(self, rank: int) -> str:
        """Such as "rank 3 (pp 1, dp 1)"."""
        return self.info["ranks"][str(rank)]["name"]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all; an event a line."""
        head = json.dumps({"displayTimeUnit": "ms", "otherData": {"format": FORMAT, **self.info}})
        events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in self._events())
        replace_file(path, f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n')

    def _events(self) -> Iterator[dict[str, Any]]:
        others = sorted({each.thread for each in self.slices} - {*THREADS})
        order = {thread: number for number, thread in enumerate((*THREADS, *others))}
        # Numbers from 1, as Perfetto merges 0 with others; no two threads have the same, as it goes by them alone at
        # times; what the host computes has the process's own, which makes it the main thread.
        places = {(rank, thread): {"pid": rank + 1, "tid": rank + 1 + order[thread] * 10**6}
                  for rank, thread in sorted({(each.rank, each.thread) for each in self.slices})}
        for rank in sorted({rank for rank, _ in places}):
            yield {"ph": "M", "name": "process_name", "pid": rank + 1, "args": {"name": self.name(rank)}}
        for (_, thread), place in places.items():
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": thread}}
        flows = [each.args["flow"] for each in self.slices if each.thread == COMMUNICATION and "flow" in each.args]
        ends, ids = Counter(flows), {flow: number for number, flow in enumerate(dict.fromkeys(flows))}
        for each in self.slices:
            place = places[each.rank, each.thread]
            yield {"ph": "X", "cat": each.kind, "name": each.name, "ts": _us(each.start),
                   "dur": _us(each.end - each.start), **place, "args": each.args}
            if each.thread == COMMUNICATION and ends[flow := each.args.get("flow", "")] == 2:
                ph, time = ("s", each.start) if each.kind == "send" else ("f", max(each.start, each.end - 1))
                yield {"ph": ph, "cat": "message", "name": "message", "id": ids[flow], "ts": _us(time), **place,
                       **({"bp": "e"} if ph == "f" else {})}  # bound to the slice around it
        for rank, time, size in self.memory:
            yield {"ph": "C", "name": "memory", "pid": rank + 1, "ts": _us(time), "args": {"bytes": size}}


def _us(nanoseconds: int) -> float:
    """Microseconds, from which also who cuts off has the nanosecond: Perfetto does, and leaves out what overlaps then
    (CoerceToTs of its importer of JSON; slice_drop_overlapping_complete_event)."""
    return (nanoseconds + 0.25) / 1e3


def read(path: str | Path) -> Trace:
    """The trace in a file. Raises ValueError, in one line, where it cannot be read, is none of ours, or is cut off."""
    try:
        found = json.loads(Path(path).read_bytes())
        info, events = found["otherData"], found["traceEvents"]
        if (version := info.pop("format")) != FORMAT:
            raise ValueError(f"it is a {version!r}, of which this version reads {FORMAT!r} alone; take the trace again")
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        slices = [Slice(e["pid"] - 1, threads[e["pid"], e["tid"]], e["cat"], e["name"], round(e["ts"] * 1e3),
                        round(e["ts"] * 1e3) + round(e["dur"] * 1e3), e["args"]) for e in events if e["ph"] == "X"]
        memory = [(e["pid"] - 1, round(e["ts"] * 1e3), e["args"]["bytes"]) for e in events if e["ph"] == "C"]
        trace = Trace(slices, memory, info)
        _ = trace.rows, trace.schedule  # made now, while the file can be named
        return trace
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no trace, or was cut off: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no trace of this library ({type(error).__name__}: {error}); take one by dualpipe "
                         "train --trace steps=10..12, or Pipeline.trace") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def training_runs(row: Iterable[Slice]) -> dict[int, list[Slice]]:
    """The actions of a rank by the number of the run of the pipeline, without runs that are forward only."""
    runs = defaultdict[int, list[Slice]](list)
    for each in row:
        if "run" in each.args:
            runs[each.args["run"]].append(each)
    kinds = {number: {action.kind for each in run for action in each.step} for number, run in runs.items()}
    return {number: run for number, run in runs.items() if kinds[number] != {"F"}}
