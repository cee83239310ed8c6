"""Where a stage's gradients are complete, and what reducing them there costs."""

from __future__ import annotations

import re

import pytest

from dualpipe.schedule import Action, Costs, Schedule, build, simulate, to_svg, to_text
from dualpipe.schedule.messages import completed


def steps(text: str) -> tuple:
    """ "0F0 1B0+0F1" as steps of actions."""
    parse = re.compile(r"(\d+)([FBIW])(\d+)").fullmatch
    groups = [[parse(action).groups() for action in step.split("+")] for step in text.split()]
    return tuple(tuple(Action(kind, int(stage), int(mb)) for stage, kind, mb in group) for group in groups)


@pytest.mark.parametrize(
    "text, kinds, expected",
    [
        ("0F0 0I0 0I1 0W0 0W1", "BW", ((), (), (), (), (0,))),
        ("0F0 1F0 1B0 0B0", "BW", ((), (), (1,), (0,))),
        ("0F0 0F1+1B0 1B1+0B0 0B1", "BW", ((), (), (1,), (0,))),
        ("0B0+1B0", "BW", ((0, 1),)),
        ("0F0 1F0 1B0 0F1 0B0 0B1", "F", ((), (1,), (), (0,), (), ())),
        ("", "BW", ()),
    ],
)
def test_a_stage_is_complete_after_its_last_action(text, kinds, expected):
    assert completed(steps(text), kinds) == expected


@pytest.mark.parametrize("name", ["dualpipev", "zbv", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("num_ranks, num_microbatches", [(1, 1), (2, 3), (4, 10)])
def test_every_stage_is_completed_once_by_a_weight_gradient(name, num_ranks, num_microbatches):
    schedule = build(name, num_ranks, num_microbatches)
    for rank, row in enumerate(schedule.ranks):
        done = completed(row)
        assert sorted(stage for stages in done for stage in stages) == list(schedule.rank_stages(rank))
        for i, stages in enumerate(done):
            for stage in stages:
                assert not any(a.stage == stage for step in row[i + 1 :] for a in step)
                assert any(a.stage == stage and a.kind in "BW" for a in row[i])


def timeline(costs: Costs):
    """One rank, two stages: gradients of stage 1 are complete at 4, those of stage 0 at 6."""
    return simulate(Schedule("mine", 1, 2, 1, (steps("0F0 1F0 1B0 0B0"),)), costs)


@pytest.mark.parametrize(
    "cost, per_stage, spans, makespan",
    [
        (1, None, [(4, 5, 1), (6, 7, 0)], 7),  # the first is hidden
        (3, None, [(4, 7, 1), (7, 10, 0)], 10),  # one after the other
        (0, {1: Costs(R=1)}, [(4, 5, 1)], 6),
        (0, None, [], 6),
    ],
)
def test_reductions_run_beside_the_steps_one_after_the_other(cost, per_stage, spans, makespan):
    found = timeline(Costs(R=cost, per_stage=per_stage))
    assert [(r.start, r.end, r.stage) for r in found.reductions[0]] == spans
    assert found.makespan == makespan
    assert found.bubble == (makespan - 6,)


def test_what_a_reduction_costs_is_scaled_and_checked_like_the_rest():
    assert Costs(R=2).scaled(3).R == 6
    with pytest.raises(ValueError, match="cost R is -1"):
        Costs(R=-1)


def test_pictures_show_reductions_where_there_are_any():
    text = to_text(timeline(Costs(R=3)), width=47)
    assert text.splitlines()[1] == " " * 23 + "R1==========R0==========", text
    assert "reduced" in text
    picture = to_svg(timeline(Costs(R=3)))
    assert picture.count("gradients of stage") == 2 and "gradients reduced" in picture
    for plain in (to_text(timeline(Costs())), to_svg(timeline(Costs()))):
        assert "reduced" not in plain
