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
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dualpipe.plan.memory import RankMemory, step_memory, unit_for
from dualpipe.runtime.files import check_parent
from dualpipe.schedule import Step
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
FORMATS = (".png", ".svg", ".pdf")


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


def _peak_bytes(ranks: Sequence[Sequence[Moment]]) -> int:
    """Return the bytes of the largest moment, at least 1."""
    return max(moment.total for moments in ranks for moment in moments) or 1


def check_picture(path: Path) -> None:
    """Raise ValueError if `draw` cannot write this file: by its suffix or folder, or without matplotlib."""
    if path.suffix not in FORMATS:
        raise ValueError(f"the picture is {str(path)!r}; give a file that ends in {', '.join(FORMATS)}")
    check_parent(path)
    if find_spec("matplotlib") is None:
        raise ValueError(f'the picture {path} needs matplotlib: pip install "dualpipe[viz]"')


def draw(ranks: Sequence[Sequence[Moment]], path: Path) -> None:
    """Draw the moments: a panel per rank, a column per step, stacked by kind. The file's suffix gives its format."""
    from matplotlib.figure import Figure  # takes 0.5 s

    unit = unit_for(_peak_bytes(ranks))
    figure = Figure(figsize=(10, 1.5 + 1.3 * len(ranks)), layout="constrained")
    panels = figure.subplots(len(ranks), sharex=True, sharey=True, squeeze=False)[:, 0]
    for rank, (axes, moments) in enumerate(zip(panels, ranks)):
        steps = range(len(moments))
        bottom = [0.0] * len(moments)
        for kind, (name, colour) in enumerate(COLOURS.items()):
            sizes = [moment.bytes[kind] / unit.bytes for moment in moments]
            axes.bar(steps, sizes, width=1.0, bottom=bottom, color=colour, label=name)
            bottom = [below + size for below, size in zip(bottom, sizes)]
        axes.set(ylabel=f"rank {rank}, {unit.name}", xmargin=0.0)
        axes.set_title(f"at most {max(bottom):.1f} {unit.name}", loc="right", fontsize="small")
    panels[-1].set_xlabel("step of the rank's schedule, all drawn equally wide")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=len(COLOURS), frameon=False)
    figure.savefig(path)
