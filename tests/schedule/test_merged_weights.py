"""Which "W" are next to each other, and what that saves."""

from __future__ import annotations

import pytest

from dualpipe.schedule import Action, Costs, Schedule, build, simulate
from dualpipe.schedule.messages import merged_weights


def steps(text):
    return [tuple(map(Action.read, step.split("+"))) for step in text.split()]


def groups(text):
    return [",".join(map(str, actions)) for actions in merged_weights(steps(text))]


def test_worked_example():
    assert groups("3W0 4W0 3W1 4W1 4W2") == ["3W0,3W1", "4W0,4W1,4W2", "3W0,3W1", "4W0,4W1,4W2", "4W0,4W1,4W2"]


@pytest.mark.parametrize("text", ["0W0", "0W0 1W0", "0W0 0F3 0W1", "0W0 0F3+0W1 0W2", "0F0 0I0", "", "0W0+0F1 0W1"])
def test_what_is_not_next_to_another_w_of_its_stage_is_alone(text):
    assert groups(text) == [""] * len(text.split())


def test_a_run_ends_at_anything_else():
    assert groups("0W0 0W1 0F4 0W2 0W3") == ["0W0,0W1", "0W0,0W1", "", "0W2,0W3", "0W2,0W3"]


def tail(num_w):
    """One rank: all forwards, all input gradients, then all weight gradients."""
    order = [Action(kind, 0, mb) for kind in "FIW" for mb in range(num_w)]
    return Schedule("mine", 1, 1, num_w, (tuple((action,) for action in order),), (0,))


@pytest.mark.parametrize(("num_w", "cost"), [(1, 10), (2, 6), (3, 4), (5, 4)])
def test_a_merged_w_costs_what_is_said_and_the_last_cost_is_for_all_larger_runs(num_w, cost):
    timeline = simulate(tail(num_w), Costs(F=1, B=11, W=10), merged_w={0: (6, 4)})
    assert timeline.makespan == num_w * (1 + 1 + cost)
    spans = [span.end - span.start for span in timeline.spans[0] if span.step[0].kind == "W"]
    assert spans == [cost] * num_w


def test_without_costs_of_merged_actions_nothing_is_merged():
    costs = Costs(F=1, B=11, W=10)
    assert simulate(tail(3), costs).spans == simulate(tail(3), costs, merged_w={}).spans


def test_in_zbv_merging_saves_time_and_in_dualpipev_the_first_rank_has_none_to_merge():
    costs = Costs(F=1, B=2, W=1)
    for name, saves in (("zbv", True), ("dualpipev", False)):
        schedule = build(name, 4, 16)
        merged_w = dict.fromkeys(range(8), (0.6, 0.5, 0.4))
        merged = simulate(schedule, costs, merged_w=merged_w)
        plain = simulate(schedule, costs)
        assert (merged.makespan < plain.makespan) is saves
        assert not any(merged_weights(schedule.ranks[0]))
        assert merged.spans[-1][-1].end < plain.spans[-1][-1].end
