"""Learning rates at known steps."""

import pytest

from dualpipe.train.config.schema import OptimizerConfig
from dualpipe.train.optim.lr_schedule import learning_rate, run_learning_rate


def test_cosine():
    rates = [learning_rate(s, peak=2.0, total_steps=12, warmup_steps=3, min_ratio=0.1) for s in range(12)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5), abs=1e-12), "half-way down"
    assert rates[11] == pytest.approx(0.2)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_wsd():
    rates = [learning_rate(s, peak=1.0, total_steps=10, warmup_steps=1, schedule="wsd", min_ratio=0.0,
                           decay_fraction=0.4) for s in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


def test_linear_and_constant():
    def rates(schedule):
        return [learning_rate(s, peak=1.0, total_steps=7, warmup_steps=2, schedule=schedule, min_ratio=0.2)
                for s in range(7)]

    assert rates("linear") == pytest.approx([1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2])
    assert rates("constant") == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 5), (2, 2), (5, 5), (3, 0)])
def test_short_runs_have_finite_positive_rates(schedule, total, warmup):
    for step in range(total):
        rate = learning_rate(step, peak=1.0, total_steps=total, warmup_steps=warmup, schedule=schedule, min_ratio=0.1)
        assert 0 < rate <= 1


def test_a_run_takes_all_of_its_settings():
    optimizer = OptimizerConfig(lr=2.0, warmup_steps=1, schedule="wsd", min_lr_ratio=0.5, decay_fraction=0.5)
    rates = [run_learning_rate(step, optimizer, 8) for step in range(8)]
    assert rates == [learning_rate(s, peak=2.0, total_steps=8, warmup_steps=1, schedule="wsd", min_ratio=0.5,
                                   decay_fraction=0.5) for s in range(8)]
    assert rates[0] == 1.0 and rates[-1] == 1.0 and max(rates) == 2.0
