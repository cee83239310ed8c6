"""`dualpipe parity`: join the ranks, compare, and print the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from dualpipe.parallel.mesh import mesh_sizes
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule.draw import aligned
from dualpipe.train.config.model_config import read_own_model_config
from dualpipe.train.config.schema import Config, ParallelConfig
from dualpipe.train.launch.join import Job, all_ranks_agree, join, open_store, prepare_device, process_groups
from dualpipe.train.parity.compare import Measured, RouteReport
from dualpipe.train.parity.errors import (
    BOUND_OF_ONE,
    BOUND_TOGETHER,
    TOLERANCES,
    Error,
    combine_gradients,
    worst,
    worst_of,
)
from dualpipe.train.parity.models import ComparedModel, ConfigModel, find_model
from dualpipe.train.parity.routes import RouteCount
from dualpipe.train.parity.search import Report, compare


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
    joined = _join_config(config, info) if model is None else _join_model(model, config.parallel, info, dtype)
    with joined as (job, compared, title):
        report = compare(compared, job, dtype_of(dtype), allowed)
    return 0 if job.rank else print_report(report, f"{title}, {dtype}", worst)


@contextmanager
def _join_config(config: Config, info: RankInfo) -> Iterator[tuple[Job, ComparedModel, str]]:
    """Join the ranks of a configuration; yield the job, its model and a title."""
    read_own_model_config(config, "parity of a configuration")
    with join(config, info) as (job, resolved):
        parallel = resolved.config.parallel
        yield job, ConfigModel(resolved), f"{parallel.schedule}, {parallel}"


@contextmanager
def _join_model(
    text: str, layout: ParallelConfig, info: RankInfo, dtype: str
) -> Iterator[tuple[Job, ComparedModel, str]]:
    """Join the ranks that compare the model of `--model`; yield the job, the model and a title."""
    store = open_store(layout, info)
    with all_ranks_agree(store, info, timedelta(seconds=layout.timeout)) as settings:
        settings |= {"--model": text, "--dtype": dtype, "the layout": str(layout)}
        mesh_sizes(info.world_size, pp=layout.pp, dp=layout.dp, ep=layout.ep)
        model = find_model(text)
        device = prepare_device(layout, info, store, settings)
    with process_groups(layout, info, store, device) as job:
        yield job, model, f"{text}, {layout}"


def print_report(report: Report, title: str, num_worst: int) -> int:
    """Print the largest errors and the verdict; return the exit status."""
    measured = report.measured
    if report.note:
        say(report.note)
    if measured.routes is None:
        print_errors(measured.errors, title, num_worst)
    else:
        print_bf16_errors(measured, title, num_worst)
        say(describe_routes(measured.routes))
    if not measured.failures:
        bound = f" {measured.errors[0].allowed:g} relative" if measured.routes is None else ""
        say(f"parity passed: all {len(measured.errors)} within{bound}")
        return 0
    say(f"parity FAILED: {'; '.join(measured.failures)}")
    if report.origin is not None:
        say(f"first: {report.origin}")
    return 1


def print_errors(errors: Sequence[Error], title: str, num_worst: int) -> None:
    """Print the largest errors. Names are not wrapped, so that they can be searched for."""
    rows = [(error.name, stage_text(error.stage), str(error.shape), f"{error.max_abs:.2e}", f"{error.relative:.2e}")
            for error in worst_of(errors, num_worst)]
    say(f"Largest differences from the unpipelined model ({title})")
    say(aligned([("tensor", "stage", "shape", "max abs", "relative"), *rows]).rstrip())


def print_bf16_errors(measured: Measured, title: str, num_worst: int) -> None:
    """Print the largest errors of a comparison in bfloat16, and the error of all gradients together."""
    sums: dict[str, float] = {}
    for error in measured.sums:
        sums[error.name] = max(sums.get(error.name, 0.0), error.relative)
    rows = []
    for error in worst_of(measured.errors, num_worst):
        added = f"{sums[error.name]:.2e}" if error.name in sums else "-"
        rows.append((error.name, stage_text(error.stage), str(error.shape), f"{error.relative:.2e}",
                     f"{error.unpipelined:.2e}", added))
    say(f"Largest errors against float64 ({title})")
    say(aligned([("tensor", "stage", "shape", "pipelined", "unpipelined", "accumulation"), *rows]).rstrip())
    together = combine_gradients(measured.errors)
    largest = worst(measured.errors)
    worst_sum = worst(measured.sums)
    say(f"error of all gradients together, relative to float64: {together.relative:.2e} pipelined, "
        f"{together.unpipelined:.2e} unpipelined: {together.excess * BOUND_TOGETHER:.2f} times (allowed: "
        f"{BOUND_TOGETHER}); of a single tensor: up to {largest.excess * BOUND_OF_ONE:.2f} times (allowed: "
        f"{BOUND_OF_ONE})")
    say(f"error of accumulation: up to {worst_sum.relative:.1e} (allowed: {worst_sum.allowed:.1e})")


def describe_routes(routes: RouteReport) -> str:
    """Return lines about the routes that were replayed, and those that were not."""
    if not routes.unpipelined:
        return ("no routes were recorded: no module calls torch.topk on scores or is a dualpipe.nn.Router; if the "
                "model chooses experts in another way (argmax, sort), choices that rounding changes count as errors: "
                "make its routers call torch.topk, or compare in float64")
    pipelined = sum_counts(routes.pipelined.values())
    unpipelined = sum_counts(routes.unpipelined.values())
    lines = [f"routes of {len(routes.unpipelined)} modules replayed from float64; bfloat16 alone would have changed "
             f"{pipelined} choices pipelined, {unpipelined} unpipelined"]
    if routes.unreplayed:
        names = ", ".join(routes.unreplayed[:3])
        lines.append(f"routes of {len(routes.unreplayed)} modules were recorded and not replayed, such as {names}: in "
                     "the pipeline they call no torch.topk; choices that rounding changes there count as errors")
    return "\n".join(lines)


def sum_counts(counts: Iterable[RouteCount]) -> RouteCount:
    """Return the sum of the counts."""
    total = RouteCount()
    for count in counts:
        total = total.plus(count)
    return total


def stage_text(stage: int) -> str:
    """Return the number of a stage as text, "-" for losses."""
    return "-" if stage < 0 else str(stage)
