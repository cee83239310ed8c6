"""Time of each rank in a trace: computation, waits and their causes. In nanoseconds.

A wait has two parts. Until the last of the ranks being waited on has begun, it is that rank's lateness (in a pipeline,
the bubble). From then on it is exposed communication, which nothing hides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from dualpipe.schedule.types import Step
from dualpipe.trace.file import DEVICE, Slice, Trace, training_runs

ALL_TO_ALL = "all-to-all"
_LABELS = {"exchange": ALL_TO_ALL, "all_to_all": ALL_TO_ALL, "gather": "gathers", "reduce": "reductions",
           "agree": "agreement", "vote": "votes", "clip": "norm", "routers": "loads"}
_WHOLE_KINDS = ("evaluate", "save", "export", "check")  # outside of training steps; counted as a whole
_ASYNC_KINDS = ("exchange", "gather", "reduce")  # collectives with one slice where they start, and one at the wait

Collective = tuple[str, tuple[int, ...], int]  # kind, ranks, sequence number


def label(item: Slice) -> str:
    """Return the name of a slice's kind of communication, such as "all-to-all" or "gradients"."""
    if item.kind in ("send", "receive"):
        return "gradients" if item.name.startswith("the gradient") else "activations"
    return _LABELS.get(item.kind, item.kind)


@dataclass
class Activity:
    """An outermost slice of a rank, with the waits inside it.

    Args:
        slice: the slice.
        late: time waited until the last of the other ranks had begun, by that rank.
        exposed: time that communication took from then on, by kind.
    """

    slice: Slice
    late: Counter[int] = field(default_factory=Counter)
    exposed: Counter[str] = field(default_factory=Counter)

    @property
    def own(self) -> int:
        """Time without waits; of an action, its computation."""
        return self.slice.end - self.slice.start - self.late.total() - self.exposed.total()

    @property
    def cost(self) -> int:
        """Time of an action when no rank is late and its parameters are gathered."""
        return self.own + self.exposed[ALL_TO_ALL]


class Measured:
    """Analysis of a trace.

    Attributes:
        trace: the trace.
        spans: activities of each rank, in order.
        runs: for each rank, the actions of each run (one `Pipeline.step`) that is complete on all ranks of the
            pipeline, in order.
        hidden: by rank and kind, the time that communication took while the rank computed. On CPU it is an upper
            bound, as the time of arrival is not known there.
        latency: median time from the start of a send to the end of its receive, of messages that were waited for.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.hidden: defaultdict[int, Counter[str]] = defaultdict(Counter)
        slices = [item for row in trace.rows.values() for item in row]
        self._sends = {item.args["flow"]: item for item in slices if item.kind == "send" and "flow" in item.args}
        self._flows: dict[int, str] = {}  # flow by the id of the slice of a receive; headers are received, too
        self._begun: defaultdict[Collective, dict[int, int]] = defaultdict(dict)  # start time by collective and rank
        self._begins: dict[int, Slice] = {}  # slice that started a communication, by the id of the slice that waits
        for row in trace.rows.values():
            self._find_begins(row)
            self._find_flows(row)
        self.latency = self._median_latency(slices)
        self.spans = {rank: self._spans(row) for rank, row in trace.rows.items()}
        self._add_side_streams()
        self.runs = self._complete_runs()

    def _find_begins(self, row: list[Slice]) -> None:
        """Pair the waits of a rank with the slices that began their communication."""
        under_way: dict[tuple[str, str], Slice] = {}
        for item in row:
            key = (label(item), item.name)
            begin = under_way.pop(key, item)
            self._begins[id(item)] = begin
            if begin is item and item.kind in _ASYNC_KINDS:
                under_way[key] = item
            if "ranks" in item.args and item.args["number"]:
                collective = (item.kind, tuple(item.args["ranks"]), item.args["number"])
                self._begun[collective][item.rank] = begin.start

    def _find_flows(self, row: list[Slice]) -> None:
        """Note the flow of each receive of a rank.

        A header, which gives the shapes of a message, is received before the message and gets the flow of the message.
        """
        flows: dict[str, str] = {}  # of the next receive, by name
        for item in reversed(row):
            if item.kind == "receive":
                flow = item.args.get("flow", flows.get(item.name, ""))
                flows[item.name] = flow
                self._flows[id(item)] = flow

    def _median_latency(self, slices: list[Slice]) -> int:
        """Return the median latency of messages that were waited for; if none was, the least of the others."""
        waited_latencies: list[int] = []
        other_latencies: list[int] = []
        for item in slices:
            send = self._sends.get(item.args.get("flow", "")) if item.kind == "receive" else None
            if send is not None:
                latencies = waited_latencies if item.start <= send.start else other_latencies
                latencies.append(item.end - send.start)
        latency = median(waited_latencies) if waited_latencies else min(other_latencies, default=0)
        return max(0, round(latency))

    def _spans(self, row: list[Slice]) -> list[Activity]:
        """Return the activities of a rank, with each wait split into lateness and exposed communication."""
        spans: list[Activity] = []
        counted_until = 0
        for item in row:
            if not spans or item.start >= spans[-1].slice.end:
                spans.append(Activity(item))
            span = spans[-1]
            is_wait = "ranks" in item.args or item.kind == "all_to_all"
            if is_wait and item.end > counted_until and span.slice.kind not in _WHOLE_KINDS:
                counted_until = item.end
                last_begin, last_rank = self._last_to_begin(item)
                late = min(max(last_begin - item.start, 0), item.end - item.start)
                span.late[last_rank] += late
                span.exposed[label(item)] += item.end - item.start - late
                self.hidden[item.rank][label(item)] += self._hidden_before(item)
        return spans

    def _last_to_begin(self, wait: Slice) -> tuple[int, int]:
        """Return when the last of the ranks being waited on had begun, and which rank it was."""
        send = self._sends.get(self._flows.get(id(wait), ""))
        if send is not None:
            return send.start, send.rank
        number = wait.args.get("number")
        if number:
            begun = self._begun[wait.kind, tuple(wait.args["ranks"]), number]
            others = ((begin, rank) for rank, begin in begun.items() if rank != wait.rank)
            return max(others, default=(wait.start, wait.rank))
        if wait.kind == "agree":
            return wait.end, wait.args["ranks"][0]
        return wait.start, wait.rank

    def _hidden_before(self, wait: Slice) -> int:
        """Return how long the communication was under way before the wait for it.

        On a device, `_add_side_streams` adds the whole time of an all-to-all. So the result for its wait is negative:
        it takes off the part that was waited for, which nothing hid.
        """
        if wait.thread == DEVICE and wait.kind == "all_to_all":
            return wait.start - wait.end
        send = self._sends.get(wait.args.get("flow", ""))
        if send is not None:
            return min(max(0, wait.start - send.start), self.latency)
        return max(0, wait.start - self._begins[id(wait)].end)

    def _add_side_streams(self) -> None:
        """Add the communication on side streams to `hidden`, except within activities that are counted as a whole."""
        whole = [span.slice for spans in self.spans.values() for span in spans if span.slice.kind in _WHOLE_KINDS]
        for item in self.trace.slices:
            is_within = any(outer.rank == item.rank and outer.start <= item.start < outer.end for outer in whole)
            if item.thread.startswith(f"{DEVICE}, ") and not is_within:
                self.hidden[item.rank][label(item)] += item.end - item.start

    def _complete_runs(self) -> dict[int, list[list[Activity]]]:
        """Return the runs of each rank that are complete on all ranks of its pipeline."""
        rank_runs = {rank: dict(self._runs_of_schedule(rank)) for rank in self.trace.rows}
        complete = {}
        for rank, runs in rank_runs.items():
            members = self.trace.info["ranks"][str(rank)]["members"]
            numbers = set.intersection(*({*rank_runs[member]} for member in members))
            complete[rank] = [run for number, run in runs.items() if number in numbers]
        return complete

    def _runs_of_schedule(self, rank: int) -> Iterator[tuple[int, list[Activity]]]:
        """Yield the number and the actions of each run of a rank that has all steps of the trace's schedule."""
        place = self.trace.info["ranks"][str(rank)]["place"]
        spans = {id(span.slice): span for span in self.spans[rank]}
        outermost = (item for item in self.trace.rows[rank] if id(item) in spans)
        for number, run in training_runs(outermost).items():
            if {item.step for item in run} == set(self.trace.schedule.ranks[place]):
                yield number, [spans[id(item)] for item in run]

    def samples(self) -> dict[Step, list[Activity]]:
        """Return the activities of each step of the schedule, from all pipelines and steps of training."""
        samples: defaultdict[Step, list[Activity]] = defaultdict(list)
        for runs in self.runs.values():
            for run in runs:
                for span in run:
                    samples[span.slice.step].append(span)
        return dict(samples)
