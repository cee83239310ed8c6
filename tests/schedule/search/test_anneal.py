"""Properties that annealing relies on: changed orders get the times and proofs of whole ones."""

import random
from collections import Counter

import pytest

from dualpipe.schedule import ScheduleError, build, simulate, validate
from dualpipe.schedule.search.anneal import Timing, orders_of, plays, random_change, with_steps
from searches import held, overlapped


def walk(name: str, num_ranks: int, num_microbatches: int, memory: float, seed: int):
    """Change a known order, one change at a time; yield each order and its candidate."""
    schedule = build(name, num_ranks, num_microbatches)
    timing, orders = Timing(schedule, overlapped(), [memory] * num_ranks), orders_of(schedule)
    times = timing.times(timing.ranks(orders))
    chance = random.Random(seed)
    for _ in range(500):
        rank = chance.randrange(num_ranks)
        order = random_change(orders[rank], chance)
        steps = order and timing.timed_steps(rank, order)
        if steps:
            changed = timing.changed(times, rank, steps, float("inf"))
            ranks = [*times.ranks[:rank], steps, *times.ranks[rank + 1 :]]
            yield timing, ranks, changed
            if changed is not None and plays(ranks, schedule.messages_in_flight):
                times, orders = changed, [*orders[:rank], order, *orders[rank + 1 :]]


@pytest.mark.parametrize("name, num_microbatches", [
    ("dualpipev", 6), ("zbv", 6), ("interleaved_1f1b", 6), ("interleaved_1f1b", 7)])
def test_a_changed_order_is_timed_and_proved_as_by_simulate_and_validate(name, num_microbatches):
    refused = accepted = 0
    for timing, ranks, changed in walk(name, 3, num_microbatches, 12, seed=5):
        schedule = with_steps(timing.schedule, ranks)
        whole = timing.times(ranks)
        assert (whole is None) == (changed is None)
        if whole is None:
            with pytest.raises(ScheduleError, match="can never start"):
                simulate(schedule)
            continue
        assert changed.starts == whole.starts and changed.result_times == whole.result_times
        timeline = simulate(schedule, timing.costs)
        assert [[span.start for span in spans] for spans in timeline.spans] == whole.starts
        assert timeline.peak_memory == held(timeline) <= 12
        if plays(ranks, schedule.messages_in_flight):
            validate(schedule)
            accepted += 1
        elif name != "interleaved_1f1b":  # it refuses some steps that take two messages of one stream
            refused += 1
            with pytest.raises(ScheduleError, match=r"deadlock|but the next to arrive"):
                validate(schedule)
    assert accepted > 50 and (refused > 0 or name == "interleaved_1f1b")


def test_a_limit_that_would_be_passed_ends_the_timing():
    for timing, ranks, changed in walk("dualpipev", 2, 4, 5, seed=1):
        if changed is not None:
            end = max(changed.ends())
            assert timing.times(ranks, end + 1e-6) is not None and timing.times(ranks, end - 1e-6) is None


def whole_work(order):
    """Counts of forwards, backwards and weight gradients by stage; a full backward counts as "I" and "W"."""
    counts = Counter()
    for step in order:
        for kind, stage in step:
            counts.update([("I", stage), ("W", stage)] if kind == "B" else [(kind, stage)])
    return counts


def test_changes_keep_the_work_and_the_original():
    chance = random.Random(0)
    order = orders_of(build("dualpipev", 3, 6))[0]
    work = whole_work(order)
    original = order[:]
    num_changed = 0
    for _ in range(500):
        changed = random_change(order, chance)
        assert order == original
        if changed is not None:
            assert whole_work(changed) == work and all(len(step) in (1, 2) for step in changed)
            num_changed += changed != order
    assert num_changed > 200


def test_an_empty_order_has_no_change():
    assert random_change([], random.Random(0)) is None
