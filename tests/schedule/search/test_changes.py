"""Random changes of a rank's order keep its work complete."""

from __future__ import annotations

from collections import Counter
from random import Random

from dualpipe.schedule import build
from dualpipe.schedule.search.anneal import orders_of, random_change


def whole_work(order):
    """Counts of forwards, backwards and weight gradients by stage; a full backward counts as "I" and "W"."""
    counts = Counter()
    for step in order:
        for kind, stage in step:
            counts.update([("I", stage), ("W", stage)] if kind == "B" else [(kind, stage)])
    return counts


def test_changes_keep_the_work_and_the_original():
    random = Random(0)
    order = orders_of(build("dualpipev", 3, 6))[0]
    work = whole_work(order)
    original = order[:]
    num_changed = 0
    for _ in range(500):
        changed = random_change(order, random)
        assert order == original
        if changed is not None:
            assert whole_work(changed) == work and all(len(step) in (1, 2) for step in changed)
            num_changed += changed != order
    assert num_changed > 200


def test_an_empty_order_has_no_change():
    assert random_change([], Random(0)) is None
