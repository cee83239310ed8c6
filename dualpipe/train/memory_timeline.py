"""What a run needs on each rank while each step of its schedule runs, by kind: as a table, and as a picture.

    parameters     as they are stored, and gathered to compute with
    accumulators   of gradients, with what is on its way to other ranks
    optimizer      its states
    activations    of the micro-batches that are alive, with what the step itself needs
    pending        what deferred weight gradients wait with
    buffers        logits, and NCCL's

All but activations and pending are there throughout, as `dualpipe memory` counts them. Of a long step, the middle of
which repeats itself, four micro-batches a rank are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from dualpipe.models import HubConfig
from dualpipe.schedule import Step
from dualpipe.train.config import Config, fit_world
from dualpipe.train.memory import GB, alive, estimate, stage_activations

COLOURS = {"parameters": "#8f9be0", "accumulators": "#d3d8f5", "optimizer": "#b0b7bf", "activations": "#58b368",
           "pending": "#f5b041", "buffers": "#c2554d"}
ROW, GAP, LEFT, TOP, CELL = 110, 18, 64, 66, 7  # pixels


class Moment(NamedTuple):
    """Bytes on a rank while a step of its schedule runs, by the kinds of COLOURS."""

    step: Step
    bytes: tuple[int, ...]


def timeline(config: Config, model: HubConfig) -> list[list[Moment]]:
    """The moments of every pipeline rank, on its largest rank of "dp", "cp" and "ep"."""
    config = fit_world(config, config.parallel.world_size)
    schedule, taken = stage_activations(config, model)
    return [
        [Moment(step, (rank.parameters + rank.gathered, rank.gradients, rank.optimizer, *both, rank.logits + rank.nccl))
         for step, both in zip(steps, alive(steps, taken))]
        for rank, steps in zip(estimate(config, model, activations=False), schedule.ranks)
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
    width = LEFT + CELL * max(map(len, ranks)) + 90
    height = TOP + len(ranks) * (ROW + GAP) + 10
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{max(width, 640)}">',
             "<style>text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#1f2933}</style>",
             f'<rect width="{width}" height="{height}" fill="#fff"/>',
             f'<text x="{LEFT}" y="22" style="font-size:15px">Memory while each step runs: {most / GB:.1f} GB</text>']
    for i, (name, colour) in enumerate(COLOURS.items()):
        lines += [f'<rect x="{LEFT + 96 * i}" y="36" width="12" height="12" fill="{colour}"/>',
                  f'<text x="{LEFT + 96 * i + 17}" y="46">{name}</text>']
    for rank, moments in enumerate(ranks):
        bottom = TOP + rank * (ROW + GAP) + ROW
        peak = max(sum(moment.bytes) for moment in moments)
        lines.append(f'<text x="10" y="{bottom - ROW / 2:g}">rank {rank}</text>')
        lines.append(f'<text x="{LEFT + CELL * len(moments) + 8}" y="{bottom - ROW * peak / most + 4:.1f}">'
                     f"{peak / GB:.1f} GB</text>")
        for column, moment in enumerate(moments):
            lines += [f"<g><title>{escape(_described(moment))}</title>", *_bars(moment, column, bottom, most), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _described(moment: Moment) -> str:
    amounts = (f"{name} {size / GB:.2f} GB" for name, size in zip(COLOURS, moment.bytes))
    return " and ".join(action.title for action in moment.step) + "\n" + "\n".join(amounts)


def _bars(moment: Moment, column: int, bottom: float, most: int) -> Iterator[str]:
    for colour, size in zip(COLOURS.values(), moment.bytes):
        high = ROW * size / most
        bottom -= high
        yield (f'<rect x="{LEFT + CELL * column}" y="{bottom:.2f}" width="{CELL - 0.5}" height="{high:.2f}" '
               f'fill="{colour}"/>')
