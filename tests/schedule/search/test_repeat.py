"""Extension of a schedule to more micro-batches by a repeated window of its steady state."""

import pytest

from dualpipe.schedule import simulate, validate
from dualpipe.schedule.search import driver
from dualpipe.schedule.search.repeat import repeat_steady_state
from searches import QUICK, held, overlapped


def test_many_micro_batches_repeat_the_steady_state(monkeypatch):
    """The search uses 10 micro-batches. Its savings at the ends of the schedule stay."""
    monkeypatch.setattr(driver, "MAX_SIZE", 40)
    costs = overlapped()
    long = driver.search(4, 60, costs=costs, effort=QUICK)
    short = driver.search(4, 10, costs=costs, effort=QUICK)
    validate(long.timeline.schedule)
    assert held(long.timeline) <= 9
    assert long.timeline.makespan < long.best_known.makespan
    savings = [result.best_known.makespan - result.timeline.makespan for result in (long, short)]
    assert savings[0] == pytest.approx(savings[1], abs=2)


def test_a_repeated_schedule_is_valid_and_adds_only_steady_state():
    costs = overlapped()
    schedule = driver.KNOWN["dualpipev"](4, 12)
    repeated = repeat_steady_state(schedule, costs, [9] * 4, 20)
    validate(repeated)
    added = simulate(repeated, costs).makespan - simulate(schedule, costs).makespan
    assert repeated.num_microbatches == 20 and added == pytest.approx(8 * 2 * 1.95)


def test_a_window_of_several_micro_batches_repeats_where_one_of_one_does_not():
    """Interleaved 1F1B on four ranks has rounds of four micro-batches."""
    schedule = driver.KNOWN["interleaved_1f1b"](4, 8)
    repeated = repeat_steady_state(schedule, overlapped(), [100] * 4, 16)
    validate(repeated)
    assert repeated.num_microbatches == 16


def test_without_a_steady_state_nothing_is_repeated():
    assert repeat_steady_state(driver.KNOWN["1f1b"](2, 1), overlapped(), [5] * 2, 9) is None
