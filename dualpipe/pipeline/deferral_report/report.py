"""Deferral report of a rank: deferred share of weight-gradient work by stage, undeferred parameters, and the bubble."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dualpipe.pipeline.deferral_report.probe import ParameterWork
from dualpipe.schedule import Costs, Schedule, simulate

MIN_SHARE = 0.5  # deferred share of a rank's weight-gradient work below which a pipeline warns
_SHOWN = 10  # parameters in a printed report


@dataclass(frozen=True)
class StageWork:
    """FLOPs of a stage's weight gradients in the first training step. deferred_flops: those that can wait for a "W"."""

    stage: int
    flops: int
    deferred_flops: int

    @property
    def share(self) -> float:
        """Return the share of the work that can wait for a "W"; 1 without any work."""
        return self.deferred_flops / self.flops if self.flops else 1.0


@dataclass(frozen=True)
class UndeferredParameter:
    """Parameter whose gradient autograd computes in the backward, in part or as a whole.

    flops_share: share of the rank's weight-gradient work; 0 if the gradient is no GEMM, which is not counted.
    """

    stage: int
    name: str
    shape: tuple[int, ...]
    flops_share: float
    reason: str


@dataclass(frozen=True)
class DeferralReport:
    """Weight-gradient work of a rank in its first training step, and the share that can wait for a "W".

    Work is counted in FLOPs of the GEMMs for gradients of matrices: 2 * rows * elements. `print(report)` shows a table.

    Attributes:
        rank: pipeline rank.
        stages: work by stage, in ascending order.
        parameters: undeferred parameters, the largest work first.
        schedule: schedule of the pipeline for the number of micro-batches of that step.
    """

    rank: int
    stages: tuple[StageWork, ...]
    parameters: tuple[UndeferredParameter, ...]
    schedule: Schedule

    @classmethod
    def of(cls, rank: int, work: Sequence[ParameterWork], schedule: Schedule) -> DeferralReport:
        """Return the report of a rank from the work that a probe has observed."""
        stages = [_stage_work(stage, work) for stage in sorted(schedule.rank_stages(rank))]
        return cls(rank, tuple(stages), tuple(undeferred(work)), schedule)

    @property
    def share(self) -> float:
        """Return the share of the rank's work that can wait for a "W"; 1 without any work."""
        return _total(self.stages).share

    @cached_property
    def bubble(self) -> float:
        """Return the bubble of a simulation, as a share of all ranks' time.

        A forward costs 1, and a whole backward 2, of which all weight gradients are 1. Stages of other ranks are
        assumed to defer the share of this rank.
        """
        stages = {work.stage: _costs(work.share) for work in self.stages}
        costs = Costs(W=self.share, I=2 - self.share, per_stage=stages)
        return simulate(self.schedule, costs).bubble_fraction

    @cached_property
    def bubble_if_all_deferred(self) -> float:
        """Return the same bubble with all weight gradients deferred."""
        return simulate(self.schedule, _costs(1.0)).bubble_fraction

    def __str__(self) -> str:
        """Return the report as a table."""
        lines = [f"weight gradients of rank {self.rank} that can wait for a \"W\": {self.share:.1%} of the FLOPs"]
        lines += [f"  stage {work.stage}: {work.share:.1%}" for work in self.stages]
        if self.parameters:
            lines += _table(self.parameters)
        schedule = self.schedule
        lines.append(f"simulated bubble of {schedule.name} (ranks {schedule.num_ranks}, micro-batches "
                     f"{schedule.num_microbatches}): {self.bubble:.1%}; with all deferred "
                     f"{self.bubble_if_all_deferred:.1%}")
        return "\n".join(lines)


def shortfall(work: Sequence[ParameterWork]) -> str | None:
    """Return the text of a warning of little deferred work; None if at least `MIN_SHARE` of it is deferred."""
    share = _total([_stage_work(stage, work) for stage in {parameter.stage for parameter in work}]).share
    if share >= MIN_SHARE:
        return None
    largest = undeferred(work)[0]
    where = f"{largest.name} {largest.shape} of stage {largest.stage}"
    return (f"only {share:.0%} of this rank's weight-gradient work can wait for a \"W\" and fill the bubble; the "
            f"largest parameter that cannot is {where} ({largest.reason}): call defer_weight_grads(stage), or see "
            "pipe.deferral_report()")


def undeferred(work: Iterable[ParameterWork]) -> list[UndeferredParameter]:
    """Return the undeferred parameters, the largest work first."""
    total = sum(parameter.deferred + parameter.undeferred for parameter in work)
    parameters = [
        UndeferredParameter(
            stage=parameter.stage,
            name=parameter.name,
            shape=parameter.shape,
            flops_share=parameter.undeferred / total if total else 0.0,
            reason=parameter.reason,
        )
        for parameter in work if parameter.reason
    ]
    return sorted(parameters, key=lambda parameter: (-parameter.flops_share, parameter.stage, parameter.name))


def _stage_work(stage: int, work: Iterable[ParameterWork]) -> StageWork:
    """Return the work of one stage."""
    parameters = [parameter for parameter in work if parameter.stage == stage]
    deferred = sum(parameter.deferred for parameter in parameters)
    undeferred = sum(parameter.undeferred for parameter in parameters)
    return StageWork(stage, flops=deferred + undeferred, deferred_flops=deferred)


def _total(stages: Iterable[StageWork]) -> StageWork:
    """Return the total work of several stages."""
    stages = list(stages)
    return StageWork(-1, sum(work.flops for work in stages), sum(work.deferred_flops for work in stages))


def _costs(share: float) -> Costs:
    """Return the costs of a stage of which `share` of the weight gradients is deferred."""
    return Costs(F=1.0, B=2.0, W=share, I=2.0 - share)


def _table(parameters: Sequence[UndeferredParameter]) -> list[str]:
    """Return a table with the largest work, as lines."""
    rows = [("not deferred", "shape", "FLOPs", "reason")]
    for parameter in parameters[:_SHOWN]:
        title = f"stage {parameter.stage} {parameter.name}"
        shape = " x ".join(map(str, parameter.shape))
        flops = f"{parameter.flops_share:.1%}" if parameter.flops_share else "-"
        rows.append((title, shape, flops, parameter.reason))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        f"  {name:<{widths[0]}}  {shape:<{widths[1]}}  {flops:>{widths[2]}}  {reason}"
        for name, shape, flops, reason in rows
    ]
    if len(parameters) > _SHOWN:
        lines.append(f"  and {len(parameters) - _SHOWN} more in `parameters`")
    return lines
