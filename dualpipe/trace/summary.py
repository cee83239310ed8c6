"""`dualpipe trace summary`: where the time of the steps in a trace went, by rank, and against a simulation of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from dualpipe.schedule.draw import aligned, to_svg
from dualpipe.schedule.simulate import Span as Box
from dualpipe.schedule.simulate import Timeline, simulate
from dualpipe.schedule.types import Step
from dualpipe.trace.costs import MeasuredCosts
from dualpipe.trace.file import read
from dualpipe.trace.measured import ALL_TO_ALL, Measured, Span

_SHOWN, _LEAST = 4, 0.05  # causes of a rank's loss that are named, and the part of it that the least one has
_SLOWEST = 5  # actions that are named
_LOAD = 1.1  # times the mean, from which on a load is named


class Summary:
    """The parts of the report. Times are in milliseconds a step."""

    def __init__(self, measured: Measured) -> None:
        self.measured, self.trace = measured, measured.trace
        self.costs = MeasuredCosts(measured).costs
        self.ideal = simulate(self.trace.schedule, self.costs)
        self.steps = max(1, max(map(len, measured.runs.values())))
        ends = [(row[0].start, max(each.end for each in row)) for row in self.trace.rows.values() if row]
        self.window = (max(end for _, end in ends) - min(start for start, _ in ends)) / 1e3 / self.steps

    # -- where the time went

    def totals(self, rank: int) -> dict[str, float]:
        """The window of a rank by what it was spent on; all together are the window."""
        found, spans = Counter[str](), self.measured.spans[rank]
        for span in spans:
            of_host = span.late or span.exposed or span.slice.kind in ("gather", "reduce")  # the latter of one rank
            kind = "compute" if span.slice.step else "" if of_host else span.slice.kind
            found[kind] += span.own
            found["bubble"] += span.late.total()
            found["exposed"] += span.exposed.total()
        per_step = {kind: time / 1e3 / self.steps for kind, time in found.items()}
        return {**per_step, "host gaps": self.window - sum(per_step.values()) + per_step.pop("", 0.0)}

    def by_rank(self) -> str:
        """A table of that, and one of communication by kind."""
        totals = {rank: self.totals(rank) for rank in self.trace.rows}
        first = ("compute", "bubble", "exposed")
        names = [*first, *sorted({name for each in totals.values() for name in each} - {*first, "host gaps"}),
                 "host gaps"]
        rows = [("ms a step", "all", *names)]
        rows += [(self.trace.name(rank), _ms(self.window), *(_ms(found.get(name, 0.0)) for name in names))
                 for rank, found in totals.items()]
        exposed = {rank: sum((span.exposed for span in spans), Counter[str]())
                   for rank, spans in self.measured.spans.items()}
        kinds = sorted({kind for each in (*exposed.values(), *self.measured.hidden.values()) for kind in each})
        more = [("exposed + hidden", *kinds)]
        more += [(self.trace.name(rank), *(
            f"{_ms(found[kind] / 1e3 / self.steps)} + {_ms(self.measured.hidden[rank][kind] / 1e3 / self.steps)}"
            for kind in kinds)) for rank, found in exposed.items()]
        return f"{aligned(rows)}\n{aligned(more)}"

    # -- against the simulation

    def lost(self, rank: int) -> Counter[tuple[str, ...]]:
        """By cause how much later a rank was through its actions than in the simulation; negative where it was
        earlier. All together are the whole of it."""
        causes, spans = Counter[tuple[str, ...]](), self.measured.spans[rank]
        info = self.trace.info["ranks"][str(rank)]
        starts = [span.slice.start for span in spans]
        for number, run in enumerate(self.measured.runs[rank]):
            until = min(self.measured.runs[member][number][0].slice.start for member in info["members"])
            due = 0.0
            before = bisect_left(starts, until)
            before -= before > 0 and spans[before - 1].slice.end > until  # a wait that began earlier
            for span, box in zip(run, self.ideal.spans[info["place"]]):
                here = bisect_left(starts, span.slice.start)
                idle, planned = span.slice.start - until, 1e3 * (box.start - due)
                _add_idle(causes, idle, planned, until, spans[before:here])
                causes["slower", _title(span.slice.step)] += span.cost - 1e3 * (box.end - box.start)
                _add_waits(causes, span.late, span.exposed - Counter({ALL_TO_ALL: span.exposed[ALL_TO_ALL]}))
                until, due, before = span.slice.end, box.end, here + 1
        return Counter({cause: time / 1e3 / self.steps for cause, time in causes.items()})

    def losses(self) -> Iterator[str]:
        """A line for each rank."""
        for rank in self.trace.rows:
            causes = self.lost(rank)
            total = causes.total()
            named = [(cause, time) for cause, time in causes.most_common(_SHOWN) if time > _LEAST * abs(total)]
            said = [f"{_ms(time)} {self._said(rank, *cause)}" for cause, time in named]
            rest = total - sum(time for _, time in named)
            verb = "lost" if total > 0 else "gained"
            yield f"{self.trace.name(rank)} {verb} {_ms(abs(total))} ms: {', '.join([*said, f'{_ms(rest)} in the rest'])}"

    def slowest(self) -> Iterator[str]:
        """The actions that took longest in comparison with their medians."""
        every = [(span.cost / 1e3 - self.costs.of(step), step, span)
                 for step, spans in self.measured.samples().items() for span in spans]
        for more, step, span in sorted(every, key=lambda each: -each[0])[:_SLOWEST]:
            at = span.slice.args.get("step")
            yield (f"{self.trace.name(span.slice.rank)}, {f'step {at}, ' if at else ''}{span.slice.name}: "
                   f"{_ms(span.cost / 1e3)} ms, {_ms(more)} more than its median")

    def _said(self, rank: int, cause: str, what: str) -> str:
        if cause == "waiting":
            return f"waiting for {self.trace.name(int(what))}"
        if cause != "slower":
            return f"in {what}"
        load = self._load(rank)
        return f"in {what} slower than its median" + (f" (experts {load:.1f}x mean load)" if load > _LOAD else "")

    def _load(self, rank: int) -> float:
        """Of a rank's experts relative to the mean of the ranks with the same stages; 0 where it is not known."""
        ranks, loads = self.trace.info["ranks"], self.trace.info.get("loads", {}).values()
        same = [int(other) for other in ranks if ranks[other]["place"] == ranks[str(rank)]["place"]]
        return mean([load[rank] / mean([load[other] for other in same]) for load in loads if load[rank]] or [0.0])

    def timeline(self) -> Timeline:
        """The first pipeline's step whose time is in the middle, as it was measured."""
        members = self.trace.info["ranks"][min(self.trace.info["ranks"], key=int)]["members"]
        runs = [[self.measured.runs[member][number] for member in members]
                for number in range(len(self.measured.runs[members[0]]))]
        lengths = [max(run[-1].slice.end for run in each) - min(run[0].slice.start for run in each) for each in runs]
        number = sorted(range(len(runs)), key=lengths.__getitem__)[len(runs) // 2]
        origin = min(run[0].slice.start for run in runs[number])
        spans = tuple(
            tuple(Box(place, (each.slice.start - origin) / 1e3, (each.slice.end - origin) / 1e3, each.slice.step)
                  for each in run) for place, run in enumerate(runs[number])
        )
        return Timeline(self.trace.schedule, self.costs, spans, ((),) * len(members))


def _add_idle(causes: Counter[tuple[str, ...]], idle: float, planned: float, since: float, between: list[Span]) -> None:
    """Add the causes of what passed between two actions, in which it was `planned` to wait so long."""
    late, exposed = Counter[int](), Counter[str]()
    for span in between:
        cut = max(0.0, since - span.slice.start)
        for rank, time in span.late.items():
            late[rank] += max(0.0, time - cut)
            cut = max(0.0, cut - time)
        for kind, time in span.exposed.items():
            exposed[kind] += max(0.0, time - cut)
    causes["host", "gaps between actions"] += idle - late.total() - exposed.total()
    for found in (late, exposed):  # what was planned is first of all that others are late
        part = min(planned, total) / total if (total := found.total()) else 0.0
        planned -= part * total
        for key in found:
            found[key] *= 1 - part  # type: ignore[assignment]
    _add_waits(causes, late, exposed)
    causes["host", "gaps between actions"] -= planned  # that was not needed


def _add_waits(causes: Counter[tuple[str, ...]], late: Counter[int], exposed: Counter[str]) -> None:
    for rank, time in late.items():
        causes["waiting", str(rank)] += time
    for kind, time in exposed.items():
        causes["exposed", f"{kind} that nothing hid"] += time


def _title(step: Step) -> str:
    return " with ".join(f"{action.kind}(stage {action.stage})" for action in step)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.{max(0, min(3, 2 - len(f'{abs(milliseconds):.0f}') + 1))}f}"


def report(path: str, svg: str | None) -> str:
    """`dualpipe trace summary`: the report on a trace; its middle step is drawn into the file `svg`."""
    trace = read(path)
    summary, schedule = Summary(Measured(trace)), trace.schedule
    timeline = summary.timeline()
    error = max(rank["clock_error_us"] for rank in trace.info["ranks"].values())
    text = (
        f"{path}: {summary.steps} step{'s' if summary.steps > 1 else ''} of {len(trace.rows)} ranks, {schedule.name}, "
        f"{schedule.num_microbatches} micro-batches; clocks are right to {_ms(error / 1e3)} ms\n\n{summary.by_rank()}\n"
        f"a pipeline's step: {_ms(timeline.makespan)} ms, {_ms(summary.ideal.makespan)} in a simulation with the "
        "medians of its actions; against that\n"
    )
    text += "".join(f"  {line}\n" for line in summary.losses())
    text += "the slowest actions\n" + "".join(f"  {line}\n" for line in summary.slowest())
    if svg is not None:
        Path(svg).write_text(to_svg(timeline), encoding="utf-8")
        text += f"wrote {svg}\n"
    return text
