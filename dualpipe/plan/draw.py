"""The picture of a plan: a bar for each row, as long as its step, of what the step is spent on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from dualpipe.plan.predict import PARTS, Prediction
from dualpipe.train.memory import GB

COLOURS = dict(zip(PARTS, ("#58b368", "#bfe3c2", "#b0b7bf", "#f5b041", "#c2554d", "#e59a95", "#8f9be0", "#b7bff0",
                           "#d9c8ef", "#e3e7eb")))
ROW, LEFT, WIDTH, TOP, RIGHT = 30, 290, 620, 92, 190  # pixels
STYLE = ("text{font-family:Helvetica,Arial,sans-serif;font-size:11px;fill:#1f2933}.h{font-size:15px;font-weight:bold}"
         ".m{fill:#6b7785}.e{text-anchor:end}")


def to_svg(runs: Sequence[Prediction]) -> str:
    """Hovering over a part says what it is and how long it takes."""
    longest, best = max(run.step for run in runs), runs[0]
    height, width = TOP + ROW * len(runs) + 20, LEFT + WIDTH + RIGHT
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
             f'height="{height}">', f"<style>{STYLE}</style>", f'<rect width="{width}" height="{height}" fill="#fff"/>',
             f'<text class="h" x="20" y="26">A step on {best.config.parallel.world_size} GPUs</text>',
             f'<text class="m" x="20" y="44">{best.tokens:,} tokens; predicted, by what an average rank spends it '
             "on</text>", *_legend(runs)]
    for i, run in enumerate(runs):
        lines += _row(run, TOP + i * ROW, WIDTH / longest)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend(runs: Sequence[Prediction]) -> Iterator[str]:
    x = 20.0
    for name in PARTS:
        if any(run.parts[name] > 0.002 * run.step for run in runs):
            yield f'<rect x="{x:g}" y="60" width="12" height="12" fill="{COLOURS[name]}"/>'
            yield f'<text x="{x + 17:g}" y="70">{escape(name)}</text>'
            x += 34 + 6.2 * len(name)


def _row(run: Prediction, top: int, scale: float) -> Iterator[str]:
    p, t, rules = run.config.parallel, run.config.train, run.config.memory.recompute
    what = f"{p}, {p.schedule}"
    how = f"{t.num_chunks} x {t.micro_batch_size}, recompute {' '.join(rules) or 'none'}"
    yield f'<text class="e" x="{LEFT - 10}" y="{top + 12}">{escape(what)}</text>'
    yield f'<text class="e m" x="{LEFT - 10}" y="{top + 24}">{escape(how)}</text>'
    x = float(LEFT)
    for name, seconds in run.parts.items():
        wide = max(0.0, seconds) * scale
        yield (f'<rect x="{x:.2f}" y="{top + 3}" width="{wide:.2f}" height="{ROW - 8}" fill="{COLOURS[name]}">'
               f"<title>{escape(name)}: {seconds:.3g} s, {seconds / run.step:.1%}</title></rect>")
        x += wide
    yield (f'<text x="{x + 8:.1f}" y="{top + 17}">{run.step:.3g} s, {run.tokens_per_second:,.0f} tokens/s/GPU, '
           f"{run.peak / GB:.0f} GB</text>")
