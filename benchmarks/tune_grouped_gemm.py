"""Tune the tile sizes of kernels/grouped_gemm_tiles.py: time candidates on this GPU and print the table.

For every shape class of the table, most important first:

1. filter   compile every candidate for the architecture; drop those that spill, need too much shared memory or get no
            matrix instructions (no GPU needed: `--offline` stops here and prints the survivors)
2. coarse   check and time the survivors on a few shapes; keep the fastest
3. fine     check and time the fastest and the present entry on every shape of the class

The shapes come from the models in expert_shapes.py. A configuration's rate is the geometric mean over the GEMMs of its
class: forward, gathered forward with and without the activation, and input gradient; or weight gradient written and
added into float32, with rows gathered or not. A class keeps its present entry if time runs out before step 3.

    python benchmarks/tune_grouped_gemm.py [--minutes M] [--classes "row wide" ...] [--save [FOLDER]]
    python benchmarks/tune_grouped_gemm.py --offline [--arch 90 80] [--classes "row wide" ...] [--most N]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from bench_grouped_gemm import Case, cases
from compile_kernels import ARCHITECTURES
from expert_shapes import Layer, Model, every, route
from gemm_candidates import CLASSES, TABLES, ShapeClass, present_entry, source, survivors
from gpu_bench import Row, add_save, print_table, require_gpu, save, time_ms

from dualpipe.kernels import grouped_gemm_tiles
from dualpipe.kernels.grouped_gemm_tiles import GemmConfig, row_shape, weight_shape

LAUNCHERS = import_module("dualpipe.kernels.grouped_gemm")  # the function of that name hides the module
KEPT = 10  # candidates that reach the fine step

# ----------------------------------------------------------------------------------------------------------- launching


class _Everywhere(dict):
    """A table that returns one configuration for every name."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    def __missing__(self, name: str) -> GemmConfig:
        return self.config


@contextmanager
def launching(config: GemmConfig) -> Iterator[None]:
    """Launch every GEMM with `config` instead of the table's entry."""
    tables = {f"{table}_configs": lambda arch: _Everywhere(config) for table in TABLES}
    with patch.multiple(grouped_gemm_tiles, **tables), _launches_anew():
        yield


@contextmanager
def _launches_anew() -> Iterator[None]:
    """Forget cached launches before and after: the tile and kernel of a shape may differ outside of the body."""
    LAUNCHERS.forget_launches()
    try:
        yield
    finally:
        LAUNCHERS.forget_launches()


class CompileOnly:
    """A kernel that compiles instead of being launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.kernel.warmup, grid=grid)


def compile_in_parallel(case: Case, configs: Sequence[GemmConfig]) -> None:
    """Compile all configurations of a case in parallel, because the compiler would take most of the time.

    A failure is ignored here; it repeats, and is reported, in the run.
    """
    from triton import AsyncCompileMode

    instead = {name: CompileOnly(kernel) for name, kernel in kernels().items()}
    with (
        ThreadPoolExecutor() as threads,
        AsyncCompileMode(threads, ignore_errors=True),
        patch.multiple(LAUNCHERS, **instead),
    ):
        for config in configs:
            with suppress(Exception), launching(config):
                case.ours()


def kernels() -> dict[str, Any]:
    """Return the kernels of the launchers by name, without the functions that the kernels call."""
    return {name: value for name, value in vars(LAUNCHERS).items() if name.endswith("_kernel") and _is_jit(value)}


def _is_jit(value: Any) -> bool:
    return hasattr(value, "warmup")


# ------------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Setting:
    model: str
    sizes: Model
    tokens: int
    share: int  # this rank has 1 / share of the experts

    def layer(self, device: torch.device) -> Layer:
        """Route tokens: skewed if all experts are on this rank, balanced otherwise, so that both occur."""
        return route(self.sizes, self.tokens, self.sizes.experts // self.share, self.share == 1, device)


def settings(shape_class: ShapeClass, coarse: bool) -> list[Setting]:
    """Return the settings, the most informative ones first in case the time runs out."""
    if coarse:
        found = every(tokens=shape_class.tokens[:1], share=(1,), model=shape_class.coarse_models)
    else:
        found = every(tokens=shape_class.tokens, share=(1, 8), model=shape_class.models)
    return [Setting(sizes=shape_class.models[s["model"]], **s) for s in found]


def class_of(case: Case) -> str:
    """Return the table entry that `case` is launched with, in the form of `str(ShapeClass)`."""
    m, n, _ = case.dense
    if "weight" in case.name:
        return f"weight {weight_shape(torch.bfloat16, out=m, hidden=n, gathered='gathered' in case.name)}"
    return f"row {row_shape(torch.bfloat16, cols=n)}"


def measure(
    shape_class: ShapeClass, configs: Sequence[GemmConfig], coarse: bool, end: float, device: torch.device
) -> list[Row]:
    """Measure every configuration on every case of the class, case by case, until the time runs out."""
    rows = []
    for setting in settings(shape_class, coarse):
        layer = setting.layer(device)
        for case in cases(setting.sizes, layer, device):
            if class_of(case) != str(shape_class):
                continue
            if time.monotonic() > end:
                return rows
            where = {"model": setting.model, "tokens": setting.tokens, "experts": layer.experts, "product": case.name}
            rows += [where | row for row in measure_case(case, configs, measure_ms=15 if coarse else 40)]
    return rows


def measure_case(case: Case, configs: Sequence[GemmConfig], measure_ms: int) -> Iterator[Row]:
    if torch.cuda.is_available():
        compile_in_parallel(case, configs)
    expected = case.expected()
    for config in configs:
        yield {"config": source(config)} | measure_config(case, config, expected, measure_ms)


def measure_config(case: Case, config: GemmConfig, expected: torch.Tensor, measure_ms: int) -> Row:
    """Check and time one configuration; return its TFLOP/s, or None and the error."""
    try:
        with launching(config):
            case.check(expected)
            ms = time_ms(case.ours, warmup_ms=5, measure_ms=measure_ms)
    except Exception as error:  # a wrong result, or any error of compiler or driver, drops this candidate
        return {"ms": None, "TFLOP/s": None, "error": f"{type(error).__name__}: {error}"[:200]}
    return {"ms": ms, "TFLOP/s": case.flops / ms / 1e9}


# ------------------------------------------------------------------------------------------------------------- choosing


def mean_rates(rows: Iterable[Row]) -> dict[str, float]:
    """Return the geometric mean rate of each configuration that ran on every case, fastest first."""
    rates: dict[str, list[float | None]] = defaultdict(list)
    for row in rows:
        rates[row["config"]].append(row["TFLOP/s"])
    most = max(map(len, rates.values()), default=0)
    complete = {name: values for name, values in rates.items() if None not in values and len(values) == most}
    means = {name: statistics.geometric_mean(values) for name, values in complete.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Tuned:
    """Result of tuning one class. ratio: the chosen entry's rate over the present entry's."""

    shape_class: ShapeClass
    chosen: str
    ratio: float
    cases: int
    rows: list[Row]
    discarded: dict[str, str]


def tune(shape_class: ShapeClass, end: float, arch: int, device: torch.device, pool: Executor) -> Tuned:
    """Run the filter, coarse and fine steps of one class."""
    present = present_entry(shape_class, arch)
    configs, dropped = survivors(shape_class, arch, pool)
    by_source = {source(config): config for config in (present, *configs)}
    step = partial(measure, shape_class, device=device)
    coarse = step(list(by_source.values()), coarse=True, end=end)
    finalists = list(dict.fromkeys([source(present), *list(mean_rates(coarse))[:KEPT]]))
    fine = step([by_source[name] for name in finalists], coarse=False, end=end)
    discarded = {source(config): why for config, why in dropped.items()}
    rows = [{"step": name} | row for name, found in (("coarse", coarse), ("fine", fine)) for row in found]
    return choose(shape_class, source(present), mean_rates(fine), rows, discarded)


def choose(
    shape_class: ShapeClass, present: str, rates: dict[str, float], rows: list[Row], discarded: dict[str, str]
) -> Tuned:
    """Choose the fastest configuration of the sorted `rates`; the present entry if no measurement is complete."""
    chosen = next(iter(rates), present)
    ratio = rates[chosen] / rates.get(present, math.nan) if rates else math.nan
    count = sum(row["step"] == "fine" and row["config"] == chosen for row in rows)
    return Tuned(shape_class, chosen, ratio, count, rows, discarded)


def best_of_each_product(rows: Sequence[Row]) -> list[Row]:
    """Return the best configuration of each GEMM by itself, which shows if GEMMs should have separate entries."""
    products = dict.fromkeys(row["product"].removeprefix("up ").removeprefix("down ") for row in rows)
    best = []
    for name in products:
        rates = mean_rates(row for row in rows if row["product"].endswith(name) and row["step"] == "fine")
        best += [{"product": name, "best": config, "TFLOP/s": rate} for config, rate in list(rates.items())[:1]]
    return best


# -------------------------------------------------------------------------------------------------------- main program


def table(tuned: Sequence[Tuned], arch: int) -> str:
    """Return the Python source of the tuned entries, as in kernels/grouped_gemm_tiles.py."""
    lines = []
    for name, written in TABLES.items():
        lines += [f"{written} = {{", f"    {arch}: {{"]
        for entry in tuned:
            if entry.shape_class.table == name:
                note = f"{entry.ratio:.3f} x the present entry on {entry.cases} cases" if entry.cases else "as before"
                lines.append(f'        "{entry.shape_class.name}": {entry.chosen},  # {note}')
        lines += ["    },", "}"]
    return "\n".join(lines)


def tune_all(args: argparse.Namespace, pool: Executor) -> None:
    device = require_gpu()
    arch = LAUNCHERS.architecture(device)
    torch.manual_seed(0)
    tuned, end = [], time.monotonic()
    total = sum(shape_class.time_share for shape_class in args.classes)
    for shape_class in args.classes:
        end += 60 * args.minutes * shape_class.time_share / total
        tuned.append(tune(shape_class, end, arch, device, pool))
        print(f"{shape_class}: {tuned[-1].chosen}, {tuned[-1].ratio:.3f} x the present entry")
        print_table(best_of_each_product(tuned[-1].rows))
        print(flush=True)
    print(table(tuned, arch))
    if args.save:
        rows = [{"class": str(entry.shape_class)} | row for entry in tuned for row in entry.rows]
        discarded = {str(entry.shape_class): entry.discarded for entry in tuned}
        save("tune_grouped_gemm", rows, args.save, table=table(tuned, arch).splitlines(), discarded=discarded)


def print_survivors(args: argparse.Namespace, pool: Executor) -> None:
    for arch, shape_class in product(args.arch, args.classes):
        kept, dropped = survivors(shape_class, arch, pool, args.most)
        print(f"sm_{arch} {shape_class}: {len(kept)} survive, {len(dropped)} of {len(kept) + len(dropped)} "
              "candidates dropped")
        for config in kept:
            print(f"    {source(config)}")
        for config, why in dropped.items():
            print(f"  - {source(config)}: {why}")
        print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    by_name = {str(shape_class): shape_class for shape_class in CLASSES}
    parser.add_argument("--classes", nargs="+", choices=by_name, default=list(by_name))
    parser.add_argument("--offline", action="store_true", help="only compile the candidates, for every --arch")
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=[90, 80])
    parser.add_argument("--most", type=int, metavar="N", help="offline: only the first N candidates of a class")
    parser.add_argument("--minutes", type=float, default=8.5, help="time budget of all classes together")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that compile")
    add_save(parser, "tune_grouped_gemm")
    args = parser.parse_args()
    args.classes = [by_name[name] for name in args.classes]
    if not args.offline:
        require_gpu()
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        (print_survivors if args.offline else tune_all)(args, pool)


if __name__ == "__main__":
    main()
