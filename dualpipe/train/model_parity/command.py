"""`dualpipe parity --model`: joins the ranks, compares, and prints."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan
from typing import Any

from dualpipe.parallel.mesh import mesh_sizes
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.printing import say
from dualpipe.runtime.rank_process import RankInfo
from dualpipe.schedule.draw import aligned
from dualpipe.train.config.schema import ParallelConfig
from dualpipe.train.launch.distributed import meet
from dualpipe.train.model_parity.compare import ModelComparison, Report, StageDifference
from dualpipe.train.model_parity.cut_model import ComparedModel
from dualpipe.train.model_parity.find_model import find_model
from dualpipe.train.parity import TOLERANCES


def check_model(
    text: str, layout: ParallelConfig, info: RankInfo, *, dtype: str, tolerance: float | None, worst: int
) -> int:
    """Compare as rank `info` the model that `--model text` names; rank 0 prints, and returns 1 where it differs.

    Raises ValueError, on all ranks, for a model that cannot be found or does not fit the layout.
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"--dtype {dtype} is not for --model, whose routes would differ by rounding; compare in "
                         f"{' or '.join(TOLERANCES)}")

    def prepare(settings: dict[str, Any]) -> tuple[ParallelConfig, ComparedModel]:
        settings["--model"] = text
        settings["--dtype"] = dtype
        settings["the layout"] = str(layout)
        mesh_sizes(info.world_size, pp=layout.pp, dp=layout.dp, ep=layout.ep)
        return layout, find_model(text)

    allowed = TOLERANCES[dtype] if tolerance is None else tolerance
    with meet(layout, info, prepare) as (job, model):
        report = ModelComparison(model, job, dtype_of(dtype), allowed).run()
    return 0 if job.rank else print_report(report, f"{text}, {layout}, {dtype}", allowed, worst)


def print_report(report: Report, title: str, allowed: float, worst: int) -> int:
    """Print the largest differences and the verdict; return the exit status."""
    rows = [(each.name, stage_text(each.stage), str(each.difference.shape), f"{each.difference.max_abs:.2e}",
             f"{each.difference.relative:.2e}") for each in _largest(report.differences, worst)]
    say(f"Largest differences from the uncut model ({title})")
    say(aligned([("tensor", "stage", "shape", "max abs", "relative"), *rows]).rstrip())
    count = len(report.differences)
    if not report.failed:
        say(f"parity passed: all {count} within {allowed:g} relative")
        return 0
    say(f"parity FAILED: {len(report.failed)} of {count} differ by more than {allowed:g} relative")
    say(f"first: {report.origin}")
    return 1


def stage_text(stage: int) -> str:
    """Return the number of a stage, nothing for losses."""
    return "-" if stage < 0 else str(stage)


def _largest(differences: Iterable[StageDifference], count: int) -> list[StageDifference]:
    """Return the `count` largest, NaN before all."""
    def size(each: StageDifference) -> float:
        relative = each.difference.relative
        return inf if isnan(relative) else relative

    return sorted(differences, key=size, reverse=True)[:count]
