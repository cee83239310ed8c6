"""Messages that the steps of a schedule receive, send and complete."""

from __future__ import annotations

import re

import pytest

from dualpipe.schedule import Action, Schedule, build, validate
from dualpipe.schedule.messages import all_messages, completed_stages
from schedules import SCHEDULES


def steps(text: str) -> tuple:
    """Parse "0F0 1B0&0F1" into steps of actions."""
    parse = re.compile(r"(\d+)([FBIW])(\d+)").fullmatch
    groups = [[parse(action).groups() for action in step.split("&")] for step in text.split()]
    return tuple(tuple(Action(kind, int(stage), int(mb)) for stage, kind, mb in group) for group in groups)


@pytest.mark.parametrize(
    "text, kinds, expected",
    [
        ("0F0 0I0 0I1 0W0 0W1", "BW", ((), (), (), (), (0,))),
        ("0F0 1F0 1B0 0B0", "BW", ((), (), (1,), (0,))),
        ("0F0 0F1&1B0 1B1&0B0 0B1", "BW", ((), (), (1,), (0,))),
        ("0B0&1B0", "BW", ((0, 1),)),
        ("0F0 1F0 1B0 0F1 0B0 0B1", "F", ((), (1,), (), (0,), (), ())),
        ("", "BW", ()),
    ],
)
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
