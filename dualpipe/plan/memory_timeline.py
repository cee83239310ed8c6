"""Memory of each pipeline rank over the steps of its schedule, by kind: as a table and as a picture.

    parameters     stored shards, and the parameters gathered for compute
    accumulators   accumulated gradients, and the copies that are reduced
    optimizer      optimizer states
    activations    live micro-batches, and temporaries of the running step
    pending        inputs held for deferred weight gradients
    buffers        NCCL buffers

A pair without communication to hide is shown as it runs: one action after the other. The middle of a long step repeats
itself, so at most four micro-batches per rank are shown, unless the schedule is "auto".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dualpipe.plan.memory import RankMemory, Unit, step_memory, unit_for
from dualpipe.schedule import Step
from dualpipe.schedule.svg import legend, picture, rect, text, tick_step, titled
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import Config

COLOURS = {
    "parameters": "#8f9be0",
    "accumulators": "#d3d8f5",
    "optimizer": "#b0b7bf",
    "activations": "#58b368",
    "pending": "#f5b041",
    "buffers": "#c2554d",
}
# Pixels: height of a rank's row, gap below it, margins around the rows, and width of a column.
ROW = 110
GAP = 18
LEFT = 130
TOP = 66
BOTTOM = 40
CELL = 7
PEAK_LABEL = 90  # pixels to the right of a row for the label of its peak
LEGEND_WIDTH = 580
STYLE = "line{stroke:#d5dbe1;stroke-width:1}.c{text-anchor:middle;fill:#6b7785}"


class Moment(NamedTuple):
    """Memory of a rank while one step of its schedule runs: bytes by kind, in the order of `COLOURS`."""

    step: Step
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.bytes)


def timeline(config: Config, model: TrainedModel) -> list[list[Moment]]:
    """Return the moments of each pipeline rank: of its replicas, those of the one with the most memory."""
    schedule, ranks = step_memory(config, model)
    return [
        [Moment(step, _bytes_by_kind(memory)) for step, memory in zip(steps, rank)]
        for steps, rank in zip(schedule.ranks, ranks)
    ]


def _bytes_by_kind(memory: RankMemory) -> tuple[int, ...]:
    """Return the bytes of a rank by the kinds of `COLOURS`."""
    parameters = memory.parameters + memory.gathered
    return (parameters, memory.gradients, memory.optimizer, memory.activations, memory.pending, memory.nccl)


def table(ranks: Sequence[Sequence[Moment]]) -> Iterator[str]:
    """Yield the lines of a table: the step of each rank with the most memory, in the unit that suits the largest."""
    unit = unit_for(_peak_bytes(ranks))
    yield " ".join(f"{name:>12}" for name in (f"{unit.name} of rank", "worst step", *COLOURS, "total"))
    for rank, moments in enumerate(ranks):
        worst = max(moments, key=lambda moment: moment.total)
        step = "&".join(map(str, worst.step))
        sizes = (size / unit.bytes for size in (*worst.bytes, worst.total))
        yield f"{rank:>12} {step:>12} " + " ".join(f"{size:>12.2f}" for size in sizes)


def to_svg(ranks: Sequence[Sequence[Moment]]) -> str:
    """Draw the moments as SVG: one row per rank, one column per step, stacked by kind. Hovering shows the sizes."""
    peak = _peak_bytes(ranks)
    unit = unit_for(peak)
    columns = max(map(len, ranks))
    bottom = TOP + len(ranks) * (ROW + GAP)
    shapes = [text(LEFT, 22, f"Memory while each step runs: at most {peak / unit.bytes:.1f} {unit.name}", "h")]
    shapes += legend(LEFT, 36, COLOURS.items())
    shapes += _step_axis(columns, bottom)
    for rank, moments in enumerate(ranks):
        row_bottom = TOP + rank * (ROW + GAP) + ROW
        shapes += _memory_axis(f"rank {rank}, {unit.name}", row_bottom, peak / unit.bytes, columns)
        shapes += _row(moments, row_bottom, peak, unit)
    width = max(LEFT + CELL * columns + PEAK_LABEL, LEFT + LEGEND_WIDTH)
    return picture(width, bottom + BOTTOM, shapes, STYLE)


def _peak_bytes(ranks: Sequence[Sequence[Moment]]) -> int:
    """Return the bytes of the largest moment, at least 1."""
    return max(moment.total for moments in ranks for moment in moments) or 1


def _row(moments: Sequence[Moment], bottom: float, peak: int, unit: Unit) -> Iterator[str]:
    """Yield the shapes of a rank: the label of its peak, and a column of bars per step."""
    rank_peak = max(moment.total for moment in moments)
    label = f"{rank_peak / unit.bytes:.1f} {unit.name}"
    yield text(LEFT + CELL * len(moments) + 8, bottom - ROW * rank_peak / peak + 4, label)
    for column, moment in enumerate(moments):
        sizes = (f"{name} {size / unit.bytes:.2f} {unit.name}" for name, size in zip(COLOURS, moment.bytes))
        title = "\n".join([" and ".join(action.title for action in moment.step), *sizes])
        yield titled(title, _bars(moment, column, bottom, peak))


def _memory_axis(title: str, bottom: float, peak: float, columns: int) -> Iterator[str]:
    """Yield the vertical axis of a rank. Its height stands for `peak` units of memory."""
    yield text(10, bottom - ROW / 2 + 4, title)
    step = tick_step(peak / 4)
    for tick in range(int(peak / step) + 1):
        y = bottom - ROW * tick * step / peak
        yield f'<line x1="{LEFT - 4}" y1="{y:.1f}" x2="{LEFT + CELL * columns}" y2="{y:.1f}"/>'
        yield text(LEFT - 8, y + 4, f"{tick * step:g}", "e m")


def _step_axis(columns: int, top: float) -> Iterator[str]:
    """Yield the step numbers below the columns, and the caption of the axis."""
    step = round(tick_step(max(1, 40 / CELL)))
    for column in range(0, columns, step):
        yield text(LEFT + CELL * (column + 0.5), top, column, "c")
    yield text(LEFT, top + 18, "steps of the schedule of each rank, in order, all drawn equally wide", "m")


def _bars(moment: Moment, column: int, bottom: float, peak: int) -> Iterator[str]:
    """Yield the stacked bars of one step, from the bottom up."""
    for colour, size in zip(COLOURS.values(), moment.bytes):
        height = ROW * size / peak
        bottom -= height
        yield rect(LEFT + CELL * column, bottom, CELL - 0.5, height, colour)
