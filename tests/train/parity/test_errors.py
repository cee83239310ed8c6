"""Errors of tensors and their bounds."""

import math

import pytest
import torch

from dualpipe.train.parity.errors import (
    BOUND_OF_ONE,
    Error,
    MicrobatchSums,
    difference,
    rounding,
    rounding_failures,
    smallest_error,
    worst,
)
from dualpipe.train.parity.steps import StageTensor

NAN = float("nan")


def test_difference():
    error = difference("x", torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert (error.max_abs, error.relative, error.shape) == (0.5, pytest.approx(0.1), (2,))
    assert difference("x", torch.tensor([2.0]), torch.tensor([0.0])).relative == 2.0
    assert difference("x", torch.tensor([2.0]), torch.tensor([1.0]), floor=4.0).relative == 0.25
    assert difference("x", torch.tensor([9.0]), torch.tensor([8.0]), floor=4.0).relative == 0.125
    assert difference("x", torch.tensor([1.0]), torch.tensor([1.0, 1.0])).relative == math.inf
    assert difference("x", torch.tensor([NAN]), torch.tensor([0.0]), allowed=1e9).is_wrong


def test_errors_are_measured_by_those_of_the_unpipelined_model():
    exact = torch.ones(64, dtype=torch.float64)
    narrow = exact * 1.01
    error = rounding("w", (exact * 1.02).float(), narrow, exact)
    assert error.excess * BOUND_OF_ONE == pytest.approx(2, abs=1e-3) and not error.is_wrong
    assert error.relative == pytest.approx(0.02, abs=1e-6)
    assert rounding("w", exact * (1 + 0.0101 * BOUND_OF_ONE), narrow, exact).is_wrong
    assert not rounding("w", exact * (1 + 2**-8), exact, exact).is_wrong, "roundings of the tensor are always allowed"


def test_few_numbers_are_measured_by_the_error_of_all_gradients():
    """Losses that the unpipelined model has right by chance."""
    large = torch.full((64,), 1e3)
    floor = smallest_error({"w": large * 1.02, "bias": torch.ones(8)}, {"w": large, "bias": torch.ones(8)})
    right = torch.ones(2)
    assert not rounding("loss", torch.tensor([1.03, 1.0]), right, right, floor).is_wrong
    assert rounding("loss", torch.tensor([1.2, 1.0]), right, right, floor).is_wrong
    assert rounding("loss", torch.tensor([NAN, 1.0]), right, right, floor).is_wrong


def sum_error(sums, gradient):
    (error,) = sums.measure([StageTensor(0, "w", gradient)], 6, lambda name: torch.float32)
    return error


def test_a_sum_in_bfloat16_is_detected():
    torch.manual_seed(0)
    parts = [torch.randn(1000).bfloat16() for _ in range(4)]
    sums = MicrobatchSums()
    for part in parts:
        sums.add([StageTensor(0, "w", part.float())])
    wide = sum(part.float() for part in parts)
    error = sum_error(sums, wide)
    assert not error.is_wrong and not error.hint
    error = sum_error(sums, parts[0] + parts[1] + parts[2] + parts[3])
    assert error.is_wrong and "bfloat16" in error.hint
    error = sum_error(sums, wide * 1.001)
    assert error.is_wrong and not error.hint


def test_nan_is_the_worst():
    exact = torch.ones(64)
    errors = [rounding("a", torch.full((64,), 9.0), exact, exact), rounding("b", torch.full((64,), NAN), exact, exact)]
    assert worst(errors).name == "b" and errors[1].is_wrong


def test_gradients_that_the_unpipelined_model_has_exactly_may_have_no_error_together():
    error = Error("w", (64,), 0.01, relative=0.00125, norm=8.0, allowed=0.00125, unpipelined=0.0, stage=0)
    assert rounding_failures([error]) == ["all gradients together are further from float64"]
    assert not rounding_failures([error._replace(relative=0.0)])
