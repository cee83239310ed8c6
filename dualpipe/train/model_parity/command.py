"""`dualpipe parity --model`: join the ranks, compare, and print the result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dualpipe.parallel.mesh import mesh_sizes
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule.draw import aligned
from dualpipe.train.config.schema import ParallelConfig
from dualpipe.train.launch.distributed import join_prepared
from dualpipe.train.model_parity.bf16.comparison import Bf16Comparison, Bf16Report, RouteReport
from dualpipe.train.model_parity.bf16.rounding import BOUNDS
from dualpipe.train.model_parity.bf16.routes import RouteCount
from dualpipe.train.model_parity.compare import ModelComparison, Report
from dualpipe.train.model_parity.models.cut_model import ComparedModel
from dualpipe.train.model_parity.models.find_model import find_model
from dualpipe.train.parity_errors import TOLERANCES, print_bf16, worst_of

BF16 = "bf16"  # the value of --dtype


def check_model(
    text: str, layout: ParallelConfig, info: RankInfo, *, dtype: str, tolerance: float | None, worst: int
) -> int:
    """Compare a model as rank `info` and return the exit status: 1 on rank 0 if it differs, else 0. Rank 0 prints.

    Args:
        text: value of `--model`, see `find_model`.
        dtype: "float64", "float32" or "bf16".
        tolerance: largest relative difference; None for the default of the dtype. Not for bf16.
        worst: number of differences to print.

    Raises ValueError, on all ranks, if the model cannot be found or does not fit the layout, and for a tolerance with
    bf16.
    """
    if dtype == BF16 and tolerance is not None:
        raise ValueError(
            f"--tolerance {tolerance:g}: the bounds of bf16 are derived; leave it out, or compare in float32")

    def prepare(settings: dict[str, Any]) -> tuple[ParallelConfig, ComparedModel]:
        settings["--model"] = text
        settings["--dtype"] = dtype
        settings["the layout"] = str(layout)
        mesh_sizes(info.world_size, pp=layout.pp, dp=layout.dp, ep=layout.ep)
        return layout, find_model(text)

    title = f"{text}, {layout}, {dtype}"
    with join_prepared(layout, info, prepare) as (job, model):
        allowed = 0.0
        comparison: Bf16Comparison | ModelComparison
        if dtype == BF16:
            comparison = Bf16Comparison(model, job)
        else:
            allowed = TOLERANCES[dtype] if tolerance is None else tolerance
            comparison = ModelComparison(model, job, dtype_of(dtype), allowed)
        if comparison.note and not job.rank:
            say(comparison.note)
        report = comparison.run()
    if job.rank:
        return 0
    if isinstance(report, Bf16Report):
        return print_bf16_report(report, title, worst)
    return print_report(report, title, allowed, worst)


def print_report(report: Report, title: str, allowed: float, worst: int) -> int:
    """Print the largest differences and the verdict; return the exit status."""
    largest = worst_of(report.differences, lambda diff: diff.difference.relative, worst)
    rows = [(diff.name, stage_text(diff.stage), str(diff.difference.shape), f"{diff.difference.max_abs:.2e}",
             f"{diff.difference.relative:.2e}") for diff in largest]
    say(f"Largest differences from the unpipelined model ({title})")
    say(aligned([("tensor", "stage", "shape", "max abs", "relative"), *rows]).rstrip())
    count = len(report.differences)
    if not report.failed:
        say(f"parity passed: all {count} within {allowed:g} relative")
        return 0
    say(f"parity FAILED: {len(report.failed)} of {count} differ by more than {allowed:g} relative")
    say(f"first: {report.origin}")
    return 1


def print_bf16_report(report: Bf16Report, title: str, worst: int) -> int:
    """Print the largest errors of a comparison in bfloat16, the routes and the verdict; return the exit status."""
    print_bf16(title, report.rounding, report.accumulation, BOUNDS, worst)
    say(describe_routes(report.routes))
    if not report.failures:
        say(f"parity passed: all {len(report.rounding)} within")
        return 0
    say(f"parity FAILED: {'; '.join(report.failures)}")
    if report.origin is not None:
        say(f"first: {report.origin}")
    return 1


def describe_routes(routes: RouteReport) -> str:
    """Return lines about the routes that were replayed, and those that were not."""
    if not routes.unpipelined:
        return ("no routes were recorded: no module calls torch.topk on scores or is a dualpipe.nn.Router; if the "
                "model chooses experts in another way (argmax, sort), choices that rounding changes count as errors: "
                "make its routers call torch.topk, or compare in float64")
    lines = [f"routes of {len(routes.unpipelined)} modules replayed from float64; bfloat16 alone would have changed "
             f"{_total(routes.pipelined.values())} choices pipelined, {_total(routes.unpipelined.values())} "
             "unpipelined"]
    if routes.unreplayed:
        names = ", ".join(routes.unreplayed[:3])
        lines.append(f"routes of {len(routes.unreplayed)} modules were recorded and not replayed, such as {names}: in "
                     "the pipeline they call no torch.topk; choices that rounding changes there count as errors")
    return "\n".join(lines)


def _total(counts: Iterable[RouteCount]) -> RouteCount:
    """Return the sum of the counts."""
    total = RouteCount(0, 0)
    for count in counts:
        total = RouteCount(total.made + count.made, total.changed + count.changed)
    return total


def stage_text(stage: int) -> str:
    """Return the number of a stage as text, "-" for losses."""
    return "-" if stage < 0 else str(stage)

