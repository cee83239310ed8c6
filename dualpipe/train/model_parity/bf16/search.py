"""The first place where a pipeline in bfloat16 is further from float64 than rounding explains.

As in float64 (see `compare`), each reference leaves out one cause: the stages one after the other in float64 the
pipeline, the same stages in bfloat16 the cut. A gradient that is right for each micro-batch, and wrong in the sum, is
searched for by steps in which more and more micro-batches count.
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
from dualpipe.train.model_parity.models.uncut import (
    StagesInSequence,
    UncutStep,
    compare_by_first_name,
    sum_by_first_name,
)
from dualpipe.train.parity_errors import measure_rounding, rounding_failures, worst_of

CUT_TOLERANCE = 1e-5  # relative, of the stages in float64, parts of which may compute in float32


class OriginSearch:
    """A search by further steps of the models. Collective over all ranks, as are all methods.

    num_additions: those of a step's gradients; see `MicrobatchSums.measure`.
    """

    def __init__(self, models: ReplayedModels, job: Job, num_chunks: int, num_additions: int) -> None:
        self._models = models
        self._job = job
        self._num_chunks = num_chunks
        self._num_additions = num_additions

    def run(
        self, rounding: Sequence[StageRounding], sums: Sequence[StageAccumulation], exact: UncutStep,
        observer: ActionResults,
    ) -> Origin | None:
        """Return the first place of what exceeds its bound in a step; None where nothing does.

        rounding, sums: those of all ranks; exact: the uncut model's step in float64; observer: of the pipeline's step.
        """
        if rounding_failures([each.rounding for each in rounding], BOUNDS):
            return self._first_rounding(rounding, exact, observer)
        if all(each.is_allowed for each in sums):
            return None
        return self._first_addition() or _origin_of_sum(worst_accumulation(sums))

    def _first_rounding(
        self, rounding: Sequence[StageRounding], exact: UncutStep, observer: ActionResults
    ) -> Origin:
        """Return the first place of an error that is too large."""
        ranks = self._job.ranks
        narrow_sequence, _ = ranks.agree(lambda: self._models.train_in_sequence(BF16))
        exact_sequence, step = ranks.agree(lambda: self._models.train_in_sequence(torch.float64))
        cut = ranks.first(lambda: self._first_of_the_cut(step, exact))
        if cut is not None:
            return cut
        own = _wrong_actions(observer, narrow_sequence, exact_sequence)
        wrong = list(chain.from_iterable(ranks.gather(lambda: own)))
        if wrong:
            action = min(wrong, key=order_of)
            inside = [each for each in rounding if each.stage == action.stage]
            worst = worst_rounding(inside or rounding)
            return Origin(worst.rounding.name, worst.relative, action.title)
        return self._first_microbatch() or _origin_of_step(worst_rounding(rounding))

    def _first_of_the_cut(self, step: UncutStep, exact: UncutStep) -> Origin | None:
        """Return the parameter by which the stages in a sequence differ most from the uncut model, both in float64."""
        tied = self._models.tied
        found = sum_by_first_name(step.gradients, tied)
        floor = CUT_TOLERANCE * max(float(gradient.norm()) for gradient in exact.gradients.values())
        compared = compare_by_first_name(found, exact.gradients, tied, floor)
        wrong = [each for each in compared if not each.relative <= CUT_TOLERANCE]  # NaN is wrong
        if not wrong:
            return None
        (worst,) = worst_of(wrong, lambda each: each.relative, 1)
        where = "the stages one after the other, without a pipeline: the cut computes something else"
        return Origin(worst.name, worst.relative, where, "compare in float64, which says in which stage")

    def _first_microbatch(self) -> Origin | None:
        """Return the worst gradient of the first micro-batch that has a wrong one."""
        for microbatch in range(self._num_chunks):
            self._models.train([microbatch])
            narrow, _ = self._models.train_uncut(BF16, microbatch)
            exact, _ = self._models.train_uncut(torch.float64, microbatch)
            own = measure_gradients(self._models.pipelined.gradients(), narrow, exact)
            worst = worst_rounding(chain.from_iterable(self._job.ranks.gather(lambda found=own: found)))  # type: ignore[misc]
            if not worst.is_allowed:
                where = self._models.pipelined.action_of("W", worst.stage, microbatch)
                hint = f"{worst.rounding.excess:.3g} times the uncut model's error"
                return Origin(worst.rounding.name, worst.relative, where, hint)
        return None

    def _first_addition(self) -> Origin | None:
        """Return the worst gradient of the first micro-batch that is added up wrongly."""
        pipelined = self._models.pipelined
        sums = MicrobatchSums()
        for microbatch in range(self._num_chunks):
            self._models.train([microbatch])
            sums.add(pipelined.gradients())
            self._models.train(range(microbatch + 1))
            own = sums.measure(pipelined.gradients(), self._num_additions)
            worst = worst_accumulation(chain.from_iterable(self._job.ranks.gather(lambda found=own: found)))  # type: ignore[misc]
            if not worst.is_allowed:
                where = pipelined.action_of("W", worst.stage, microbatch)
                hint = "; ".join(filter(None, ["its gradient is right alone, the addition is not", worst.hint]))
                return Origin(worst.accumulation.name, worst.accumulation.relative, where, hint)
        return None


def _wrong_actions(
    observer: ActionResults, narrow: StagesInSequence, exact: StagesInSequence
) -> list[Action]:
    """Return the actions of this rank whose results are further from float64 than those of the stages in a sequence, by
    more than their bound."""
    wrong = []
    for boundary, results in observer.results.items():
        references = zip(narrow.boundaries[boundary], exact.boundaries[boundary])
        for found, (unpipelined, expected) in zip(results, references):
            if found.is_floating_point() and not _is_rounded_alike(found, unpipelined, expected):
                wrong.append(observer.actions[boundary])
    return wrong


def _is_rounded_alike(pipelined: Tensor, unpipelined: Tensor, exact: Tensor) -> bool:
    """Return True if a result of an action is no further from float64 than its bound."""
    if pipelined.shape != exact.shape:
        return False
    return measure_rounding("", pipelined, unpipelined, exact).excess <= BOUNDS.single


def _origin_of_sum(found: StageAccumulation) -> Origin:
    """Return the place of a gradient that is not the sum of its micro-batches', where no addition is known."""
    where = f"the sum over the micro-batches of stage {found.stage}, though not when the step is run again"
    return Origin(found.accumulation.name, found.accumulation.relative, where, found.hint)


def _origin_of_step(found: StageRounding) -> Origin:
    """Return the place of an error that is in no action and no micro-batch."""
    return Origin(found.rounding.name, found.relative, "the step as a whole, and in no micro-batch alone")
