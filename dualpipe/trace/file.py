"""The file of a trace: Chrome's trace event format, which ui.perfetto.dev opens, with the schedule in its metadata.

A process is a rank, its threads are what it computes, its communication, its lanes (threads of the host beside it) and
the streams of its device. Flows lead from a send to its receive. Imports no torch.

The format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format").
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.files import replace_file
from dualpipe.schedule import Schedule, Step, validate
from dualpipe.schedule.types import Action

FORMAT = "dualpipe trace 1"
COMPUTE, COMMUNICATION, DEVICE = THREADS = ("compute", "communication", "device")
_FLOWS = {"send": "s", "receive": "f"}


class Slice(NamedTuple):
    """What a thread of a rank did from `start` to `end`, in microseconds.

    args: of an action `actions` (such as ["0F1", "3B0"]), `stage` and `microbatch`; of a segment these, its `number`
    and whether it is `inside`; of a communication `bytes`, `ranks` and its `number` among those of one kind; of a send
    and its receive the same `flow`; the optimizer's `step`.
    """

    rank: int
    thread: str
    kind: str
    name: str
    start: float
    end: float
    args: dict[str, Any]

    @property
    def step(self) -> Step:
        """The actions that it is; none where it is something else."""
        return tuple(map(Action.read, self.args.get("actions", ())))


@dataclass(frozen=True)
class Trace:
    """slices: those of a thread in the order of their starts, an outer one before those inside of it.

    memory: samples (rank, microseconds, bytes). info: `ranks`, by number as text, each with its `name`, the global
    numbers of its pipeline (`members`), its `place` there and how wrong its clock can be (`clock_error_us`);
    `schedule`; `loads` of experts by step and rank, where they are known.
    """

    slices: list[Slice]
    memory: list[tuple[int, float, int]]
    info: dict[str, Any]

    @cached_property
    def schedule(self) -> Schedule:
        """That of the steps. Raises ValueError where there is none, or no valid one."""
        given = self.info.get("schedule")
        if not given:
            raise ValueError("the trace holds no training step of a pipeline; trace at least one")
        ranks = tuple(tuple(tuple(map(Action.read, step.split(";"))) for step in steps) for steps in given["ranks"])
        schedule = Schedule(given["name"], len(ranks), len(given["placement"]), given["num_microbatches"], ranks,
                            tuple(given["placement"]))
        validate(schedule)
        return schedule

    @cached_property
    def rows(self) -> dict[int, list[Slice]]:
        """By rank the slices that its time is made of: its device's, of the stream that computes, or its host's."""
        timed = {each.rank for each in self.slices if each.thread == DEVICE}
        rows: dict[int, list[Slice]] = {int(rank): [] for rank in self.info["ranks"]}
        for each in self.slices:
            if each.thread == DEVICE or (each.rank not in timed and each.thread in (COMPUTE, COMMUNICATION)):
                rows[each.rank].append(each)
        for row in rows.values():
            row.sort(key=lambda each: (each.start, -each.end))
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
        threads: dict[tuple[int, str], int] = {}
        for rank, name in {(each.rank, each.thread): None for each in self.slices}:
            used = sum(other == rank for other, _ in threads) + len(THREADS)
            threads[rank, name] = THREADS.index(name) if name in THREADS else used
        for number, told in self.info["ranks"].items():
            yield from _named("process", told["name"], pid=int(number), sort=int(number))
        for (rank, name), tid in threads.items():
            yield from _named("thread", name, pid=rank, tid=tid, sort=tid)
        numbers: dict[str, int] = {}  # of flows, as Perfetto takes no text
        ends = Counter(each.args["flow"] for each in self.slices if "flow" in each.args and each.thread == COMMUNICATION)
        for each in self.slices:
            place = {"pid": each.rank, "tid": threads[each.rank, each.thread]}
            duration = round(each.end - each.start, 3)
            yield {"ph": "X", "cat": each.kind, "name": each.name, "ts": each.start, "dur": duration, **place,
                   "args": each.args}
            flow = each.args.get("flow")
            if each.thread == COMMUNICATION and ends[flow] == 2:  # that of a step that failed may lack the other
                at = {"s": each.start, "f": round(max(each.start, each.end - 1e-3), 3)}[_FLOWS[each.kind]]
                number = numbers.setdefault(flow, len(numbers))
                yield {"ph": _FLOWS[each.kind], "bp": "e", "cat": "message", "name": "message", "id": number, "ts": at,
                       **place}
        for rank, at, used in self.memory:
            yield {"ph": "C", "name": "memory", "pid": rank, "ts": at, "args": {"bytes": used}}


def training_runs(row: Iterable[Slice]) -> list[list[Slice]]:
    """The actions of a rank, by the step of the pipeline that they are part of, in which each comes once; without those
    of steps that are forward only."""
    runs: list[list[Slice]] = [[]]
    seen: set[str] = set()
    for each in row:
        if actions := each.args.get("actions"):
            if not seen.isdisjoint(actions):
                runs.append([])
                seen.clear()
            runs[-1].append(each)
            seen.update(actions)
    return [run for run in runs if any(action.kind != "F" for each in run for action in each.step)]


def _named(what: str, name: str, *, sort: int, **place: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": sort}}


def read(path: str | Path) -> Trace:
    """The trace in a file. Raises ValueError, in one line, where it cannot be read, is none of ours, or is cut off."""
    try:
        found = json.loads(Path(path).read_bytes())
        info = found["otherData"]
        if info.pop("format") != FORMAT:
            raise KeyError("format")
        threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in found["traceEvents"]
                   if event["name"] == "thread_name"}
        slices = [
            Slice(event["pid"], threads[event["pid"], event["tid"]], event["cat"], event["name"], event["ts"],
                  round(event["ts"] + event["dur"], 3), event["args"])
            for event in found["traceEvents"] if event["ph"] == "X"
        ]
        memory = [(event["pid"], event["ts"], event["args"]["bytes"]) for event in found["traceEvents"]
                  if event["ph"] == "C"]
        trace = Trace(slices, memory, info)
        assert trace.rows is not None and trace.schedule.num_ranks
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, IndexError, UnicodeDecodeError, json.JSONDecodeError) as error:
        whole = "" if not isinstance(error, json.JSONDecodeError) else " (cut off?)"
        raise ValueError(f"{path} is no trace of dualpipe{whole}: {type(error).__name__}: {error}; take one with "
                         "dualpipe train --trace steps=10..12, or Pipeline.trace") from error
    return trace
