"""Errors of bfloat16 in the tensors of a pipeline's stages, and their bounds.

The checks are those of `train.parity` for this library's own models: rounding takes the pipeline no further from
float64 than the unpipelined model (`Rounding`), and the gradient of a step is the sum of those of its micro-batches
(`Accumulation`). The second detects accumulation in bfloat16, which the first cannot: over four micro-batches that adds
an error of 2^-9 to one of percents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualpipe.train.model_parity.models.pipelined import StageGradient, has_bfloat16_values
from dualpipe.train.model_parity.models.unpipelined import UnpipelinedStep
from dualpipe.train.parity_errors import Accumulation, Bounds, Rounding, measure_rounding, worst_of

# Wider than for this library's models, which round almost equally with and without a pipeline. Measured over 7 families
# of transformers, where the unpipelined model computes experts differently, and 10 batches: 0.6 to 1.2 times for all
# gradients together and up to 1.5 for one; for gpt-oss, whose unpipelined model is wrong by 12% to 90%, 2.0 and 2.9.
BOUNDS = Bounds(2.5, 4.0)
ONE_ROUNDING = 2**-9
# In a tensor of fewer elements, such as four losses, the relative error of the unpipelined model counts as at least
# that of all its gradients together: the norm of few errors is random, and may differ several times between two models
# that round equally.
SMALL = 32


class StageRounding(NamedTuple):
    """The errors of a tensor of a stage. stage: -1 for losses."""

    stage: int
    rounding: Rounding

    @property
    def relative(self) -> float:
        """The error of the pipeline, relative to the tensor."""
        return self.rounding.pipelined / (self.rounding.norm or 1.0)

    @property
    def is_allowed(self) -> bool:
        """True if the error is within its bound; False for NaN."""
        return self.rounding.excess <= BOUNDS.single


class StageAccumulation(NamedTuple):
    """The error of a gradient's accumulation in a stage. hint: a likely cause, or ""."""

    stage: int
    accumulation: Accumulation
    hint: str

    @property
    def is_allowed(self) -> bool:
        """True if the error is within its bound; False for NaN."""
        return self.accumulation.relative <= self.accumulation.allowed


def measure_gradients(
    gradients: Iterable[StageGradient], narrow: UnpipelinedStep, exact: UnpipelinedStep
) -> list[StageRounding]:
    """Return the errors of stages' gradients, and of those of the unpipelined model, against float64.

    narrow, exact: steps of the unpipelined model in bfloat16 and float64.
    """
    small_floor = _floor_of_small(narrow, exact)
    errors = []
    for stage, name, gradient in gradients:
        floor = small_floor if gradient.numel() < SMALL else ONE_ROUNDING
        rounding = measure_rounding(name, gradient, narrow.gradients[name], exact.gradients[name], floor)
        errors.append(StageRounding(stage, rounding))
    return errors


def measure_losses(
    name: str, losses: Tensor, replica: int, narrow: UnpipelinedStep, exact: UnpipelinedStep
) -> StageRounding:
    """Return the error of the losses of the micro-batches of one pipeline, with the number `replica`."""
    floor = _floor_of_small(narrow, exact) if losses.numel() < SMALL else ONE_ROUNDING
    rounding = measure_rounding(name, losses.double().cpu(), narrow.losses[replica], exact.losses[replica], floor)
    return StageRounding(-1, rounding)


class MicrobatchSums:
    """Sums in float64 of gradients, each computed from one micro-batch."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._magnitudes: list[Tensor] = []  # sums of absolute values; errors are relative to their norms

    def add(self, gradients: Iterable[StageGradient]) -> None:
        """Add the gradients of a micro-batch."""
        for index, (_, _, gradient) in enumerate(gradients):
            exact = gradient.double()
            if index == len(self._sums):
                self._sums.append(torch.zeros_like(exact))
                self._magnitudes.append(torch.zeros_like(exact))
            self._sums[index] += exact
            self._magnitudes[index] += exact.abs()

    def measure(self, step: Sequence[StageGradient], num_additions: int) -> list[StageAccumulation]:
        """Return the distances of a step's gradients from the sums. An addition in float32 may round by 2^-24."""
        allowed = num_additions * torch.finfo(torch.float32).eps / 2
        errors = []
        for (stage, name, gradient), total, magnitude in zip(step, self._sums, self._magnitudes):
            relative = float((gradient.double() - total).norm() / (magnitude.norm() or 1.0))
            hint = _hint(gradient) if not relative <= allowed else ""
            errors.append(StageAccumulation(stage, Accumulation(name, relative, allowed), hint))
        return errors


def worst_rounding(errors: Iterable[StageRounding]) -> StageRounding:
    """Return the error that exceeds the unpipelined model's most; NaN comes first."""
    (worst,) = worst_of(errors, lambda error: error.rounding.excess, 1)
    return worst


def worst_accumulation(errors: Iterable[StageAccumulation]) -> StageAccumulation:
    """Return the largest error; NaN is the largest."""
    (worst,) = worst_of(errors, lambda error: error.accumulation.relative, 1)
    return worst


def _floor_of_small(narrow: UnpipelinedStep, exact: UnpipelinedStep) -> float:
    """Return the smallest relative error that the unpipelined model is taken to have in a small tensor."""
    return max(_relative_error(narrow.gradients, exact.gradients), ONE_ROUNDING)


def _relative_error(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the error of all gradients together, relative to their norm."""
    errors = [(gradients[name].double() - value).norm() for name, value in exact.items()]
    norms = [value.norm() for value in exact.values()]
    return float(torch.stack(errors).norm() / torch.stack(norms).norm())


def _hint(gradient: Tensor) -> str:
    """Return a likely cause of a wrong sum, or ""."""
    if has_bfloat16_values(gradient):
        return "all its elements are bfloat16 values: it was accumulated, reduced or stored in bfloat16"
    return ""
