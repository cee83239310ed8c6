"""Search for the first place where a pipelined step differs from the unpipelined model.

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
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.runtime.device import deterministic
from dualpipe.schedule import Action
from dualpipe.train.launch.join import Job
from dualpipe.train.parity.compare import LOSS, LOST, Comparison, Measured
from dualpipe.train.parity.errors import Error, difference, rounding, rounding_failures, worst
from dualpipe.train.parity.models import BF16, ComparedModel
from dualpipe.train.parity.routes import Microbatch
from dualpipe.train.parity.steps import Call, recorded_calls


class Origin(NamedTuple):
    """The first place where the pipeline and the unpipelined model differ."""

    name: str  # of a parameter
    relative: float  # error of its gradient
    where: str  # such as "F(stage 1, micro-batch 0)"
    hint: str = ""  # a likely cause, or ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.name}: relative error {self.relative:.2g}; first differs in {self.where}{hint}"

    @staticmethod
    def of(error: Error, where: str, hint: str = "") -> Origin:
        """Return the place of an error."""
        return Origin(error.name, error.relative, where, hint or error.hint)


class Report(NamedTuple):
    """The result of a comparison, the same on every rank.

    note: see `stop_random_numbers`. origin: the first place that differs, None if nothing does or none was found.
    """

    note: str
    measured: Measured
    origin: Origin | None


def compare(model: ComparedModel, job: Job, dtype: torch.dtype, tolerance: float) -> Report:
    """Compare a model in its pipeline with the unpipelined one, and search for the first difference. Collective.

    Args:
        dtype: float64, float32 or bfloat16.
        tolerance: largest relative error in float64 and float32.
    """
    comparison = Comparison(model, job, dtype, tolerance)
    if dtype is not BF16:
        return _run(comparison)
    with deterministic():
        return _run(comparison)


def _run(comparison: Comparison) -> Report:
    measured = comparison.run()
    origin = _Search(comparison, measured).run() if measured.failures else None
    return Report(comparison.note, measured, origin)


class _Search:
    """A search by further steps of the models. Construction and methods are collective."""

    def __init__(self, comparison: Comparison, measured: Measured) -> None:
        self._comparison = comparison
        self._measured = measured
        self._job = comparison.job
        self._pipeline = comparison.pipeline
        self._numbers = range(comparison.model.num_chunks)

    def run(self) -> Origin | None:
        """Return the first place that differs; None if no error exceeds its bound."""
        errors = self._measured.errors
        largest = worst(errors)
        if self._measured.are_weights:
            return Origin.of(largest, f"the weights of stage {largest.stage}, before any step")
        are_wrong = rounding_failures(errors) if self._comparison.is_bf16 else self._measured.failures
        if are_wrong:
            return self._first_difference() or Origin.of(largest, "the step as a whole, and in no micro-batch alone")
        if any(error.is_wrong for error in self._measured.sums):
            return self._first_addition()
        return None

    def _first_difference(self) -> Origin | None:
        """Return the first place where a result differs, or a gradient of one micro-batch."""
        in_module = self._first_module()
        if in_module is not None:
            return in_module
        wrong_losses = [error for error in self._measured.errors if error.name.startswith(LOSS) and error.is_wrong]
        if wrong_losses:
            last = self._pipeline.schedule.num_stages - 1
            return Origin.of(wrong_losses[0], f"the loss behind stage {last}, whose outputs are right")
        return self._first_weight_gradient()

    # -- modules

    def _first_module(self) -> Origin | None:
        """Return the first module with another output than in the unpipelined model, and one of its parameters.

        With context parallelism there is none: a rank has parts of the outputs.
        """
        if self._pipeline.columns is not None:
            return None
        expected, verdicts = self._judge_calls()
        merged: dict[Microbatch, dict[int, Verdict]] = {}
        for rank_verdicts in self._job.ranks.gather(lambda: verdicts):
            for microbatch, of_calls in rank_verdicts.items():
                merged.setdefault(microbatch, {}).update(of_calls)
        for microbatch in sorted(merged, key=lambda place: (place.number, place.replica)):
            suspects = find_suspects(expected[microbatch], merged[microbatch], microbatch)
            if suspects is not None:
                return self._in_modules(suspects)
        return None

    def _judge_calls(self) -> tuple[dict[Microbatch, list[Call]], dict[Microbatch, dict[int, Verdict]]]:
        """Repeat the step with hooks on all modules; return the calls of the unpipelined model, and verdicts on them.

        The verdicts are those on this rank's modules, by micro-batch and number of the call.
        """
        exact = self._comparison.exact
        rounded = self._comparison.rounded or exact
        with recorded_calls(self._pipeline.modules_with_own_tokens(), self._pipeline.position) as calls:
            self._comparison.train(self._numbers)
        with (recorded_calls(exact.modules, exact.position) as expected,
              recorded_calls(rounded.modules, rounded.position) as of_rounded):
            self._job.ranks.agree(lambda: self._comparison.train_unpipelined(self._numbers))
        verdicts: dict[Microbatch, dict[int, Verdict]] = {}
        for microbatch, rank_calls in calls.items():
            pending: dict[str, list[Call]] = defaultdict(list)
            for call in rank_calls:
                pending[call.name].append(call)
            num_expected = Counter(call.name for call in expected[microbatch])
            # The calls of a module that several ranks share cannot be told apart.
            shared = {name for name, own in pending.items() if len(own) < num_expected[name]}
            verdicts[microbatch] = {}
            for number, (call, rounded_call) in enumerate(zip(expected[microbatch], of_rounded[microbatch])):
                if pending[call.name] and call.name not in shared:
                    own = pending[call.name].pop(0)
                    is_right = self._are_right(own.outputs, call.outputs, rounded_call.outputs)
                    verdicts[microbatch][number] = Verdict(is_right, self._pipeline.stage_of[own.module])
        return expected, verdicts

    def _are_right(self, outputs: Sequence[Tensor], exact: Sequence[Tensor], rounded: Sequence[Tensor]) -> bool | None:
        """Return True if the outputs of a call are right; None if they cannot be compared."""
        triples = [(output, reference, unpipelined) for output, reference, unpipelined in zip(outputs, exact, rounded)
                   if reference.is_floating_point() and reference.numel()]
        if not triples or any(output.shape != reference.shape for output, reference, _ in triples):
            return None
        if self._comparison.is_bf16:
            return not any(rounding("", output, unpipelined, reference).is_wrong
                           for output, reference, unpipelined in triples)
        return not any(difference("", output, reference, allowed=self._comparison.tolerance).is_wrong
                       for output, reference, _ in triples)

    def _in_modules(self, place: Suspects) -> Origin:
        """Return the worst parameter of the modules, or of their stage; first one without a gradient."""
        errors = self._measured.errors
        # If outputs before the wrong one are unknown, that module is more likely to have received wrong inputs.
        unknown = self._errors_in(place.names[:-1])
        suspected = unknown or self._errors_in(place.names)
        lost = [error for error in suspected if error.hint == LOST]
        in_stage = [error for error in errors if error.stage == place.stage]
        largest = worst(lost or suspected or in_stage)
        stage = largest.stage if suspected else place.stage
        where = f"{Action('F', stage, place.microbatch.number).title}, in {' or '.join(place.names)}"
        return Origin(largest.name, largest.relative, where, place.hint or (LOST if lost else ""))

    def _errors_in(self, modules: Sequence[str]) -> list[Error]:
        """Return the errors of the parameters inside modules."""
        return [error for error in self._measured.errors
                if any(error.name.startswith(f"{module}.") for module in modules)]

    # -- gradients

    def _first_weight_gradient(self) -> Origin | None:
        """Return the first micro-batch with a wrong contribution to a gradient, and the parameter.

        Of several it is the first in the backward, which runs from the last stage to the first.
        """
        for microbatch in self._numbers:
            self._comparison.train([microbatch])
            references = self._job.ranks.agree(lambda m=microbatch: self._comparison.train_unpipelined([m]))  # type: ignore[misc]
            wrong = self._gather_wrong(self._comparison.measure_gradients(references))
            if wrong:
                order = list(references.exact.gradients)
                first = min(wrong, key=lambda error: (-error.stage, order.index(error.name)))
                return Origin.of(first, self._pipeline.weight_action(first.stage, microbatch))
        return None

    def _first_addition(self) -> Origin:
        """Return the worst gradient of the first micro-batch that is added wrongly."""
        for microbatch in self._numbers:
            wrong = [error for error in self._comparison.measure_sums(range(microbatch + 1)) if error.is_wrong]
            if wrong:
                largest = max(wrong, key=lambda error: error.relative)
                hint = "its gradient is right alone, the addition is not"
                if largest.hint:
                    hint = f"{hint}; {largest.hint}"
                return Origin.of(largest, self._pipeline.weight_action(largest.stage, microbatch), hint)
        largest = worst(self._measured.sums)
        where = f"the sum over the micro-batches of stage {largest.stage}, though not when the step is run again"
        return Origin.of(largest, where)

    def _gather_wrong(self, rank_errors: Iterable[Error]) -> Collection[Error]:
        """Return the errors of all ranks that exceed their bounds."""
        rank_wrong = [error for error in rank_errors if error.is_wrong]
        return list(chain.from_iterable(self._job.ranks.gather(lambda: rank_wrong)))


class Verdict(NamedTuple):
    """True for a call with right outputs, None for outputs that cannot be compared. stage: of the pipeline's module."""

    is_right: bool | None
    stage: int


class Suspects(NamedTuple):
    """Modules of which one is wrong in a micro-batch. stage: of the first wrong output. hint: a likely cause, or ""."""

    names: list[str]
    microbatch: Microbatch
    stage: int
    hint: str = ""


def find_suspects(
    expected: Sequence[Call], verdicts: Mapping[int, Verdict], microbatch: Microbatch
) -> Suspects | None:
    """Return the modules called after the last right output, up to the first wrong one; None if none is wrong.

    Modules that the pipeline does not call, or whose outputs cannot be compared, are neither right nor wrong, such as
    experts split over ranks, which receive other tokens. Modules around others are left out, unless they are wrong.

    Example: norm right, router right, experts not comparable, next norm wrong -> experts, next norm.

    Args:
        expected: calls in the unpipelined model.
        verdicts: by the number of the call, for those that the pipeline makes too.
    """
    suspects: list[Call] = []
    for number, call in enumerate(expected):
        verdict = verdicts.get(number)
        if verdict is not None and verdict.is_right:
            suspects = []
            continue
        suspects.append(call)
        if verdict is None or verdict.is_right is None:
            continue
        *unknown, wrong = suspects
        for suspect in unknown:
            if has_hooks(suspect.module):
                hint = (f"{type(suspect.module).__name__} has forward hooks, and the pipeline does not call it: its "
                        "segments() must run them")
                return Suspects([suspect.name], microbatch, verdict.stage, hint)
        names = [suspect.name for suspect in unknown
                 if not any(other.name.startswith(f"{suspect.name}.") for other in expected)]
        return Suspects(list(dict.fromkeys([*names, wrong.name])), microbatch, verdict.stage)
    return None


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
