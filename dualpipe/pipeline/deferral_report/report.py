"""The report: a rank's deferred share of weight-gradient work by stage, what is not deferred, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dualpipe.pipeline.deferral_report.probe import ParameterWork
from dualpipe.schedule import Costs, Schedule, simulate

ENOUGH = 0.5  # of a rank's weight-gradient work, below which a pipeline warns
_SHOWN = 10  # parameters in a printed report


@dataclass(frozen=True)
class StageWork:
    """The FLOPs of a stage's weight gradients in the first training step, and those of them that can wait for a "W"."""

    stage: int
    flops: int
    deferred_flops: int

    @property
    def share(self) -> float:
        """Return the part that can wait; 1 where there is nothing to do."""
        return self.deferred_flops / self.flops if self.flops else 1.0


@dataclass(frozen=True)
class UndeferredParameter:
    """A parameter whose gradient autograd makes in the backward, in part or whole.

    flops_share: of all weight-gradient work of the rank; 0 where the gradient is no GEMM, which is not counted.
    """

    stage: int
    name: str
    shape: tuple[int, ...]
    flops_share: float
    reason: str


@dataclass(frozen=True)
class DeferralReport:
    """How much of the weight-gradient work of `rank` can wait for a "W", from its first training step.

    stages: in ascending order; parameters: those that are not deferred, the largest work first; schedule: the
    pipeline's, for the number of micro-batches of that step. Work is counted in FLOPs of the GEMMs that make gradients
    of matrices: 2 * rows * elements. `print(report)` shows a table.
    """

    rank: int
    stages: tuple[StageWork, ...]
    parameters: tuple[UndeferredParameter, ...]
    schedule: Schedule

    @classmethod
    def of(cls, rank: int, work: Sequence[ParameterWork], schedule: Schedule) -> DeferralReport:
        """Return the report of what a probe has found."""
        stages = [_stage_work(stage, work) for stage in sorted(schedule.rank_stages(rank))]
        return cls(rank, tuple(stages), tuple(undeferred(work)), schedule)

    @property
    def share(self) -> float:
        """Return the part of the rank's work that can wait; 1 where there is nothing to do."""
        return _total(self.stages).share

    @cached_property
    def bubble(self) -> float:
        """Return the simulated part of all ranks' time that is bubble, with the work deferred that can be.

        A forward costs 1, a whole backward 2, of which all weight gradients are 1. Stages of other ranks are taken to
        defer as much as this rank's do in all.
        """
        stages = {work.stage: _costs(work.share) for work in self.stages}
        costs = Costs(W=self.share, I=2 - self.share, per_stage=stages)
        return simulate(self.schedule, costs).bubble_fraction

    @cached_property
    def bubble_if_all_deferred(self) -> float:
        """Return the same with all weight gradients deferred."""
        return simulate(self.schedule, _costs(1.0)).bubble_fraction

    def __str__(self) -> str:
        lines = [f"weight gradients of rank {self.rank} that can wait for a \"W\": {self.share:.1%} of the FLOPs"]
        lines += [f"  stage {work.stage}: {work.share:.1%}" for work in self.stages]
        if self.parameters:
            lines += _table(self.parameters)
        name, count = self.schedule.name, self.schedule.num_microbatches
        lines.append(f"simulated bubble of {name} (ranks {self.schedule.num_ranks}, micro-batches {count}): "
                     f"{self.bubble:.1%}; with all deferred {self.bubble_if_all_deferred:.1%}")
        return "\n".join(lines)


def shortfall(work: Sequence[ParameterWork]) -> str | None:
    """Return a line that warns of little deferred work; None where at least `ENOUGH` of it is deferred."""
    share = _total([_stage_work(stage, work) for stage in {parameter.stage for parameter in work}]).share
    if share >= ENOUGH:
        return None
    largest = undeferred(work)[0]
    where = f"{largest.name} {largest.shape} of stage {largest.stage}"
    return (f"only {share:.0%} of this rank's weight-gradient work can wait for a \"W\" and fill the bubble; the "
            f"largest parameter that cannot is {where} ({largest.reason}): call defer_weight_grads(stage), or see "
            "pipe.deferral_report()")


def undeferred(work: Iterable[ParameterWork]) -> list[UndeferredParameter]:
    """Return the parameters that have a reason not to be deferred, the largest work first."""
    total = sum(parameter.deferred + parameter.undeferred for parameter in work)
    parameters = [
        UndeferredParameter(each.stage, each.name, each.shape, each.undeferred / total if total else 0.0, each.reason)
        for each in work if each.reason
    ]
    return sorted(parameters, key=lambda each: (-each.flops_share, each.stage, each.name))


def _stage_work(stage: int, work: Iterable[ParameterWork]) -> StageWork:
    parameters = [parameter for parameter in work if parameter.stage == stage]
    deferred = sum(parameter.deferred for parameter in parameters)
    return StageWork(stage, deferred + sum(parameter.undeferred for parameter in parameters), deferred)


def _total(stages: Iterable[StageWork]) -> StageWork:
    """Return the work of several stages as if they were one."""
    stages = list(stages)
    return StageWork(-1, sum(work.flops for work in stages), sum(work.deferred_flops for work in stages))


def _costs(share: float) -> Costs:
    """Return the costs of a stage of which `share` of the weight gradients is deferred."""
    return Costs(F=1.0, B=2.0, W=share, I=2.0 - share)


def _table(parameters: Sequence[UndeferredParameter]) -> list[str]:
    """Return the largest of the parameters as lines of a table."""
    rows = [("not deferred", "shape", "FLOPs", "reason")]
    for each in parameters[:_SHOWN]:
        flops = f"{each.flops_share:.1%}" if each.flops_share else "-"
        rows.append((f"stage {each.stage} {each.name}", " x ".join(map(str, each.shape)), flops, each.reason))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        f"  {name:<{widths[0]}}  {shape:<{widths[1]}}  {flops:>{widths[2]}}  {reason}"
        for name, shape, flops, reason in rows
    ]
    if len(parameters) > _SHOWN:
        lines.append(f"  and {len(parameters) - _SHOWN} more in `parameters`")
    return lines
