"""Timelines as text, and tables that compare them. The picture is in `svg`."""

from __future__ import annotations

from collections.abc import Sequence

from dualpipe.schedule.simulate import Span, Timeline

LEGEND = "F forward, B backward, I backward for the input only, W weight gradients, . idle"
REDUCTION = "=: gradients being reduced over data-parallel ranks"


def to_text(timeline: Timeline, width: int = 120) -> str:
    """One line a rank, at most `width` characters: each step's kinds and, where it has room, its micro-batches.

    Lower case marks the upper half of a rank's stages: on a V, the way back. Where reductions cost something, a line
    below the rank's shows when they run.
    """
    margin = len(f"rank {len(timeline.spans) - 1} ")
    scale = max(1, width - margin) / timeline.makespan if timeline.makespan else 0.0
    lines = []
    for rank in range(len(timeline.spans)):
        lines.append(f"{f'rank {rank}':<{margin}}" + _row(timeline, rank, scale))
        if timeline.reductions[rank]:
            lines.append(" " * margin + _reductions(timeline, rank, scale))
    several = any(len(timeline.schedule.rank_stages(rank)) > 1 for rank in range(len(timeline.spans)))
    lines.append(LEGEND + ("; lower case: the later stages of a rank" if several else ""))
    if any(timeline.reductions):
        lines.append(REDUCTION)
    return "\n".join(lines) + "\n"


def second_half(timeline: Timeline, rank: int) -> frozenset[int]:
    """The upper half of the stages of `rank`: those drawn in lower case, or lighter."""
    stages = timeline.schedule.rank_stages(rank)
    return frozenset(stages[(len(stages) + 1) // 2 :])


def number(value: float) -> str:
    """At most two decimals, and none where there are none."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _row(timeline: Timeline, rank: int, scale: float) -> str:
    """Every step starts and ends at its time, rounded, so that rows stay aligned."""
    row = ["."] * round(timeline.makespan * scale)
    upper = second_half(timeline, rank)
    for span in timeline.spans[rank]:
        start, end = round(span.start * scale), round(span.end * scale)
        row[start:end] = _cell(span, upper, end - start)
    return "".join(row).rstrip(". ")


def _reductions(timeline: Timeline, rank: int, scale: float) -> str:
    row = [" "] * round(timeline.makespan * scale)
    for reduction in timeline.reductions[rank]:
        start, end = round(reduction.start * scale), round(reduction.end * scale)
        row[start:end] = f"R{reduction.stage}".ljust(end - start, "=")[: end - start]
    return "".join(row).rstrip()


def _cell(span: Span, upper: frozenset[int], columns: int) -> str:
    """As much of the step as fits: kinds and micro-batches, else kinds, else the first kind."""
    kinds = [action.kind.lower() if action.stage in upper else action.kind for action in span.step]
    full = "".join(f"{kind}{action.microbatch}" for kind, action in zip(kinds, span.step))
    text = next((text for text in (full, "".join(kinds)) if len(text) <= columns), kinds[0])
    return text[:columns].ljust(columns)


def table(timelines: Sequence[Timeline], sizes: Sequence[float] | None = None) -> str:
    """A row for each timeline: makespan, and that of the first relative to it; bubble; peak of live activations.

    sizes: how big the stages of each timeline are, in stages of the first; activations are counted in those.
    """
    sizes = sizes or [1.0] * len(timelines)
    rows = [("schedule", "stages", "makespan", "relative", "bubble", "peak activations")]
    rows += [
        (
            timeline.schedule.name,
            str(timeline.schedule.num_stages),
            number(timeline.makespan),
            f"{timeline.makespan / timelines[0].makespan:.3f}" if timelines[0].makespan else "-",
            f"{100 * timeline.bubble_fraction:.1f}%",
            number(max(timeline.peak_activations) * size),
        )
        for timeline, size in zip(timelines, sizes)
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]) for row in rows
    ]
    return "\n".join(lines) + "\n"
