"""Shared parts of the benchmarks: main program, median times, the machine's rates, checks, goals, results.

A benchmark is a list of settings, a function that measures one setting on a `Machine` and yields rows, and the goals
for the rows. Exit status: 0 if every goal is met or nothing could be measured, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualpipe.pipeline import executor

RESULTS = Path(__file__).parent / "results"
WORST_ROW = 5  # tolerance of the worst row, over that of the whole tensor
SHOWN = 12  # listed rows that miss a goal; the JSON has all
CHUNK = 2**26  # elements compared at a time: 0.5 GB in float64

Row = dict[str, Any]

# ------------------------------------------------------------------------------------------------------- main program


@dataclass(frozen=True)
class Machine:
    """The device and its measured rates: a copy's bytes read and written, and a dense bfloat16 GEMM."""

    device: torch.device
    copy_gb_per_s: float
    dense_tflops: float


@dataclass(frozen=True)
class Goal:
    """A goal: `column` is at least `minimum` in every row for which `applies` is True."""

    text: str
    column: str
    minimum: float
    applies: Callable[[Row], bool] = lambda row: True

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows that the goal applies to."""
        return [row for row in rows if row.get(self.column) is not None and self.applies(row)]

    def missed(self, rows: Iterable[Row]) -> list[Row]:
        return [row for row in self.rows(rows) if not row[self.column] >= self.minimum]


@dataclass(frozen=True)
class Bench:
    """Definition of a benchmark: its settings, the function that measures one of them, and its goals.

    settings: keyword arguments of `measure`, each with "model" and "tokens"; quick: values that select a few of them.
    """

    doc: str
    name: str
    settings: Sequence[Row]
    quick: Row
    measure: Callable[..., Iterable[Row]]
    goals: Sequence[Goal]


@dataclass
class Outcome:
    rows: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)


def run_bench(bench: Bench) -> int:
    """Run the main program of a kernel's benchmark; return the exit status."""
    args = parse(bench)
    device = require_gpu()
    torch.manual_seed(0)
    machine = Machine(device, copy_gb_per_s(device), dense_tflops(device))
    rates = {"copy_gb_per_s": machine.copy_gb_per_s, "dense_tflops": machine.dense_tflops}
    print(f"{torch.cuda.get_device_name()}: a copy moves {machine.copy_gb_per_s:.0f} GB/s, a dense product of 8192^3 "
          f"runs at {machine.dense_tflops:.0f} TFLOP/s", flush=True)
    outcome = run_settings(bench, chosen(bench, args), machine, args.minutes)
    if args.save:
        saved = {"failures": outcome.failures, "skipped": outcome.skipped}
        save(bench.name, outcome.rows, args.save, **rates, **saved)
    return report(bench.goals, outcome)


def parse(bench: Bench) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=bench.doc.splitlines()[0])
    for name in bench.settings[0]:
        values = list(dict.fromkeys(setting[name] for setting in bench.settings))
        parser.add_argument(f"--{name}", type=type(values[0]), nargs="+", default=values, choices=values)
    parser.add_argument("--quick", action="store_true", help=f"only {describe(bench.quick)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no setting after so long")
    add_save(parser, bench.name)
    return parser.parse_args()


def add_save(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, metavar="FOLDER",
                        help=f"write {name}.json there, without a folder under benchmarks/results/")


def chosen(bench: Bench, args: argparse.Namespace) -> list[Row]:
    """Return the settings that the command line selects."""
    wanted = bench.quick.items() if args.quick else ()
    return [
        setting
        for setting in bench.settings
        if all(value in getattr(args, name) for name, value in setting.items())
        and all(setting[name] == value for name, value in wanted)
    ]


def run_settings(bench: Bench, settings: Sequence[Row], machine: Machine, minutes: float) -> Outcome:
    """Run the settings one after the other; a failure, or a lack of memory, does not stop the next ones."""
    outcome, end = Outcome(), time.monotonic() + 60 * minutes
    for at, setting in enumerate(settings):
        if time.monotonic() > end:
            outcome.skipped = list(settings[at:])
            break
        before = len(outcome.rows)
        try:
            for row in bench.measure(machine, **setting):
                outcome.rows.append(setting | row)
        except RuntimeError as error:
            outcome.failures.append(setting | {"error": str(error)})
        print_table(outcome.rows[before:])
        print(flush=True)
    return outcome


def report(goals: Sequence[Goal], outcome: Outcome) -> int:
    """Print which goals are met and the rows that miss one; return 1 if a goal is missed or a setting failed."""
    met = [report_goal(goal, outcome.rows) for goal in goals]
    for failure in outcome.failures:
        print(f"FAILED: {describe(failure)}")
    if outcome.skipped:
        print(f"not measured for lack of time: {len(outcome.skipped)} settings, from {describe(outcome.skipped[0])}")
    return 0 if all(met) and not outcome.failures else 1


def report_goal(goal: Goal, rows: Sequence[Row]) -> bool:
    about, missed = goal.rows(rows), goal.missed(rows)
    verdict = f"MISSED on {len(missed)} of {len(about)} rows" if missed else f"met on all {len(about)} rows"
    print(f"goal: {goal.text}: {verdict if about else 'nothing of this was measured'}")
    for row in sorted(missed, key=lambda row: row[goal.column])[:SHOWN]:
        print(f"    {row[goal.column]:.3g} {describe(row)}")
    if len(missed) > SHOWN:
        print(f"    and {len(missed) - SHOWN} more")
    return not missed


def describe(row: Row) -> str:
    """Describe a row by every field that is not a measured float."""
    return ", ".join(f"{name} {value}" for name, value in row.items() if not isinstance(value, float))


def require_gpu() -> torch.device:
    """Return the CUDA device; without one, print so and end the process with status 0."""
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: needs a CUDA device, and there is none here; nothing was measured")
        sys.exit(0)
    return torch.device("cuda")


# ----------------------------------------------------------------------------------------------------------- measuring


def time_ms(fn: Callable[[], Any], *, warmup_ms: int = 25, measure_ms: int = 100) -> float:
    """Return the median milliseconds of a call, flushing L2 before each; without a GPU, by the host's clock."""
    if not torch.cuda.is_available():
        return statistics.median(_host_ms(fn) for _ in range(3))
    from triton.testing import do_bench

    return do_bench(fn, warmup=warmup_ms, rep=measure_ms, return_mode="median")


def _host_ms(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return 1000 * (time.perf_counter() - start)


def copy_gb_per_s(device: torch.device, gib: float = 2.0) -> float:
    """Return the copy bandwidth, bytes read and written in 1e9 a second: the bound of memory-bound kernels."""
    source = torch.randn(int(gib * 2**30) // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / time_ms(lambda: target.copy_(source)) / 1e6


def dense_tflops(device: torch.device, size: int = 8192) -> float:
    """Return the TFLOP/s of a large dense GEMM."""
    return 2 * size**3 / dense_ms([(size, size, size)], device) / 1e9


def dense_ms(shapes: Sequence[tuple[int, int, int]], device: torch.device) -> float:
    """Return the total milliseconds of dense bfloat16 GEMMs of random (m, k) and (k, n), given as (m, n, k)."""
    total = 0.0
    for m, n, k in shapes:
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        total += time_ms(lambda a=a, b=b: torch.mm(a, b.t()))
    return total


class Spans:
    """Timer for named spans of work: by events on the compute stream, on CPU by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._open: set[str] = set()
        self._spans: list[tuple[str, Callable[[], float]]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body as one span; a span inside of another of the same name counts as part of it."""
        if name in self._open:
            yield
            return
        start = self._now()
        self._open.add(name)
        try:
            yield
        finally:
            self._open.remove(name)
            self._spans.append((name, partial(self._ms, start, self._now())))

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call in a span."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return call(*args, **kwargs)

        return timed

    def take(self) -> list[tuple[str, float]]:
        """Wait for the device; return and clear the (name, milliseconds) of all spans, in the order of their ends."""
        spans, self._spans = self._spans, []
        return [(name, ms()) for name, ms in spans]

    def of_actions(self, span: Callable[[str], AbstractContextManager]) -> None:
        """Make every pipeline of this process run its instructions within `span(name)`."""
        executor.annotation = lambda device: span  # the hook that names the ranges of a profile

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self._on_cuda else 1000 * (end - start)


def peak_gb(fn: Callable[[], Any], device: torch.device) -> float | None:
    """Return the peak GB that a call adds to the allocated memory; None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function by `torch.compile` for static shapes, after a reset of the compiler.

    Without the reset, the function would silently run eagerly after eight shapes. Without a GPU, return the function
    itself, because its times do not count there.
    """
    if not torch.cuda.is_available():
        return function
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


# ------------------------------------------------------------------------------------------------------------ checking


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new tensors with NaN, or the largest integer, so that unwritten results show."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(action="ignore"):  # about operations that have no deterministic version
        torch.use_deterministic_algorithms(True, warn_only=True)  # this fills new memory
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def relative_errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return ||actual - expected|| / ||expected|| of the whole and of the worst row, in float64, some rows at a time.

    A row whose norm is below the root mean square of all row norms is divided by that root mean square instead.
    """
    if actual.shape != expected.shape:
        raise RuntimeError(f"a result has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    shape = (-1, expected.shape[-1]) if expected.dim() > 1 else (1, -1)
    actual, expected = actual.detach().reshape(shape), expected.detach().reshape(shape)
    step = max(1, CHUNK // max(1, expected.shape[1]))
    differences, norms = [], []
    for a, e in zip(actual.split(step), expected.split(step)):
        differences.append((a.double() - e.double()).square().sum(1))
        norms.append(e.double().square().sum(1))
    difference, norm = torch.cat(differences), torch.cat(norms)
    worst = (difference / norm.clamp(min=max(float(norm.mean()), 1e-300))).max()
    return float(difference.sum() / norm.sum().clamp(min=1e-300)) ** 0.5, float(worst) ** 0.5


def check_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise RuntimeError if a kernel's result is wrong, which ends its measurement: a fast wrong result is no result.

    The worst row has a limit of its own, because one wrong row of many would not show in the error of the whole.
    """
    error, worst = relative_errors(actual, expected)
    if not (error <= tolerance and worst <= WORST_ROW * tolerance):  # NaN too
        raise RuntimeError(f"{name}: relative error {error:.3g}, of the worst row {worst:.3g}, exceeds {tolerance:.3g} "
                           f"or {WORST_ROW} times that; not timed")


# ------------------------------------------------------------------------------------------------------------- results


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows as a table; floats have at least three significant digits."""
    if not rows:
        return
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(names)]
    for line in (names, *cells):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))


def save(name: str, rows: Sequence[Row], folder: Path = RESULTS, **facts: Any) -> Path:
    """Write `rows` to <folder>/<name>.json, with date, machine and versions."""
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_device_facts(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        **facts,
        "rows": list(rows),
    }
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"saved {path}")
    return path


def _device_facts() -> Row:
    if not torch.cuda.is_available():
        return {"device": "cpu", "cpus": os.cpu_count(), "machine": platform.platform()}
    properties = torch.cuda.get_device_properties(0)
    facts = {"device": properties.name, "multiprocessors": properties.multi_processor_count}
    return facts | {"cuda": torch.version.cuda}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
