"""The pictures that a run leaves behind: its loss curve and its schedule."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dualpipe.schedule import Schedule, simulate, to_svg
from dualpipe.train.metrics import read_metrics


def save_loss_curve(metrics: Path, picture: Path, *, unigram: float | None) -> bool:
    """Draw training and held-out loss of a metrics.jsonl as PNG, with the loss of a unigram model as a line.

    Returns False where there is no matplotlib to draw with.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second, for the one rank that draws
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    held_out = [(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], color="#1f77b4", linewidth=1.2, label="training")
    if held_out:
        axes.plot(*zip(*held_out), color="#d62728", marker="o", markersize=4, label="held out")
    if unigram is not None:
        axes.axhline(unigram, color="#7f7f7f", linestyle="--", linewidth=1, label=f"unigram model, {unigram:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(picture)
    return True


def save_schedule(schedule: Schedule, picture: Path) -> bool:
    """Draw a schedule, timed with unit costs, as SVG; that needs nothing but Python."""
    picture.write_text(to_svg(simulate(schedule)), encoding="utf-8")
    return True
