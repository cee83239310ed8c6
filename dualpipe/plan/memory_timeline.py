"""What a run needs on each rank while each step of its schedule runs, by kind: as a table, and as a picture.

    parameters     as they are stored, and gathered to compute with
    accumulators   of gradients, with what is copied to be reduced
    optimizer      its states
    activations    of the micro-batches that are alive, with what the step itself needs
    pending        what deferred weight gradients wait with
    buffers        NCCL's

Pairs that have no communication to hide are shown as they run, one action after the other. Of a long step, the middle
of which repeats itself, four micro-batches a rank are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dualpipe.plan.memory import step_memory, unit_for
from dualpipe.schedule import Step
from dualpipe.schedule.svg import legend, picture, rect, text, tick_step, titled
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import Config

COLOURS = {"parameters": "#8f9be0", "accumulators": "#d3d8f5", "optimizer": "#b0b7bf", "activations": "#58b368",
           "pending": "#f5b041", "buffers": "#c2554d"}
ROW, GAP, LEFT, TOP, BOTTOM, CELL = 110, 18, 130, 66, 40, 7  # pixels
STYLE = "line{stroke:#d5dbe1;stroke-width:1}.c{text-anchor:middle;fill:#6b7785}"


class Moment(NamedTuple):
    """Bytes on a rank while a step of its schedule runs, by the kinds of COLOURS."""

    step: Step
    bytes: tuple[int, ...]


def timeline(config: Config, model: TrainedModel) -> list[list[Moment]]:
    """The moments of every pipeline rank, on its largest rank of "dp", "cp" and "ep"."""
    schedule, ranks = step_memory(config, model)
    return [
        [Moment(step, (of.parameters + of.gathered, of.gradients, of.optimizer, of.activations, of.pending,
                       of.nccl)) for step, of in zip(steps, rank)]
        for steps, rank in zip(schedule.ranks, ranks)
    ]


def table(ranks: Sequence[Sequence[Moment]]) -> Iterator[str]:
    """For each rank the step in which it needs most, in the unit that suits the largest."""
    unit = unit_for(_most(ranks))
    yield " ".join(f"{name:>12}" for name in (f"{unit.name} of rank", "worst step", *COLOURS, "total"))
    for number, moments in enumerate(ranks):
        worst = max(moments, key=lambda moment: sum(moment.bytes))
        step = "&".join(map(str, worst.step))
        sizes = (size / unit.bytes for size in (*worst.bytes, sum(worst.bytes)))
        yield f"{number:>12} {step:>12} " + " ".join(f"{size:>12.2f}" for size in sizes)


def to_svg(ranks: Sequence[Sequence[Moment]]) -> str:
    """A row for each rank and a column for each of its steps, stacked by kind; hovering says how much of what."""
    most = _most(ranks)
    unit = unit_for(most)
    columns = max(map(len, ranks))
    shapes = [text(LEFT, 22, f"Memory while each step runs: at most {most / unit.bytes:.1f} {unit.name}", "h"),
              *legend(LEFT, 36, COLOURS.items()), *_step_axis(columns, TOP + len(ranks) * (ROW + GAP))]
    for rank, moments in enumerate(ranks):
        bottom = TOP + rank * (ROW + GAP) + ROW
        peak = max(sum(moment.bytes) for moment in moments)
        shapes += _memory_axis(f"rank {rank}, {unit.name}", bottom, most / unit.bytes, columns)
        shapes.append(text(LEFT + CELL * len(moments) + 8, bottom - ROW * peak / most + 4,
                           f"{peak / unit.bytes:.1f} {unit.name}"))
        for column, moment in enumerate(moments):
            amounts = (f"{name} {size / unit.bytes:.2f} {unit.name}" for name, size in zip(COLOURS, moment.bytes))
            title = "\n".join([" and ".join(action.title for action in moment.step), *amounts])
            shapes.append(titled(title, _bars(moment, column, bottom, most)))
    width = max(LEFT + CELL * columns + 90, LEFT + 580)  # room for the legend
    return picture(width, TOP + len(ranks) * (ROW + GAP) + BOTTOM, shapes, STYLE)


def _most(ranks: Sequence[Sequence[Moment]]) -> int:
    return max(sum(moment.bytes) for moments in ranks for moment in moments) or 1


def _memory_axis(title: str, bottom: float, most: float, columns: int) -> Iterator[str]:
    """The axis of a rank, whose height is `most` units of memory."""
    yield text(10, bottom - ROW / 2 + 4, title)
    step = tick_step(most / 4)
    for i in range(int(most / step) + 1):
        y = bottom - ROW * i * step / most
        yield f'<line x1="{LEFT - 4}" y1="{y:.1f}" x2="{LEFT + CELL * columns}" y2="{y:.1f}"/>'
        yield text(LEFT - 8, y + 4, f"{i * step:g}", "e m")


def _step_axis(columns: int, top: float) -> Iterator[str]:
    """Numbers below the columns, and what they count."""
    step = round(tick_step(max(1, 40 / CELL)))
    for column in range(0, columns, step):
        yield text(LEFT + CELL * (column + 0.5), top, column, "c")
    yield text(LEFT, top + 18, "steps of a rank's schedule, one after the other, all as wide", "m")


def _bars(moment: Moment, column: int, bottom: float, most: int) -> Iterator[str]:
    for colour, size in zip(COLOURS.values(), moment.bytes):
        high = ROW * size / most
        bottom -= high
        yield rect(LEFT + CELL * column, bottom, CELL - 0.5, high, colour)
