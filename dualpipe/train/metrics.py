"""What a run reports while it goes: a JSON line, TensorBoard scalars and a live line for every step.

Only the rank that knows the loss has a `MetricsWriter`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from dualpipe.device import peak_memory
from dualpipe.files import replace_file
from dualpipe.train.console import Console, say, warn

METRICS = "metrics.jsonl"
PICTURES = {"tensorboard": "no TensorBoard events", "matplotlib": "no picture of the loss"}  # what it costs to lack one


@dataclass(frozen=True)
class StepMetrics:
    """One line of `metrics.jsonl`."""

    step: int
    """optimizer steps done, from 1"""
    loss: float
    """mean over the tokens of the global batch, in nats"""
    grad_norm: float
    """norm of the whole model's gradient, before clipping"""
    lr: float
    """learning rate of this step"""
    tokens_per_second: float
    """the whole job's"""
    tflops_per_rank: float
    """10^12 floating-point operations per second of each rank, in the model's matrix products as they are counted by
    `dualpipe.models.sizes.flops_per_token`"""
    memory_bytes: int
    """this rank's: the peak on its CUDA device, or what the process has resident"""
    mfu: float | None = None
    """tflops_per_rank as a share of the device's peak in bf16; absent in other dtypes and where that is not known"""
    eval_loss: float | None = None
    """on held-out data after this step; absent where there was no evaluation"""
    load_max_over_mean: float | None = None
    """largest over mean of the tokens that the global batch gave each expert, in the layer where it is largest: from 1,
    where all experts have as many, to experts / top_k, where one has every token. This and what follows are absent
    where the model has no router"""
    dropped: float | None = None
    """tokens without a place at their expert, over all layers: 0, because no expert has a capacity"""
    balance_loss: float | None = None
    """mean over the layers, without its coefficient; absent where that is 0"""
    z_loss: float | None = None
    """as balance_loss"""


class MetricsWriter:
    """Writes `folder`/metrics.jsonl, TensorBoard events, W&B and progress; use it as a context manager.

    None of it is worth the run: what cannot be written is said once, and training goes on without it.
    """

    def __init__(
        self, folder: Path, *, total_steps: int, start_step: int = 0, console: Console | None = None,
        log_interval: int = 1, wandb: str = "", settings: Mapping[str, object] | None = None,
    ) -> None:
        """start_step: steps already done. Lines that an earlier run left for later steps are kept in another file.
        log_interval: the steps between those that are written; with an evaluation, and the last, a step always is.
        wandb: the project at Weights & Biases, or nothing; settings: what it is told of the run.
        """
        self._total, self._interval = total_steps, log_interval
        self._display = _Display(console or Console(highlight=False, soft_wrap=True), total_steps, start_step)
        missing = {package: cost for package, cost in PICTURES.items() if find_spec(package) is None}
        if missing:
            self.say(f"{', '.join(missing.values())}: pip install {' '.join(missing)} (or 'dualpipe[viz]')")
        self._outputs: dict[str, _Lines | _Board | _Wandb] = {}
        self._open(METRICS, lambda: _Lines(folder / METRICS, start_step))
        if "tensorboard" not in missing:
            self._open("TensorBoard", lambda: _Board(folder / "tensorboard", start_step))
        if wandb:
            self._open("W&B", lambda: _Wandb(folder, wandb, settings or {}))

    def write(self, metrics: StepMetrics) -> None:
        """Record one step, at once and flushed."""
        step = metrics.step
        due = step % self._interval == 0 or step == self._total or metrics.eval_loss is not None
        if due:
            values = {k: v for k, v in dataclasses.asdict(metrics).items() if v is not None}
            del values["step"]
            for name, output in list(self._outputs.items()):
                self._attempt(name, partial(output.add, step, values))
        self._display.update(metrics, due)

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        self._display.say(text)

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()
        for name, output in list(self._outputs.items()):
            self._attempt(name, output.close)

    def _open(self, name: str, make: Callable[[], _Lines | _Board | _Wandb]) -> None:
        self._attempt(name, lambda: self._outputs.update({name: make()}))

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        """Where it fails, that is said, and this output is left alone from then on."""
        try:
            work()
        except Exception as error:  # whatever these packages raise
            self._outputs.pop(name, None)
            text = str(error).split("\n")[0] or repr(error)
            warn(f"{name} cannot be written: {text}; training goes on without it")


class _Display:
    """A live progress line on a terminal, one printed line per step elsewhere."""

    def __init__(self, console: Console, total_steps: int, start_step: int) -> None:
        self._console, self._total = console, total_steps
        steps = MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total_steps)) + 1))
        text = TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True, ratio=1))
        rest = (BarColumn(bar_width=6), TimeRemainingColumn(compact=True)) if console.width >= 80 else ()
        columns = (steps, *rest[:1], text, *rest[1:])
        self._progress = Progress(*columns, console=console) if console.is_terminal else None
        if self._progress is not None:
            self._task = self._progress.add_task("train", total=total_steps, completed=start_step, text="")

    def start(self) -> None:
        if self._progress is not None:
            self._progress.start()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, metrics: StepMetrics, due: bool) -> None:
        """due: whether the step is written elsewhere too; the live line shows every one."""
        if self._progress is None:
            held_out = "" if metrics.eval_loss is None else f"  held-out loss {metrics.eval_loss:.4f}"
            if due:
                self.say(f"step {metrics.step}/{self._total}  {describe(metrics)}{held_out}")
            return
        self._progress.update(self._task, completed=metrics.step, text=describe(metrics))
        if metrics.eval_loss is not None:
            self.say(f"step {metrics.step}: loss {metrics.loss:.4f}  held-out loss {metrics.eval_loss:.4f}")

    def say(self, text: str) -> None:
        say(text, self._console)


def describe(metrics: StepMetrics) -> str:
    """The step in short: with counter, bar and remaining time it fits a terminal of 80 columns."""
    return (
        f"loss {metrics.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s  grad norm {metrics.grad_norm:.2f}  "
        f"{metrics.memory_bytes / 2**20:,.0f} MiB"
    )


def json_line(values: Mapping[str, object]) -> str:
    """One line of valid JSON: a number that is not finite, which JSON does not have, becomes null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(clean, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`, but for lines that a crash or a full disk cut short, or that are damaged."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and "step" in row]


def memory_bytes(device: torch.device) -> int:
    """Peak memory of a CUDA device; on CPU what the process has resident now (its peak where /proc is missing)."""
    if device.type == "cuda":
        return peak_memory(device)
    try:
        resident = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


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

    def close(self) -> None:
        """Nothing is open."""


class _Board:
    """TensorBoard's events. A new run gets the folder for itself: all that is in one is drawn as one curve.

    Written here and not by torch's SummaryWriter, whose thread meets a full disk with a traceback of its own.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # for the one rank that writes
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter
        if not start_step and folder.is_dir() and any(folder.iterdir()):
            folder.rename(_unused_name(folder))
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._write(file_version="brain.Event:2")
        self._write(step=start_step + 1, session_log=SessionLog(status=SessionLog.START))  # hides what came later

    def add(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        """Nothing is open."""

    def _write(self, **event: Any) -> None:
        with self._path.open("ab") as file:
            self._record_writer(file).write(self._event(wall_time=time.time(), **event).SerializeToString())


class _Wandb:
    """A run at Weights & Biases, or, with WANDB_MODE=offline, in the folder."""

    def __init__(self, folder: Path, project: str, settings: Mapping[str, object]) -> None:
        import wandb

        self._run = wandb.init(project=project, dir=str(folder), config=dict(settings))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _unused_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate
