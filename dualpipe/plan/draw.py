"""The picture of a plan: a bar for each row, as long as its step, of what the step is spent on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dualpipe.plan.memory import GB
from dualpipe.plan.meshes import described
from dualpipe.plan.predict import PARTS, Prediction
from dualpipe.schedule.svg import legend, picture, rect, text, titled

COLOURS = dict(zip(PARTS, ("#58b368", "#bfe3c2", "#b0b7bf", "#f5b041", "#c2554d", "#e59a95", "#8f9be0", "#b7bff0",
                           "#d9c8ef", "#e3e7eb")))
ROW, LEFT, WIDTH, TOP, RIGHT = 30, 290, 620, 92, 230  # pixels


def to_svg(runs: Sequence[Prediction]) -> str:
    """Hovering over a part says what it is and how long it takes."""
    longest, best = max(run.step_seconds for run in runs), runs[0]
    used = [name for name in PARTS if any(run.parts[name] > 0.002 * run.step_seconds for run in runs)]
    shapes = [text(20, 26, f"A step on {best.config.parallel.world_size} GPUs", "h"),
              text(20, 44, f"{best.tokens:,} tokens; predicted, by what an average rank spends it on", "m"),
              *legend(20, 60, ((name, COLOURS[name]) for name in used))]
    for i, run in enumerate(runs):
        shapes += _row(run, TOP + i * ROW, WIDTH / longest)
    return picture(LEFT + WIDTH + RIGHT, TOP + ROW * len(runs) + 20, shapes)


def _row(run: Prediction, top: int, scale: float) -> Iterator[str]:
    layout, batch = described(run)
    yield text(LEFT - 10, top + 12, layout, "e") + text(LEFT - 10, top + 24, batch, "e m")
    x = float(LEFT)
    for name, seconds in run.parts.items():
        wide = max(0.0, seconds) * scale
        yield titled(f"{name}: {seconds:.3g} s, {seconds / run.step_seconds:.1%}",
                     [rect(x, top + 3, wide, ROW - 8, COLOURS[name])])
        x += wide
    speed = f"{run.tokens_per_second:,.0f} tokens/s/GPU"
    yield text(x + 8, top + 17, f"{run.step_seconds:.3g} s, {speed}, {run.peak / GB:.0f} GB")
