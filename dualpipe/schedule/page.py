"""Timelines on one page of HTML that needs nothing besides: no network, no file, only a browser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.schedule.draw import LOOKS, REDUCTION, upper_half
from dualpipe.schedule.messages import need, result
from dualpipe.schedule.simulate import Costs, Span, Timeline
from dualpipe.schedule.types import Action, Schedule

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "__DATA__"  # in the template, of what is drawn


class WholeStep(NamedTuple):
    """A step of training around its schedule, in the unit of the timeline.

    before, after: time that every rank spends before the schedule begins, and after it ends, by name.
    idle: idle time of an average rank within the schedule, by cause.
    """

    before: Mapping[str, float]
    after: Mapping[str, float]
    idle: Mapping[str, float]


def to_html(
    timelines: Sequence[Timeline | Sequence[Span]],
    *,
    title: str,
    names: Sequence[str] = (),
    unit: str = "",
    notes: str = "",
    steps: Sequence[WholeStep] = (),
) -> str:
    """A page that draws `timelines` one below the other on one time axis, each compared with the first.

    timelines: simulated ones, or the steps of all ranks as they were measured, in any order and from any origin of
        time; those of a rank do not overlap.
    names: what each is called; its schedule's name, or "measured", unless given.
    unit: the unit of all times, such as "ms".
    notes: text of any number of lines below the title, in letters of one width.
    steps: the whole step around each timeline, which is then drawn, timed and compared as such.

    Colours are those of `to_svg`. Raises ValueError for no timelines, measured ones without a step, and names or
    steps of another number.
    """
    names = names or [line.schedule.name if isinstance(line, Timeline) else "measured" for line in timelines]
    if not timelines or len(names) != len(timelines):
        raise ValueError(f"{len(timelines)} timelines and {len(names)} names; give one or more, and a name for each")
    if steps and len(steps) != len(timelines):
        raise ValueError(f"{len(timelines)} timelines and {len(steps)} whole steps; give one for each, or none")
    around: Sequence[WholeStep | None] = steps or [None] * len(timelines)
    drawn = [_drawn(line, name, step) for line, name, step in zip(timelines, names, around)]
    data = dict(title=title, unit=unit, notes=notes, looks=LOOKS, reduction=REDUCTION, timelines=drawn)
    # Within a script only "<" can end it, or open a comment; JSON has it in strings alone.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text, 1)


def _drawn(given: Timeline | Sequence[Span], name: str, step: WholeStep | None) -> dict[str, Any]:
    """What the page knows of a timeline.

    A step is [start, end, action, ...], an action [kind, stage, micro-batch, number of the action that its input comes
    from, or -1]. Actions are numbered in the order of ranks, steps, actions. `around` has the [start, end] of what
    every rank does before and after the schedule.
    """
    timeline = given if isinstance(given, Timeline) else _measured(given, name)
    steps = [span.step for row in timeline.spans for span in row]
    numbers = {result(action): number for number, action in enumerate(action for step in steps for action in step)}
    origin = min((row[0].start for row in timeline.spans if row), default=0.0)
    before = sum(step.before.values()) if step else 0.0
    after = sum(step.after.values()) if step else 0.0

    def time(value: float) -> float:
        return float(f"{value - origin + before:.9g}")

    def action_of(action: Action) -> tuple[str, int, int, int]:
        taken = need(timeline.schedule, action)
        return action.kind, action.stage, action.microbatch, numbers.get(taken, -1) if taken else -1

    end = time(timeline.makespan + after)
    return {
        "name": name,
        "words": _words(timeline, step, end),
        "makespan": end,
        "around": [[0.0, time(origin)], [time(timeline.makespan), end]] if step else [],
        "p2p": timeline.costs.p2p,
        "upper": sorted(upper_half(timeline)),
        "ranks": [[[time(s.start), time(s.end), *map(action_of, s.step)] for s in row] for row in timeline.spans],
        "reductions": [[[time(r.start), time(r.end), r.stage] for r in row] for row in timeline.reductions],
    }


def _words(timeline: Timeline, step: WholeStep | None, length: float) -> tuple[str, ...]:
    """What the heading of a timeline is made of: its size, what its length and its idle time are called, why it is
    idle, and its memory."""
    schedule = timeline.schedule
    counts = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
    memory = f"at most {max(timeline.peak_activations)} live activations"
    if step is None:
        return counts, "makespan", "bubble", "", memory
    around = {**step.before, **step.after}
    causes = ", ".join(f"{name} {time / length:.1%}" for name, time in step.idle.items())
    grey = ", ".join(f"{name} {time / length:.1%}" for name, time in around.items())
    return counts, "step", "idle", f" ({causes})", f"in grey {grey}; {memory}"


def _measured(spans: Sequence[Span], name: str) -> Timeline:
    """The timeline of steps that were measured, of the schedule that they make up; what it costs is not known."""
    if not spans:
        raise ValueError(f"timeline {name!r} has no steps; give one span or more")
    rows = [sorted(s for s in spans if s.rank == rank) for rank in range(1 + max(span.rank for span in spans))]
    actions = [action for span in spans for action in span.step]
    stages, microbatches = 1 + max(a.stage for a in actions), 1 + max(a.microbatch for a in actions)
    schedule = Schedule(name, len(rows), stages, microbatches, tuple(tuple(s.step for s in row) for row in rows))
    return Timeline(schedule, Costs(), tuple(map(tuple, rows)), ((),) * len(rows))
