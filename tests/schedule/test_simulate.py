"""Times: published truths, and tiny schedules worked out by hand."""

from math import inf, nan

import pytest

from dualpipe.schedule import Action, Costs, Schedule, ScheduleError, build, simulate

F, B, I, W = ((lambda stage, mb, kind=kind: Action(kind, stage, mb)) for kind in "FBIW")  # noqa: E741


@pytest.mark.parametrize("num_ranks, num_microbatches, makespan", [(4, 10, 66), (8, 20, 134)])
def test_published_makespans_of_dualpipev(num_ranks, num_microbatches, makespan):
    timeline = simulate(build("dualpipev", num_ranks, num_microbatches), Costs(F=1, B=2, W=1, FB=3))
    assert timeline.makespan == makespan
    assert timeline.bubble == (makespan - 6 * num_microbatches,) * num_ranks
    assert timeline.peak_activations == (2 * num_ranks + 1,) * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("unit", [1, 4])
def test_bubble_of_dualpipev(num_ranks, unit):
    """(P-1)(F&B + B - 3W) on every rank, where F, I and W cost the same."""
    costs = Costs(F=unit, B=2 * unit, W=unit)
    for num_microbatches in (2 * num_ranks, 2 * num_ranks + 1, 5 * num_ranks):
        timeline = simulate(build("dualpipev", num_ranks, num_microbatches), costs)
        assert timeline.bubble == ((num_ranks - 1) * (3 * unit + 2 * unit - 3 * unit),) * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_bubble_of_dualpipev_where_overlap_saves_time(num_ranks):
    """The formula holds for the last two ranks; those before idle less, for they overlap less and compute longer."""
    timeline = simulate(build("dualpipev", num_ranks, 3 * num_ranks), Costs(F=4, B=8, W=4, FB=10))
    bubble = (num_ranks - 1) * (10 + 8 - 3 * 4)
    assert timeline.bubble[-2:] == (bubble, bubble)
    assert all(a <= b for a, b in zip(timeline.bubble, timeline.bubble[1:]))


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_makespan_and_bubble_of_1f1b(num_ranks):
    costs = Costs(F=3, B=5)
    for num_microbatches in (1, num_ranks, 3 * num_ranks + 1):
        timeline = simulate(build("1f1b", num_ranks, num_microbatches), costs)
        assert timeline.makespan == (num_microbatches + num_ranks - 1) * 8
        assert timeline.bubble == ((num_ranks - 1) * 8,) * num_ranks
        assert timeline.bubble_fraction == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))


def test_interleaving_divides_the_bubble():
    """arXiv:2104.04473: (P-1)(F+B) of its smaller stages, so with v stages a rank the bubble is v times smaller."""
    for stages_per_rank in (1, 2, 4):
        schedule = build("interleaved_1f1b", 4, 16, stages_per_rank=stages_per_rank)
        assert max(simulate(schedule).bubble) == 3 * 3


def two_ranks(*ranks: tuple, microbatches: int = 1) -> Schedule:
    return Schedule("mine", 2, 2, microbatches, ranks)


SPLIT = two_ranks(((F(0, 0),), (B(0, 0),)), ((F(1, 0),), (I(1, 0),), (W(1, 0),)))


def times(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    return [[(span.start, span.end) for span in spans] for spans in simulate(schedule, costs).spans]


def test_p2p_delays_what_crosses_ranks_and_nothing_else():
    assert times(SPLIT, Costs(F=1, B=3, W=1)) == [[(0, 1), (4, 7)], [(1, 2), (2, 4), (4, 5)]]
    assert times(SPLIT, Costs(F=1, B=3, W=1, p2p=0.5)) == [[(0, 1), (5, 8)], [(1.5, 2.5), (2.5, 4.5), (4.5, 5.5)]]
    turn = Schedule("v", 1, 2, 1, (((F(0, 0),), (F(1, 0),), (B(1, 0),), (B(0, 0),)),))
    assert simulate(turn, Costs(p2p=7)).makespan == 6


def test_costs_of_stages():
    expected = [[(0, 1), (14, 16)], [(1, 6), (6, 14), (14, 16)]]
    slow = Costs(F=5, B=10, W=2)
    assert times(SPLIT, Costs(per_stage={1: slow})) == expected
    assert times(SPLIT, Costs(F=9, per_stage=[Costs(), slow])) == expected


def test_costs_of_pairs():
    pair = (F(0, 1), B(1, 0))
    steps = ((F(0, 0),), (F(1, 0),), pair, (B(0, 0),), (F(1, 1),), (B(1, 1),), (B(0, 1),))
    schedule = Schedule("p", 1, 2, 2, (steps,))

    def cost(**given):
        return simulate(schedule, Costs(**given)).spans[0][2].end - 2

    assert cost() == 3
    assert cost(FB=2.5) == 2.5
    assert cost(pairs={("B", "F"): 2.25}) == cost(pairs={("F", "B"): 2.25}) == 2.25
    assert cost(FB=2.5, per_stage={1: Costs(F=1, B=4, FB=4)}) == 1 + 4 - (0.5 + 1) / 2
    split = Schedule("p", 1, 2, 2, ((steps[0], steps[1], (I(1, 0), F(0, 1)), (W(1, 0),), *steps[3:]),))
    assert simulate(split, Costs(pairs={("F", "I"): 1.5})).spans[0][2].end == 3.5


def test_a_pair_starts_when_both_can_and_ends_as_one():
    schedule = two_ranks(
        ((F(0, 0),), (F(0, 1),), (B(0, 0),), (B(0, 1),)),
        ((F(1, 0),), (F(1, 1), B(1, 0)), (B(1, 1),)),
        microbatches=2,
    )
    assert times(schedule, Costs(FB=2.5)) == [[(0, 1), (1, 2), (4.5, 6.5), (6.5, 8.5)], [(1, 2), (2, 4.5), (4.5, 6.5)]]


def test_activations_live_until_their_weights_are_done():
    held = ((F(0, 0),), (I(0, 0),), (F(0, 1),), (B(0, 1),), (W(0, 0),))
    freed = ((F(0, 0),), (I(0, 0),), (W(0, 0),), (F(0, 1),), (B(0, 1),))
    paired = ((F(0, 0),), (F(0, 1), B(0, 0)), (B(0, 1),))
    for steps, peak in ((held, 2), (freed, 1), (paired, 2)):
        assert simulate(Schedule("s", 1, 1, 2, (steps,))).peak_activations == (peak,)


def test_fractions_and_empty_ranks():
    timeline = simulate(Schedule("s", 2, 1, 1, (((F(0, 0),), (B(0, 0),)), ())))
    assert timeline.makespan == 3
    assert timeline.bubble == (0, 3)
    assert timeline.bubble_fraction == 0.5
    assert timeline.peak_activations == (1, 0)
    assert simulate(timeline.schedule, Costs(F=0, B=0, W=0)).bubble_fraction == 0


def test_steps_that_wait_for_each_other_are_refused():
    with pytest.raises(ScheduleError, match="rank 0: step 0 can never start"):
        simulate(two_ranks(((B(0, 0),), (F(0, 0),)), ((F(1, 0),), (B(1, 0),))))


@pytest.mark.parametrize("step", [(), (F(0, 1), F(0, 2), F(0, 3))])
def test_steps_of_no_or_of_three_actions_are_refused(step):
    with pytest.raises(ScheduleError, match=f"rank 0, step 1: .*not {len(step)}"):
        simulate(Schedule("s", 1, 1, 4, (((F(0, 0),), step, (B(0, 0),)),)))
    with pytest.raises(ValueError, match=f"not {len(step)}"):
        Costs().of(step)


@pytest.mark.parametrize("given, name", [
    ({"F": -1}, "F"), ({"R": -1}, "R"), ({"p2p": nan}, "p2p"), ({"FB": inf}, "FB"), ({"W": 3}, "W"),
    ({"pairs": {("F", "F"): -2}}, "F&F"), ({"pairs": {("F", "X"): 2}}, "F, B, I, W"), ({"FB": 1.9}, "F&B"),
    ({"pairs": {("I", "F"): 0.5}}, "I&F"),
])
def test_costs_that_cannot_be(given, name):
    with pytest.raises(ValueError, match=name):
        Costs(**given)


def test_a_pair_may_be_as_long_as_one_of_its_actions():
    assert Costs(F=0.3, B=0.3, W=0.1, FB=0.3, pairs={("I", "I"): 0.2}).of((I(0, 0), I(1, 1))) == 0.2


@pytest.mark.parametrize("stage", [2, -1])
def test_costs_of_a_stage_that_there_is_not(stage):
    with pytest.raises(ValueError, match=f"stage {stage}"):
        simulate(SPLIT, Costs(per_stage={0: Costs(), stage: Costs()}))


def test_scaled_costs():
    costs = Costs(F=1, B=2, W=1, FB=2.5, R=3, pairs={("F", "I"): 1.5}, p2p=0.1, per_stage={0: Costs(F=3)})
    assert costs.scaled(2) == Costs(
        F=2, B=4, W=2, FB=5, R=6, pairs={("F", "I"): 3}, p2p=0.1, per_stage={0: Costs(F=6, B=4, W=2)}
    )


def one_rank(costs: Costs):
    """Two stages on one rank: gradients of stage 1 are complete at 4, those of stage 0 at 6."""
    return simulate(Schedule("mine", 1, 2, 1, (((F(0, 0),), (F(1, 0),), (B(1, 0),), (B(0, 0),)),)), costs)


@pytest.mark.parametrize("cost, per_stage, spans, makespan", [
    (1, None, [(4, 5, 1), (6, 7, 0)], 7),  # the first is hidden
    (3, None, [(4, 7, 1), (7, 10, 0)], 10),  # one after the other
    (0, {1: Costs(R=1)}, [(4, 5, 1)], 6), (0, None, [], 6),
])
def test_reductions_run_beside_the_steps_one_after_the_other(cost, per_stage, spans, makespan):
    found = one_rank(Costs(R=cost, per_stage=per_stage))
    assert [(r.start, r.end, r.stage) for r in found.reductions[0]] == spans
    assert found.makespan == makespan
    assert found.bubble == (makespan - 6,)
