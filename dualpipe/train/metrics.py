"""Metrics of a run: the record of a step, the writers of the record, and pictures at the end.

The rank that knows the loss has a `MetricsWriter`, which gives each record to the console and to three outputs:
`metrics.jsonl`, TensorBoard and Weights & Biases. All other ranks have `NoMetrics`.

To add a metric: a field of `StepMetrics`, and its value in `Trainer._step_values` (known on the device) or
`Trainer._read` (known on the host).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import rich.console
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from dualpipe.nn.routing.losses import LOSSES
from dualpipe.runtime.device import memory_in_use, peak_memory
from dualpipe.runtime.files import replace_file
from dualpipe.runtime.printing import discard_output, say, warn
from dualpipe.schedule import Schedule, simulate, to_svg

METRICS = "metrics.jsonl"
OPTIONAL_PACKAGES = {  # and the consequence of a missing one
    "tensorboard": "no TensorBoard events",
    "matplotlib": "no picture of the loss",
}


@dataclass(frozen=True)
class StepMetrics:
    """A line of `metrics.jsonl`. Fields that are None are left out of the line."""

    step: int  # completed optimizer steps, from 1
    loss: float  # mean over the tokens of the global batch that count for the loss, in nats
    grad_norm: float  # of the whole model's gradient, before clipping
    lr: float  # of this step
    tokens_per_second: float  # of the whole job
    # 10^12 floating-point operations per second and rank, in the model's GEMMs as counted by
    # `dualpipe.train.config.model_config.flops_per_token`.
    tflops_per_rank: float
    memory_bytes: int  # of this rank: the peak on its CUDA device, or the resident memory of the process on CPU
    mfu: float | None = None  # tflops_per_rank over the device's peak in bf16; None in other dtypes or if unknown
    # Shares of the tokens that came from each of data.sources, in all steps up to this one; None with a single source.
    source_shares: list[float] | None = None
    counted_tokens: int | None = None  # tokens of the global batch that count for the loss; None if all do
    eval_loss: float | None = None  # on validation data after this step; None without an evaluation
    # Multi-token prediction, None without it: loss and eval_loss of each depth, and the mean number of tokens per
    # greedy verification of the drafts, from 1 to 1 + depths (see `train.loss.count_accepted`).
    mtp_loss: list[float] | None = None
    eval_mtp_loss: list[float] | None = None
    acceptance_length: float | None = None
    # Largest over mean number of tokens of an expert in the global batch, in the layer where the ratio is largest: from
    # 1 (all experts have the same number) to experts / top_k (one expert has every token). This and the following are
    # None for a model without routers.
    load_max_over_mean: float | None = None
    dropped: float | None = None  # tokens beyond the capacity of their expert: 0, because capacity is unlimited
    # By name, as in `dualpipe.nn.routing.losses.LOSSES`: means over the layers, without coefficients, of the losses
    # whose coefficients are not 0. In the line they are numbers beside the others.
    router_losses: dict[str, float] | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the record of values by name, where router losses are beside the other values."""
        router_losses = {name: value for name, value in values.items() if name in LOSSES}
        others = {name: value for name, value in values.items() if name not in LOSSES}
        return cls(**others, router_losses=router_losses)

    def line(self) -> dict[str, Any]:
        """Return the values that are not None, by name; router losses are beside the other values."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return values | values.pop("router_losses", {})


class Throughput(NamedTuple):
    """The work of a step, from which its duration gives the speed."""

    tokens: int  # of a step, on all ranks
    ranks: int
    flops_per_token: float  # forward and backward
    peak_tflops: float | None  # of a rank's device, in bf16; None if unknown or in another dtype

    def metrics(self, seconds: float) -> dict[str, float | None]:
        """Return the speed of a step that took `seconds`, by field of `StepMetrics`."""
        tokens_per_second = self.tokens / seconds
        tflops = tokens_per_second * self.flops_per_token / 1e12 / self.ranks
        return {
            "tokens_per_second": tokens_per_second, "tflops_per_rank": tflops,
            "mfu": self.peak_tflops and tflops / self.peak_tflops,
        }


class Output(Protocol):
    """A writer of the records of a run."""

    name: str

    def start(self, step: int) -> None:
        """Begin, or begin again, after a number of completed steps."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write the values of a step, by name."""

    def finish(self) -> None:
        """End after the last step."""


class MetricsWriter:
    """Writes the records of a run to the console, `folder`/metrics.jsonl, TensorBoard and Weights & Biases.

    Use it as a context manager. A failing output never ends the run: it is warned about once, and training continues
    without it.
    """

    def __init__(
        self, folder: Path, *, total_steps: int, start_step: int = 0, console: Console | None = None,
        log_interval: int = 1, print_interval: int = 1, wandb: str = "", settings: Mapping[str, object] | None = None,
    ) -> None:
        """Open all outputs.

        Args:
            start_step: number of completed steps. Lines of later steps, from an earlier run, move to another file.
            log_interval: steps between written steps. Steps with an evaluation and the last step are always written.
            print_interval: steps between printed steps, if the console is not a terminal. Steps that are not written
                are not printed. The first written step, those with an evaluation and the last one are always printed.
            wandb: project at Weights & Biases, or "".
            settings: description of the run for Weights & Biases.
        """
        self._total = total_steps
        self._interval = log_interval
        self._print_interval = print_interval
        self._last_printed: int | None = None  # step
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None  # a live line, on a terminal
        if self._console.is_terminal:
            self._progress = _live_line(self._console, total_steps)
            self._task = self._progress.add_task("train", total=total_steps, completed=start_step, text="")
        missing = {package: cost for package, cost in OPTIONAL_PACKAGES.items() if find_spec(package) is None}
        if missing:
            self.say(f"{', '.join(missing.values())}: pip install {' '.join(missing)} (or 'dualpipe[viz]')")
        self._outputs: list[Output] = [JsonLines(folder / METRICS)]
        if "tensorboard" not in missing:
            self._outputs.append(TensorBoard(folder / "tensorboard"))
        if wandb:
            self._outputs.append(WandbRun(folder, wandb, settings or {}, is_new=start_step == 0))
        self._working: list[Output] = []
        self.go_back(start_step)

    def go_back(self, step: int) -> None:
        """Continue after `step`. Lines of later steps move to another file, as when a run resumes."""
        self._working = list(self._outputs)
        for output in self._outputs:
            with self._optional(output):
                output.start(step)

    def write(self, metrics: StepMetrics) -> None:
        """Write the record of a step and flush. The live line shows every step."""
        step = metrics.step
        has_evaluation = metrics.eval_loss is not None
        is_due = step % self._interval == 0 or step == self._total or has_evaluation
        if is_due:
            values = metrics.line()
            del values["step"]
            for output in list(self._working):  # a copy: `_optional` removes outputs that fail
                with self._optional(output):
                    output.write(step, dict(values))
        # With counter, bar and remaining time, this text fits a terminal of 80 columns.
        text = (f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s  "
                f"grad norm {metrics.grad_norm:.2f}  {metrics.memory_bytes / 2**20:,.0f} MiB")
        evaluation = _evaluation_text(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=text)
            if has_evaluation:
                self.say(f"step {step}: loss {metrics.loss:.4f}{evaluation}")
        elif is_due and self._is_printed(step, has_evaluation=has_evaluation):
            self._last_printed = step
            self.say(f"step {step}/{self._total}  {text}{evaluation}")

    def _is_printed(self, step: int, *, has_evaluation: bool) -> bool:
        """Return True if a written step is also printed on a console without a live line."""
        if has_evaluation or step == self._total or self._last_printed is None:
            return True
        return step // self._print_interval != self._last_printed // self._print_interval

    def say(self, text: str) -> None:
        """Print a line above the live line."""
        say(text, self._console)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        for output in self._outputs:
            with self._optional(output):
                output.finish()

    @contextmanager
    def _optional(self, output: Output) -> Iterator[None]:
        """Warn if the work of an output inside fails, and write no more to it."""
        try:
            yield
        except Exception as error:  # these packages raise errors of many kinds
            if output in self._working:
                self._working.remove(output)
            text = str(error).split("\n")[0] or repr(error)
            warn(f"{output.name} cannot be written: {text}; training goes on without it")


class NoMetrics:
    """The writer of a rank that does not know the loss: does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Do nothing."""

    def go_back(self, step: int) -> None:
        """Do nothing."""

    def write(self, metrics: StepMetrics) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""


def _live_line(console: rich.console.Console, total_steps: int) -> Progress:
    """Return a progress line: the step counter and the metrics; from 80 columns on, also a bar and the time left."""
    steps = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total_steps)) + 1))
    text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, ratio=1))
    if console.width < 80:
        return Progress(steps, text, console=console)
    return Progress(steps, BarColumn(bar_width=6), text, TimeRemainingColumn(compact=True), console=console)


def _evaluation_text(metrics: StepMetrics) -> str:
    """Return the results of a step's evaluation, to append to a line; "" without an evaluation."""
    if metrics.eval_loss is None:
        return ""
    text = f"  validation loss {metrics.eval_loss:.4f}"
    if metrics.eval_mtp_loss is not None:
        text += f" (MTP {', '.join(f'{loss:.4f}' for loss in metrics.eval_mtp_loss)})"
        text += f"  acceptance length {metrics.acceptance_length:.3f}"
    return text


def json_line(values: Mapping[str, object]) -> str:
    """Return a line of valid JSON; numbers that are not finite, which JSON lacks, become null."""
    def clean(value: object) -> object:
        if isinstance(value, list):
            return [clean(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: clean(value) for name, value in values.items()}, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`, without lines that are incomplete or damaged."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]


class JsonLines:
    """Lines of JSON in a file. The file is opened for every line, so it is created again if it was removed."""

    name = METRICS

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_torn = False  # the last line may be incomplete
        self._has_warned = False

    def start(self, step: int) -> None:
        """Keep the lines up to `step`; copy the file first if it has others, or lines that cannot be read."""
        path = self._path
        self._is_torn = False
        self._has_warned = False
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = read_metrics(path) if path.exists() else []
        rows = [row for row in earlier if row["step"] <= step]
        if path.exists() and len(rows) < len(path.read_bytes().splitlines()):
            shutil.copyfile(path, _unused_name(path))
        replace_file(path, "".join(map(json_line, rows)))

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Append a line and flush. The first failure is warned about; the next line is tried nevertheless."""
        line = json_line({"step": step, **values, "time": datetime.now(UTC).isoformat(timespec="milliseconds")})
        if self._is_torn:
            line = "\n" + line
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
            self._is_torn = False
        except OSError as error:
            if not self._has_warned:
                warn(f"{self._path} cannot be written at step {step}: {error.strerror or error}; training goes on, and "
                     "tries again with each line")
            self._is_torn = True
            self._has_warned = True

    def finish(self) -> None:
        """Do nothing: every line is in the file."""


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return `values` with lists flattened: name/1, name/2, ..."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list) and value:
            flat |= {f"{name}/{number}": item for number, item in enumerate(value, 1)}
        else:
            flat[name] = value
    return flat


class TensorBoard:
    """TensorBoard events in a folder.

    A new run renames the folder of an earlier one, because TensorBoard draws one folder as one curve. Torch's
    SummaryWriter is not used: its thread answers a full disk with a traceback.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = Path()

    def start(self, step: int) -> None:
        """Begin a new file of events, which hides later steps of earlier files."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # imported here: only one rank writes

        folder = self._folder
        if not step and folder.is_dir() and any(folder.iterdir()):
            folder.rename(_unused_name(folder))
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._add(file_version="brain.Event:2")
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Add an event with the values of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        tags = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(values).items()]
        self._add(step=step, summary=Summary(value=tags))

    def finish(self) -> None:
        """Do nothing: every event is in the file."""

    def _add(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        with self._path.open("ab") as file:
            RecordWriter(file).write(Event(wall_time=time.time(), **event).SerializeToString())


class WandbRun:
    """The run at Weights & Biases: one for all starts of a run in `folder`.

    W&B drops a row whose step is not above all that it has. So each row also has the training step as a value, which is
    the x-axis of all charts, and rows of steps that are trained once more get W&B's next steps. `folder`/wandb-run.json
    has the id of the run and its next step, which W&B does not tell while it is offline.

    is_new: start a run, instead of going on with that of an earlier start. WANDB_RUN_ID comes first.
    """

    name = "W&B"

    def __init__(self, folder: Path, project: str, settings: Mapping[str, object], *, is_new: bool) -> None:
        self._folder = folder
        self._project = project
        self._settings = settings
        self._file = folder / "wandb-run.json"
        self._is_new = is_new
        self._run: Any = None
        self._offset = 0  # W&B's step minus the training step

    def start(self, step: int) -> None:
        """Start or resume the run after a number of completed steps."""
        import wandb  # imported here: only one rank writes

        record: dict[str, Any] = {}
        if not self._is_new and self._file.exists():
            record = json.loads(self._file.read_text(encoding="utf-8"))
        run_id = os.environ.get("WANDB_RUN_ID") or record.get("id")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")  # seconds for an upload: other ranks wait for this one
        self.finish()
        resume: Any = os.environ.get("WANDB_RESUME", "allow")
        run = wandb.init(project=self._project, dir=str(self._folder), config=dict(self._settings), id=run_id,
                         resume=resume)
        self._run = run
        self._is_new = False
        run.define_metric("*", step_metric="step")
        next_step = step + 1
        if hasattr(run, "step"):  # a stand-in for wandb may lack it
            next_step = max(next_step, run.step, record["next_step"] if run.id == record.get("id") else 0)
        self._offset = next_step - (step + 1)
        self._record(next_step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log the values of a step."""
        self._run.log({"step": step, **scalars(values)}, step=step + self._offset)
        self._record(step + self._offset + 1)

    def _record(self, next_step: int) -> None:
        """Write the file for the next start."""
        replace_file(self._file, json.dumps({"id": self._run.id, "next_step": next_step}) + "\n", flush=False)

    def finish(self) -> None:
        """End the run, if there is one."""
        run = self._run
        self._run = None
        if run is not None:
            run.finish()


def set_aside(path: Path) -> None:
    """Rename the file or folder of an earlier run, if there is one."""
    if path.is_symlink() or path.exists():
        path.rename(_unused_name(path))


def _unused_name(path: Path) -> Path:
    """Return the first of name.1, name.2, ... that does not exist."""
    candidates = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def memory_bytes(device: torch.device) -> int:
    """Return the peak memory of a CUDA device; on CPU the resident memory of the process.

    Without /proc, which has the resident memory, it is the peak of the process.
    """
    return peak_memory(device) if device.type == "cuda" else memory_in_use(device)


# -- pictures


def draw(folder: Path, schedule: Schedule, *, unigram: float | None) -> None:
    """Draw loss.png from the metrics in `folder`, and schedule.svg with unit costs, and print all paths.

    unigram: loss of a unigram model, a horizontal line in the picture; None for no line.
    """
    loss_picture = folder / "loss.png"
    schedule_picture = folder / "schedule.svg"
    board = f" (TensorBoard: {folder / 'tensorboard'})" if find_spec("tensorboard") else ""
    say(f"metrics: {folder / METRICS}{board}")
    if find_spec("matplotlib"):
        try:
            _draw_loss(read_metrics(folder / METRICS), loss_picture, unigram)
            say(f"loss curve: {loss_picture}")
        except Exception as error:  # of any kind: a missing picture must not change the run's exit status
            warn(f"{loss_picture} cannot be drawn: {error}")
    try:
        schedule_picture.write_text(to_svg(simulate(schedule)), encoding="utf-8")
        say(f"schedule: {schedule_picture}")
    except OSError as error:
        warn(f"{schedule_picture} cannot be drawn: {error}")


def _draw_loss(rows: list[dict[str, Any]], picture: Path, unigram: float | None) -> None:
    """Draw training and validation loss over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes 0.5 s, and only one rank draws
    from matplotlib.figure import Figure

    validation = [(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["loss"] for row in rows], color="#1f77b4", linewidth=1.2, label="training")
    for depth, losses in enumerate(zip(*(row.get("mtp_loss") or () for row in rows)), 1):
        axes.plot(steps, losses, linewidth=0.8, linestyle=":", label=f"training, {depth} further ahead")
    if validation:
        axes.plot(*zip(*validation), color="#d62728", marker="o", markersize=4, label="validation")
    if unigram is not None:
        axes.axhline(unigram, color="#7f7f7f", linestyle="--", linewidth=1, label=f"unigram model, {unigram:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(picture)


# -- the console


class Console(rich.console.Console):
    """Rich's console, but it does not exit the process if the reader of its pipe has closed the pipe."""

    def on_broken_pipe(self) -> None:
        """Continue without the console."""
        discard_output(BrokenPipeError())
