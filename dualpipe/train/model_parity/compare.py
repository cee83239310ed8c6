"""The comparison of a pipelined step with the uncut model's, and the search for the place where they part.

Tensors cannot be compared inside of the uncut model, whose boundaries between stages nobody knows. So the search goes
by three references, each of which leaves out one cause:

    weights     the stages' weights are those of the uncut model, before any step
    sequence    the stages, unsharded and one after the other in one process, against the uncut model: the cut
    actions     what each action of the pipeline hands on, against the same stage in the sequence: the first that
                differs is the cause of all behind it, as micro-batches do not depend on each other
    micro-batch where all of these are right, a weight gradient is wrong. The step is run again with the losses of all
                micro-batches but one multiplied by zero, so that each one's part of a gradient is seen in the order,
                with the accumulation and with the reductions of the whole step
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.runtime.recorder import Recorder
from dualpipe.train.launch.distributed import Job
from dualpipe.train.model_parity.inside_stage import ModuleCalls, Suspects, find_suspects
from dualpipe.train.model_parity.models.cut_model import ComparedModel
from dualpipe.train.model_parity.models.origin import Origin, order_of
from dualpipe.train.model_parity.models.pipelined import (
    ActionResults,
    PipelinedModel,
    StageGradient,
    has_bfloat16_values,
)
from dualpipe.train.model_parity.models.uncut import (
    StagesInSequence,
    UncutStep,
    compare_by_first_name,
    make_batches,
    names_of,
    sum_by_first_name,
    tied_names,
    train_whole,
)
from dualpipe.train.parity_errors import Difference, difference, worst_of


class StageDifference(NamedTuple):
    """A compared tensor of a stage. stage: its number, -1 for losses; name: that in the uncut model."""

    stage: int
    name: str
    difference: Difference


class Report(NamedTuple):
    """The result of a comparison, the same on every rank. origin: None where nothing differs."""

    differences: list[StageDifference]
    failed: list[StageDifference]
    origin: Origin | None


class _Place(NamedTuple):
    """A place where a rank differs; the first of all ranks' has the least order."""

    order: tuple[int, ...]
    stage: int
    name: str
    relative: float
    where: str
    hint: str = ""
    microbatch: int = 0
    replica: int = 0


_NOTHING = Suspects([])


class ModelComparison:
    """A model, uncut and in a pipeline, on the same batches. Collective over all ranks, as are all methods.

    Raises ValueError, on all ranks, where the stages lack parameters of the uncut model.
    """

    def __init__(self, model: ComparedModel, job: Job, dtype: torch.dtype, tolerance: float) -> None:
        self._model = model
        self._job = job
        self._dtype = dtype
        self._tolerance = tolerance
        self._whole = job.ranks.agree(lambda: model.build_whole(dtype, job.device))
        self._tied = tied_names(self._whole)
        self._batches = job.ranks.agree(lambda: make_batches(model, job.place.replicas, dtype, job.device))
        self._pipelined = PipelinedModel(model, job, dtype)
        self._own_batch = self._batches[job.place.replica]
        self._stages_of = self._agree_on_names()

    def run(self) -> Report:
        """Compare weights, then a step; where something differs, find the first place."""
        report = self._report(self._compare_weights())
        if report.failed:
            worst = _worst(report.failed)
            where = f"the weights of stage {worst.stage}, before any step"
            return report._replace(origin=Origin(worst.name, worst.difference.relative, where))
        observer = ActionResults()
        with Recorder.current().observed_by(observer):
            losses = self._pipelined.train(self._own_batch)
        expected = self._job.ranks.agree(lambda: train_whole(self._model, self._whole, self._batches))
        differences = self._compare_gradients(self._pipelined.gradients(), expected)
        if losses is not None:
            own = expected.losses[self._job.place.replica].to(losses)
            name = "loss of the micro-batches"
            if self._job.place.replicas > 1:
                name += f" of pipeline {self._job.place.replica}"
            differences.append(StageDifference(-1, name, difference(name, losses, own)))
        report = self._report(differences)
        if report.failed:
            return report._replace(origin=self._find_origin(report, expected, observer))
        return report

    # -- what is compared

    def _agree_on_names(self) -> dict[str, list[int]]:
        """Return the stages that have each parameter; ValueError where no stage has one."""
        own = [(name, stage) for stage, name, _ in self._pipelined.parameters()]
        found: dict[str, list[int]] = {}
        for name, stage in sorted(set(chain.from_iterable(self._job.ranks.gather(lambda: own)))):
            for tied in self._tied[name]:
                found.setdefault(tied, []).append(stage)
        held = names_of(self._pipelined.stages)
        of_all = set(chain.from_iterable(self._job.ranks.gather(lambda: held)))
        has_tied = {tied for name in of_all for tied in self._tied[name]}
        missing = [name for name in self._tied if name not in has_tied]
        if missing:
            raise ValueError(f"no stage has {len(missing)} of the uncut model's parameters, such as {missing[0]!r}; "
                             "cut() must put every parameter into a stage")
        return found

    def _compare_weights(self) -> list[StageDifference]:
        """Return the distances of this rank's weights from the uncut model's."""
        expected = dict(self._whole.named_parameters(remove_duplicate=False))
        values = self._pipelined.values()
        return self._job.ranks.agree(lambda: [_compare(each, expected[each.name].detach(), 0.0) for each in values])

    def _compare_gradients(self, found: Iterable[StageGradient], expected: UncutStep) -> list[StageDifference]:
        """Return the distances of this rank's gradients from the uncut model's."""
        floor = self._floor(expected)
        return [_compare(each, expected.gradients[each.name], floor) for each in found]

    def _floor(self, expected: UncutStep) -> float:
        """Return the norm that a gradient counts as at least.

        As in `train.parity.compare`: a gradient that is zero but for rounding differs by one eps of the whole gradient
        at most, which is let pass.
        """
        norm = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm().item()
        return norm * torch.finfo(self._dtype).eps / self._tolerance

    def _report(self, differences: list[StageDifference]) -> Report:
        """Return the differences of all ranks, each tensor once."""
        if self._job.place.replica:  # pipeline 0 has the same parameters, and not the same losses
            differences = [each for each in differences if each.stage < 0]
        of_all = list(chain.from_iterable(self._job.ranks.gather(lambda: differences)))
        return Report(of_all, [each for each in of_all if self._differs(each.difference)], None)

    def _differs(self, found: Difference) -> bool:
        return not found.relative <= self._tolerance  # NaN differs

    # -- the first place that differs

    def _find_origin(self, report: Report, expected: UncutStep, observer: ActionResults) -> Origin:
        """Return the first place where the step differs. Collective."""
        sequence = self._job.ranks.agree(self._build_sequence)
        step = sequence.train(self._batches, self._job.place.replica)
        cut = self._job.ranks.gather(lambda: self._first_of_the_cut(step, expected))
        action = self._job.ranks.gather(lambda: self._first_action(sequence, observer))
        first = _least([*cut, *action])
        if first is None:
            first = _least([*self._job.ranks.gather(lambda: self._first_loss(report))])
        if first is None:
            first = self._first_weight_gradient()
        if first is None:
            worst = _worst(report.failed)
            where = "no action, when the step is run again: it does not always differ"
            return Origin(worst.name, worst.difference.relative, where)
        if first.name:
            return Origin(first.name, first.relative, first.where, first.hint)
        inside = [each for each in report.failed if each.stage == first.stage]
        suspects = self._look_into_stage(first, sequence) if first.where.startswith("F") else _NOTHING
        suspected = [each for each in inside if each.name in suspects.names]
        worst = _worst(suspected or inside or report.failed)
        return Origin(worst.name, worst.difference.relative, first.where, suspects.hint)

    def _look_into_stage(self, first: _Place, sequence: StagesInSequence) -> Suspects:
        """Return the parameters, by the uncut model's names, of the modules in which a forward goes wrong. Collective.

        The step is run again, with hooks on the modules of the stage: their outputs would not fit in memory for all.
        """
        own = next((stage for stage in self._pipelined.stages if stage.number == first.stage), None)
        calls = ModuleCalls(first.stage, nn.Module() if own is None else own.module)
        with calls.hooked():
            self._pipelined.train(self._own_batch)
        alone = sequence.stages[first.stage]
        expected = ModuleCalls(first.stage, alone.module)
        with expected.hooked():
            sequence.train(self._batches, self._job.place.replica, expected.take)

        def find() -> Suspects:
            if own is None or self._job.place.replica != first.replica:
                return _NOTHING
            found = find_suspects(calls.of_microbatch.get(first.microbatch, []),
                                  expected.of_microbatch[first.microbatch], dict(alone.module.named_modules()),
                                  self._tolerance)
            return Suspects([name for own_name, name in alone.names.items()
                             if any(own_name.startswith(f"{module}.") for module in found.names)], found.hint)

        return next((each for each in self._job.ranks.gather(find) if each.names or each.hint), _NOTHING)

    def _build_sequence(self) -> StagesInSequence:
        """Build all stages, unsharded, in this process."""
        count = self._pipelined.schedule.num_stages
        stages = self._model.build_stages(count, range(count), self._dtype, self._job.device, None)
        return StagesInSequence(self._model, stages)

    def _first_of_the_cut(self, step: UncutStep, expected: UncutStep) -> _Place | None:
        """Return the first parameter of the stages in a sequence that differs from the uncut model's."""
        floor = self._floor(expected)
        found = sum_by_first_name(step.gradients, self._tied)
        compared = compare_by_first_name(found, expected.gradients, self._tied, floor)
        failed = [each for each in compared if self._differs(each)]
        if not failed:
            return None
        # One without any gradient says more than those that are changed by it.
        unused = [each for each in failed if each.name not in found]
        (worst,) = worst_of(unused or failed, lambda each: each.relative, 1)
        losses = (step.losses - expected.losses).abs() > self._tolerance * expected.losses.abs()
        microbatch = int(losses.any(0).nonzero()[0]) if losses.any() else 0
        stage = self._stages_of[worst.name][0]
        where = (f"stage {stage}, micro-batch {microbatch}, in the stages one after the other, without a pipeline: "
                 "the cut computes something else")
        hint = "no stage uses it" if unused else ""
        return _Place((-1, stage), stage, worst.name, worst.relative, where, hint)

    def _first_action(self, sequence: StagesInSequence, observer: ActionResults) -> _Place | None:
        """Return the first of this rank's actions whose results differ from those of the stage in a sequence."""
        first: _Place | None = None
        for boundary, results in observer.results.items():
            expected = sequence.boundaries[boundary]
            relative = max((_relative(*pair) for pair in zip(results, expected)), default=0.0)
            if len(results) == len(expected) and relative <= self._tolerance:
                continue
            action = observer.actions[boundary]
            found = _Place(order_of(action), action.stage, "", relative, action.title,
                           microbatch=action.microbatch, replica=self._job.place.replica)
            if first is None or found.order < first.order:
                first = found
        return first

    def _first_loss(self, report: Report) -> _Place | None:
        """Return the loss, where it differs though outputs do not."""
        wrong = [each for each in report.failed if each.stage < 0]
        if not wrong:
            return None
        last = self._pipelined.schedule.num_stages - 1
        where = f"the loss behind stage {last}, whose outputs are right"
        return _Place((0, last), last, wrong[0].name, wrong[0].difference.relative, where)

    def _first_weight_gradient(self) -> _Place | None:
        """Return the first micro-batch whose part of a gradient is wrong, and the parameter. Collective."""
        for microbatch in range(self._model.num_chunks):
            self._pipelined.train(self._own_batch, [microbatch])
            expected = train_whole(self._model, self._whole, self._batches, microbatch)
            gradients = self._pipelined.gradients()
            compared = self._compare_gradients(gradients, expected)
            own = [self._found_gradient(gradient, each, expected, microbatch)
                   for gradient, each in zip(gradients, compared) if self._differs(each.difference)]
            first = _least(chain.from_iterable(self._job.ranks.gather(lambda found=own: found)))  # type: ignore[misc]
            if first is not None:
                return first
        return None

    def _found_gradient(
        self, gradient: StageGradient, compared: StageDifference, expected: UncutStep, microbatch: int
    ) -> _Place:
        """Return the place of a weight gradient that differs; backwards run from the last stage to the first."""
        where = self._pipelined.action_of("W", gradient.stage, microbatch)
        hint = self._hint(gradient, expected.gradients[gradient.name])
        place = list(self._tied).index(gradient.name)
        order = (-gradient.stage, place)
        return _Place(order, gradient.stage, gradient.name, compared.difference.relative, where, hint)

    def _hint(self, found: StageGradient, expected: Tensor) -> str:
        """Return a likely cause of a gradient that differs, or nothing."""
        gradient = found.gradient
        stages = sorted(set(self._stages_of[found.name]))
        if not gradient.count_nonzero():
            return "the gradient is zero: this micro-batch's part is lost"
        if has_bfloat16_values(gradient) and not has_bfloat16_values(expected):
            return "all its numbers are bfloat16's: it was accumulated or reduced in that"
        if len(stages) > 1:
            numbers = " and ".join(map(str, stages))
            return (f"tied: stages {numbers} have it, and its gradients must be summed over them; share one Parameter, "
                    "or give both stages tied_parameters()")
        return ""


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return the distance of a tensor from its reference, infinite for another shape."""
    if found.shape != expected.shape:
        return float("inf")
    return difference("", found, expected).relative if found.numel() else 0.0


def _compare(found: StageGradient, expected: Tensor, floor: float) -> StageDifference:
    """Measure a tensor of a stage; ValueError where it has not the shape of the uncut model's."""
    if found.gradient.shape != expected.shape:
        raise ValueError(f"{found.name!r} in stage {found.stage} has shape {list(found.gradient.shape)}, and "
                         f"{list(expected.shape)} in the uncut model; parts of a parameter must be DTensors, as "
                         "dualpipe.parallel.shard_experts makes them")
    measured = difference(found.name, found.gradient, expected, floor)
    return StageDifference(found.stage, found.name, measured)


def _worst(found: Iterable[StageDifference]) -> StageDifference:
    """Return the largest difference; NaN is the largest."""
    (worst,) = worst_of(found, lambda each: each.difference.relative, 1)
    return worst


def _least(found: Iterable[_Place | None]) -> _Place | None:
    """Return the first place of all ranks."""
    places = [each for each in found if each is not None]
    return min(places, key=lambda each: each.order, default=None)

