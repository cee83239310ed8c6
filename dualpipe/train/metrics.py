"""The reports of a run: a JSON line, TensorBoard scalars and a live line for every step, and pictures at its end.

Only the rank that knows the loss has a `MetricsWriter`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

import rich.console
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from dualpipe.runtime.device import memory_in_use, peak_memory
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.printing import go_on_without, say, warn
from dualpipe.schedule import Schedule, simulate, to_svg

METRICS = "metrics.jsonl"
PICTURES = {"tensorboard": "no TensorBoard events", "matplotlib": "no picture of the loss"}  # what it costs to lack one


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`; what is None is absent there."""

    step: int  # optimizer steps done, from 1
    loss: float  # mean over the tokens of the global batch that count, in nats
    grad_norm: float  # of the whole model's gradient, before clipping
    lr: float  # of this step
    tokens_per_second: float  # the whole job's
    # 10^12 floating-point operations per second of each rank, in the model's matrix products as they are counted by
    # `dualpipe.models.flops.flops_per_token`.
    tflops_per_rank: float
    memory_bytes: int  # this rank's: the peak on its CUDA device, or what the process has resident
    mfu: float | None = None  # tflops_per_rank over the device's peak in bf16; None in other dtypes, or where unknown
    # Shares of the tokens of each of data.sources, in all steps until this one; None where there is one text.
    source_shares: list[float] | None = None
    counted_tokens: int | None = None  # tokens of the global batch that count for the loss; None for text: all do
    eval_loss: float | None = None  # on held-out data after this step; None where there was no evaluation
    # Of multi-token prediction, None where there is none: as loss and eval_loss, of each depth, and how many tokens a
    # greedy verification of the drafts would give at a time (see `train.step.loss.accepted`), from 1 to 1 + depths.
    mtp_loss: list[float] | None = None
    eval_mtp_loss: list[float] | None = None
    acceptance_length: float | None = None
    # Largest over mean of the tokens that the global batch gave each expert, in the layer where it is largest: from 1,
    # where all experts have as many, to experts / top_k, where one has every token. This and what follows are None
    # where the model has no router.
    load_max_over_mean: float | None = None
    dropped: float | None = None  # tokens without a place at their expert: 0, because no expert has a capacity
    balance_loss: float | None = None  # mean over the layers, without its coefficient; None where that is 0
    z_loss: float | None = None  # as balance_loss


class Throughput(NamedTuple):
    """The speed of a step, by its duration."""

    tokens: int  # of a step, on all ranks
    ranks: int
    flops_per_token: float  # forward and backward
    peak_tflops: float | None  # of a rank's device, in bf16; None where it is unknown or another dtype is used

    def metrics(self, seconds: float) -> dict[str, float | None]:
        """Return the speed of a step of so many seconds, by the names of `StepMetrics`."""
        tokens_per_second = self.tokens / seconds
        tflops = tokens_per_second * self.flops_per_token / 1e12 / self.ranks
        return {
            "tokens_per_second": tokens_per_second, "tflops_per_rank": tflops,
            "mfu": self.peak_tflops and tflops / self.peak_tflops,
        }


class MetricsWriter:
    """Writes `folder`/metrics.jsonl, TensorBoard events, W&B and progress; use it as a context manager.

    None of it is worth the run: what cannot be written is said once, and training goes on without it.
    """

    def __init__(
        self, folder: Path, *, total_steps: int, start_step: int = 0, console: Console | None = None,
        log_interval: int = 1, print_interval: int = 1, wandb: str = "", settings: Mapping[str, object] | None = None,
    ) -> None:
        """start_step: steps already done. Lines that an earlier run left for later steps are kept in another file.
        log_interval: the steps between those that are written; with an evaluation, and the last, a step always is.
        print_interval: the steps between those of them that are printed on what is no terminal; the first is, too.
        wandb: the project at Weights & Biases, or nothing; settings: what it is told of the run.
        """
        self._total, self._interval = total_steps, log_interval
        self._print_interval = print_interval
        self._printed: int | None = None  # the last step that was
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None  # a live line, on a terminal
        if self._console.is_terminal:
            steps = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total_steps)) + 1))
            text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, ratio=1))
            rest = (BarColumn(bar_width=6), TimeRemainingColumn(compact=True)) if self._console.width >= 80 else ()
            self._progress = Progress(steps, *rest[:1], text, *rest[1:], console=self._console)
            self._task = self._progress.add_task("train", total=total_steps, completed=start_step, text="")
        missing = {package: cost for package, cost in PICTURES.items() if find_spec(package) is None}
        if missing:
            self.say(f"{', '.join(missing.values())}: pip install {' '.join(missing)} (or 'dualpipe[viz]')")
        self._outputs: dict[str, Callable[[int, dict[str, Any]], None]] = {}  # each takes a step and its values
        self._files: dict[str, Callable[[int], Callable[[int, dict[str, Any]], None]]] = {
            METRICS: lambda start: _Lines(folder / METRICS, start).add}
        if "tensorboard" not in missing:
            self._files["TensorBoard"] = lambda start: _tensorboard(folder / "tensorboard", start)
        self.go_back(start_step)
        if wandb:
            with self._optional("W&B"):
                from wandb import init

                self._run = run = init(project=wandb, dir=str(folder), config=dict(settings or {}))
                self._outputs["W&B"] = lambda step, values: run.log(scalars(values), step=step)

    def go_back(self, step: int) -> None:
        """Go on after this step: what is written of later ones is kept apart, as where a run goes on."""
        for name, begin in self._files.items():
            with self._optional(name):
                self._outputs[name] = begin(step)

    def write(self, metrics: StepMetrics) -> None:
        """Record one step, at once and flushed; the live line shows every one."""
        step, evaluated = metrics.step, metrics.eval_loss is not None
        due = step % self._interval == 0 or step == self._total or evaluated
        values = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
        del values["step"]
        for name, add in list(self._outputs.items()) if due else ():
            with self._optional(name):
                add(step, dict(values))
        # With counter, bar and remaining time it fits a terminal of 80 columns.
        text = (f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s  "
                f"grad norm {metrics.grad_norm:.2f}  {metrics.memory_bytes / 2**20:,.0f} MiB")
        held_out = f"  held-out loss {metrics.eval_loss:.4f}" if evaluated else ""
        if metrics.eval_mtp_loss is not None:
            held_out += f" (MTP {', '.join(f'{loss:.4f}' for loss in metrics.eval_mtp_loss)})"
            held_out += f"  acceptance length {metrics.acceptance_length:.3f}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=text)
            if evaluated:
                self.say(f"step {step}: loss {metrics.loss:.4f}{held_out}")
        elif due and self._is_printed(step, evaluated=evaluated):
            self._printed = step
            self.say(f"step {step}/{self._total}  {text}{held_out}")

    def _is_printed(self, step: int, *, evaluated: bool) -> bool:
        """Return True if a step that is written is printed where there is no live line."""
        if evaluated or step == self._total or self._printed is None:
            return True
        return step // self._print_interval != self._printed // self._print_interval

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        say(text, self._console)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if "W&B" in self._outputs:
            with self._optional("W&B"):
                self._run.finish()

    @contextmanager
    def _optional(self, name: str) -> Iterator[None]:
        """Say where the work inside fails, and leave this output alone from then on."""
        try:
            yield
        except Exception as error:  # whatever these packages raise
            self._outputs.pop(name, None)
            text = str(error).split("\n")[0] or repr(error)
            warn(f"{name} cannot be written: {text}; training goes on without it")


class _Lines:
    """Lines of JSON in a file, which is opened for each: one that was removed meanwhile is there again."""

    def __init__(self, path: Path, start_step: int) -> None:
        """Keep the lines up to `start_step`; a file with lines of steps that will now be run gets another name."""
        self._path = path
        self._torn = self._warned = False  # torn: the last line may be there in part
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = read_metrics(path) if path.exists() else []
        keep = [row for row in earlier if row["step"] <= start_step]
        if path.exists() and len(keep) < len(path.read_bytes().splitlines()):
            shutil.copyfile(path, _unused_name(path))
        replace_file(path, "".join(map(json_line, keep)))

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Add a line, flushed. A failure is warned about once, and the next line tried again."""
        line = json_line({"step": step, **values, "time": datetime.now(UTC).isoformat(timespec="milliseconds")})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._torn + line)
            self._torn = False
        except OSError as error:
            if not self._warned:
                warn(f"{self._path} cannot be written at step {step}: {error.strerror or error}; training goes on, and "
                     "tries again with each line")
            self._torn = self._warned = True


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The values with each of a list by itself: name/1, name/2, ..."""
    lists = {name: value if isinstance(value, list) else None for name, value in values.items()}
    return {name if each is None else f"{name}/{number}": value for name, each in lists.items()
            for number, value in enumerate(each or [values[name]], 1)}


def _tensorboard(folder: Path, start_step: int) -> Callable[[int, dict[str, Any]], None]:
    """TensorBoard's events. A new run gets the folder for itself: all that is in one is drawn as one curve.

    Written here and not by torch's SummaryWriter, whose thread meets a full disk with a traceback of its own.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # for the one rank that writes
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    def write(**event: Any) -> None:
        with path.open("ab") as file:
            RecordWriter(file).write(Event(wall_time=time.time(), **event).SerializeToString())

    if not start_step and folder.is_dir() and any(folder.iterdir()):
        folder.rename(_unused_name(folder))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
    write(file_version="brain.Event:2")
    write(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))  # hides what came later
    return lambda step, values: write(step=step, summary=Summary(
        value=[Summary.Value(tag=name, simple_value=value) for name, value in scalars(values).items()]
    ))


def set_aside(path: Path) -> None:
    """Give what an earlier run has left another name."""
    if path.is_symlink() or path.exists():
        path.rename(_unused_name(path))


def _unused_name(path: Path) -> Path:
    candidates = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def json_line(values: Mapping[str, object]) -> str:
    """One line of valid JSON: a number that is not finite, which JSON does not have, becomes null."""
    def clean(value: object) -> object:
        if isinstance(value, list):
            return [clean(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: clean(value) for name, value in values.items()}, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`, but for lines that a crash or a full disk cut short, or that are damaged."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def memory_bytes(device: torch.device) -> int:
    """Peak memory of a CUDA device; on CPU what the process has resident now (its peak where /proc is missing)."""
    return peak_memory(device) if device.type == "cuda" else memory_in_use(device)


# -- pictures


def draw(folder: Path, schedule: Schedule, *, unigram: float | None) -> None:
    """Draw loss.png from the metrics in `folder`, and schedule.svg, timed with unit costs; say where everything is.

    unigram: the loss of a unigram model, a line in the picture.
    """
    loss, picture = folder / "loss.png", folder / "schedule.svg"
    board = f" (TensorBoard: {folder / 'tensorboard'})" if find_spec("tensorboard") else ""
    say(f"metrics: {folder / METRICS}{board}")
    if find_spec("matplotlib"):
        try:
            _draw_loss(read_metrics(folder / METRICS), loss, unigram)
            say(f"loss curve: {loss}")
        except Exception as error:  # matplotlib's too: the run is done, and no picture is worth its exit status
            warn(f"{loss} cannot be drawn: {error}")
    try:
        picture.write_text(to_svg(simulate(schedule)), encoding="utf-8")
        say(f"schedule: {picture}")
    except OSError as error:
        warn(f"{picture} cannot be drawn: {error}")


def _draw_loss(rows: list[dict[str, Any]], picture: Path, unigram: float | None) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second, for the one rank that draws
    from matplotlib.figure import Figure

    held_out = [(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["loss"] for row in rows], color="#1f77b4", linewidth=1.2, label="training")
    for depth, losses in enumerate(zip(*(row.get("mtp_loss") or () for row in rows)), 1):
        axes.plot(steps, losses, linewidth=0.8, linestyle=":", label=f"training, {depth} further ahead")
    if held_out:
        axes.plot(*zip(*held_out), color="#d62728", marker="o", markersize=4, label="held out")
    if unigram is not None:
        axes.axhline(unigram, color="#7f7f7f", linestyle="--", linewidth=1, label=f"unigram model, {unigram:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(picture)


# -- the console


class Console(rich.console.Console):
    """Rich's console, which would end the process where the reader of a pipe has gone."""

    def on_broken_pipe(self) -> None:
        """Go on without the console."""
        go_on_without(BrokenPipeError())
