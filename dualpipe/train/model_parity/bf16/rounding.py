"""The errors of bfloat16 in the tensors of a pipeline's stages, and how large they may be.

What can be asked of the pipeline is what `train.parity` asks of this library's own models: that rounding takes it no
further from float64 than the uncut model (`Rounding`), and that the gradient of a step is the sum of those of its
micro-batches (`Accumulation`). The second sees what accumulates in bfloat16, which the first cannot: four micro-batches
add an error of 2^-9 to one of percents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualpipe.train.model_parity.models.pipelined import StageGradient, has_bfloat16_values
from dualpipe.train.model_parity.models.uncut import UncutStep
from dualpipe.train.parity_errors import Accumulation, Bounds, Rounding, measure_rounding, worst_of

# Wider than those of this library's models, whose two forms are rounded almost alike. Measured over 7 families of
# transformers, whose uncut models compute experts otherwise, and 10 batches: of all gradients together 0.6 to 1.2
# times, of one up to 1.5; in gpt-oss, whose uncut model is wrong by 12% to 90%, 2.0 and 2.9.
BOUNDS = Bounds(2.5, 4.0)
ONE_ROUNDING = 2**-9
# The norm of few errors is itself a matter of chance: of two models that are rounded alike, one's can be several times
# the other's. So in a tensor of fewer elements, such as four losses, the uncut model's relative error counts as at
# least that of all its gradients together.
SMALL = 32


class StageRounding(NamedTuple):
    """The errors of a tensor of a stage. stage: its number, -1 for losses."""

    stage: int
    rounding: Rounding

    @property
    def relative(self) -> float:
        """The error of the pipeline, relative to the tensor."""
        return self.rounding.pipelined / (self.rounding.norm or 1.0)

    @property
    def is_allowed(self) -> bool:
        """Return True if the error is within its bound, which NaN is not."""
        return self.rounding.excess <= BOUNDS.single


class StageAccumulation(NamedTuple):
    """The error of a gradient's accumulation in a stage. hint: a likely cause, or nothing."""

    stage: int
    accumulation: Accumulation
    hint: str

    @property
    def is_allowed(self) -> bool:
        """Return True if the error is within its bound, which NaN is not."""
        return self.accumulation.relative <= self.accumulation.allowed


def measure_gradients(
    gradients: Iterable[StageGradient], narrow: UncutStep, exact: UncutStep
) -> list[StageRounding]:
    """Return the errors of stages' gradients beside those of the uncut model in bfloat16."""
    small_floor = _floor_of_small(narrow, exact)
    found = []
    for stage, name, gradient in gradients:
        floor = small_floor if gradient.numel() < SMALL else ONE_ROUNDING
        rounding = measure_rounding(name, gradient, narrow.gradients[name], exact.gradients[name], floor)
        found.append(StageRounding(stage, rounding))
    return found


def measure_losses(name: str, losses: Tensor, replica: int, narrow: UncutStep, exact: UncutStep) -> StageRounding:
    """Return the error of the losses of one pipeline's micro-batches."""
    floor = _floor_of_small(narrow, exact) if losses.numel() < SMALL else ONE_ROUNDING
    rounding = measure_rounding(name, losses.double().cpu(), narrow.losses[replica], exact.losses[replica], floor)
    return StageRounding(-1, rounding)


class MicrobatchSums:
    """Sums, in float64, of the gradients that micro-batches have alone."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._sizes: list[Tensor] = []  # sums of absolute values, which errors are relative to

    def add(self, gradients: Iterable[StageGradient]) -> None:
        """Add those of a micro-batch."""
        for place, (_, _, gradient) in enumerate(gradients):
            exact = gradient.double()
            if place == len(self._sums):
                self._sums.append(torch.zeros_like(exact))
                self._sizes.append(torch.zeros_like(exact))
            self._sums[place] += exact
            self._sizes[place] += exact.abs()

    def measure(self, step: Sequence[StageGradient], num_additions: int) -> list[StageAccumulation]:
        """Return how far the gradients of a step are from the sums; each addition in float32 rounds by 2^-24."""
        allowed = num_additions * torch.finfo(torch.float32).eps / 2
        found = []
        for (stage, name, gradient), total, size in zip(step, self._sums, self._sizes):
            relative = float((gradient.double() - total).norm() / (size.norm() or 1.0))
            hint = _hint(gradient) if not relative <= allowed else ""
            found.append(StageAccumulation(stage, Accumulation(name, relative, allowed), hint))
        return found


def worst_rounding(found: Iterable[StageRounding]) -> StageRounding:
    """Return the one that exceeds the uncut model's error most; NaN does so before all."""
    (worst,) = worst_of(found, lambda each: each.rounding.excess, 1)
    return worst


def worst_accumulation(found: Iterable[StageAccumulation]) -> StageAccumulation:
    """Return the largest; NaN is the largest."""
    (worst,) = worst_of(found, lambda each: each.accumulation.relative, 1)
    return worst


def _floor_of_small(narrow: UncutStep, exact: UncutStep) -> float:
    """Return the relative error that the uncut model's counts as at least in a small tensor."""
    return max(_relative_error(narrow.gradients, exact.gradients), ONE_ROUNDING)


def _relative_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the error of all tensors together, relative to their norm."""
    errors = [(found[name].double() - value).norm() for name, value in exact.items()]
    norms = [value.norm() for value in exact.values()]
    return float(torch.stack(errors).norm() / torch.stack(norms).norm())


def _hint(gradient: Tensor) -> str:
    """Return a likely cause of a sum that is wrong, or nothing."""
    if has_bfloat16_values(gradient):
        return "all its numbers are bfloat16's: it was accumulated, reduced or stored in that"
    return ""
