"""`dualpipe trace summary`: where the time of the steps in a trace went, by rank and compared with a simulation."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from statistics import mean
from typing import Any

from dualpipe.runtime.files import write_texts
from dualpipe.schedule.draw import aligned, to_svg
from dualpipe.schedule.page import to_html
from dualpipe.schedule.read_costs import costs_from
from dualpipe.schedule.simulate import Costs, Span, Timeline, simulate
from dualpipe.trace.costs import MeasuredCosts
from dualpipe.trace.file import read
from dualpipe.trace.measured import ALL_TO_ALL, Activity, Measured

_MAX_CAUSES = 4  # of a rank's loss that are named
_MIN_SHARE = 0.05  # of a rank's loss from which on a cause is named
_NEGLIGIBLE_MS = 0.005
_NUM_SLOWEST = 5  # actions
_WIDEST = 1600  # pixels, as some actions are short compared with others
_HIGH_LOAD = 1.1  # times the mean, from which on a load is named

Cause = tuple[str, str]  # kind of cause; action, rank or communication


class Summary:
    """Parts of the report. Times are in milliseconds per step.

    Attributes:
        measured: the analysis of the trace.
        trace: the trace.
        costs: the measured costs.
        ideal: simulation of the schedule with the measured costs.
        steps: number of complete steps of training.
        window: time from the first slice to the last.
    """

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self.trace = measured.trace
        self.costs = costs_from(MeasuredCosts(measured).json_costs)
        self.ideal = simulate(self.trace.schedule, self.costs)
        self.steps = max(1, max(map(len, measured.runs.values())))
        slices = [item for row in self.trace.rows.values() for item in row]
        self.window = self._ms(max(item.end for item in slices) - min(item.start for item in slices))

    def _ms(self, nanoseconds: float) -> float:
        return nanoseconds / 1e6 / self.steps

    # -- where the time went

    def totals(self, rank: int) -> dict[str, float]:
        """Return the time of a rank by use. Together they are the `window`."""
        totals = Counter[str]()
        for span in self.measured.spans[rank]:
            totals += Counter({  # without zeros
                _use(span): span.own,
                "bubble": span.late.total(),
                "exposed": span.exposed.total(),
            })
        del totals["host gaps"]  # is the rest of the window
        times = {use: self._ms(time) for use, time in totals.items()}
        return {**times, "host gaps": self.window - sum(times.values())}

    def by_rank(self) -> str:
        """Return a table of `totals`, and one of exposed and hidden communication by kind."""
        ranks = self.trace.rows
        totals = {rank: self.totals(rank) for rank in ranks}
        first_uses = ("compute", "bubble", "exposed")
        last_use = "host gaps"
        other_uses = sorted({use for times in totals.values() for use in times} - {*first_uses, last_use})
        uses = [*first_uses, *other_uses, last_use]
        rows: list[tuple[str, ...]] = [("ms a step", "all", *uses)]
        rows += [(self.trace.name(rank), _short(self.window), *(_short(totals[rank].get(use, 0.0)) for use in uses))
                 for rank in ranks]
        communication = self._communication_by_rank()
        return f"{aligned(rows)}\n{communication}" if communication else aligned(rows)

    def _communication_by_rank(self) -> str:
        """Return a table of exposed and hidden communication by kind; "" if there is none."""
        ranks = self.trace.rows
        exposed = {rank: sum((span.exposed for span in self.measured.spans[rank]), Counter[str]()) for rank in ranks}
        hidden = self.measured.hidden
        kinds = sorted({kind for rank in ranks for kind in exposed[rank] | hidden[rank]})
        if not kinds:
            return ""
        rows: list[tuple[str, ...]] = [("exposed + hidden", *kinds)]
        for rank in ranks:
            cells = (f"{_short(self._ms(exposed[rank][kind]))} + {_short(self._ms(hidden[rank][kind]))}"
                     for kind in kinds)
            rows.append((self.trace.name(rank), *cells))
        return aligned(rows)

    # -- compared with the simulation

    def lost(self, rank: int) -> dict[Cause, float]:
        """Return by cause how much later than in the simulation a rank finished its actions.

        A negative time is a gain. Both are counted from the agreement of the ranks on the step. Together the causes
        make up the whole difference.
        """
        causes = Counter[Cause]()
        spans = self.measured.spans[rank]
        starts = [span.slice.start for span in spans]
        place = self.trace.info["ranks"][str(rank)]["place"]
        for run in self.measured.runs[rank]:
            first = bisect_left(starts, run[0].slice.start)
            next_index = next((i + 1 for i in range(first - 1, -1, -1) if spans[i].slice.kind == "agree"), first)
            end = spans[next_index - 1].slice.end if next_index < first else run[0].slice.start
            ideal_end = 0.0
            for span, ideal in zip(run, self.ideal.spans[place]):
                index = bisect_left(starts, span.slice.start)
                planned_idle = round(1e6 * (ideal.start - ideal_end))
                _add_idle(causes, span.slice.start - end, planned_idle, spans[next_index:index])
                title = " with ".join(f"{action.kind}(stage {action.stage})" for action in ideal.step)
                causes["slower", title] += span.cost - round(1e6 * (ideal.end - ideal.start))
                _add_waits(causes, span.late, Counter({**span.exposed, ALL_TO_ALL: 0}))
                next_index = index + 1
                end = span.slice.end
                ideal_end = ideal.end
        return {cause: self._ms(time) for cause, time in causes.items()}

    def losses(self) -> Iterator[str]:
        """Yield a line about the losses of each rank."""
        for rank in self.trace.rows:
            causes = self.lost(rank)
            total = sum(causes.values())
            if abs(total) <= _NEGLIGIBLE_MS:
                yield f"{self.trace.name(rank)} lost nothing"
                continue
            elsewhere = total
            parts = []
            for cause, time in sorted(causes.items(), key=lambda item: -item[1])[:_MAX_CAUSES]:
                if time > _MIN_SHARE * abs(total):
                    parts.append(f"{_short(time)} {self._describe(rank, *cause)}")
                    elsewhere -= time
            parts.append(f"{_short(elsewhere)} elsewhere" if elsewhere >= 0 else
                         f"{_short(-elsewhere)} gained elsewhere")
            verb = "lost" if total > 0 else "gained"
            yield f"{self.trace.name(rank)} {verb} {_short(abs(total))} ms: {', '.join(parts)}"

    def slowest(self) -> Iterator[str]:
        """Yield a line about each of the actions that took longest compared with their medians."""
        excesses = [(span.cost / 1e6 - self.costs.of(step), span)
                    for step, spans in self.measured.samples().items() for span in spans]
        for excess, span in sorted(excesses, key=lambda item: -item[0])[:_NUM_SLOWEST]:
            step = f"step {span.slice.args['step']}, " if "step" in span.slice.args else ""
            yield (f"{self.trace.name(span.slice.rank)}, {step}{span.slice.name}: {_short(span.cost / 1e6)} ms, "
                   f"{_short(excess)} more than its median")

    def _describe(self, rank: int, kind: str, detail: str) -> str:
        """Return the text of a cause of a rank's loss."""
        if kind == "waiting":
            return f"waiting for {self.trace.name(int(detail))}"
        if kind != "slower":
            return f"in {detail}"
        load = self._relative_load(rank)
        load_note = f" (experts {load:.1f}x mean load)" if load > _HIGH_LOAD else ""
        return f"in {detail} slower than its median{load_note}"

    def _relative_load(self, rank: int) -> float:
        """Return the load of a rank's experts over the mean of the ranks with the same stages; 0 if not known."""
        ranks = self.trace.info["ranks"]
        place = ranks[str(rank)]["place"]
        same_stages = [int(other) for other in ranks if ranks[other]["place"] == place]
        ratios = [loads[rank] / mean([loads[other] for other in same_stages])
                  for loads in self.trace.info["loads"].values() if loads[rank]]
        return mean(ratios or [0.0])

    def timelines(self) -> list[Timeline]:
        """Return the measured steps of the first pipeline, shortest first."""
        ranks = self.trace.info["ranks"]
        members = ranks[min(ranks, key=int)]["members"]
        timelines = []
        for runs in zip(*(self.measured.runs[member] for member in members)):
            origin = min(run[0].slice.start for run in runs)
            spans = tuple(
                tuple(Span(place, (span.slice.start - origin) / 1e6, (span.slice.end - origin) / 1e6, span.slice.step)
                      for span in run)
                for place, run in enumerate(runs)
            )
            timelines.append(Timeline(self.trace.schedule, Costs(), spans, ((),) * len(spans)))
        return sorted(timelines, key=lambda timeline: timeline.makespan)


def _use(span: Activity) -> str:
    """Return the use of the time of an activity without its waits: "compute", "host gaps", or its kind."""
    if span.slice.step:
        return "compute"
    is_communication = span.late or span.exposed or span.slice.kind in ("gather", "reduce")  # of one rank without waits
    return "host gaps" if is_communication else span.slice.kind


def _add_idle(causes: Counter[Cause], idle: int, planned_idle: int, between: list[Activity]) -> None:
    """Add the causes of the time between two actions.

    The idle time of the simulation is taken off the causes: first off the lateness of other ranks, then off the time of
    messages, then off the gaps of the host.

    between: activities between the two actions.
    """
    late = sum((span.late for span in between), Counter[int]())
    exposed = sum((span.exposed for span in between), Counter[str]())
    host_gaps = idle - late.total() - exposed.total()
    planned_idle = _subtract_planned(late, planned_idle)
    planned_idle = _subtract_planned(exposed, planned_idle)
    causes["host", "gaps between actions"] += host_gaps - planned_idle
    _add_waits(causes, late, exposed)


def _subtract_planned(waits: Counter[Any], planned_idle: int) -> int:
    """Subtract planned idle time from waits, in place. Return the rest of it."""
    for key, time in waits.items():
        planned = min(planned_idle, time)
        planned_idle -= planned
        waits[key] = time - planned
    return planned_idle


def _add_waits(causes: Counter[Cause], late: Counter[int], exposed: Counter[str]) -> None:
    for rank, time in late.items():
        causes["waiting", str(rank)] += time
    for kind, time in exposed.items():
        causes["exposed", f"{kind} that nothing hid"] += time


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _short(milliseconds: float) -> str:
    """Format a time with three digits."""
    num_whole_digits = len(f"{abs(milliseconds):.0f}")
    return f"{milliseconds:.{max(0, 3 - num_whole_digits)}f}"


def report(path: str, svg: str | None, html: str | None = None) -> str:
    """Return the report on the trace `path`.

    Args:
        path: the trace file.
        svg: file to draw the middle step into, if any.
        html: file to draw the middle step and the simulation into, if any.

    Raises:
        ValueError: the trace cannot be read or has no step of training.
        OSError: a file cannot be written.
    """
    trace = read(path)
    schedule = trace.schedule
    summary = Summary(Measured(trace))
    timelines = summary.timelines()
    middle = timelines[len(timelines) // 2]
    average = mean(timeline.makespan for timeline in timelines)
    clock_error = max(rank["clock_error_us"] for rank in trace.info["ranks"].values()) / 1e3
    lines = [
        f"{path}: {_counted(summary.steps, 'step')} of {_counted(len(trace.rows), 'rank')}, {schedule.name}, "
        f"{schedule.num_microbatches} micro-batches; clocks are right to {_short(clock_error)} ms",
        "",
        summary.by_rank(),
        f"the actions of a step, first to last: {_short(average)} ms on average, {_short(middle.makespan)} in the "
        f"middle step; simulated with their medians {_short(summary.ideal.makespan)}, against which",
        *(f"  {line}" for line in summary.losses()),
        "the slowest actions",
        *(f"  {line}" for line in summary.slowest()),
    ]
    text = "\n".join(lines) + "\n"
    written_lines = write_texts(
        (svg, lambda: to_svg(middle, _WIDEST)),
        (html, lambda: to_html((middle, summary.ideal), title=path, notes=text, names=("measured", "simulated"),
                               unit="ms")),
    )
    return text + "".join(f"{line}\n" for line in written_lines)
