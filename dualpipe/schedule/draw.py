"""Timelines as text, as tables that compare them, and as pictures in the manner of DeepSeek's README of DualPipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import ceil, floor
from typing import Any

from dualpipe.schedule.simulate import Reduction, Span, Timeline
from dualpipe.schedule.svg import number, picture, rect, text, tick_step, titled
from dualpipe.schedule.types import Kind

PARTS = 6  # of a text timeline, one below the other, at most
CUT = "~"
LEGEND = "F forward, B backward, I backward for the input only, W weight gradients, . idle"

# What a kind is, and the fills of the first and of the second half of a rank's stages: all light enough for dark text.
LOOKS: dict[Kind, tuple[str, str, str]] = {
    "F": ("forward", "#f5b041", "#fce0ac"),
    "B": ("backward", "#58b368", "#bfe3c2"),
    "I": ("backward for the input", "#45b5c4", "#b9e4ea"),
    "W": ("weight gradients", "#8f9be0", "#d3d8f5"),
}
REDUCTION = "#c2554d"
ROW, GAP, LEFT, RIGHT, TOP, BOTTOM = 30, 6, 64, 76, 76, 34  # pixels
CELL = 17  # pixels of the shortest step, so that two digits fit
WIDEST = 6000  # pixels of time axis at most, unless given; numbers that do not fit are left out
STYLE = (  # numbers in cells, of pairs, at the axis; the back of a row, the frame of a pair
    ".n{text-anchor:middle;font-size:10.5px}.p{text-anchor:middle;font-size:9.5px}"
    ".a{text-anchor:middle;fill:#6b7785;font-size:10px}"
    "rect{stroke:#fff;stroke-width:.8}.b{fill:#f1f3f5;stroke:none}.o{fill:none;stroke:#1f2933;stroke-width:1.3}"
    "line{stroke:#d5dbe1;stroke-width:1}"
)


def upper_half(timeline: Timeline) -> set[int]:
    """The stages in the upper half of those of their rank: on a V, the way back."""
    stages = map(timeline.schedule.rank_stages, range(len(timeline.spans)))
    return {stage for mine in stages for stage in mine[(len(mine) + 1) // 2 :]}


def to_text(timeline: Timeline, width: int = 120) -> str:
    """One line a rank, at most `width` characters: each step's kinds and micro-batches.

    Where these need more columns than there are, the timeline is cut into parts, one below the other; where it would
    take more than PARTS of them, it is one line a rank again, and micro-batches are left out of steps without room.

    Lower case marks the upper half of a rank's stages: on a V, the way back. Where reductions cost something, a line
    below the rank's shows when they run.
    """
    margin = len(f"rank {len(timeline.spans) - 1} ")
    columns = max(1, width - margin)
    needed = _columns_needed(timeline)
    is_squeezed = needed > PARTS * columns
    parts = 1 if is_squeezed else max(1, ceil(needed / columns))
    scale = parts * columns / timeline.makespan if timeline.makespan else 0.0
    upper = upper_half(timeline)

    def cell(span: Span, room: int) -> str:
        """As much of the step as fits: kinds and micro-batches, else kinds, else the first kind."""
        kinds = [action.kind.lower() if action.stage in upper else action.kind for action in span.step]
        full = "".join(f"{kind}{action.microbatch}" for kind, action in zip(kinds, span.step))
        return next((text for text in (full, "".join(kinds)) if len(text) <= room), kinds[0]).ljust(room)

    def bar(reduction: Reduction, room: int) -> str:
        return f"R{reduction.stage}".ljust(room, "=")

    lines = []
    for part in range(parts):
        if parts > 1:
            lines.append(f"time {number(part * columns / scale)} to {number((part + 1) * columns / scale)}")
        for rank, (spans, reductions) in enumerate(zip(timeline.spans, timeline.reductions)):
            row = _line(spans, ".", cell, scale, part, columns)
            lines.append(f"{f'rank {rank}':<{margin}}{row}".rstrip())
            if reductions:
                lines.append(" " * margin + _line(reductions, " ", bar, scale, part, columns))
        if parts > 1:
            lines.append("")
    lines.append(LEGEND + ("; lower case: the later stages of a rank" if upper else ""))
    if any(timeline.reductions):
        lines.append("=: gradients being reduced over data-parallel ranks")
    if parts > 1:
        lines.append(f"{CUT}: part of a step that is named in the lines above or below")
    if is_squeezed:
        lines.append(f"to name all micro-batches takes {margin + needed} columns; --svg and --html draw them")
    return "\n".join(lines) + "\n"


def _line(
    pieces: Sequence[Span] | Sequence[Reduction], idle: str, label: Callable[[Any, int], str], scale: float, part: int,
    columns: int,
) -> str:
    """A rank's columns of a part of a timeline; `scale`: columns per unit of time."""
    first, last = part * columns, (part + 1) * columns
    row = [idle] * columns
    for piece in pieces:
        start = floor(piece.start * scale + 0.5)  # rounded alike everywhere, so that rows stay aligned
        end = floor(piece.end * scale + 0.5)
        left, right = max(start, first), min(end, last)
        if left >= right:
            continue
        begun_in = start // columns
        columns_there = min(end, (begun_in + 1) * columns) - start
        named_in = begun_in if columns_there >= min(end - start - columns_there, columns) else begun_in + 1
        room = right - left
        row[left - first : right - first] = label(piece, room)[:room] if part == named_in else CUT * room
    return "".join(row).rstrip(". ")


def _columns_needed(timeline: Timeline) -> int:
    """Columns for a rank's steps at which each has room for its kinds and micro-batches."""
    most = 0.0  # per unit of time
    for span in chain.from_iterable(timeline.spans):
        if span.end > span.start:
            letters = sum(1 + len(str(action.microbatch)) for action in span.step)
            most = max(most, letters / (span.end - span.start))
    return ceil(most * timeline.makespan * (1 - 1e-9))


def table(timelines: Sequence[Timeline], sizes: Sequence[float]) -> str:
    """A row for each timeline: makespan, and that of the first relative to it; bubble; peaks of activations, which are
    alive until their "W", and of memory, of which an "I" frees a part (see `Timeline.peak_memory`).

    sizes: how big the stages of each timeline are, in stages of the first; activations are counted in those.
    """
    rows = [("schedule", "stages", "makespan", "relative", "bubble", "peak activations", "peak memory")]
    for timeline, size in zip(timelines, sizes):
        rows.append((
            timeline.schedule.name,
            str(timeline.schedule.num_stages),
            number(timeline.makespan),
            f"{timeline.makespan / timelines[0].makespan:.3f}" if timelines[0].makespan else "-",
            f"{100 * timeline.bubble_fraction:.1f}%",
            number(max(timeline.peak_activations) * size),
            number(timeline.peak_memory * size),
        ))
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in rows]
    return "\n".join(lines) + "\n"


def to_svg(timeline: Timeline, widest: float = WIDEST) -> str:
    """A row for each rank, colour by kind and lighter for the way back, an overlapped pair framed in one cell.
    widest: pixels of time axis at most.

    Reductions of gradients, which run beside the steps, are bars below the row.
    Hovering over a step tells what it is and when it runs.
    """
    durations = [span.end - span.start for span in chain.from_iterable(timeline.spans) if span.end > span.start]
    scale = min(CELL / min(durations), widest / timeline.makespan) if durations else 1.0  # pixels per unit of time
    end, bottom = LEFT + timeline.makespan * scale, TOP + len(timeline.spans) * (ROW + GAP)
    upper = upper_half(timeline)
    shapes = [*_heading(timeline, bool(upper)), text(LEFT - 10, bottom + 16, "time", "m e"),
              text(end + 10, TOP - 8, "peak alive", "m")]
    step = tick_step(60 / scale)  # pixels apart, at least
    for i in range(floor(timeline.makespan / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        shapes += [f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom + 2}"/>',
                   text(x, bottom + 16, f"{i * step:g}", "a")]
    for rank in range(len(timeline.spans)):
        shapes += _row(timeline, rank, scale, upper)
    return picture(max(end + RIGHT, LEFT + 960), bottom + BOTTOM, shapes, STYLE)  # room for the legend


def _heading(timeline: Timeline, halves: bool) -> Iterator[str]:
    """What is drawn, and a legend of what is in it; `halves`: some ranks have stages of both halves."""
    schedule, spans = timeline.schedule, list(chain.from_iterable(timeline.spans))
    yield text(LEFT, 26, schedule.name, "h")
    yield text(LEFT + 10 + 9.2 * len(schedule.name), 26, f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, "
               f"{schedule.num_microbatches} micro-batches; makespan {number(timeline.makespan)}, bubble "
               f"{100 * timeline.bubble_fraction:.1f}%", "m")
    used = {action.kind for span in spans for action in span.step}
    x = float(LEFT)
    for meaning, *colours in (LOOKS[kind] for kind in LOOKS if kind in used):
        width = 14 if halves else 28
        for i, colour in enumerate(colours if halves else colours[:1]):
            yield rect(x + width * i, 41, width, 12, colour)
        yield text(x + 34, 51, meaning)
        x += 62 + 5.8 * len(meaning)
    if any(len(span.step) == 2 for span in spans):
        yield rect(x, 41, 28, 12, kind="o") + text(x + 34, 51, "overlapped")
        x += 118
    if any(timeline.reductions):
        yield rect(x, 45, 28, GAP - 1, REDUCTION) + text(x + 34, 51, "gradients reduced")
        x += 160
    if halves:
        yield text(x, 51, "lighter: later stages of the rank", "m")


def _row(timeline: Timeline, rank: int, scale: float, upper: set[int]) -> Iterator[str]:
    def place(start: float, end: float) -> tuple[float, float, str]:
        """Where it begins, how wide it is, and what is said of that."""
        said = f"\nrank {rank}, {number(start)} to {number(end)}"
        return LEFT + start * scale, (end - start) * scale, said

    top, middle = TOP + rank * (ROW + GAP), TOP + rank * (ROW + GAP) + ROW / 2 + 4
    x, width, _ = place(0, timeline.makespan)
    yield text(LEFT - 10, middle, f"rank {rank}", "e") + rect(x, top, width, ROW, kind="b")
    yield text(x + width + 10, middle, timeline.peak_activations[rank])
    for _, start, end, step in timeline.spans[rank]:
        x, width, when = place(start, end)
        height, shapes = ROW / len(step), []
        for i, action in enumerate(step):  # of a pair, which runs at the same time, one lies above the other
            y = top + i * height
            shapes.append(rect(x, y, width, height, LOOKS[action.kind][2 if action.stage in upper else 1]))
            if width >= 7 * len(str(action.microbatch)):
                kind = "n" if len(step) == 1 else "p"
                shapes.append(text(x + width / 2, y + height / 2 + 3.7, action.microbatch, kind))
        if len(step) == 2:
            shapes.append(rect(x + 0.6, top + 0.6, width - 1.2, ROW - 1.2, kind="o"))
        names = (f"{LOOKS[a.kind][0]} of micro-batch {a.microbatch}, stage {a.stage}" for a in step)
        yield titled(" overlapped with ".join(names) + when, shapes)
    for _, start, end, stage in timeline.reductions[rank]:
        x, width, when = place(start, end)
        yield titled(f"gradients of stage {stage} reduced{when}", [rect(x, top + ROW, width, GAP - 1, REDUCTION)])
