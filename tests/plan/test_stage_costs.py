"""What the actions of a stage cost: a pair hides what fits behind the other."""

from __future__ import annotations

from dualpipe.plan.stage_costs import Seconds, walk_seconds


def test_a_pair_hides_what_fits_behind_the_other():
    action = [Seconds(1.0, 2.0), Seconds(3.0)]
    assert walk_seconds([action], 0.0) == 6
    # F 0-1, B 1-2; F's message 1-3, B's 3-5; F 3-6, B 6-9
    assert walk_seconds([action, action], 0.0) == 9
    # messages go one after the other: 1-5 and 5-9
    assert walk_seconds([[Seconds(1.0, 4.0), Seconds(1.0)]] * 2, 0.0) == 10
    # alone, a backward hides its message behind its own weight gradients
    assert walk_seconds([[Seconds(1.0, 2.0, deferred=1.5), Seconds(3.0)]], 0.0) == 6
    # what computes beside a message is slower by half: 1, then 1 of 2 seconds
    assert walk_seconds([[Seconds(1.0, 2.0, deferred=1.0), Seconds(0.0)]], 0.5) == 3
    assert walk_seconds([[Seconds(1.0, 2.0, deferred=1.5), Seconds(0.0)]], 0.5) == 3.5
