"""What a trace says of each rank's time: what it computed, what it waited for and why, and what each action costs.

A wait has two parts. Until the last of those that it waits for has begun, it is somebody's lateness (in a pipeline, the
bubble); from then on it is communication that nothing hides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from dualpipe.schedule import Step
from dualpipe.trace.file import DEVICE, Slice, Trace, training_runs

ALL_TO_ALL = "all-to-all"
_LABELS = {"exchange": ALL_TO_ALL, "all_to_all": ALL_TO_ALL, "gather": "gathers", "reduce": "reductions",
           "agree": "agreement", "vote": "votes", "clip": "norm", "routers": "loads"}
_ASIDE = ("evaluate", "save", "export")  # beside the training steps, with all that is in them


def label(each: Slice) -> str:
    """What a kind of communication is called."""
    if each.kind in ("send", "receive"):
        return "gradients" if each.name.startswith("the gradient") else "activations"
    return _LABELS.get(each.kind, each.kind)


@dataclass
class Span:
    """An outermost slice of a rank, in microseconds.

    late: what passed in it because other ranks had not begun yet, by rank; exposed: what communications took from then
    on, by kind.
    """

    slice: Slice
    late: Counter[int] = field(default_factory=Counter)
    exposed: Counter[str] = field(default_factory=Counter)

    @property
    def own(self) -> float:
        """The rest: of an action its computing."""
        return self.slice.end - self.slice.start - self.late.total() - self.exposed.total()

    @property
    def cost(self) -> float:
        """What an action takes when nobody is late and its parameters are there."""
        return self.own + self.exposed[ALL_TO_ALL]


class Measured:
    """A trace, taken apart.

    spans: by rank, in order. runs: by rank, of each step of the pipeline those of its actions. hidden: by rank, what
    communications took beside its computing, by kind; on CPU at most, as nobody sees there when something has arrived.
    latency: of a message that is waited for, the median from the begin of the send to the end of the receive.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, self.hidden = trace, defaultdict[int, Counter[str]](Counter)
        self._sends = {each.args["flow"]: each for row in trace.rows.values() for each in row
                       if each.kind == "send" and "flow" in each.args}
        # When each rank began a collective, and of a wait when that rank itself did: before, where it began it apart.
        self._begun = defaultdict[tuple[str, tuple[int, ...], int], dict[int, float]](dict)
        self._own: dict[int, float] = {}  # by the slice's id
        self._flows: dict[int, str] = {}  # of receives, those of headers too
        for row in trace.rows.values():
            self._find_begins(row)
        taken = [(self._sends[flow], each) for row in trace.rows.values() for each in row
                 if (flow := self._flows.get(id(each))) in self._sends and "flow" in each.args]
        waited = [each.end - send.start for send, each in taken if each.start <= send.start]
        fastest = min((each.end - send.start for send, each in taken), default=0.0)  # no message took longer than that
        self.latency = max(0.0, median(waited) if waited else fastest)
        self.spans = {rank: self._spans(row) for rank, row in trace.rows.items()}
        for each in trace.slices:  # streams beside the one that computes
            if each.thread.startswith(f"{DEVICE}, "):
                self.hidden[each.rank][label(each)] += each.end - each.start
        self.runs = {rank: list(self._runs(rank)) for rank in trace.rows}

    def _find_begins(self, row: list[Slice]) -> None:
        under_way: dict[tuple[str, str], float] = {}
        for each in row:
            what = label(each), each.name
            if each.kind == "exchange" or (each.kind in ("gather", "reduce") and what not in under_way):
                under_way[what] = each.start
            begun = self._own[id(each)] = under_way[what] if each.start == under_way.get(what) else under_way.pop(
                what, each.start)
            if "ranks" in each.args and (number := each.args["number"]):
                self._begun[each.kind, tuple(each.args["ranks"]), number][each.rank] = begun
        flows: dict[str, str] = {}
        for each in reversed(row):
            if each.kind == "receive":
                flows[each.name] = self._flows[id(each)] = each.args.get("flow", flows.get(each.name, ""))

    def _last(self, wait: Slice) -> tuple[float, int]:
        """When the last of those that a wait is for had begun, and which rank that was."""
        if (send := self._sends.get(self._flows.get(id(wait), ""))) is not None:
            return send.start, send.rank
        if number := wait.args.get("number"):
            begun = self._begun[wait.kind, tuple(wait.args["ranks"]), number]
            return max(((at, rank) for rank, at in begun.items() if rank != wait.rank), default=(wait.start, wait.rank))
        return (wait.end, wait.args["ranks"][0]) if wait.kind == "agree" else (wait.start, wait.rank)

    def _spans(self, row: list[Slice]) -> list[Span]:
        spans: list[Span] = []
        counted = 0.0  # until when
        for each in row:
            if not spans or each.start >= spans[-1].slice.end:
                spans.append(Span(each))
            communicates = "ranks" in each.args or each.kind == "all_to_all"
            if not communicates or spans[-1].slice.kind in _ASIDE or each.end <= counted:
                continue
            counted, (last, rank) = each.end, self._last(each)
            late = min(max(last - each.start, 0.0), each.end - each.start)
            spans[-1].late[rank] += late
            spans[-1].exposed[label(each)] += each.end - each.start - late
            flow = each.args.get("flow")
            before = self._sends[flow].start if flow in self._sends else self._own[id(each)]
            beside = max(0.0, each.start - before)
            if each.thread == DEVICE and each.kind == "all_to_all":  # the other stream's time, less this
                beside = late - (each.end - each.start)
            self.hidden[each.rank][label(each)] += min(beside, self.latency) if flow else beside
        return spans

    def _runs(self, rank: int) -> Iterator[list[Span]]:
        place = self.trace.info["ranks"][str(rank)]["place"]
        expected = {action for step in self.trace.schedule.ranks[place] for action in step}
        spans = {id(span.slice): span for span in self.spans[rank]}
        for run in training_runs(each for each in self.trace.rows[rank] if id(each) in spans):
            if {action for each in run for action in each.step} == expected:
                yield [spans[id(each)] for each in run]

    def samples(self) -> dict[Step, list[Span]]:
        """The spans of each step of the schedule, all pipelines and steps of training together."""
        found = defaultdict[Step, list[Span]](list)
        for runs in self.runs.values():
            for run in runs:
                for span in run:
                    found[span.slice.step].append(span)
        return dict(found)
