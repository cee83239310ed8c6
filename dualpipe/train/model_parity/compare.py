"""Comparison of a pipelined step with the unpipelined model, and the search for the first difference.

The boundaries between stages are unknown inside the unpipelined model, so its tensors there cannot be compared. The
search uses other references, each of which rules out a cause:

    weights     the weights of the stages are compared with the unpipelined model's before any step
    sequence    the stages, unsharded and one after the other in one process, are compared with the unpipelined model:
                a difference comes from the split into stages
    actions     the results of each action of the pipeline are compared with the same stage in the sequence. The first
                that differs causes all later ones, as micro-batches do not depend on each other
    micro-batch if all of these are right, a weight gradient is wrong. The step is repeated with the losses of all
                micro-batches but one multiplied by zero: so the contribution of that one has the order, the
                accumulation and the reductions of the whole step
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
from dualpipe.train.model_parity.models.unpipelined import (
    StagesInSequence,
    UnpipelinedStep,
    compare_by_first_name,
    make_batches,
    names_of,
    stop_random_numbers,
    sum_by_first_name,
    tied_names,
    train_whole,
)
from dualpipe.train.parity_errors import Difference, difference, worst_of


class StageDifference(NamedTuple):
    """The difference of a tensor of a stage. stage: -1 for losses; name: in the unpipelined model."""

    stage: int
    name: str
    difference: Difference


class Report(NamedTuple):
    """The result of a comparison, the same on every rank.

    differences: of all tensors; failed: those beyond the tolerance; origin: the first one, None if nothing differs.
    """

    differences: list[StageDifference]
    failed: list[StageDifference]
    origin: Origin | None


class _Place(NamedTuple):
    """A place where the step of a rank differs."""

    order: tuple[int, ...]  # sort key; the first place of all ranks has the smallest
    stage: int
    name: str  # of a parameter; "" if unknown
    relative: float
    where: str
    hint: str = ""
    microbatch: int = 0
    replica: int = 0


_NO_SUSPECTS = Suspects([])


class ModelComparison:
    """A model, unpipelined and in a pipeline, on the same batches. Construction and methods are collective.

    Raises ValueError, on all ranks, if the stages lack parameters of the unpipelined model.

    Attributes:
        note: see `stop_random_numbers`.
    """

    def __init__(self, model: ComparedModel, job: Job, dtype: torch.dtype, tolerance: float) -> None:
        self._model = model
        self._job = job
        self._dtype = dtype
        self._tolerance = tolerance
        self._whole = job.ranks.agree(lambda: model.build_whole(dtype, job.device))
        self._tied = tied_names(self._whole)
        self._batches = job.ranks.agree(lambda: make_batches(model, job.place.replicas, dtype, job.device))
        self.note = job.ranks.agree(lambda: stop_random_numbers(model, self._whole, self._batches[0]))
        self._pipelined = PipelinedModel(model, job, dtype, training=self._whole.training)
        self._rank_batch = self._batches[job.place.replica]
        self._stages_of = self._gather_names()

    def run(self) -> Report:
        """Compare the weights, then a step; search for the first difference if there is one."""
        report = self._report(self._compare_weights())
        if report.failed:
            worst = _worst(report.failed)
            where = f"the weights of stage {worst.stage}, before any step"
            return report._replace(origin=Origin(worst.name, worst.difference.relative, where))
        observer = ActionResults()
        with Recorder.current().observed_by(observer):
            losses = self._pipelined.train(self._rank_batch)
        expected = self._job.ranks.agree(lambda: train_whole(self._model, self._whole, self._batches))
        differences = self._compare_gradients(self._pipelined.gradients(), expected)
        if losses is not None:
            expected_losses = expected.losses[self._job.place.replica].to(losses)
            name = "loss of the micro-batches"
            if self._job.place.replicas > 1:
                name += f" of pipeline {self._job.place.replica}"
            differences.append(StageDifference(-1, name, difference(name, losses, expected_losses)))
        report = self._report(differences)
        if report.failed:
            return report._replace(origin=self._find_origin(report, expected, observer))
        return report

    # -- comparisons

    def _gather_names(self) -> dict[str, list[int]]:
        """Return the numbers of the stages that have each parameter, by its names in the unpipelined model.

        Raises ValueError if no stage has one.
        """
        rank_names = [(name, stage) for stage, name, _ in self._pipelined.parameters()]
        stages_of: dict[str, list[int]] = {}
        for name, stage in sorted(set(chain.from_iterable(self._job.ranks.gather(lambda: rank_names)))):
            for tied in self._tied[name]:
                stages_of.setdefault(tied, []).append(stage)
        all_rank_names = names_of(self._pipelined.stages)
        all_names = set(chain.from_iterable(self._job.ranks.gather(lambda: all_rank_names)))
        all_tied = {tied for name in all_names for tied in self._tied[name]}
        missing = [name for name in self._tied if name not in all_tied]
        if missing:
            raise ValueError(f"no stage has {len(missing)} of the unpipelined model's parameters, such as "
                             f"{missing[0]!r}; cut() must put every parameter into a stage")
        return stages_of

    def _compare_weights(self) -> list[StageDifference]:
        """Compare this rank's weights with those of the unpipelined model."""
        expected = dict(self._whole.named_parameters(remove_duplicate=False))
        values = self._pipelined.values()
        return self._job.ranks.agree(lambda: [_compare(value, expected[value.name].detach(), 0.0) for value in values])

    def _compare_gradients(
        self, gradients: Iterable[StageGradient], expected: UnpipelinedStep
    ) -> list[StageDifference]:
        """Compare gradients of this rank with those of the unpipelined model."""
        floor = self._floor(expected)
        return [_compare(gradient, expected.gradients[gradient.name], floor) for gradient in gradients]

    def _floor(self, expected: UnpipelinedStep) -> float:
        """Return the norm that the norm of a gradient counts as at least.

        An error of one eps of the whole gradient is always allowed, for gradients that are zero up to rounding; see
        `train.parity.compare`.
        """
        norm = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm().item()
        return norm * torch.finfo(self._dtype).eps / self._tolerance

    def _report(self, differences: list[StageDifference]) -> Report:
        """Return the differences of all ranks, without duplicates."""
        if self._job.place.replica:  # pipeline 0 has the same parameters, but other losses
            differences = [diff for diff in differences if diff.stage < 0]
        all_differences = list(chain.from_iterable(self._job.ranks.gather(lambda: differences)))
        failed = [diff for diff in all_differences if self._is_beyond_tolerance(diff.difference)]
        return Report(all_differences, failed, None)

    def _is_beyond_tolerance(self, diff: Difference) -> bool:
        return not diff.relative <= self._tolerance  # True for NaN

    # -- the first place that differs

    def _find_origin(self, report: Report, expected: UnpipelinedStep, observer: ActionResults) -> Origin:
        """Return the first place where the step differs. Collective."""
        sequence = self._job.ranks.agree(self._build_sequence)
        step = sequence.train(self._batches, self._job.place.replica)
        in_sequence = self._job.ranks.gather(lambda: self._first_in_sequence(step, expected))
        in_actions = self._job.ranks.gather(lambda: self._first_action(sequence, observer))
        first = _first_of([*in_sequence, *in_actions])
        if first is None:
            first = _first_of(self._job.ranks.gather(lambda: self._first_loss(report)))
        if first is None:
            first = self._first_weight_gradient()
        if first is None:
            worst = _worst(report.failed)
            where = "no action, when the step is run again: it does not always differ"
            return Origin(worst.name, worst.difference.relative, where)
        if first.name:
            return Origin(first.name, first.relative, first.where, first.hint)
        suspects = self._search_stage(first, sequence) if first.where.startswith("F") else _NO_SUSPECTS
        in_stage = [diff for diff in report.failed if diff.stage == first.stage]
        suspected = [diff for diff in in_stage if diff.name in suspects.names]
        worst = _worst(suspected or in_stage or report.failed)
        return Origin(worst.name, worst.difference.relative, first.where, suspects.hint)

    def _search_stage(self, first: _Place, sequence: StagesInSequence) -> Suspects:
        """Return the parameters of the modules where a forward goes wrong, by names in the unpipelined model.

        Collective. The step is repeated with hooks on the modules of that stage alone: the outputs of all modules may
        not fit in memory.
        """
        rank_stage = next((stage for stage in self._pipelined.stages if stage.number == first.stage), None)
        calls = ModuleCalls(first.stage, nn.Module() if rank_stage is None else rank_stage.module)
        with calls.hooked():
            self._pipelined.train(self._rank_batch)
        reference = sequence.stages[first.stage]
        expected = ModuleCalls(first.stage, reference.module)
        with expected.hooked():
            sequence.train(self._batches, self._job.place.replica, expected.take)

        def find() -> Suspects:
            if rank_stage is None or self._job.place.replica != first.replica:
                return _NO_SUSPECTS
            modules = find_suspects(
                calls.of_microbatch.get(first.microbatch, []), expected.of_microbatch[first.microbatch],
                dict(reference.module.named_modules()), self._tolerance)
            parameters = [name for stage_name, name in reference.names.items()
                          if any(stage_name.startswith(f"{module}.") for module in modules.names)]
            return Suspects(parameters, modules.hint)

        rank_suspects = self._job.ranks.gather(find)
        return next((suspects for suspects in rank_suspects if suspects.names or suspects.hint), _NO_SUSPECTS)

    def _build_sequence(self) -> StagesInSequence:
        """Build all stages in this process, unsharded."""
        count = self._pipelined.schedule.num_stages
        stages = self._model.build_stages(count, range(count), self._dtype, self._job.device, None)
        if not self._whole.training:
            for stage in stages:
                stage.module.eval()
        return StagesInSequence(self._model, stages)

    def _first_in_sequence(self, step: UnpipelinedStep, expected: UnpipelinedStep) -> _Place | None:
        """Return the place where the stages in sequence differ from the unpipelined model, None if nowhere."""
        floor = self._floor(expected)
        gradients = sum_by_first_name(step.gradients, self._tied)
        compared = compare_by_first_name(gradients, expected.gradients, self._tied, floor)
        failed = [diff for diff in compared if self._is_beyond_tolerance(diff)]
        if not failed:
            return None
        # A parameter without a gradient tells more than those whose gradients it changes.
        unused = [diff for diff in failed if diff.name not in gradients]
        (worst,) = worst_of(unused or failed, lambda diff: diff.relative, 1)
        is_wrong = (step.losses - expected.losses).abs() > self._tolerance * expected.losses.abs()
        microbatch = int(is_wrong.any(0).nonzero()[0]) if is_wrong.any() else 0
        stage = self._stages_of[worst.name][0]
        where = (f"stage {stage}, micro-batch {microbatch}, in the stages one after the other, without a pipeline: "
                 "the split into stages changes the result")
        hint = "no stage uses it" if unused else ""
        return _Place((-1, stage), stage, worst.name, worst.relative, where, hint)

    def _first_action(self, sequence: StagesInSequence, observer: ActionResults) -> _Place | None:
        """Return the first action of this rank with other results than the stage in sequence, None if there is none."""
        first: _Place | None = None
        for boundary, results in observer.results.items():
            expected = sequence.boundaries[boundary]
            relative = max((_relative(*pair) for pair in zip(results, expected)), default=0.0)
            if len(results) == len(expected) and relative <= self._tolerance:
                continue
            action = observer.actions[boundary]
            place = _Place(order_of(action), action.stage, "", relative, action.title,
                           microbatch=action.microbatch, replica=self._job.place.replica)
            if first is None or place.order < first.order:
                first = place
        return first

    def _first_loss(self, report: Report) -> _Place | None:
        """Return the loss if it differs although the outputs do not, else None."""
        wrong = [diff for diff in report.failed if diff.stage < 0]
        if not wrong:
            return None
        last = self._pipelined.schedule.num_stages - 1
        where = f"the loss behind stage {last}, whose outputs are right"
        return _Place((0, last), last, wrong[0].name, wrong[0].difference.relative, where)

    def _first_weight_gradient(self) -> _Place | None:
        """Return the first micro-batch with a wrong contribution to a gradient, and the parameter. Collective."""
        for microbatch in range(self._model.num_chunks):
            self._pipelined.train(self._rank_batch, [microbatch])
            expected = train_whole(self._model, self._whole, self._batches, microbatch)
            gradients = self._pipelined.gradients()
            compared = self._compare_gradients(gradients, expected)
            rank_places = [self._gradient_place(gradient, diff, expected, microbatch)
                           for gradient, diff in zip(gradients, compared) if self._is_beyond_tolerance(diff.difference)]
            places = self._job.ranks.gather(lambda bound=rank_places: bound)  # type: ignore[misc]
            first = _first_of(chain.from_iterable(places))
            if first is not None:
                return first
        return None

    def _gradient_place(
        self, gradient: StageGradient, compared: StageDifference, expected: UnpipelinedStep, microbatch: int
    ) -> _Place:
        """Return the place of a weight gradient that differs; backwards run from the last stage to the first."""
        where = self._pipelined.action_of("W", gradient.stage, microbatch)
        hint = self._hint(gradient, expected.gradients[gradient.name])
        order = (-gradient.stage, list(self._tied).index(gradient.name))
        return _Place(order, gradient.stage, gradient.name, compared.difference.relative, where, hint)

    def _hint(self, stage_gradient: StageGradient, expected: Tensor) -> str:
        """Return a likely cause of a gradient that differs, or ""."""
        gradient = stage_gradient.gradient
        stages = sorted(set(self._stages_of[stage_gradient.name]))
        if not gradient.count_nonzero():
            return "the gradient is zero: this micro-batch's part is lost"
        if has_bfloat16_values(gradient) and not has_bfloat16_values(expected):
            return "all its elements are bfloat16 values: it was accumulated or reduced in bfloat16"
        if len(stages) > 1:
            numbers = " and ".join(map(str, stages))
            return (f"tied: stages {numbers} have it, and its gradients must be summed over them; share one Parameter, "
                    "or give both stages tied_parameters()")
        return ""


def _relative(tensor: Tensor, expected: Tensor) -> float:
    """Return the relative distance of a tensor from its reference, infinity for another shape."""
    if tensor.shape != expected.shape:
        return float("inf")
    return difference("", tensor, expected).relative if tensor.numel() else 0.0


def _compare(value: StageGradient, expected: Tensor, floor: float) -> StageDifference:
    """Measure a tensor of a stage. Raises ValueError if its shape differs from that in the unpipelined model."""
    if value.gradient.shape != expected.shape:
        raise ValueError(f"{value.name!r} in stage {value.stage} has shape {list(value.gradient.shape)}, and "
                         f"{list(expected.shape)} in the unpipelined model; parts of a parameter must be DTensors, as "
                         "dualpipe.parallel.shard_experts makes them")
    return StageDifference(value.stage, value.name, difference(value.name, value.gradient, expected, floor))


def _worst(differences: Iterable[StageDifference]) -> StageDifference:
    """Return the largest difference; NaN is the largest."""
    (worst,) = worst_of(differences, lambda diff: diff.difference.relative, 1)
    return worst


def _first_of(places: Iterable[_Place | None]) -> _Place | None:
    """Return the first place, None if there is none."""
    return min((place for place in places if place is not None), key=lambda place: place.order, default=None)

