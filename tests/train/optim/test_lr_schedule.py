"""Learning rates at known steps."""

from typing import get_args

import pytest

from dualpipe.train.config.schema import LRSchedule, OptimizerConfig
from dualpipe.train.optim.lr_schedule import SCHEDULES, learning_rate


def rates(total_steps, **settings):
    optimizer = OptimizerConfig(**settings)
    return [learning_rate(step, optimizer, total_steps) for step in range(total_steps)]


def test_cosine():
    found = rates(12, lr=2.0, warmup_steps=3, min_lr_ratio=0.1)
    assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert found[7] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5), abs=1e-12), "half-way down"
    assert found[11] == pytest.approx(0.2)
    assert found[3:] == sorted(found[3:], reverse=True)


def test_wsd():
    found = rates(10, lr=1.0, warmup_steps=1, schedule="wsd", min_lr_ratio=0.0, decay_fraction=0.4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


def test_linear_and_constant():
    settings = {"lr": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.2}
    assert rates(7, schedule="linear", **settings) == pytest.approx([1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates(7, schedule="constant", **settings) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 5), (2, 2), (5, 5), (3, 0)])
def test_short_runs_have_finite_positive_rates(schedule, total, warmup):
    assert all(0 < rate <= 1 for rate in rates(total, lr=1.0, warmup_steps=warmup, schedule=schedule))


def test_every_schedule_is_a_choice_of_the_setting():
    assert set(SCHEDULES) == set(get_args(LRSchedule))
