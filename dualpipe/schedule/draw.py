"""Timelines as text, as SVG pictures in the style of DeepSeek's README of DualPipe, and tables that compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import chain
from math import ceil, floor, log10
from typing import Any, NamedTuple

from dualpipe.schedule.simulate import Reduction, Span, Timeline
from dualpipe.schedule.types import Action, Kind

PARTS = 6  # maximum number of parts of a text timeline, one below the other
CUT = "~"  # fills the columns of a step that continues in another part, if that part has its label
LEGEND = "F forward, B backward, I backward for the input only, W weight gradients, . idle"

# Name of a kind, and its colours on the first and on the later half of a rank's stages, light enough for dark text.
LOOKS: dict[Kind, tuple[str, str, str]] = {
    "F": ("forward", "#f5b041", "#fce0ac"),
    "B": ("backward", "#58b368", "#bfe3c2"),
    "I": ("backward for the input", "#45b5c4", "#b9e4ea"),
    "W": ("weight gradients", "#8f9be0", "#d3d8f5"),
}
REDUCTION = "#c2554d"

# Pixels: height of a rank's row, gap below it, and margins around the rows.
ROW = 30
GAP = 6
LEFT = 64
RIGHT = 76
TOP = 76
BOTTOM = 34
CELL = 17  # pixels of the shortest step, so that two digits fit
WIDEST = 6000  # default for the maximum width of the time axis in pixels; numbers that do not fit are left out
# Classes of text: heading (h), muted (m), ending at its x instead of starting there (e). Numbers in a cell (n), in a
# pair (p) and at the axis (a); background of a row (b), frame of a pair (o). Cells keep their colours in dark mode, and
# so the numbers in them stay dark.
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#1f2933}.h{font-size:15px;font-weight:bold}"
    ".m{fill:#6b7785}.e{text-anchor:end}"
    ".n{text-anchor:middle;font-size:10.5px}.p{text-anchor:middle;font-size:9.5px}"
    ".a{text-anchor:middle;fill:#6b7785;font-size:10px}"
    "rect{stroke:#fff;stroke-width:.8}.b{fill:#f1f3f5;stroke:none}.o{fill:none;stroke:#1f2933;stroke-width:1.3}"
    "line{stroke:#d5dbe1;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#d1d9e0}.m,.a{fill:#9198a1}.n,.p{fill:#1f2933}"
    'rect[fill="#fff"]{fill:#0d1117}rect{stroke:#0d1117}.b{fill:#1c2128}.o{stroke:#f0f6fc}line{stroke:#3d444d}}'
)


def upper_half(timeline: Timeline) -> set[int]:
    """Return the later half of each rank's stages: on a V, the stages on the way back."""
    rank_stages = map(timeline.schedule.rank_stages, range(len(timeline.spans)))
    return {stage for stages in rank_stages for stage in stages[(len(stages) + 1) // 2 :]}


# -- text


class _Columns(NamedTuple):
    """Columns of one part of a text timeline."""

    part: int  # index of the part
    width: int  # columns of a part
    scale: float  # columns per unit of time


def to_text(timeline: Timeline, width: int = 120) -> str:
    """Draw a timeline as text of at most `width` characters, one line per rank.

    A step is drawn as its kinds and micro-batches. Lower case marks the later half of a rank's stages: on a V, the way
    back. If reductions cost anything, a line below the rank's shows when they run.

    A timeline that needs more columns is cut into parts, one below the other. If that takes more than `PARTS` parts, it
    is not cut: each rank has one line, and steps that are too short for their micro-batches are drawn without them.
    """
    margin = len(f"rank {len(timeline.spans) - 1} ")
    columns = max(1, width - margin)
    needed = _columns_needed(timeline)
    is_squeezed = needed > PARTS * columns
    num_parts = 1 if is_squeezed else max(1, ceil(needed / columns))
    scale = num_parts * columns / timeline.makespan if timeline.makespan else 0.0
    lines = []
    for part in range(num_parts):
        if num_parts > 1:
            lines.append(f"time {number(part * columns / scale)} to {number((part + 1) * columns / scale)}")
        lines += _rank_lines(timeline, margin, _Columns(part, columns, scale))
        if num_parts > 1:
            lines.append("")
    lines.append(LEGEND + ("; lower case: the later stages of a rank" if upper_half(timeline) else ""))
    if any(timeline.reductions):
        lines.append("=: gradients being reduced over data-parallel ranks")
    if num_parts > 1:
        lines.append(f"{CUT}: part of a step that is named in the lines above or below")
    if is_squeezed:
        lines.append(f"to name all micro-batches takes {margin + needed} columns; --svg and --html draw them")
    return "\n".join(lines) + "\n"


def _rank_lines(timeline: Timeline, margin: int, columns: _Columns) -> Iterator[str]:
    """Yield the lines of all ranks in one part of a timeline."""
    upper = upper_half(timeline)

    def step_label(span: Span, room: int) -> str:
        """Return the longest that fits of: kinds and micro-batches, kinds, the first kind."""
        kinds = [action.kind.lower() if action.stage in upper else action.kind for action in span.step]
        with_microbatches = "".join(f"{kind}{action.microbatch}" for kind, action in zip(kinds, span.step))
        labels = (with_microbatches, "".join(kinds))
        return next((label for label in labels if len(label) <= room), kinds[0]).ljust(room)

    def reduction_label(reduction: Reduction, room: int) -> str:
        return f"R{reduction.stage}".ljust(room, "=")

    for rank, (spans, reductions) in enumerate(zip(timeline.spans, timeline.reductions)):
        row = _line(spans, ".", step_label, columns)
        yield f"{f'rank {rank}':<{margin}}{row}".rstrip()
        if reductions:
            yield " " * margin + _line(reductions, " ", reduction_label, columns)


def _line(
    intervals: Sequence[Span] | Sequence[Reduction], idle: str, label: Callable[[Any, int], str], columns: _Columns
) -> str:
    """Return the columns of a rank in one part of a timeline.

    An interval that crosses two parts has its label in the part with more of it, and `CUT` in the other.
    """
    width = columns.width
    first = columns.part * width
    last = first + width
    row = [idle] * width
    for interval in intervals:
        start = floor(interval.start * columns.scale + 0.5)  # one way of rounding everywhere keeps rows aligned
        end = floor(interval.end * columns.scale + 0.5)
        left = max(start, first)
        right = min(end, last)
        if left >= right:
            continue
        start_part = start // width
        columns_in_start_part = min(end, (start_part + 1) * width) - start
        columns_in_next_part = min(end - start - columns_in_start_part, width)
        label_part = start_part if columns_in_start_part >= columns_in_next_part else start_part + 1
        room = right - left
        row[left - first : right - first] = label(interval, room)[:room] if columns.part == label_part else CUT * room
    return "".join(row).rstrip(". ")


def _columns_needed(timeline: Timeline) -> int:
    """Return the number of columns at which every step has room for its kinds and micro-batches."""
    densest = 0.0  # characters per unit of time
    for span in chain.from_iterable(timeline.spans):
        if span.end > span.start:
            num_characters = sum(1 + len(str(action.microbatch)) for action in span.step)
            densest = max(densest, num_characters / (span.end - span.start))
    return ceil(densest * timeline.makespan * (1 - 1e-9))


def table(timelines: Sequence[Timeline], sizes: Sequence[float]) -> str:
    """Return a table with a row per timeline that compares it with the first.

    The columns are the makespan, alone and relative to the first; the bubble; `Timeline.peak_activations`, which counts
    an activation until its "W"; and `Timeline.peak_memory`, in which an "I" frees a part of it. The unit of both peaks
    is the activations of one stage of the first timeline.

    sizes: size of a stage of each timeline, relative to a stage of the first.
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
    """Return rows as text with aligned columns: the first column to the left, the others to the right."""
    first_width, *widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([name.ljust(first_width), *map(str.rjust, cells, widths)]) for name, *cells in rows]
    return "\n".join(lines) + "\n"


# -- SVG


def to_svg(timeline: Timeline, widest: float = WIDEST) -> str:
    """Draw a timeline as SVG, with a row per rank.

    Colours show the kind, lighter ones the way back of a V. The two actions of a pair share a framed cell. Reductions
    of gradients, which run beside the steps, are bars below the row. Hovering over a step shows its actions and times.

    widest: maximum width of the time axis in pixels.
    """
    durations = [span.end - span.start for span in chain.from_iterable(timeline.spans) if span.end > span.start]
    scale = min(CELL / min(durations), widest / timeline.makespan) if durations else 1.0  # pixels per unit of time
    right = LEFT + timeline.makespan * scale
    bottom = TOP + len(timeline.spans) * (ROW + GAP)
    upper = upper_half(timeline)
    shapes = [
        *_heading(timeline, has_halves=bool(upper)),
        text(LEFT - 10, bottom + 16, "time", "m e"),
        text(right + 10, TOP - 8, "peak alive", "m"),
        *_axis(timeline, scale, bottom),
    ]
    for rank in range(len(timeline.spans)):
        shapes += _row(timeline, rank, scale, upper)
    width = max(right + RIGHT, LEFT + 960)  # with room for the legend
    height = bottom + BOTTOM
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>'
    return "\n".join([frame, rect(0, 0, width, height, "#fff"), *shapes, "</svg>"]) + "\n"


def _axis(timeline: Timeline, scale: float, bottom: float) -> Iterator[str]:
    """Yield the lines and numbers of the time axis, at least 60 pixels apart."""
    step = tick_step(60 / scale)
    for i in range(floor(timeline.makespan / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        yield f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom + 2}"/>'
        yield text(x, bottom + 16, f"{i * step:g}", "a")


def _heading(timeline: Timeline, has_halves: bool) -> Iterator[str]:
    """Yield the title, and a legend of the colours in use. has_halves: some rank has stages on both halves of a V."""
    schedule = timeline.schedule
    spans = list(chain.from_iterable(timeline.spans))
    yield text(LEFT, 26, schedule.name, "h")
    yield text(LEFT + 10 + 9.2 * len(schedule.name), 26, f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, "
               f"{schedule.num_microbatches} micro-batches; makespan {number(timeline.makespan)}, bubble "
               f"{100 * timeline.bubble_fraction:.1f}%", "m")
    used_kinds = {action.kind for span in spans for action in span.step}
    x = float(LEFT)
    for name, *colours in (LOOKS[kind] for kind in LOOKS if kind in used_kinds):
        width = 14 if has_halves else 28
        for i, colour in enumerate(colours if has_halves else colours[:1]):
            yield rect(x + width * i, 41, width, 12, colour)
        yield text(x + 34, 51, name)
        x += 62 + 5.8 * len(name)
    if any(len(span.step) == 2 for span in spans):
        yield rect(x, 41, 28, 12, kind="o") + text(x + 34, 51, "overlapped")
        x += 118
    if any(timeline.reductions):
        yield rect(x, 45, 28, GAP - 1, REDUCTION) + text(x + 34, 51, "gradients reduced")
        x += 160
    if has_halves:
        yield text(x, 51, "lighter: later stages of the rank", "m")


def _row(timeline: Timeline, rank: int, scale: float, upper: set[int]) -> Iterator[str]:
    """Yield the shapes of a rank: its name, its peak of live activations, its steps and its reductions."""
    top = TOP + rank * (ROW + GAP)
    baseline = top + ROW / 2 + 4
    row_width = timeline.makespan * scale
    yield text(LEFT - 10, baseline, f"rank {rank}", "e") + rect(LEFT, top, row_width, ROW, kind="b")
    yield text(LEFT + row_width + 10, baseline, timeline.peak_activations[rank])
    for _, start, end, step in timeline.spans[rank]:
        names = (f"{LOOKS[a.kind][0]} of micro-batch {a.microbatch}, stage {a.stage}" for a in step)
        title = " overlapped with ".join(names) + _times(rank, start, end)
        yield titled(title, _cell(step, LEFT + start * scale, top, (end - start) * scale, upper))
    for _, start, end, stage in timeline.reductions[rank]:
        title = f"gradients of stage {stage} reduced{_times(rank, start, end)}"
        yield titled(title, [rect(LEFT + start * scale, top + ROW, (end - start) * scale, GAP - 1, REDUCTION)])


def _times(rank: int, start: float, end: float) -> str:
    return f"\nrank {rank}, {number(start)} to {number(end)}"


def _cell(step: Sequence[Action], x: float, top: float, width: float, upper: set[int]) -> Iterator[str]:
    """Yield the shapes of a step; the actions of a pair, which run at the same time, are one above the other."""
    height = ROW / len(step)
    for i, action in enumerate(step):
        y = top + i * height
        yield rect(x, y, width, height, LOOKS[action.kind][2 if action.stage in upper else 1])
        if width >= 7 * len(str(action.microbatch)):
            kind = "n" if len(step) == 1 else "p"
            yield text(x + width / 2, y + height / 2 + 3.7, action.microbatch, kind)
    if len(step) == 2:
        yield rect(x + 0.6, top + 0.6, width - 1.2, ROW - 1.2, kind="o")


def rect(x: float, y: float, width: float, height: float, fill: str = "", kind: str = "") -> str:
    """Return a rectangle with its upper left corner at (x, y). kind: its CSS class."""
    attributes = ""
    if fill:
        attributes += f' fill="{fill}"'
    if kind:
        attributes += f' class="{kind}"'
    return f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{attributes}/>'


def text(x: float, y: float, content: object, kind: str = "") -> str:
    """Return a line of text with its baseline at `y`. kind: its CSS class."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{number(x)}" y="{number(y)}"{attribute}>{escape(str(content))}</text>'


def titled(title: str, shapes: Iterable[str]) -> str:
    """Group shapes that show `title` when the pointer is over them."""
    return f"<g><title>{escape(title)}</title>{''.join(shapes)}</g>"


def tick_step(least: float) -> float:
    """Return the smallest of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, ... that is at least `least`, as the step of an axis."""
    magnitude = 10.0 ** floor(log10(least))
    return next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= least * (1 - 1e-9))


def number(value: float) -> str:
    """Format a number with at most two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
