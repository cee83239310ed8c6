"""The pictures that a run leaves behind: its loss curve and its schedule."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dualpipe.schedule import Schedule, simulate, to_svg
from dualpipe.train.console import say, warn
from dualpipe.train.metrics import METRICS, read_metrics


def draw(folder: Path, schedule: Schedule, *, unigram: float | None) -> None:
    """Draw loss.png from the metrics in `folder`, and schedule.svg, timed with unit costs; say where everything is.

    unigram: the loss of a unigram model, a line in the picture.
    """
    board = f" (TensorBoard: {folder / 'tensorboard'})" if find_spec("tensorboard") else ""
    say(f"metrics: {folder / METRICS}{board}")
    if find_spec("matplotlib"):
        try:
            save_loss_curve(folder / METRICS, folder / "loss.png", unigram=unigram)
            say(f"loss curve: {folder / 'loss.png'}")
        except Exception as error:  # matplotlib's too: the run is done, and no picture is worth its exit status
            warn(f"{folder / 'loss.png'} cannot be drawn: {error}")
    picture = folder / "schedule.svg"
    try:
        picture.write_text(to_svg(simulate(schedule)), encoding="utf-8")
        say(f"schedule: {picture}")
    except OSError as error:
        warn(f"{picture} cannot be drawn: {error}")


def save_loss_curve(metrics: Path, picture: Path, *, unigram: float | None) -> None:
    """Draw training and held-out loss of a metrics.jsonl as PNG, with the loss of a unigram model as a line."""
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
