"""Messages that the steps of a schedule receive, send and complete."""


import pytest

from dualpipe.schedule import Action, Costs, Schedule, build, simulate, validate
from dualpipe.schedule.messages import all_messages, completed_stages, merged_weights
from schedules import SCHEDULES


def steps(text: str) -> tuple:
    """Parse "0F0 1B0&0F1" into steps of actions."""
    return tuple(tuple(map(Action.read, step.split("&"))) for step in text.split())


@pytest.mark.parametrize("text, kinds, expected", [
    ("0F0 0I0 0I1 0W0 0W1", "BW", ((), (), (), (), (0,))), ("0F0 1F0 1B0 0B0", "BW", ((), (), (1,), (0,))),
    ("0F0 0F1&1B0 1B1&0B0 0B1", "BW", ((), (), (1,), (0,))), ("0B0&1B0", "BW", ((0, 1),)),
    ("0F0 1F0 1B0 0F1 0B0 0B1", "F", ((), (1,), (), (0,), (), ())), ("", "BW", ()),
])
def test_a_stage_is_complete_after_its_last_action(text, kinds, expected):
    assert completed_stages(steps(text), kinds) == expected


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks, num_microbatches", [(1, 1), (2, 3), (4, 10)])
def test_every_stage_is_completed_once_by_a_weight_gradient(name, num_ranks, num_microbatches):
    schedule = build(name, num_ranks, num_microbatches)
    for rank, row in enumerate(schedule.ranks):
        done = completed_stages(row)
        assert sorted(stage for stages in done for stage in stages) == list(schedule.rank_stages(rank))
        for i, stages in enumerate(done):
            for stage in stages:
                assert not any(a.stage == stage for step in row[i + 1 :] for a in step)
                assert any(a.stage == stage and a.kind in "BW" for a in row[i])


def test_activations_and_gradients_are_streams_apart():
    """DeepSeek's order on 4 ranks: rank 1 receives a gradient before an activation that rank 0 sent earlier."""
    deepseek = build("dualpipev", 4, 8)
    messages = all_messages(deepseek)
    sent = [m.route for step in messages[0] for m in step.outgoing if m.dst == 1]
    taken = [m.route for step in messages[1] for m in step.incoming if m.src == 0]
    assert sorted(sent) == sorted(taken)
    first = next(i for i, (a, b) in enumerate(zip(sent, taken)) if a != b)
    assert sent[first] == "activation of micro-batch 6 for stage 1 (rank 0 to 1)"
    assert taken[first] == "gradient of micro-batch 0 for stage 6 (rank 0 to 1)"
    streams = {m.stream for steps in messages for step in steps for m in step.outgoing}
    assert len(streams) == 12  # over three borders, both ways, of activations and of gradients
    for stream in streams:
        sent_here = [m for step in messages[stream[0]] for m in step.outgoing if m.stream == stream]
        assert sent_here == [m for step in messages[stream[1]] for m in step.incoming if m.stream == stream]


def test_a_step_takes_its_messages_as_they_are_sent():
    """Rank 1's pair of forwards is in another order than rank 0's, which is the order of the messages."""
    turned = Schedule("turned", 2, 2, 2, (steps("0F0 0F1 0B0 0B1"), steps("1F1&1F0 1B0 1B1")))
    validate(turned)
    assert [m.microbatch for m in all_messages(turned)[1][0].incoming] == [0, 1]


# -- weight gradients next to each other, and what merging them saves


def groups(text):
    return [",".join(map(str, actions)) for actions in merged_weights(steps(text))]


def test_worked_example():
    assert groups("3W0 4W0 3W1 4W1 4W2") == ["3W0,3W1", "4W0,4W1,4W2", "3W0,3W1", "4W0,4W1,4W2", "4W0,4W1,4W2"]


@pytest.mark.parametrize("text", ["0W0", "0W0 1W0", "0W0 0F3 0W1", "0W0 0F3&0W1 0W2", "0F0 0I0", "", "0W0&0F1 0W1"])
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
