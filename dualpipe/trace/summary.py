"""`dualpipe trace summary`: where the time of the steps in a trace went, by rank, and against a simulation of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from statistics import mean

from dualpipe.runtime.files import write_wanted
from dualpipe.schedule.draw import aligned, to_svg
from dualpipe.schedule.page import to_html
from dualpipe.schedule.read_costs import costs_from
from dualpipe.schedule.simulate import Costs, Span, Timeline, simulate
from dualpipe.trace.costs import MeasuredCosts
from dualpipe.trace.file import read
from dualpipe.trace.measured import ALL_TO_ALL, Activity, Measured

_SHOWN, _LEAST = 4, 0.05  # causes of a rank's loss that are named, and the part of it that the least one has
_NOTHING = 0.005  # ms, which are not said
_SLOWEST = 5  # actions that are named
_WIDEST = 1600  # pixels: some actions are short beside others
_LOAD = 1.1  # times the mean, from which on a load is named

Cause = tuple[str, str]  # what kind of cause; what or who it is


class Summary:
    """The parts of the report; in milliseconds a step."""

    def __init__(self, measured: Measured) -> None:
        self.measured, self.trace = measured, measured.trace
        self.costs = costs_from(MeasuredCosts(measured).given)
        self.ideal = simulate(self.trace.schedule, self.costs)
        self.steps = max(1, max(map(len, measured.runs.values())))
        every = [each for row in self.trace.rows.values() for each in row]
        self.window = self._ms(max(each.end for each in every) - min(each.start for each in every))

    def _ms(self, nanoseconds: float) -> float:
        return nanoseconds / 1e6 / self.steps

    # -- where the time went

    def totals(self, rank: int) -> dict[str, float]:
        """Return the time of a rank by its use; all together are the `window`."""
        found = Counter[str]()
        for span in self.measured.spans[rank]:
            of_host = span.late or span.exposed or span.slice.kind in ("gather", "reduce")  # these of one rank alone
            kind = "compute" if span.slice.step else "host gaps" if of_host else span.slice.kind
            found += Counter({kind: span.own, "bubble": span.late.total(), "exposed": span.exposed.total()})
        times = {kind: self._ms(time) for kind, time in found.items() if kind != "host gaps"}
        return {**times, "host gaps": self.window - sum(times.values())}

    def by_rank(self) -> str:
        """A table of that, and one of communication by kind."""
        totals, ranks = {rank: self.totals(rank) for rank in self.trace.rows}, self.trace.rows
        first, last = ("compute", "bubble", "exposed"), "host gaps"
        kinds = [*first, *sorted({kind for each in totals.values() for kind in each} - {*first, last}), last]
        rows: list[tuple[str, ...]] = [("ms a step", "all", *kinds)]
        rows += [(self.trace.name(rank), _short(self.window), *(_short(totals[rank].get(kind, 0.0)) for kind in kinds))
                 for rank in ranks]
        exposed = {rank: sum((span.exposed for span in self.measured.spans[rank]), Counter[str]()) for rank in ranks}
        hidden = self.measured.hidden
        kinds = sorted({kind for rank in ranks for kind in exposed[rank] | hidden[rank]})
        both: list[tuple[str, ...]] = [("exposed + hidden", *kinds)]
        both += [(self.trace.name(rank), *(" + ".join(_short(self._ms(each[rank][kind])) for each in (exposed, hidden))
                                           for kind in kinds)) for rank in ranks]
        return f"{aligned(rows)}\n{aligned(both)}" if kinds else aligned(rows)

    # -- against the simulation

    def lost(self, rank: int) -> dict[Cause, float]:
        """By cause how much later a rank was through its actions than in the simulation, negative where it was earlier,
        counted from when the ranks had agreed on the step. All together are the whole of it."""
        causes, spans = Counter[Cause](), self.measured.spans[rank]
        starts = [span.slice.start for span in spans]
        for run in self.measured.runs[rank]:
            here, due = bisect_left(starts, run[0].slice.start), 0.0
            agreed = next((i + 1 for i in range(here - 1, -1, -1) if spans[i].slice.kind == "agree"), here)
            until = spans[agreed - 1].slice.end if agreed < here else run[0].slice.start
            for span, box in zip(run, self.ideal.spans[self.trace.info["ranks"][str(rank)]["place"]]):
                here = bisect_left(starts, span.slice.start)
                planned = round(1e6 * (box.start - due))
                _add_idle(causes, span.slice.start - until, planned, spans[agreed:here])
                title = " with ".join(f"{action.kind}(stage {action.stage})" for action in box.step)
                causes["slower", title] += span.cost - round(1e6 * (box.end - box.start))
                _add_waits(causes, span.late, Counter({**span.exposed, ALL_TO_ALL: 0}))
                agreed, until, due = here + 1, span.slice.end, box.end
        return {cause: self._ms(time) for cause, time in causes.items()}

    def losses(self) -> Iterator[str]:
        """A line for each rank."""
        for rank in self.trace.rows:
            causes = self.lost(rank)
            total = rest = sum(causes.values())
            said = []
            for cause, time in sorted(causes.items(), key=lambda each: -each[1])[:_SHOWN]:
                if time > _LEAST * abs(total):
                    said.append(f"{_short(time)} {self._said(rank, *cause)}")
                    rest -= time
            said.append(f"{_short(rest)} elsewhere" if rest >= 0 else f"{_short(-rest)} gained elsewhere")
            what = f"{'lost' if total > 0 else 'gained'} {_short(abs(total))} ms: {', '.join(said)}"
            yield f"{self.trace.name(rank)} {what if abs(total) > _NOTHING else 'lost nothing'}"

    def slowest(self) -> Iterator[str]:
        """The actions that took longest in comparison with their medians."""
        more = [(span.cost / 1e6 - self.costs.of(step), span)
                for step, spans in self.measured.samples().items() for span in spans]
        for time, span in sorted(more, key=lambda each: -each[0])[:_SLOWEST]:
            step = f"step {span.slice.args['step']}, " if "step" in span.slice.args else ""
            yield (f"{self.trace.name(span.slice.rank)}, {step}{span.slice.name}: {_short(span.cost / 1e6)} ms, "
                   f"{_short(time)} more than its median")

    def _said(self, rank: int, cause: str, what: str) -> str:
        if cause == "waiting":
            return f"waiting for {self.trace.name(int(what))}"
        load = self._load(rank)
        more = f" (experts {load:.1f}x mean load)" if load > _LOAD else ""
        return f"in {what} slower than its median{more}" if cause == "slower" else f"in {what}"

    def _load(self, rank: int) -> float:
        """Load of a rank's experts over the mean of the ranks with the same stages; 0 where it is not known."""
        ranks, loads = self.trace.info["ranks"], self.trace.info["loads"].values()
        same = [int(other) for other in ranks if ranks[other]["place"] == ranks[str(rank)]["place"]]
        return mean([load[rank] / mean([load[other] for other in same]) for load in loads if load[rank]] or [0.0])

    def timelines(self) -> list[Timeline]:
        """The steps of the first pipeline as they were measured, the shortest one first."""
        ranks, found = self.trace.info["ranks"], []
        members = ranks[min(ranks, key=int)]["members"]
        for runs in zip(*(self.measured.runs[member] for member in members)):
            first = min(run[0].slice.start for run in runs)
            spans = tuple(
                tuple(Span(place, (each.slice.start - first) / 1e6, (each.slice.end - first) / 1e6, each.slice.step)
                      for each in run) for place, run in enumerate(runs)
            )
            found.append(Timeline(self.trace.schedule, Costs(), spans, ((),) * len(spans)))
        return sorted(found, key=lambda timeline: timeline.makespan)


def _add_idle(causes: Counter[Cause], idle: int, planned: int, between: list[Activity]) -> None:
    """Add the causes of the time between two actions, of which so much is `planned`: first of all that others are late,
    then that messages take their time."""
    late = sum((span.late for span in between), Counter[int]())
    exposed = sum((span.exposed for span in between), Counter[str]())
    causes["host", "gaps between actions"] += idle - late.total() - exposed.total()
    for found in (late, exposed):
        for key, time in found.items():
            part = min(planned, time)
            planned -= part
            found[key] -= part  # type: ignore[index]
    causes["host", "gaps between actions"] -= planned  # which was not needed
    _add_waits(causes, late, exposed)


def _add_waits(causes: Counter[Cause], late: Counter[int], exposed: Counter[str]) -> None:
    for rank, time in late.items():
        causes["waiting", str(rank)] += time
    for kind, time in exposed.items():
        causes["exposed", f"{kind} that nothing hid"] += time


def _number(of: int, what: str) -> str:
    return f"{of} {what}{'s' if of > 1 else ''}"


def _short(milliseconds: float) -> str:
    """Three digits."""
    whole = len(f"{abs(milliseconds):.0f}")
    return f"{milliseconds:.{max(0, 3 - whole)}f}"


def report(path: str, svg: str | None, html: str | None = None) -> str:
    """The report on a trace; its middle step drawn into the file `svg`, and beside the simulation into `html`."""
    trace = read(path)
    summary, schedule = Summary(Measured(trace)), trace.schedule
    steps = summary.timelines()
    middle, average = steps[len(steps) // 2], mean(timeline.makespan for timeline in steps)
    error = max(rank["clock_error_us"] for rank in trace.info["ranks"].values()) / 1e3
    lines = [
        f"{path}: {_number(summary.steps, 'step')} of {_number(len(trace.rows), 'rank')}, {schedule.name}, "
        f"{schedule.num_microbatches} micro-batches; clocks are right to {_short(error)} ms", "", summary.by_rank(),
        f"the actions of a step, first to last: {_short(average)} ms on average, {_short(middle.makespan)} in the "
        f"middle step; simulated with their medians {_short(summary.ideal.makespan)}, against which",
        *(f"  {line}" for line in summary.losses()),
        "the slowest actions", *(f"  {line}" for line in summary.slowest()),
    ]
    text = "\n".join(lines) + "\n"
    return text + "".join(f"{line}\n" for line in write_wanted(
        (svg, lambda: to_svg(middle, _WIDEST)),
        (html, lambda: to_html((middle, summary.ideal), title=path, notes=text, names=("measured", "simulated"),
                               unit="ms")),
    ))
