"""Search for the first place where a pipeline in bfloat16 is further from float64 than rounding explains.

As in float64 (see `compare`), each reference rules out a cause: the stages in sequence in float64 rule out the
pipeline, the same stages in bfloat16 the split into stages. If the gradients of all micro-batches are right and a sum
is wrong, the search runs steps in which more and more micro-batches count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from dualpipe.schedule import Action
from dualpipe.train.launch.distributed import Job
from dualpipe.train.model_parity.bf16.models import BF16, ReplayedModels
from dualpipe.train.model_parity.bf16.rounding import (
    BOUNDS,
    MicrobatchSums,
    StageAccumulation,
    StageRounding,
    measure_gradients,
    worst_accumulation,
    worst_rounding,
)
from dualpipe.train.model_parity.models.origin import Origin, order_of
from dualpipe.train.model_parity.models.pipelined import ActionResults
from dualpipe.train.model_parity.models.unpipelined import (
    StagesInSequence,
    UnpipelinedStep,
    compare_by_first_name,
    sum_by_first_name,
)
from dualpipe.train.parity_errors import measure_rounding, rounding_failures, worst_of

CUT_TOLERANCE = 1e-5  # relative, for stages in float64, parts of which may compute in float32


class OriginSearch:
    """A search by further steps of the models. Construction and methods are collective.

    num_additions: see `MicrobatchSums.measure`.
    """

    def __init__(self, models: ReplayedModels, job: Job, num_chunks: int, num_additions: int) -> None:
        self._models = models
        self._job = job
        self._num_chunks = num_chunks
        self._num_additions = num_additions

    def run(
        self, rounding: Sequence[StageRounding], sums: Sequence[StageAccumulation], exact: UnpipelinedStep,
        observer: ActionResults,
    ) -> Origin | None:
        """Return the first place in a step where an error exceeds its bound; None if none does.

        Args:
            rounding, sums: errors of all ranks.
            exact: the step of the unpipelined model in float64.
            observer: of the pipeline's step.
        """
        if rounding_failures([error.rounding for error in rounding], BOUNDS):
            return self._first_rounding(rounding, exact, observer)
        if all(error.is_allowed for error in sums):
            return None
        return self._first_addition() or _origin_of_sum(worst_accumulation(sums))

    def _first_rounding(
        self, rounding: Sequence[StageRounding], exact: UnpipelinedStep, observer: ActionResults
    ) -> Origin:
        """Return the first place where an error against float64 is too large."""
        ranks = self._job.ranks
        narrow_sequence, _ = ranks.agree(lambda: self._models.train_in_sequence(BF16))
        exact_sequence, step = ranks.agree(lambda: self._models.train_in_sequence(torch.float64))
        in_sequence = ranks.first(lambda: self._worst_in_sequence(step, exact))
        if in_sequence is not None:
            return in_sequence
        rank_actions = _wrong_actions(observer, narrow_sequence, exact_sequence)
        wrong_actions = list(chain.from_iterable(ranks.gather(lambda: rank_actions)))
        if wrong_actions:
            action = min(wrong_actions, key=order_of)
            in_stage = [error for error in rounding if error.stage == action.stage]
            worst = worst_rounding(in_stage or rounding)
            return Origin(worst.rounding.name, worst.relative, action.title)
        return self._first_microbatch() or _origin_of_step(worst_rounding(rounding))

    def _worst_in_sequence(self, step: UnpipelinedStep, exact: UnpipelinedStep) -> Origin | None:
        """Return the parameter with the largest difference between stages in sequence and the unpipelined model.

        Both are in float64. The result is None if they do not differ.
        """
        tied = self._models.tied
        gradients = sum_by_first_name(step.gradients, tied)
        floor = CUT_TOLERANCE * max(float(gradient.norm()) for gradient in exact.gradients.values())
        compared = compare_by_first_name(gradients, exact.gradients, tied, floor)
        wrong = [diff for diff in compared if not diff.relative <= CUT_TOLERANCE]  # NaN is wrong
        if not wrong:
            return None
        (worst,) = worst_of(wrong, lambda diff: diff.relative, 1)
        where = "the stages one after the other, without a pipeline: the split into stages changes the result"
        return Origin(worst.name, worst.relative, where, "compare in float64, which names the stage")

    def _first_microbatch(self) -> Origin | None:
        """Return the worst gradient of the first micro-batch that has a wrong one, None if none has."""
        for microbatch in range(self._num_chunks):
            self._models.train([microbatch])
            narrow, _ = self._models.train_unpipelined(BF16, microbatch)
            exact, _ = self._models.train_unpipelined(torch.float64, microbatch)
            rank_errors = measure_gradients(self._models.pipelined.gradients(), narrow, exact)
            errors = self._job.ranks.gather(lambda bound=rank_errors: bound)  # type: ignore[misc]
            worst = worst_rounding(chain.from_iterable(errors))
            if not worst.is_allowed:
                where = self._models.pipelined.action_of("W", worst.stage, microbatch)
                hint = f"{worst.rounding.excess:.3g} times the unpipelined model's error"
                return Origin(worst.rounding.name, worst.relative, where, hint)
        return None

    def _first_addition(self) -> Origin | None:
        """Return the worst gradient of the first micro-batch that is added wrongly, None if none is."""
        pipelined = self._models.pipelined
        sums = MicrobatchSums()
        for microbatch in range(self._num_chunks):
            self._models.train([microbatch])
            sums.add(pipelined.gradients())
            self._models.train(range(microbatch + 1))
            rank_errors = sums.measure(pipelined.gradients(), self._num_additions)
            errors = self._job.ranks.gather(lambda bound=rank_errors: bound)  # type: ignore[misc]
            worst = worst_accumulation(chain.from_iterable(errors))
            if not worst.is_allowed:
                where = pipelined.action_of("W", worst.stage, microbatch)
                hint = "its gradient is right alone, the addition is not"
                if worst.hint:
                    hint = f"{hint}; {worst.hint}"
                return Origin(worst.accumulation.name, worst.accumulation.relative, where, hint)
        return None


def _wrong_actions(
    observer: ActionResults, narrow: StagesInSequence, exact: StagesInSequence
) -> list[Action]:
    """Return the actions of this rank with results that are too far from float64.

    narrow, exact: stages in sequence in bfloat16, whose errors bound those of the pipeline, and in float64.
    """
    wrong = []
    for boundary, results in observer.results.items():
        references = zip(narrow.boundaries[boundary], exact.boundaries[boundary])
        for result, (unpipelined, expected) in zip(results, references):
            if result.is_floating_point() and not _is_within_bound(result, unpipelined, expected):
                wrong.append(observer.actions[boundary])
    return wrong


def _is_within_bound(pipelined: Tensor, unpipelined: Tensor, exact: Tensor) -> bool:
    """Return True if the error of an action's result is within its bound."""
    if pipelined.shape != exact.shape:
        return False
    return measure_rounding("", pipelined, unpipelined, exact).excess <= BOUNDS.single


def _origin_of_sum(error: StageAccumulation) -> Origin:
    """Return the place of a wrong sum over micro-batches if no wrong addition was found."""
    where = f"the sum over the micro-batches of stage {error.stage}, though not when the step is run again"
    return Origin(error.accumulation.name, error.accumulation.relative, where, error.hint)


def _origin_of_step(error: StageRounding) -> Origin:
    """Return the place of an error that occurs in no action and no micro-batch."""
    return Origin(error.rounding.name, error.relative, "the step as a whole, and in no micro-batch alone")
