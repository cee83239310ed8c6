"""Timelines on one HTML page that needs only a browser: no network, and no other file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualpipe.schedule.draw import LOOKS, REDUCTION, upper_half
from dualpipe.schedule.messages import required_input, result
from dualpipe.schedule.simulate import Costs, Span, Timeline
from dualpipe.schedule.types import Action, Schedule

TEMPLATE = Path(__file__).with_name("page.html")
PLACEHOLDER = "__DATA__"  # of the JSON data, in the template


def to_html(
    timelines: Sequence[Timeline | Sequence[Span]],
    *,
    title: str,
    names: Sequence[str] = (),
    unit: str = "",
    notes: str = "",
) -> str:
    """Return a page that draws timelines one below the other on one time axis, each compared with the first.

    Colours are those of `to_svg`.

    Args:
        timelines: simulated timelines, or the measured schedule steps of all ranks, as spans in any order and from any
            origin of time; the spans of one rank must not overlap.
        title: title of the page.
        names: name of each timeline. Default: the name of its schedule, or "measured".
        unit: unit of all times, such as "ms".
        notes: lines of text below the title, in a monospaced font.

    Raises:
        ValueError: there are no timelines, a measured timeline has no steps, or `names`, if passed, does not have one
            item for each timeline.
    """
    names = names or [line.schedule.name if isinstance(line, Timeline) else "measured" for line in timelines]
    if not timelines or len(names) != len(timelines):
        raise ValueError(f"{len(timelines)} timelines and {len(names)} names; give one or more, and a name for each")
    drawn = []
    for line, name in zip(timelines, names):
        timeline = line if isinstance(line, Timeline) else _measured_timeline(line, name)
        drawn.append(_timeline_data(timeline, name))
    data = dict(title=title, unit=unit, notes=notes, looks=LOOKS, reduction=REDUCTION, timelines=drawn)
    # In a script element only "<" can end the script or open a comment; in JSON it occurs in strings alone.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, text, 1)


def _timeline_data(timeline: Timeline, name: str) -> dict[str, Any]:
    """Return the data of a timeline for the page.

    A step is [start, end, action, ...]. An action is [kind, stage, micro-batch, number of the action that computes its
    input, or -1]; actions are numbered in the order of ranks, steps and actions.
    """
    steps = [span.step for spans in timeline.spans for span in spans]
    numbers = {result(action): number for number, action in enumerate(action for step in steps for action in step)}
    origin = min((spans[0].start for spans in timeline.spans if spans), default=0.0)

    def time(value: float) -> float:
        return float(f"{value - origin:.9g}")

    def action_data(action: Action) -> tuple[str, int, int, int]:
        source = required_input(timeline.schedule, action)
        return action.kind, action.stage, action.microbatch, numbers.get(source, -1) if source else -1

    schedule = timeline.schedule
    return {
        "name": name,
        "size": f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches",
        "memory": f"at most {max(timeline.peak_activations)} live activations",
        "makespan": time(timeline.makespan),
        "p2p": timeline.costs.p2p,
        "upper": sorted(upper_half(timeline)),
        "ranks": [[[time(s.start), time(s.end), *map(action_data, s.step)] for s in row] for row in timeline.spans],
        "reductions": [[[time(r.start), time(r.end), r.stage] for r in row] for row in timeline.reductions],
    }


def _measured_timeline(spans: Sequence[Span], name: str) -> Timeline:
    """Return the timeline of measured steps, with the schedule that they form. Its costs are not known."""
    if not spans:
        raise ValueError(f"timeline {name!r} has no steps; give one span or more")
    num_ranks = 1 + max(span.rank for span in spans)
    rows = [tuple(sorted(span for span in spans if span.rank == rank)) for rank in range(num_ranks)]
    actions = [action for span in spans for action in span.step]
    schedule = Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=1 + max(action.stage for action in actions),
        num_microbatches=1 + max(action.microbatch for action in actions),
        ranks=tuple(tuple(span.step for span in row) for row in rows),
    )
    return Timeline(schedule, Costs(), tuple(rows), ((),) * num_ranks)
