"""Comparison of a pipelined step with the unpipelined model, in float64, float32 or bfloat16.

In float64 and float32 the unpipelined model of the same dtype is the reference. In bfloat16 the reference is a float64
model with weights rounded to bfloat16, whose routes all models replay; the errors of the unpipelined bfloat16 model
bound those of the pipeline.

If something differs, further steps search for the first place that does:

    weights     the weights of the stages are compared with the unpipelined model's before any step
    modules     the outputs of all modules are compared, in the order in which the unpipelined model calls them. The
                first that differs in a micro-batch causes all later ones, as micro-batches do not depend on each other
    micro-batch if all of these are right, a weight gradient is wrong. The step is repeated with the losses of all
                micro-batches but one multiplied by zero: so the contribution of that one has the order, the
                accumulation and the reductions of the whole step
    sums        if the gradients of all micro-batches are right and a sum is wrong, the search runs steps in which more
                and more micro-batches count
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.runtime.device import deterministic
from dualpipe.schedule import Action
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
from dualpipe.train.parity.routes import Microbatch, Replay, RouteCounts, RouteReport, Routes
from dualpipe.train.parity.steps import (
    LOSS,
    CallKey,
    Calls,
    Names,
    StagesInPipeline,
    StageTensor,
    Step,
    UnpipelinedModel,
    make_batches,
    recorded_calls,
    stop_random_numbers,
)

LOST = "the gradient is zero: it is lost, or no stage uses the parameter"


class Report(NamedTuple):
    """The result of a comparison, the same on every rank.

    note: see `stop_random_numbers`. errors: of gradients and losses, or of the weights if they differ before any step.
    failures: texts about exceeded bounds. sums: errors of the sums over micro-batches. routes: those replayed; None in
    float64 and float32. origin: a text about the first place that differs; "" if nothing does or none was found.
    """

    note: str
    errors: list[Error]
    failures: list[str]
    sums: Sequence[Error] = ()
    routes: RouteReport | None = None
    origin: str = ""


def compare(model: ComparedModel, job: Job, dtype: torch.dtype, tolerance: float) -> Report:
    """Compare a model in its pipeline with the unpipelined one, and search for the first difference. Collective.

    Args:
        dtype: float64, float32 or bfloat16.
        tolerance: largest relative error in float64 and float32.
    """
    comparison = Comparison(model, job, dtype, tolerance)
    with deterministic() if dtype is BF16 else nullcontext():
        report = comparison.run()
        if report.failures and not report.origin:
            report = report._replace(origin=_find_origin(comparison, report))
        return report


class References(NamedTuple):
    """A step of the unpipelined model: as the reference, and in the dtype of the pipeline; see `Comparison`."""

    exact: Step
    rounded: Step


class Comparison:
    """A model, unpipelined and in a pipeline, on the same batches. Construction and methods are collective.

    Attributes:
        note: see `stop_random_numbers`.
        tolerance: largest relative error in float64 and float32.
        exact: the unpipelined model, the reference.
        rounded: the unpipelined model in the dtype of the pipeline: in float64 and float32 the same as `exact`.
        pipeline: the stages of this rank.

    Raises ValueError, on all ranks, if the stages lack parameters of the unpipelined model, or have others.
    """

    def __init__(self, model: ComparedModel, job: Job, dtype: torch.dtype, tolerance: float) -> None:
        self.model = model
        self.job = job
        self.is_bf16 = dtype is BF16
        self.tolerance = 0.0 if self.is_bf16 else tolerance
        self._dtype = dtype
        agree = job.ranks.agree
        whole = agree(lambda: model.build_whole(dtype, job.device))
        batches = agree(lambda: make_batches(model, job.place.batch_shards, dtype, job.device))
        self.note = agree(lambda: stop_random_numbers(model, whole, batches[0]))
        self._weights = dict(whole.named_parameters(remove_duplicate=False))
        names = Names(whole)
        routes: Routes | None = None
        if self.is_bf16:
            routes = Routes()
            self._unpipelined_replay = Replay(routes)
            self.rounded = UnpipelinedModel(model, whole, batches, names, job.device, self._unpipelined_replay)
            exact = agree(lambda: self._build_exact(whole))
            wide = [batch.map(lambda t: t.double() if t.is_floating_point() else t) for batch in batches]
            self.exact = UnpipelinedModel(model, exact, wide, names, job.device, routes)
        else:
            self.rounded = UnpipelinedModel(model, whole, batches, names, job.device)
            self.exact = self.rounded
        self.pipeline = StagesInPipeline(model, job, dtype, batches, names, routes, training=whole.training)
        self._stages_of = self._gather_stages(names)

    def run(self) -> Report:
        """Compare the weights, then a step, and in bfloat16 its gradients with the sums over micro-batches."""
        weights = self._compare_weights()
        if any(error.is_wrong for error in weights):
            largest = worst(weights)
            origin = describe_origin(largest, f"the weights of stage {largest.stage}, before any step")
            return Report(self.note, weights, [self._count_wrong(weights)], origin=origin)
        references = self.train_unpipelined()
        losses = self.pipeline.train()
        self.job.ranks.agree(self._check_dtypes)
        errors = self.measure_step([*self.pipeline.gradients(), *losses], references)
        failures = self.find_failures(errors)
        if not self.is_bf16:
            return Report(self.note, errors, failures)
        routes = self._count_routes()
        sums = self.measure_sums(range(self.model.num_chunks))
        largest = worst(sums)
        if largest.is_wrong:
            failures.append(f"{largest.name} is not the sum of its micro-batches' gradients")
        return Report(self.note, errors, failures + routes.failures(), sums, routes)

    def train_unpipelined(self, counted: Collection[int] | None = None) -> References:
        """Run a step of the unpipelined model. counted: see `UnpipelinedModel.train`."""

        def train() -> References:
            exact = self.exact.train(counted)  # first: it chooses the routes
            return References(exact, self.rounded.train(counted) if self.is_bf16 else exact)

        return self.job.ranks.agree(train)

    # -- errors

    def find_failures(self, errors: Sequence[Error]) -> list[str]:
        """Return a text for each bound of a step that errors exceed."""
        if self.is_bf16:
            return rounding_failures(errors)
        return [self._count_wrong(errors)] if any(error.is_wrong for error in errors) else []

    def measure_step(self, tensors: Iterable[StageTensor], references: References) -> list[Error]:
        """Return the errors of gradients and losses on all ranks. tensors: those of this rank."""
        exact, rounded = ({**step.gradients, **step.losses} for step in references)
        floor = self._gradient_floor(references)
        errors = []
        for stage, name, tensor in tensors:
            error = self.measure(name, tensor, exact[name], rounded[name], floor)
            hint = self._hint(tensor, rounded[name], error) if error.is_wrong and stage >= 0 else ""
            errors.append(error._replace(stage=stage, hint=hint))
        return self._gather(errors)

    def measure_sums(self, numbers: Collection[int]) -> list[Error]:
        """Compare the gradients of a step over some micro-batches with the sums over each alone, on all ranks.

        Without the losses of routers, which a step without its other micro-batches has too.
        """
        sums = MicrobatchSums()
        for number in numbers:
            self.pipeline.train([number], with_router_losses=False)
            sums.add(self.pipeline.gradients())
        self.pipeline.train(numbers, with_router_losses=False)
        num_additions = self.model.num_chunks + 2 * self.job.place.replicas  # one per micro-batch, and two per replica
        return self._gather(sums.measure(self.pipeline.gradients(), num_additions, self.pipeline.gradient_dtype))

    def _gather(self, errors: Sequence[Error]) -> list[Error]:
        """Return the errors of all ranks; of gradients and weights in pipeline 0 alone: the others have the same."""
        own = [error for error in errors if error.stage < 0 or not self.job.place.replica]
        return list(chain.from_iterable(self.job.ranks.gather(lambda: own)))

    def _gradient_floor(self, references: References) -> float:
        """Return the norm that the norm of a gradient counts as at least; in bfloat16, see `smallest_error`.

        Some gradients are zero up to rounding, such as a router's with one expert per token and norm_topk_prob: their
        terms cancel, and the rest depends on the order of summation. Measured: up to 0.06 eps of the norm of the whole
        gradient, in float32 and in float64 (4 to 8 layers, hidden size 16 to 256). So an error of one eps of that norm,
        2e-16 or 1e-7 relative to it, is always allowed; a larger error is detected in any tensor.
        """
        exact, rounded = references
        if self.is_bf16:
            return smallest_error(rounded.gradients, exact.gradients)
        return norm_of(exact.gradients.values()) * torch.finfo(self._dtype).eps / self.tolerance

    def measure(self, name: str, value: Tensor, exact: Tensor, rounded: Tensor, floor: float = 0.0) -> Error:
        """Measure a tensor of the pipeline. floor: see `_gradient_floor`."""
        if not self.is_bf16:
            return difference(name, value, exact, floor, allowed=self.tolerance)
        return rounding(name, value, rounded, exact, floor if value.numel() < SMALL else 0.0)

    def _compare_weights(self) -> list[Error]:
        """Compare the weights of all ranks with those of the unpipelined model; [] if formats make them differ."""
        if self.model.has_dtype_rules:
            return []
        errors = []
        for stage, name, value in self.pipeline.values():
            weight = self._weights[name].detach()
            error = difference(name, value.to(weight.dtype), weight, allowed=self.tolerance)
            errors.append(error._replace(stage=stage))
        return self._gather(errors)

    def _check_dtypes(self) -> None:
        """Raise ValueError if the outputs of a stage are not in bfloat16."""
        if not self.is_bf16 or self.model.has_dtype_rules:
            return
        last = self.pipeline.schedule.num_stages - 1
        for stage, dtypes in self.pipeline.observer.output_dtypes.items():
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

    def _gather_stages(self, names: Names) -> dict[str, list[int]]:
        """Return the numbers of the stages that have each parameter.

        Raises ValueError, on all ranks, if none has one, or if a stage has one of another shape.
        """

        def name_parameters() -> set[tuple[str, int]]:
            for stage, name, parameter in self.pipeline.parameters():
                expected = self._weights[name].shape
                if parameter.shape != expected:
                    raise ValueError(
                        f"{name!r} in stage {stage} has shape {list(parameter.shape)}, and {list(expected)} in the "
                        "unpipelined model; parts of a parameter must be DTensors, as "
                        "dualpipe.parallel.shard_experts makes them")
            return {(name, stage.number) for stage in self.pipeline.stages for name in stage.names.values()}

        stages_of: dict[str, list[int]] = {}
        for name, stage in sorted(set(chain.from_iterable(self.job.ranks.gather(name_parameters)))):
            stages_of.setdefault(name, []).append(stage)
        missing = [name for name, first in names.first.items() if first not in stages_of]
        if missing:
            raise ValueError(f"no stage has {len(missing)} of the unpipelined model's parameters, such as "
                             f"{missing[0]!r}; cut() must put every parameter into a stage")
        return stages_of

    def _count_routes(self) -> RouteReport:
        """Return the choices of the latest step, summed over all ranks."""
        replay = self.pipeline.replay
        assert replay is not None, "bfloat16 replays"
        made: Counter[str] = Counter()
        changed: Counter[str] = Counter()
        for counts in self.job.ranks.gather(lambda: replay.counts):
            made.update(counts.made)
            changed.update(counts.changed)
        return RouteReport(self._unpipelined_replay.counts, RouteCounts(made, changed))

    def _build_exact(self, whole: nn.Module) -> nn.Module:
        """Build the unpipelined model in float64, with the weights of the bfloat16 model."""
        exact = self.model.build_whole(torch.float64, self.job.device)
        copy_parameters(exact, whole)
        return exact.train(whole.training)


# -- the first place that differs


def describe_origin(error: Error, where: str) -> str:
    """Return a text about a wrong tensor, and the place where it, or what it is computed from, first differs."""
    cause = f" ({error.hint})" if error.hint else ""
    return f"{error.name}: relative error {error.relative:.2g}; first differs in {where}{cause}"


def _find_origin(comparison: Comparison, report: Report) -> str:
    """Return a text about the first place that differs; "" if no error exceeds its bound. Collective."""
    if comparison.find_failures(report.errors):
        return (
            _find_module(comparison, report.errors)
            or _find_loss(comparison, report.errors)
            or _find_weight_gradient(comparison)
            or describe_origin(worst(report.errors), "the step as a whole, and in no micro-batch alone"))
    if any(error.is_wrong for error in report.sums):
        return _find_addition(comparison, report.sums)
    return ""


def _find_loss(comparison: Comparison, errors: Iterable[Error]) -> str:
    """Return a text about the first wrong loss; "" if all are right. The outputs of all modules are right."""
    for error in errors:
        if error.name.startswith(LOSS) and error.is_wrong:
            last = comparison.pipeline.schedule.num_stages - 1
            return describe_origin(error, f"the loss behind stage {last}, whose outputs are right")
    return ""


def _find_weight_gradient(comparison: Comparison) -> str:
    """Return a text about the first micro-batch with a wrong contribution to a gradient; "" if all are right.

    Of several parameters it is the first in the backward, which runs from the last stage to the first.
    """
    for microbatch in range(comparison.model.num_chunks):
        comparison.pipeline.train([microbatch])
        references = comparison.train_unpipelined([microbatch])
        errors = comparison.measure_step(comparison.pipeline.gradients(), references)
        wrong = [error for error in errors if error.is_wrong]
        if wrong:
            order = list(references.exact.gradients)
            first = min(wrong, key=lambda error: (-error.stage, order.index(error.name)))
            return describe_origin(first, comparison.pipeline.weight_action(first.stage, microbatch))
    return ""


def _find_addition(comparison: Comparison, sums: Iterable[Error]) -> str:
    """Return a text about the worst gradient of the first micro-batch that is added wrongly."""
    for microbatch in range(comparison.model.num_chunks):
        wrong = [error for error in comparison.measure_sums(range(microbatch + 1)) if error.is_wrong]
        if wrong:
            largest = max(wrong, key=lambda error: error.relative)
            hint = "its gradient is right alone, the addition is not"
            if largest.hint:
                hint = f"{hint}; {largest.hint}"
            where = comparison.pipeline.weight_action(largest.stage, microbatch)
            return describe_origin(largest._replace(hint=hint), where)
    largest = worst(sums)
    return describe_origin(
        largest, f"the sum over the micro-batches of stage {largest.stage}, though not when the step is run again")


class Verdict(NamedTuple):
    """A comparison of the outputs of a call. stage: of the pipeline's module."""

    is_right: bool
    stage: int


class Suspects(NamedTuple):
    """Modules of which one is wrong in a micro-batch. stage: of the first wrong output. hint: a likely cause, or ""."""

    names: list[str]
    stage: int
    hint: str = ""


def _find_module(comparison: Comparison, errors: Sequence[Error]) -> str:
    """Return a text about the first module with another output than in the unpipelined model; "" if there is none.

    With context parallelism there is none: a rank has parts of the outputs.
    """
    if comparison.pipeline.columns is not None:
        return ""
    expected, verdicts = _judge_calls(comparison)
    for microbatch in sorted(verdicts, key=lambda place: (place.number, place.replica)):
        suspects = find_suspects(expected[microbatch], verdicts[microbatch])
        if suspects is not None:
            return _describe_suspects(suspects, microbatch, errors)
    return ""


def _describe_suspects(suspects: Suspects, microbatch: Microbatch, errors: Sequence[Error]) -> str:
    """Return a text about the worst parameter of the modules, or of their stage; first one without a gradient."""

    def errors_in(modules: Sequence[str]) -> list[Error]:
        return [error for error in errors if any(error.name.startswith(f"{module}.") for module in modules)]

    # If outputs before the wrong one are unknown, that module is more likely to have received wrong inputs.
    inside = errors_in(suspects.names[:-1]) or errors_in(suspects.names)
    lost = [error for error in inside if error.hint == LOST]
    largest = worst(lost or inside or [error for error in errors if error.stage == suspects.stage])
    stage = largest.stage if inside else suspects.stage
    where = f"{Action('F', stage, microbatch.number).title}, in {' or '.join(suspects.names)}"
    return describe_origin(largest._replace(hint=suspects.hint or (LOST if lost else "")), where)


def _judge_calls(comparison: Comparison) -> tuple[dict[Microbatch, Calls], dict[Microbatch, dict[CallKey, Verdict]]]:
    """Repeat the step with hooks on all modules; return the calls of the unpipelined model, and verdicts on them.

    The verdicts are on the modules of all ranks whose outputs can be compared.
    """
    pipeline, exact, rounded = comparison.pipeline, comparison.exact, comparison.rounded
    with recorded_calls(pipeline.modules_with_own_tokens(), pipeline.observer.position) as calls:
        pipeline.train()
    with (recorded_calls(exact.modules, exact.position) as expected,
          recorded_calls(rounded.modules, rounded.position) as of_rounded):
        comparison.train_unpipelined()
    rank_verdicts: list[tuple[Microbatch, CallKey, Verdict]] = []
    for microbatch, rank_calls in calls.items():
        num_calls = Counter(name for name, _ in expected[microbatch])
        for key, call in expected[microbatch].items():
            # The calls of a module that several ranks share cannot be told apart.
            if (key.name, num_calls[key.name] - 1) not in rank_calls:
                continue
            own = rank_calls[key]
            is_right = _are_right(comparison, own.outputs, call.outputs, of_rounded[microbatch][key].outputs)
            if is_right is not None:
                rank_verdicts.append((microbatch, key, Verdict(is_right, pipeline.stage_of[own.module])))
    verdicts: dict[Microbatch, dict[CallKey, Verdict]] = defaultdict(dict)
    for microbatch, key, verdict in chain.from_iterable(comparison.job.ranks.gather(lambda: rank_verdicts)):
        verdicts[microbatch][key] = verdict
    return expected, verdicts


def _are_right(
    comparison: Comparison, outputs: Sequence[Tensor], exact: Sequence[Tensor], rounded: Sequence[Tensor]
) -> bool | None:
    """Return True if the outputs of a call are right; None if they cannot be compared."""
    errors = []
    for output, reference, unpipelined in zip(outputs, exact, rounded):
        if not reference.is_floating_point() or not reference.numel():
            continue
        if output.shape != reference.shape:
            return None
        errors.append(comparison.measure("", output, reference, unpipelined))
    return not any(error.is_wrong for error in errors) if errors else None


def find_suspects(expected: Calls, verdicts: Mapping[CallKey, Verdict]) -> Suspects | None:
    """Return the modules called after the last right output, up to the first wrong one; None if none is wrong.

    Modules that the pipeline does not call, or whose outputs cannot be compared, are neither right nor wrong, such as
    experts split over ranks, which receive other tokens. Modules around others are left out, unless they are wrong.

    Example: norm right, router right, experts not comparable, next norm wrong -> experts, next norm.

    Args:
        expected: calls in the unpipelined model.
        verdicts: on those that the pipeline makes too and whose outputs can be compared.
    """
    unknown: list[CallKey] = []
    for key in expected:
        verdict = verdicts.get(key)
        if verdict is None:
            unknown.append(key)
        elif verdict.is_right:
            unknown = []
        else:
            return _suspects_before(key, unknown, expected, verdict.stage)
    return None


def _suspects_before(wrong: CallKey, unknown: Sequence[CallKey], expected: Calls, stage: int) -> Suspects:
    """Return the modules of which one causes a wrong output. unknown: calls after the last right output."""
    for key in unknown:
        module = expected[key].module
        if module._forward_hooks or module._forward_pre_hooks:
            hint = (f"{type(module).__name__} has forward hooks, and the pipeline does not call it: its segments() "
                    "must run them")
            return Suspects([key.name], stage, hint)
    names = [key.name for key in unknown
             if not any(other.name.startswith(f"{key.name}.") for other in expected)]
    return Suspects(list(dict.fromkeys([*names, wrong.name])), stage)
