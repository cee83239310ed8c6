"""`dualpipe compare RUN_A RUN_B`: loss, speed, memory and settings of two runs, as a table and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from dualpipe.schedule.draw import aligned
from dualpipe.train.runs.metrics_file import METRICS, read_metrics
from dualpipe.train.runs.run_file import Start, read_starts

Row = dict[str, Any]
WARM_UP = 2  # first steps that speeds leave out: they compile, and load data and kernels
LAST_PART = 10  # the mean loss at the end is over the last tenth of the steps
_MISSING = "-"


@dataclass(frozen=True)
class Run:
    """A run from its output directory.

    rows: lines of `metrics.jsonl`, by step. starts: in order; none for a run without `run.json`.
    """

    folder: Path
    rows: dict[int, Row]
    starts: list[Start]

    @property
    def start(self) -> Start | None:
        """The last start that trained a step, or else the last one; None for a run without `run.json`."""
        trained = self.trained()
        if trained:
            return trained[-1][0]
        return self.starts[-1] if self.starts else None

    def trained(self) -> list[tuple[Start, int, int]]:
        """Return the starts whose steps remain, each with the first and the last of these steps.

        A start that went on from an earlier step has replaced the later steps of those before it.
        """
        trained = []
        last = max(self.rows)
        for start in reversed(self.starts):
            if start.step < last:
                trained.append((start, start.step + 1, last))
                last = start.step
        return trained[::-1]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read the run of an output directory, or of its `metrics.jsonl`. Raises ValueError without any step."""
        folder = path.parent if path.name == METRICS else path
        metrics = folder / METRICS
        if not metrics.is_file():
            raise ValueError(f"{path} has no {METRICS}; give output.dir of a run of `dualpipe train`")
        rows = {row["step"]: row for row in read_metrics(metrics)}
        if not rows:
            raise ValueError(f"{metrics} has no step; give a run that has trained")
        return cls(folder, rows, read_starts(folder))


def compare(first: Path, second: Path, picture: Path | None = None) -> Iterator[str]:
    """Yield the lines of the comparison; draw the losses and the speed to `picture`.

    Raises ValueError for a directory without metrics, and for a picture without matplotlib.
    """
    runs = [Run.read(first), Run.read(second)]
    names = _short_names(runs)
    yield aligned([("", *names, "change"), *_table(runs)]).rstrip()
    shared = _shared_steps(runs)
    if not shared:
        yield "the runs have no step in common: losses at the same step cannot be compared"
    elif max(len(run.rows) for run in runs) > len(shared):
        yield (f"losses, gradient norm and expert load are compared at steps {shared[0]} to {shared[-1]}, which both "
               "have")
    yield from _differences(runs, names)
    if picture is not None:
        _draw(runs, names, picture)
        yield f"wrote {picture}"


# -- the table


def _table(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield rows of text: a name, the values of both runs, and the change from the first to the second."""
    shared = _shared_steps(runs)
    last_part = shared[-max(1, len(shared) // LAST_PART):]

    def compared(run: Run) -> dict[int, Row]:
        return {step: run.rows[step] for step in shared} or run.rows

    yield _line("steps", runs, lambda run: float(max(run.rows)), "{:.0f}", relative=False)
    if shared:
        yield _line(f"loss at step {shared[-1]}", runs, lambda run: _number(run.rows[shared[-1]], "loss"), "{:.4f}")
        yield _line(f"mean loss of the last {len(last_part)}", runs,
                    lambda run: _mean(_number(run.rows[step], "loss") for step in last_part), "{:.4f}")
    yield _line("lowest validation loss", runs,
                lambda run: min(_numbers(compared(run), "eval_loss"), default=None), "{:.4f}")
    yield _line("tokens/s (median)", runs, lambda run: _median(_steady(run), "tokens_per_second"), "{:,.0f}")
    yield _line("TFLOPS per rank (median)", runs, lambda run: _median(_steady(run), "tflops_per_rank"), "{:.3g}")
    yield _line("MFU (median)", runs, lambda run: _median(_steady(run), "mfu"), "{:.1%}")
    yield _line("memory (most)", runs, lambda run: max(_numbers(run.rows, "memory_bytes"), default=None), "{:.4g}",
                scale=2**-30, unit=" GiB")
    yield _line("gradient norm (median)", runs, lambda run: _median(compared(run), "grad_norm"), "{:.3g}")
    yield _line("largest expert load over the mean", runs,
                lambda run: _median(compared(run), "load_max_over_mean"), "{:.3g}")


def _line(
    name: str, runs: Sequence[Run], value_of: Callable[[Run], float | None], form: str, *, scale: float = 1.0,
    unit: str = "", relative: bool = True,
) -> tuple[str, ...]:
    """Return a row of the table. A value that a run does not have is a dash."""
    values = [value_of(run) for run in runs]
    texts = [_MISSING if value is None else form.format(value * scale) + unit for value in values]
    before, after = values
    change = ""
    if relative and before and after is not None:
        change = f"{(after - before) / before:+.1%}"
    return name, *texts, change


def _shared_steps(runs: Sequence[Run]) -> list[int]:
    """Return the steps that all runs have, in order."""
    return sorted(set.intersection(*(set(run.rows) for run in runs)))


def _steady(run: Run) -> dict[int, Row]:
    """Return the rows after the warm-up of `Run.start`; all rows of a shorter run."""
    begin = run.start.step if run.start is not None else min(run.rows) - 1
    steady = {step: row for step, row in run.rows.items() if step > begin + WARM_UP}
    return steady or run.rows


def _number(row: Row, name: str) -> float | None:
    """Return a number of a row; None if the row lacks it, or it is not finite."""
    value = row.get(name)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def _numbers(rows: Mapping[int, Row], name: str) -> list[float]:
    """Return the numbers of all rows that have them."""
    values = (_number(row, name) for row in rows.values())
    return [value for value in values if value is not None]


def _median(rows: Mapping[int, Row], name: str) -> float | None:
    """Return the median of a number, None if no row has it."""
    values = _numbers(rows, name)
    return statistics.median(values) if values else None


def _mean(values: Iterator[float | None]) -> float | None:
    """Return the mean of numbers; None if one of them is missing."""
    numbers = list(values)
    known = [number for number in numbers if number is not None]
    return statistics.fmean(known) if known and len(known) == len(numbers) else None


# -- settings


def _differences(runs: Sequence[Run], names: Sequence[str]) -> Iterator[str]:
    """Yield the settings and versions that differ."""
    unknown = [name for run, name in zip(runs, names) if run.start is None]
    if unknown:
        yield f"the settings of {' and '.join(unknown)} are not known: there is no run.json"
        return
    earlier = [line for run, name in zip(runs, names) for line in _earlier_settings(run, name)]
    first, second = ({} if run.start is None else _flat(run.start) for run in runs)
    different = _different(first, second)
    if different:
        yield "settings that differ:"
        rows = [(f"  {name}", _text(first, name), _text(second, name)) for name in different]
        yield aligned([("", *names), *rows]).rstrip()
    elif earlier:
        yield "the last starts of the runs have the same settings and versions"
    else:
        yield "the runs have the same settings and versions"
    yield from earlier


def _earlier_settings(run: Run, name: str) -> Iterator[str]:
    """Yield a line for the steps of each start whose settings differ from those of `Run.start`."""
    if run.start is None:
        return
    last = _flat(run.start)
    for start, first_step, last_step in run.trained():
        settings = _flat(start)
        texts = [f"{setting} = {_text(settings, setting)}" for setting in _different(settings, last)]
        if texts:
            steps = f"step {last_step}" if first_step == last_step else f"steps {first_step} to {last_step}"
            yield f"{name} trained {steps} with {', '.join(texts)}"


def _different(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ, in order."""
    return [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]


def _flat(start: Start) -> dict[str, Any]:
    """Return the settings and versions of a start by dotted names, without output.dir."""
    flat = {f"version of {name}": version for name, version in start.versions.items()}
    settings = dict(start.settings)

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                add(f"{prefix}.{name}" if prefix else str(name), inner)
        else:
            flat[prefix] = value

    add("", settings.pop("run", {}))
    add("model config", settings.pop("model", {}))
    flat.pop("output.dir", None)
    return flat


def _text(settings: Mapping[str, Any], name: str) -> str:
    """Return a setting as text."""
    return repr(settings[name]) if name in settings else _MISSING


def _short_names(runs: Sequence[Run]) -> list[str]:
    """Return the folders' names, from the first part in which they differ."""
    paths = [run.folder.resolve() for run in runs]
    if paths[0] == paths[1]:
        return ["A", "B"]
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*(path.parts for path in paths))))
    return ["/".join(path.parts[shared:]) or path.name for path in paths]


# -- the picture


def _draw(runs: Sequence[Run], names: Sequence[str], picture: Path) -> None:
    """Draw losses and speed over the steps; the format is that of the picture's suffix."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f'the picture {picture} needs matplotlib: pip install "dualpipe[viz]"') from error
    figure = Figure(figsize=(8, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, speeds = figure.subplots(2, 1, sharex=True)
    for run, name, color in zip(runs, names, ("#1f77b4", "#d62728")):
        losses.plot(*_curve(run, "loss"), color=color, linewidth=1.2, label=name)
        losses.plot(*_curve(run, "eval_loss"), color=color, marker="o", markersize=4, linestyle=":")
        speeds.plot(*_curve(run, "tokens_per_second"), color=color, linewidth=1.0, label=name)
    losses.set(ylabel="loss (nats per token; dotted: validation)")
    speeds.set(xlabel="step", ylabel="tokens per second")
    for axes in (losses, speeds):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:
        raise ValueError(f"the picture {picture} cannot be written: {error}; give a .png, .svg or .pdf in a folder "
                         "that exists") from error


def _curve(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a number, and the numbers."""
    numbers = {step: _number(row, name) for step, row in sorted(run.rows.items())}
    points = {step: number for step, number in numbers.items() if number is not None}
    return list(points), list(points.values())
