"""Picture of a plan: one bar per run, as long as its step, divided into the parts of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dualpipe.plan.memory import GB
from dualpipe.plan.meshes import describe
from dualpipe.plan.predict import PARTS, Prediction
from dualpipe.schedule.svg import legend, picture, rect, text, titled

COLOURS = dict(zip(PARTS, ("#58b368", "#bfe3c2", "#b0b7bf", "#f5b041", "#c2554d", "#e59a95", "#8f9be0", "#b7bff0",
                           "#d9c8ef", "#e3e7eb")))
# Pixels: height of a row, margins, and width of the longest bar.
ROW = 30
LEFT = 290
WIDTH = 620
TOP = 92
RIGHT = 230


def to_svg(runs: Sequence[Prediction]) -> str:
    """Draw the runs as SVG. Hovering over a part shows its name and its seconds."""
    longest = max(run.step_seconds for run in runs)
    best = runs[0]
    used = [name for name in PARTS if any(run.parts[name] > 0.002 * run.step_seconds for run in runs)]
    shapes = [text(20, 26, f"A step on {best.config.parallel.world_size} GPUs", "h"),
              text(20, 44, f"{best.tokens:,} tokens; predicted, by the parts of a step on an average rank", "m"),
              *legend(20, 60, ((name, COLOURS[name]) for name in used))]
    for i, run in enumerate(runs):
        shapes += _row(run, TOP + i * ROW, WIDTH / longest)
    return picture(LEFT + WIDTH + RIGHT, TOP + ROW * len(runs) + 20, shapes)


def _row(run: Prediction, top: int, scale: float) -> Iterator[str]:
    """Yield the shapes of a run. scale: pixels per second."""
    layout, batch = describe(run)
    yield text(LEFT - 10, top + 12, layout, "e") + text(LEFT - 10, top + 24, batch, "e m")
    x = float(LEFT)
    for name, seconds in run.parts.items():
        width = max(0.0, seconds) * scale
        yield titled(f"{name}: {seconds:.3g} s, {seconds / run.step_seconds:.1%}",
                     [rect(x, top + 3, width, ROW - 8, COLOURS[name])])
        x += width
    speed = f"{run.tokens_per_second:,.0f} tokens/s/GPU"
    yield text(x + 8, top + 17, f"{run.step_seconds:.3g} s, {speed}, {run.peak / GB:.0f} GB")
