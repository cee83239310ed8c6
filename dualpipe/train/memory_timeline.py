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

from dualpipe.models import HubConfig
from dualpipe.schedule import Step
from dualpipe.schedule.svg import legend, picture, rect, text, titled
from dualpipe.train.config import Config
from dualpipe.train.memory import GB, step_memory

COLOURS = {"parameters": "#8f9be0", "accumulators": "#d3d8f5", "optimizer": "#b0b7bf", "activations": "#58b368",
           "pending": "#f5b041", "buffers": "#c2554d"}
ROW, GAP, LEFT, TOP, CELL = 110, 18, 64, 66, 7  # pixels


class Moment(NamedTuple):
    """Bytes on a rank while a step of its schedule runs, by the kinds of COLOURS."""

    step: Step
    bytes: tuple[int, ...]


def timeline(config: Config, model: HubConfig) -> list[list[Moment]]:
    """The moments of every pipeline rank, on its largest rank of "dp", "cp" and "ep"."""
    schedule, ranks = step_memory(config, model)
    return [
        [Moment(step, (of.parameters + of.gathered, of.gradients, of.optimizer, of.activations, of.pending,
                       of.nccl)) for step, of in zip(steps, rank)]
        for steps, rank in zip(schedule.ranks, ranks)
    ]


def table(ranks: Sequence[Sequence[Moment]]) -> Iterator[str]:
    """For each rank the step in which it needs most, in GiB."""
    yield " ".join(f"{name:>12}" for name in ("rank", "worst step", *COLOURS, "total"))
    for number, moments in enumerate(ranks):
        worst = max(moments, key=lambda moment: sum(moment.bytes))
        step = "&".join(map(str, worst.step))
        yield f"{number:>12} {step:>12} " + " ".join(f"{x / 2**30:>12.2f}" for x in (*worst.bytes, sum(worst.bytes)))


def to_svg(ranks: Sequence[Sequence[Moment]]) -> str:
    """A row for each rank and a column for each of its steps, stacked by kind; hovering says how much of what."""
    most = max(sum(moment.bytes) for moments in ranks for moment in moments) or 1
    shapes = [text(LEFT, 22, f"Memory while each step runs: {most / GB:.1f} GB", "h"),
              *legend(LEFT, 36, COLOURS.items())]
    for rank, moments in enumerate(ranks):
        bottom = TOP + rank * (ROW + GAP) + ROW
        peak = max(sum(moment.bytes) for moment in moments)
        shapes += [text(10, bottom - ROW / 2, f"rank {rank}"),
                   text(LEFT + CELL * len(moments) + 8, bottom - ROW * peak / most + 4, f"{peak / GB:.1f} GB")]
        for column, moment in enumerate(moments):
            amounts = (f"{name} {size / GB:.2f} GB" for name, size in zip(COLOURS, moment.bytes))
            title = "\n".join([" and ".join(action.title for action in moment.step), *amounts])
            shapes.append(titled(title, _bars(moment, column, bottom, most)))
    width = max(LEFT + CELL * max(map(len, ranks)) + 90, 640)  # room for the legend
    return picture(width, TOP + len(ranks) * (ROW + GAP) + 10, shapes)


def _bars(moment: Moment, column: int, bottom: float, most: int) -> Iterator[str]:
    for colour, size in zip(COLOURS.values(), moment.bytes):
        high = ROW * size / most
        bottom -= high
        yield rect(LEFT + CELL * column, bottom, CELL - 0.5, high, colour)
