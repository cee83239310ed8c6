"""Errors of bfloat16 and their bounds."""

import torch

from dualpipe.train.model_parity.bf16.rounding import (
    BOUNDS,
    MicrobatchSums,
    measure_gradients,
    measure_losses,
    worst_accumulation,
    worst_rounding,
)
from dualpipe.train.model_parity.models.pipelined import StageGradient
from dualpipe.train.model_parity.models.unpipelined import UnpipelinedStep
from dualpipe.train.parity_errors import Rounding, rounding_failures


def step(gradients, losses=(1.0, 1.0)):
    return UnpipelinedStep(torch.tensor([losses], dtype=torch.float64), gradients)


def test_errors_are_measured_by_those_of_the_uncut_model():
    exact = torch.ones(64, dtype=torch.float64)
    narrow = exact * 1.01
    pipelined = StageGradient(2, "w", (exact * 1.02).float())
    (found,) = measure_gradients([pipelined], step({"w": narrow}), step({"w": exact}))
    assert found.stage == 2 and abs(found.rounding.excess - 2) < 1e-3 and found.is_allowed
    assert abs(found.relative - 0.02) < 1e-6
    wrong = StageGradient(2, "w", exact * (1 + 0.0101 * BOUNDS.single))
    (found,) = measure_gradients([wrong], step({"w": narrow}), step({"w": exact}))
    assert not found.is_allowed


def test_few_numbers_are_measured_by_the_error_of_all_gradients():
    """Losses and a bias that the unpipelined model has right by chance."""
    large = torch.full((64,), 1e3)
    exact, narrow = step({"w": large, "bias": torch.ones(8)}), step({"w": large * 1.02, "bias": torch.ones(8)})
    found = measure_losses("loss", torch.tensor([1.03, 1.0]), 0, narrow, exact)
    assert found.stage == -1 and found.is_allowed
    assert not measure_losses("loss", torch.tensor([1.2, 1.0]), 0, narrow, exact).is_allowed
    assert not measure_losses("loss", torch.tensor([float("nan"), 1.0]), 0, narrow, exact).is_allowed
    (bias,) = measure_gradients([StageGradient(0, "bias", torch.full((8,), 1.03))], narrow, exact)
    assert bias.is_allowed
    (bias,) = measure_gradients([StageGradient(0, "bias", torch.full((8,), 1.2))], narrow, exact)
    assert not bias.is_allowed


def test_a_sum_in_bfloat16_is_seen():
    torch.manual_seed(0)
    parts = [torch.randn(1000).bfloat16() for _ in range(4)]
    sums = MicrobatchSums()
    for part in parts:
        sums.add([StageGradient(0, "w", part.float())])
    wide = sum(part.float() for part in parts)
    narrow = parts[0] + parts[1] + parts[2] + parts[3]
    (found,) = sums.measure([StageGradient(0, "w", wide)], num_additions=6)
    assert found.is_allowed and not found.hint
    (found,) = sums.measure([StageGradient(0, "w", narrow)], num_additions=6)
    assert not found.is_allowed and "bfloat16" in found.hint
    (found,) = sums.measure([StageGradient(0, "w", wide * 1.001)], num_additions=6)
    assert not found.is_allowed and not found.hint


def test_nan_is_the_worst():
    exact = step({"a": torch.ones(64), "b": torch.ones(64)})
    gradients = [StageGradient(0, "a", torch.full((64,), 9.0)), StageGradient(0, "b", torch.full((64,), float("nan")))]
    found = measure_gradients(gradients, exact, exact)
    assert worst_rounding(found).rounding.name == "b" and not found[1].is_allowed
    sums = MicrobatchSums()
    sums.add([StageGradient(0, "a", torch.ones(64)), StageGradient(0, "b", torch.ones(64))])
    added = sums.measure(gradients, 6)
    assert worst_accumulation(added).accumulation.name == "b" and not added[1].is_allowed


def test_gradients_that_the_uncut_model_has_exactly_may_have_no_error_together():
    found = Rounding("w", (64,), norm=8.0, pipelined=0.01, unpipelined=0.0, excess=1.0)
    assert rounding_failures([found], BOUNDS) == ["all gradients together are further from float64"]
    assert not rounding_failures([found._replace(pipelined=0.0)], BOUNDS)
