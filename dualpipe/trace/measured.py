"""Each rank's time by a trace: what it computed, what it waited for and why. In nanoseconds.

A wait has two parts. Until the last of those that it waits for has begun, it is somebody's lateness (in a pipeline, the
bubble); from then on it is communication that nothing hides.
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
_ASIDE = ("evaluate", "save", "export", "check")  # beside the steps of training, with all that is in them


def label(each: Slice) -> str:
    """Return the name of a kind of communication."""
    if each.kind in ("send", "receive"):
        return "gradients" if each.name.startswith("the gradient") else "activations"
    return _LABELS.get(each.kind, each.kind)


@dataclass
class Activity:
    """An outermost slice of a rank. late: what passed in it because other ranks had not begun yet, by rank; exposed:
    what communications took from then on, by kind."""

    slice: Slice
    late: Counter[int] = field(default_factory=Counter)
    exposed: Counter[str] = field(default_factory=Counter)

    @property
    def own(self) -> int:
        """The rest: of an action its computing."""
        return self.slice.end - self.slice.start - self.late.total() - self.exposed.total()

    @property
    def cost(self) -> int:
        """Return the time of an action when nobody is late and its parameters are there."""
        return self.own + self.exposed[ALL_TO_ALL]


class Measured:
    """A trace, taken apart.

    spans: by rank, in order. runs: by rank, those of the actions of each step of the pipeline that is whole on all of
    its ranks, in the same order. hidden: by rank and kind, what communications took while it computed; on CPU at most,
    as nobody sees there when something has arrived. latency: of a message that is waited for, the median from the begin
    of the send to the end of the receive.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.hidden = trace, defaultdict[int, Counter[str]](Counter)
        every = [each for row in trace.rows.values() for each in row]
        self._sends = {each.args["flow"]: each for each in every if each.kind == "send" and "flow" in each.args}
        self._flows: dict[int, str] = {}  # of receives, by the slice's id; those of headers too
        # When each rank began a collective; and of a slice the one that began it, another one where it only waits.
        self._begun = defaultdict[tuple[str, tuple[int, ...], int], dict[int, int]](dict)
        self._begins: dict[int, Slice] = {}
        for row in trace.rows.values():
            self._find_begins(row)
        taken = [(each.start <= send.start, each.end - send.start) for each in every
                 if (send := self._sends.get(each.args.get("flow", ""))) is not None and each.kind == "receive"]
        waited = [time for waits, time in taken if waits]
        self.latency = max(0, round(median(waited)) if waited else min((time for _, time in taken), default=0))
        self.spans = {rank: self._spans(row) for rank, row in trace.rows.items()}
        aside = [span.slice for spans in self.spans.values() for span in spans if span.slice.kind in _ASIDE]
        for each in trace.slices:
            if each.thread.startswith(f"{DEVICE}, ") and not any(  # a stream beside the one that computes
                one.rank == each.rank and one.start <= each.start < one.end for one in aside
            ):
                self.hidden[each.rank][label(each)] += each.end - each.start
        whole = {rank: dict(self._whole_runs(rank)) for rank in trace.rows}
        self.runs: dict[int, list[list[Activity]]] = {}
        for rank, runs in whole.items():
            of_all = set.intersection(*({*whole[each]} for each in trace.info["ranks"][str(rank)]["members"]))
            self.runs[rank] = [run for number, run in runs.items() if number in of_all]

    def _find_begins(self, row: list[Slice]) -> None:
        under_way: dict[tuple[str, str], Slice] = {}
        for each in row:
            what = label(each), each.name
            begin = self._begins[id(each)] = under_way.pop(what, each)
            if begin is each and each.kind in ("exchange", "gather", "reduce"):
                under_way[what] = each
            if "ranks" in each.args and (number := each.args["number"]):
                self._begun[each.kind, tuple(each.args["ranks"]), number][each.rank] = begin.start
        flows: dict[str, str] = {}
        for each in reversed(row):
            if each.kind == "receive":
                flows[each.name] = self._flows[id(each)] = each.args.get("flow", flows.get(each.name, ""))

    def _last(self, wait: Slice) -> tuple[int, int]:
        """When the last of those that a wait is for had begun, and which rank that was."""
        if (send := self._sends.get(self._flows.get(id(wait), ""))) is not None:
            return send.start, send.rank
        if number := wait.args.get("number"):
            begun = self._begun[wait.kind, tuple(wait.args["ranks"]), number]
            return max(((at, rank) for rank, at in begun.items() if rank != wait.rank), default=(wait.start, wait.rank))
        return (wait.end, wait.args["ranks"][0]) if wait.kind == "agree" else (wait.start, wait.rank)

    def _beside(self, wait: Slice) -> int:
        """Return how long the awaited communication was under way before."""
        if wait.thread == DEVICE and wait.kind == "all_to_all":  # all of it is seen, on another stream
            return wait.start - wait.end
        if (send := self._sends.get(wait.args.get("flow", ""))) is not None:
            return min(max(0, wait.start - send.start), self.latency)
        return max(0, wait.start - self._begins[id(wait)].end)

    def _spans(self, row: list[Slice]) -> list[Activity]:
        spans: list[Activity] = []
        counted = 0  # until when
        for each in row:
            if not spans or each.start >= spans[-1].slice.end:
                spans.append(Activity(each))
            waits = "ranks" in each.args or each.kind == "all_to_all"
            if waits and each.end > counted and spans[-1].slice.kind not in _ASIDE:
                counted, (last, rank) = each.end, self._last(each)
                late = min(max(last - each.start, 0), each.end - each.start)
                spans[-1].late[rank] += late
                spans[-1].exposed[label(each)] += each.end - each.start - late
                self.hidden[each.rank][label(each)] += self._beside(each)
        return spans

    def _whole_runs(self, rank: int) -> Iterator[tuple[int, list[Activity]]]:
        """Return the runs of the trace's schedule, with their numbers."""
        place, spans = self.trace.info["ranks"][str(rank)]["place"], {id(span.slice): span for span in self.spans[rank]}
        for number, run in training_runs(each for each in self.trace.rows[rank] if id(each) in spans).items():
            if {each.step for each in run} == set(self.trace.schedule.ranks[place]):
                yield number, [spans[id(each)] for each in run]

    def samples(self) -> dict[Step, list[Activity]]:
        """The spans of each step of the schedule, of all pipelines and steps of training."""
        found = defaultdict[Step, list[Activity]](list)
        for span in (span for runs in self.runs.values() for run in runs for span in run):
            found[span.slice.step].append(span)
        return dict(found)
