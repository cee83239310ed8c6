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
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
    """of the whole model, before clipping"""
    lr: float
    """learning rate of this step"""
    tokens_per_second: float
    """of the whole job"""
    tflops_per_rank: float
    """10^12 floating-point operations per second of each rank, in the model's matrix products as they are counted by
    `dualpipe.models.sizes.flops_per_token`; the share of the device's peak is the MFU"""
    memory_bytes: int
    """this rank's: the peak on its CUDA device, or what the process has resident"""
    eval_loss: float | None = None
    """on held-out data after this step; absent where there was no evaluation"""
    load_max_over_mean: float | None = None
    """of the tokens that the global batch gave each expert, in the layer where it is largest: 1 is even. This and what
    follows are absent where the model has no router"""
    dropped: float | None = None
    """tokens without a place at their expert, over all layers: 0, because no expert has a capacity"""
    balance_loss: float | None = None
    """mean over the layers, without its coefficient; absent where that is 0"""
    z_loss: float | None = None
    """as balance_loss"""


class MetricsWriter:
    """Writes `folder`/metrics.jsonl, TensorBoard events and progress; use it as a context manager."""

    def __init__(self, folder: Path, *, total_steps: int, start_step: int = 0, console: Console | None = None) -> None:
        """`start_step`: steps already done. Lines that an earlier run left for later steps are kept in another file."""
        make_folder(folder)
        self._file = _open_lines(folder / METRICS, start_step)
        self._display = _Display(console or Console(highlight=False, soft_wrap=True), total_steps, start_step)
        self._board = None
        missing = {package: cost for package, cost in PICTURES.items() if find_spec(package) is None}
        if missing:
            self.say(f"{', '.join(missing.values())}: pip install {' '.join(missing)} (or 'dualpipe[viz]')")
        if "tensorboard" not in missing:
            from torch.utils.tensorboard import SummaryWriter  # for the one rank that writes

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Record one step, at once and flushed."""
        values = {k: v for k, v in dataclasses.asdict(metrics).items() if v is not None}
        self._file.write(json_line(values))
        self._file.flush()
        for name, value in values.items():
            if self._board is not None and name != "step":
                self._board.add_scalar(name, value, metrics.step)
        self._display.update(metrics)

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        self._display.say(text)

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._display.stop()
        if self._board is not None:
            self._board.close()
        self._file.close()


class _Display:
    """A live progress line on a terminal, one printed line per step elsewhere."""

    def __init__(self, console: Console, total_steps: int, start_step: int) -> None:
        self._console, self._total = console, total_steps
        text = TextColumn("{task.fields[text]}")
        columns = (MofNCompleteColumn(), BarColumn(bar_width=6), text, TimeRemainingColumn(compact=True))
        self._progress = Progress(*columns, console=console) if console.is_terminal else None
        if self._progress is not None:
            self._task = self._progress.add_task("train", total=total_steps, completed=start_step, text="")

    def start(self) -> None:
        if self._progress is not None:
            self._progress.start()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, metrics: StepMetrics) -> None:
        if self._progress is None:
            held_out = "" if metrics.eval_loss is None else f"  held-out loss {metrics.eval_loss:.4f}"
            self.say(f"step {metrics.step}/{self._total}  {describe(metrics)}{held_out}")
            return
        self._progress.update(self._task, completed=metrics.step, text=describe(metrics))
        if metrics.eval_loss is not None:
            self.say(f"step {metrics.step}: loss {metrics.loss:.4f}  held-out loss {metrics.eval_loss:.4f}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)


def make_folder(folder: Path) -> None:
    """Make the output directory; ValueError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output.dir = {str(folder)!r} cannot be made: {error.strerror}; choose another") from error


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


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl`; one that a crash cut short ends the list."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def memory_bytes(device: torch.device) -> int:
    """Peak memory of a CUDA device; on CPU what the process has resident now (its peak where /proc is missing)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        resident = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


def _open_lines(path: Path, start_step: int) -> IO[str]:
    """Open for appending; a file with lines of steps that will now be run is kept too, under another name."""
    earlier = read_metrics(path) if path.exists() else []
    keep = [row for row in earlier if row["step"] <= start_step]
    if path.exists() and len(keep) < len(path.read_bytes().splitlines()):
        shutil.copyfile(path, _unused_name(path))
    temporary = path.with_name(f".{path.name}")  # beside it, so that a crash now loses nothing
    temporary.write_text("".join(map(json_line, keep)), encoding="utf-8")
    os.replace(temporary, path)
    return path.open("a", encoding="utf-8")


def _unused_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate
