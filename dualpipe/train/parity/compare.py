"""Comparison of a pipelined step with the unpipelined model, in float64, float32 or bfloat16.

In float64 and float32 the unpipelined model of the same dtype is the reference. In bfloat16 the reference is a float64
model with weights rounded to bfloat16, whose routes all models replay; the errors of the unpipelined bfloat16 model
bound those of the pipeline. Replaying would hide a router that chooses wrongly, so the choices that the models would
have made differently are counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.runtime.recorder import Recorder
from dualpipe.train.launch.join import Job
from dualpipe.train.parity.errors import (
    SMALL,
    Error,
    MicrobatchSums,
    difference,
    has_bfloat16_values,
    norm_of,
    rounding,
    rounding_failures,
    smallest_error,
    worst,
)
from dualpipe.train.parity.models import BF16, ComparedModel, copy_parameters
from dualpipe.train.parity.routes import ModuleNames, Replay, RouteCount, Routes
from dualpipe.train.parity.steps import (
    OutputDtypes,
    StagesInPipeline,
    Step,
    UnpipelinedModel,
    first_names,
    make_batches,
    stop_random_numbers,
)

# A module of the pipeline may change twice as many choices as in the unpipelined model, and this many (or 1%) more.
MORE_CHANGED = 8
LOSS = "loss of the micro-batches"
LOST = "the gradient is zero: it is lost, or no stage uses the parameter"


class References(NamedTuple):
    """A step of the unpipelined model. rounded: in bfloat16, if `exact` is in float64 for that reason; else None."""

    exact: Step
    rounded: Step | None


class RouteReport(NamedTuple):
    """The choices of all modules, by name.

    unpipelined, pipelined: choices in the two models. unreplayed: modules that made no choice in the pipeline.
    """

    unpipelined: dict[str, RouteCount]
    pipelined: dict[str, RouteCount]
    unreplayed: list[str]

    def failures(self) -> list[str]:
        """Return a text about the first module that changes more choices than rounding explains, if there is one."""
        for name, count in self.pipelined.items():
            unpipelined = self.unpipelined[name]
            expected = unpipelined.changed / unpipelined.made * count.made
            if count.changed > 2 * expected + max(MORE_CHANGED, count.made / 100):
                return [f"{name} would choose {count} experts differently than in float64, and {unpipelined} in the "
                        "unpipelined model"]
        return []


class Measured(NamedTuple):
    """The errors of a step on all ranks, the same on every rank.

    errors: of gradients and losses, or of the weights if they differ before any step. sums: of the sums over
    micro-batches. routes: those replayed; None in float64 and float32. failures: texts about exceeded bounds.
    """

    errors: list[Error]
    sums: list[Error]
    routes: RouteReport | None
    failures: list[str]
    are_weights: bool = False


class Comparison:
    """A model, unpipelined and in a pipeline, on the same batches. Construction and methods are collective.

    Attributes:
        note: see `stop_random_numbers`.
        tolerance: largest relative error in float64 and float32.
        exact, rounded: the unpipelined model; `rounded` in bfloat16, if `exact` is in float64 for that reason.

    Raises ValueError, on all ranks, if the stages lack parameters of the unpipelined model.
    """

    def __init__(self, model: ComparedModel, job: Job, dtype: torch.dtype, tolerance: float) -> None:
        self.model = model
        self.job = job
        self.is_bf16 = dtype is BF16
        self.tolerance = 0.0 if self.is_bf16 else tolerance
        self._dtype = dtype
        whole = job.ranks.agree(lambda: model.build_whole(dtype, job.device))
        self._batches = job.ranks.agree(lambda: make_batches(model, job.place.batch_shards, dtype, job.device))
        self.note = job.ranks.agree(lambda: stop_random_numbers(model, whole, self._batches[0]))
        self._whole = whole
        self._first = first_names(whole)
        self._names = ModuleNames(whole, self._first)
        self._exact_whole = job.ranks.agree(self._build_exact) if self.is_bf16 else whole
        self.exact = self._unpipelined(self._exact_whole, torch.float64 if self.is_bf16 else dtype)
        self.rounded = self._unpipelined(whole, dtype) if self.is_bf16 else None
        self._routes = Routes()
        self._rank_routes = self._routes  # of the tokens of this context-parallel rank
        self.pipeline = StagesInPipeline(
            model, job, dtype, self._batches, self._names, self._first, training=whole.training)
        self._stages_of = self._gather_stages()
        self._outputs = OutputDtypes()

    def run(self) -> Measured:
        """Compare the weights, then a step, and in bfloat16 its gradients with the sums over micro-batches."""
        weights = self._compare_weights()
        if any(error.is_wrong for error in weights):
            return Measured(weights, [], None, [self._count_wrong(weights)], are_weights=True)
        references, unpipelined_replay = self._first_references()
        replay = self._replay(self._rank_routes)
        with Recorder.current().observed_by(self._outputs):
            losses = self.pipeline.train(chooser=replay)
        self.job.ranks.agree(self._check_dtypes)
        rank_errors = self.measure_gradients(references) + self._measure_losses(losses, references)
        errors = list(chain.from_iterable(self.job.ranks.gather(lambda: rank_errors)))
        if not self.is_bf16:
            wrong = any(error.is_wrong for error in errors)
            return Measured(errors, [], None, [self._count_wrong(errors)] if wrong else [])
        assert replay is not None, "bfloat16 replays"
        sums = self.measure_sums(range(self.model.num_chunks))
        routes = self._count_routes(unpipelined_replay, replay)
        failures = rounding_failures(errors)
        largest = worst(sums)
        if largest.is_wrong:
            failures.append(f"{largest.name} is not the sum of its micro-batches' gradients")
        return Measured(errors, sums, routes, failures + routes.failures())

    # -- steps

    def train(self, counted: Collection[int], *, with_router_losses: bool = True) -> None:
        """Run a step of the pipeline. counted: see `StagesInPipeline.train`."""
        replay = self._replay(self._rank_routes)
        self.pipeline.train(counted, replay, with_router_losses=with_router_losses)

    def train_unpipelined(self, counted: Collection[int]) -> References:
        """Run a step of the unpipelined model. counted: see `UnpipelinedModel.train`."""
        exact = self.exact.train(counted, self._replay(self._routes))
        rounded = None if self.rounded is None else self.rounded.train(counted, self._replay(self._routes))
        return References(exact, rounded)

    def _first_references(self) -> tuple[References, Replay]:
        """Run the first step of the unpipelined model, and in bfloat16 record and replay its routes."""
        agree = self.job.ranks.agree
        replay = Replay(self._routes)
        rounded = self.rounded
        if rounded is None:
            return References(agree(self.exact.train), None), replay
        exact_step = agree(lambda: self.exact.train(chooser=self._routes))
        rounded_step = agree(lambda: rounded.train(chooser=replay))
        columns = self.pipeline.columns
        if columns is not None:
            self._rank_routes = self._routes.of_columns(columns, self._batches[0].inputs[0].shape[1])
        return References(exact_step, rounded_step), replay

    def _replay(self, routes: Routes) -> Replay | None:
        return Replay(routes) if self.is_bf16 else None

    # -- errors

    def measure_gradients(self, references: References) -> list[Error]:
        """Return the errors of this rank's gradients. [] outside of pipeline 0: the others have the same gradients."""
        gradients = self.pipeline.gradients()
        if self.job.place.replica:
            return []
        floor = self._gradient_floor(references)
        exact, rounded = references
        errors = []
        for stage, name, gradient in gradients:
            expected = exact.gradients[name]
            unpipelined = None if rounded is None else rounded.gradients[name]
            _check_shape(stage, name, gradient, expected)
            error = self._measure(name, gradient, expected, unpipelined, floor)
            if error.is_wrong:
                reference = expected if unpipelined is None else unpipelined
                error = error._replace(hint=self._hint(gradient, reference, error))
            errors.append(error._replace(stage=stage))
        return errors

    def measure_sums(self, numbers: Collection[int]) -> list[Error]:
        """Compare the gradients of a step over some micro-batches with the sums over each alone, on all ranks.

        Without the losses of routers, which a step without its other micro-batches has too.
        """
        replicas = self.job.place.replicas
        sums = MicrobatchSums()
        for number in numbers:
            self.train([number], with_router_losses=False)
            sums.add(self.pipeline.gradients())
        self.train(numbers, with_router_losses=False)
        num_additions = self.model.num_chunks + 2 * replicas  # one per micro-batch, and two per replica
        rank_errors = sums.measure(self.pipeline.gradients(), num_additions,
                                   lambda name: self.model.gradient_dtype(name, replicas))
        if self.job.place.replica:
            rank_errors = []
        return list(chain.from_iterable(self.job.ranks.gather(lambda: rank_errors)))

    def _gradient_floor(self, references: References) -> float:
        """Return the norm that the norm of a gradient counts as at least; in bfloat16, see `smallest_error`.

        Some gradients are zero up to rounding, such as a router's with one expert per token and norm_topk_prob: their
        terms cancel, and the rest depends on the order of summation. Measured: up to 0.06 eps of the norm of the whole
        gradient, in float32 and in float64 (4 to 8 layers, hidden size 16 to 256). So an error of one eps of that norm,
        2e-16 or 1e-7 relative to it, is always allowed; a larger error is detected in any tensor.
        """
        exact, rounded = references
        if rounded is None:
            return norm_of(exact.gradients.values()) * torch.finfo(self._dtype).eps / self.tolerance
        return smallest_error(rounded.gradients, exact.gradients)

    def _measure(self, name: str, value: Tensor, exact: Tensor, rounded: Tensor | None, floor: float) -> Error:
        """Measure a tensor of the pipeline. floor: see `_gradient_floor`."""
        if rounded is None:
            return difference(name, value, exact, floor, allowed=self.tolerance)
        if value.numel() < SMALL:
            return rounding(name, value, rounded, exact, floor)
        return rounding(name, value, rounded, exact)

    def _measure_losses(self, losses: Tensor | None, references: References) -> list[Error]:
        """Return the errors of the losses that this rank has: those of its pipeline, and on rank 0 the routers'."""
        place = self.job.place
        title = f"{LOSS} of pipeline {place.replica}" if place.replicas > 1 else LOSS
        values = dict(self.pipeline.router_losses()) if not self.job.rank else {}
        if losses is not None:
            values[title] = losses.cpu()
        floor = self._gradient_floor(references)
        expected, unpipelined = (
            {} if step is None else {title: step.losses[place.batch_shard], **step.router_losses}
            for step in references)
        return [self._measure(name, value, expected[name], unpipelined.get(name), floor)
                for name, value in values.items()]

    def _compare_weights(self) -> list[Error]:
        """Compare the weights of all ranks with those of the unpipelined model; [] if formats make them differ."""
        if self.model.has_dtype_rules:
            return []
        expected = dict(self._whole.named_parameters(remove_duplicate=False))
        values = self.pipeline.values()

        def compare() -> list[Error]:
            errors = []
            for stage, name, value in values:
                weight = expected[name].detach()
                _check_shape(stage, name, value, weight)
                errors.append(difference(name, value.to(weight.dtype), weight, allowed=self.tolerance, stage=stage))
            return errors if not self.job.place.replica else []

        return list(chain.from_iterable(self.job.ranks.gather(compare)))

    def _check_dtypes(self) -> None:
        """Raise ValueError if the outputs of a stage are not in bfloat16."""
        if not self.is_bf16 or self.model.has_dtype_rules:
            return
        last = self.pipeline.schedule.num_stages - 1
        for stage, dtypes in self._outputs.of_stage.items():
            others = dtypes - {BF16}
            if others and stage != last:  # the last stage may return float32 logits
                raise ValueError(f"the outputs of stage {stage} are {others.pop()}, but --dtype bf16 needs "
                                 "torch.bfloat16; make place(stages, mesh, dtype) use that dtype in its policy")

    def _hint(self, gradient: Tensor, reference: Tensor, error: Error) -> str:
        """Return a likely cause of a gradient that differs, or "". reference: of the same dtype."""
        if not gradient.count_nonzero():
            return LOST
        if has_bfloat16_values(gradient) and not has_bfloat16_values(reference):
            return "all its elements are bfloat16 values: it was accumulated or reduced in bfloat16"
        stages = self._stages_of[error.name]
        if len(stages) > 1:
            numbers = " and ".join(map(str, stages))
            return (f"tied: stages {numbers} have it, and its gradients must be summed over them; share one Parameter, "
                    "or give both stages tied_parameters()")
        if self.is_bf16:
            return f"{error.relative / (error.unpipelined or 1.0):.3g} times the unpipelined model's error"
        return ""

    def _count_wrong(self, errors: Sequence[Error]) -> str:
        num_wrong = sum(error.is_wrong for error in errors)
        return f"{num_wrong} of {len(errors)} differ by more than {errors[0].allowed:g} relative"

    # -- names and routes

    def _gather_stages(self) -> dict[str, list[int]]:
        """Return the numbers of the stages that have each parameter. Raises ValueError if none has one."""
        rank_names = {(name, stage.number) for stage in self.pipeline.stages for name in stage.names.values()}
        stages_of: dict[str, list[int]] = {}
        for name, stage in sorted(set(chain.from_iterable(self.job.ranks.gather(lambda: rank_names)))):
            stages_of.setdefault(name, []).append(stage)
        missing = [name for name, first in self._first.items() if first not in stages_of]
        if missing:
            raise ValueError(f"no stage has {len(missing)} of the unpipelined model's parameters, such as "
                             f"{missing[0]!r}; cut() must put every parameter into a stage")
        return stages_of

    def _count_routes(self, unpipelined: Replay, pipelined: Replay) -> RouteReport:
        """Return the choices summed over all ranks."""
        names = list(unpipelined.counts)
        rank_modules = set(self.pipeline.modules.values())
        rank_unreplayed = {name for name in names if name in rank_modules and name not in pipelined.counts}
        gathered = self.job.ranks.gather(lambda: (pipelined.counts, rank_unreplayed))
        totals: dict[str, RouteCount] = {}
        for name in names:
            for rank_counts, _ in gathered:
                if name in rank_counts:
                    totals[name] = totals.get(name, RouteCount()).plus(rank_counts[name])
        unreplayed = set(chain.from_iterable(rank_names for _, rank_names in gathered))
        return RouteReport(unpipelined.counts, totals, [name for name in names if name in unreplayed])

    # -- models

    def _build_exact(self) -> nn.Module:
        """Build the unpipelined model in float64, with the weights of the bfloat16 model."""
        exact = self.model.build_whole(torch.float64, self.job.device)
        copy_parameters(exact.named_parameters(), self._whole)
        return exact.train(self._whole.training)

    def _unpipelined(self, whole: nn.Module, dtype: torch.dtype) -> UnpipelinedModel:
        """Return the unpipelined model in a dtype, with its batches."""
        batches = [batch.map(lambda t: t.to(dtype) if t.is_floating_point() else t) for batch in self._batches]
        return UnpipelinedModel(self.model, whole, batches, self.job.device, self._names.of(whole, self._first))


def _check_shape(stage: int, name: str, tensor: Tensor, expected: Tensor) -> None:
    """Raise ValueError if the shape of a stage's tensor differs from that in the unpipelined model."""
    if tensor.shape != expected.shape:
        raise ValueError(f"{name!r} in stage {stage} has shape {list(tensor.shape)}, and {list(expected.shape)} in the "
                         "unpipelined model; parts of a parameter must be DTensors, as "
                         "dualpipe.parallel.shard_experts makes them")
