"""`dualpipe parity`: join the ranks, compare, and print the result."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta

from dualpipe.parallel.mesh import mesh_sizes
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule.draw import aligned
from dualpipe.train.config.model_config import read_own_model_config
from dualpipe.train.config.schema import Config
from dualpipe.train.launch.join import Job, all_ranks_agree, join, open_store, prepare_device, process_groups
from dualpipe.train.parity.compare import Report, compare
from dualpipe.train.parity.errors import (
    BOUND_OF_ONE,
    BOUND_TOGETHER,
    TOLERANCES,
    combine_gradients,
    worst,
    worst_first,
)
from dualpipe.train.parity.models import ComparedModel, ConfigModel, find_model


def check_parity(
    config: Config, info: RankInfo, *, model: str | None, dtype: str, tolerance: float | None, worst: int
) -> int:
    """Compare as rank `info` and return the exit status: 1 on rank 0 if something differs, else 0. Rank 0 prints.

    Args:
        config: of the run; with `model` only its numbers of ranks.
        model: value of `--model`, see `find_model`; None for the model of the configuration.
        dtype: "float64", "float32" or "bf16".
        tolerance: largest relative difference; None for the default of the dtype. Not for bf16.
        worst: number of differences to print.

    Raises ValueError, on all ranks, if the model cannot be found or does not fit the layout, and for a tolerance with
    bf16.
    """
    if dtype == "bf16" and tolerance is not None:
        raise ValueError(
            f"--tolerance {tolerance:g}: the bounds of bf16 are derived; leave it out, or compare in float32")
    allowed = TOLERANCES.get(dtype, 0.0) if tolerance is None else tolerance

    def run(job: Job, compared: ComparedModel, title: str) -> int:
        report = compare(compared, job, dtype_of(dtype), allowed)
        return 0 if job.rank else print_report(report, f"{title}, {dtype}", worst)

    if model is None:
        read_own_model_config(config, "parity of a configuration")
        if config.lora.is_enabled:
            raise ValueError("parity of a configuration compares a model without adapters; leave out [lora]")
        with join(config, info) as (job, resolved):
            parallel = resolved.config.parallel
            return run(job, ConfigModel(resolved), f"{parallel.schedule}, {parallel}")
    layout = config.parallel
    store = open_store(layout, info)
    with all_ranks_agree(store, info, timedelta(seconds=layout.timeout)) as settings:
        settings |= {"--model": model, "--dtype": dtype, "the layout": str(layout)}
        mesh_sizes(info.world_size, pp=layout.pp, dp=layout.dp, ep=layout.ep)
        compared = find_model(model)
        device = prepare_device(layout, info, store, settings)
    with process_groups(layout, info, store, device) as job:
        return run(job, compared, f"{model}, {layout}")


def print_report(report: Report, title: str, num_worst: int) -> int:
    """Print the largest errors and the verdict; return the exit status."""
    if report.note:
        say(report.note)
    print_errors(report, title, num_worst)
    if report.routes is not None:
        print_bounds(report)
        say(report.routes.describe())
    if not report.failures:
        bound = f" {report.errors[0].allowed:g} relative" if report.routes is None else ""
        say(f"parity passed: all {len(report.errors)} within{bound}")
        return 0
    say(f"parity FAILED: {'; '.join(report.failures)}")
    if report.origin:
        say(f"first: {report.origin}")
    return 1


def print_errors(report: Report, title: str, num_worst: int) -> None:
    """Print the largest errors. Names are not wrapped, so that they can be searched for."""
    sums: dict[str, float] = defaultdict(float)
    for error in report.sums:
        sums[error.name] = max(sums[error.name], error.relative)
    columns = ("max abs", "relative") if report.routes is None else ("pipelined", "unpipelined", "accumulation")
    rows = []
    for error in worst_first(report.errors)[:num_worst]:
        row = [error.name, "-" if error.stage < 0 else str(error.stage), str(error.shape)]
        if report.routes is None:
            row += [f"{error.max_abs:.2e}", f"{error.relative:.2e}"]
        else:
            added = f"{sums[error.name]:.2e}" if error.name in sums else "-"
            row += [f"{error.relative:.2e}", f"{error.unpipelined:.2e}", added]
        rows.append(row)
    reference = "differences from the unpipelined model" if report.routes is None else "errors against float64"
    say(f"Largest {reference} ({title})")
    say(aligned([("tensor", "stage", "shape", *columns), *rows]).rstrip())


def print_bounds(report: Report) -> None:
    """Print the largest errors of a comparison in bfloat16 beside their bounds."""
    together = combine_gradients(report.errors)
    largest = worst(report.errors)
    worst_sum = worst(report.sums)
    say(f"error of all gradients together, relative to float64: {together.relative:.2e} pipelined, "
        f"{together.unpipelined:.2e} unpipelined: {together.excess * BOUND_TOGETHER:.2f} times (allowed: "
        f"{BOUND_TOGETHER}); of a single tensor: up to {largest.excess * BOUND_OF_ONE:.2f} times (allowed: "
        f"{BOUND_OF_ONE})")
    say(f"error of accumulation: up to {worst_sum.relative:.1e} (allowed: {worst_sum.allowed:.1e})")
