"""Known schedules: their orders by hand and as torch has them, their times and their memory."""

from dataclasses import replace

import pytest

from dualpipe.schedule import Costs, Schedule, ScheduleError, build, simulate, validate
from schedules import SCHEDULES
from searches import overlapped


def slow(*values: object) -> list:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def rank_order(schedule: Schedule, rank: int) -> str:
    return " ".join("&".join(map(str, step)) for step in schedule.ranks[rank])


def torch_order(num_ranks: int, num_microbatches: int) -> list[list[tuple[str, ...]]]:
    """The actions of torch's ScheduleDualPipeV, pairs as they are, bubbles left out."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    theirs = object.__new__(ScheduleDualPipeV)  # its constructor wants stages and process groups
    theirs.pp_group_size = num_ranks
    theirs._n_microbatches = num_microbatches
    return [
        [
            tuple(map(str, action.sub_actions or (action,)))
            for action in theirs._calculate_single_rank_operations(rank)
            if action is not None
        ]
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [*range(1, 9), *slow(*range(9, 17))])
def test_dualpipev_is_the_order_of_torch_and_deepseek(num_ranks):
    for num_microbatches in range(2 * num_ranks, 2 * num_ranks + 20):
        ours = build("dualpipev", num_ranks, num_microbatches)
        assert [[tuple(map(str, step)) for step in steps] for steps in ours.ranks] == torch_order(
            num_ranks, num_microbatches
        )


def test_1f1b_by_hand():
    schedule = build("1f1b", 3, 3)
    assert rank_order(schedule, 0) == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert rank_order(schedule, 1) == "1F0 1F1 1B0 1F2 1B1 1B2"
    assert rank_order(schedule, 2) == "2F0 2B0 2F1 2B1 2F2 2B2"


@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 2), (4, 4), (4, 10), (8, 24)])
def test_1f1b_is_the_order_of_torch(num_ranks, num_microbatches):
    from torch.distributed.pipelining.schedules import Schedule1F1B

    ours = build("1f1b", num_ranks, num_microbatches)
    theirs = object.__new__(Schedule1F1B)
    theirs._num_stages, theirs._n_microbatches = num_ranks, num_microbatches
    orders = theirs._get_pipeline_order()
    for rank in range(num_ranks):
        actions = [action for action in orders[rank] if action is not None and action.is_compute_op]
        if rank < num_ranks - 1:
            assert rank_order(ours, rank) == " ".join(map(str, actions))
        else:  # torch 2.13 counts the forwards of the last rank from 1, in this list and not where it runs them
            kinds = [action.kind for (action,) in ours.ranks[rank]]
            assert kinds == [action.computation_type.value for action in actions]


@pytest.mark.parametrize("num_ranks, num_microbatches", [
    (2, 2), (4, 8), (4, 16), (8, 24), (2, 3), (4, 5), (8, 15), (4, 3), (3, 8), (4, 10), (8, 20)])
def test_interleaved_1f1b_is_the_order_of_torch_where_torch_has_one(num_ranks, num_microbatches):
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    ours = build("interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank=3)
    theirs = object.__new__(ScheduleInterleaved1F1B)
    theirs.pp_group_size, theirs.n_local_stages = num_ranks, 3
    theirs._n_microbatches = num_microbatches
    theirs.microbatches_per_round = num_microbatches // max(1, num_microbatches // num_ranks)
    for rank in range(num_ranks):
        actions = theirs._calculate_single_rank_operations(rank)
        assert rank_order(ours, rank) == " ".join(str(action) for action in actions if action is not None)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_zbv_is_the_order_of_torch(num_ranks):
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    for num_microbatches in range(1, 4 * num_ranks):
        ours = build("zbv", num_ranks, num_microbatches)
        theirs = object.__new__(ScheduleZBVZeroBubble)
        theirs.pp_group_size, theirs.num_stages, theirs._n_microbatches = num_ranks, 2 * num_ranks, num_microbatches
        for rank in range(num_ranks):
            actions = theirs._calculate_single_rank_operations(rank)
            assert rank_order(ours, rank) == " ".join(str(action) for action in actions if action is not None)


@pytest.mark.parametrize("num_ranks", [*range(1, 6), *slow(6, 7, 8, 13, 16)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_valid(name, num_ranks):
    for num_microbatches in range(1, 4 * num_ranks + 1):
        validate(build(name, num_ranks, num_microbatches))


@pytest.mark.parametrize("size, makespan, activations, in_flight", [
    ((8, 9), 75, 18, 1), ((4, 5), 39, 10, 1), ((4, 10), 69, 12, 2), ((3, 7), 48, 9, 2), ((4, 13), 87, 12, 2),
    ((8, 20), 141, 25, 3),
])
def test_known_times_of_interleaved_1f1b_for_no_multiple_of_the_ranks(size, makespan, activations, in_flight):
    schedule = build("interleaved_1f1b", *size)
    timeline = simulate(schedule, Costs(F=1, B=2))
    assert timeline.makespan == makespan and max(timeline.peak_activations) == activations
    assert schedule.messages_in_flight == in_flight


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb"])
def test_interleaved_schedules_have_no_more_messages_in_flight_than_they_need(name):
    for num_ranks, num_microbatches in ((2, 5), (3, 8), (4, 11), (4, 13), (8, 23), (8, 25)):
        schedule = build(name, num_ranks, num_microbatches)
        assert schedule.messages_in_flight > 1
        with pytest.raises(ScheduleError, match="deadlock"):
            validate(replace(schedule, messages_in_flight=schedule.messages_in_flight - 1))


@pytest.mark.parametrize("stages_per_rank", [1, 3, 4])
def test_interleaved_1f1b_with_other_numbers_of_stages_is_valid(stages_per_rank):
    for num_ranks in range(1, 6):
        for num_microbatches in range(1, 3 * num_ranks + 1):
            schedule = build("interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
            assert schedule.num_stages == num_ranks * stages_per_rank
            validate(schedule)


@pytest.mark.parametrize("most_ranks", [8, *slow(16)])
@pytest.mark.parametrize("costs", [
    Costs(), Costs(FB=2.6), Costs(FB=2.0), Costs(W=0.5), Costs(W=1.5), Costs(F=1.0, B=3.0, W=1.0, FB=3.2),
    Costs(F=2.0, B=3.0, W=1.0),
])
def test_few_microbatches_take_no_longer_than_1f1b(costs, most_ranks):
    """1F1B with the same layers: P stages, each of two of ours. It takes (M + P - 1)(2F + 2B)."""
    for num_ranks in range(1, most_ranks + 1):
        for num_microbatches in range(1, 2 * num_ranks):
            timeline = simulate(build("dualpipev", num_ranks, num_microbatches), costs)
            others = (num_microbatches + num_ranks - 1) * 2 * (costs.F + costs.B)
            assert timeline.makespan <= others * (1 + 1e-12)
            assert max(timeline.peak_activations) <= 2 * num_ranks + 1


def test_few_microbatches_known_times():
    """Makespans with the default costs; a way through the V and back with nothing else takes 2P(F + I) + W."""
    times = {(4, 1): 18, (4, 4): 30, (4, 7): 48, (8, 1): 34, (8, 9): 68, (8, 15): 104}
    assert {size: simulate(build("dualpipev", *size)).makespan for size in times} == times


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_few_microbatches_overlap_once_there_are_more_than_ranks(num_ranks):
    for num_microbatches in range(num_ranks + 1, 2 * num_ranks):
        schedule = build("dualpipev", num_ranks, num_microbatches)
        for steps in schedule.ranks:
            assert any(len(step) == 2 for step in steps)
            assert {tuple(action.kind for action in step) for step in steps if len(step) == 2} == {("F", "B")}


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_memory_of_zbv_and_1f1b(num_ranks):
    for num_microbatches in range(1, 4 * num_ranks):
        assert max(simulate(build("zbv", num_ranks, num_microbatches)).peak_activations) <= 2 * num_ranks
        peaks = simulate(build("1f1b", num_ranks, num_microbatches)).peak_activations
        assert peaks == tuple(min(num_microbatches, num_ranks - rank) for rank in range(num_ranks))


@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min"])
def test_no_bubble_in_the_steady_state(name):
    """With F = I = W a rank idles only while the first forward reaches it and the last gradients leave it."""
    for num_ranks in (2, 3, 4, 8):
        times = [simulate(build(name, num_ranks, m)).makespan for m in (2 * num_ranks, 4 * num_ranks)]
        assert times[1] - times[0] == 6 * 2 * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 16])
def test_v_half_and_v_min_hold_less_than_1f1b_and_take_less_time(num_ranks):
    """1F1B holds P micro-batches of a stage that is as big as two of the V."""
    size = num_ranks, 3 * num_ranks
    v_half, v_min, whole = (simulate(build(name, *size)) for name in ("v_half", "v_min", "1f1b"))
    assert v_half.peak_memory <= num_ranks + 2
    assert v_min.peak_memory <= max(num_ranks if num_ranks > 3 else 4, (2 * num_ranks + 8) // 3)
    assert v_half.makespan <= v_min.makespan
    assert v_min.makespan < 2 * whole.makespan or num_ranks == 1


@pytest.mark.parametrize("num_ranks", [2, 4, 8, *slow(16)])
def test_dualpipev_half_overlaps_at_half_the_memory(num_ranks):
    """DualPipeV holds 2P + 1 activations. V-Half holds as much as this schedule, but overlaps nothing."""
    half, full, v_half = (build(name, num_ranks, 2 * num_ranks) for name in ("dualpipev_half", "dualpipev", "v_half"))
    for communication in (0.2, 0.35):
        costs = overlapped(communication)
        timeline = simulate(half, costs)
        assert timeline.peak_memory <= num_ranks + 2
        assert timeline.makespan < 1.2 * simulate(full, costs).makespan
        assert timeline.makespan < 0.98 * simulate(v_half, costs).makespan


@pytest.mark.parametrize("name, num_ranks, memory", [("v_min", 4, 4), ("v_half", 4, 6), ("v_min", 8, 8),
                                                     ("v_half", 8, 10), ("zbv", 4, 8), ("zbv", 8, 16)])
@pytest.mark.parametrize("factor", [2, 3, *slow(4)])
def test_schedules_on_a_v_are_as_fast_as_published_ones(name, num_ranks, memory, factor):
    """Makespans of arXiv:2405.15362 (its search, F = I = W = 1) beyond the work of a rank, 6 a micro-batch."""
    published = {(4, 4): 11, (4, 6): 5, (4, 8): 3, (8, 8): 23, (8, 10): 17, (8, 16): 7}
    num_microbatches = factor * num_ranks
    timeline = simulate(build(name, num_ranks, num_microbatches))
    assert timeline.peak_memory <= memory
    assert timeline.makespan - 6 * num_microbatches <= published[num_ranks, memory]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("costs", [Costs(), Costs(F=1, B=2.5, W=1), Costs(F=1.5, B=2.25, W=0.75)])
def test_times_and_memory_of_the_schedules_in_a_loop(num_ranks, costs):
    """The bubbles of the papers where W <= F and W <= I: gpipe and 1f1b (P-1)(F+B), zb1p (P-1)(F+I-W), zb2p (P-1)F."""
    num_microbatches = 3 * num_ranks
    input_grad = costs.B - costs.W
    full = costs.F + costs.B
    bubbles = {"gpipe": full, "1f1b": full, "zb1p": costs.F + input_grad - costs.W}
    for name, bubble in bubbles.items():
        timeline = simulate(build(name, num_ranks, num_microbatches), costs)
        assert timeline.makespan == pytest.approx(num_microbatches * full + (num_ranks - 1) * bubble), name
    held = {name: simulate(build(name, num_ranks, num_microbatches)).peak_activations
            for name in ("gpipe", "zb1p", "zb2p")}
    assert set(held["gpipe"]) == {num_microbatches}
    assert set(held["zb1p"]) == {num_ranks}
    assert set(held["zb2p"]) == {2 * num_ranks - 1}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_zb2p_has_no_bubble_between_a_ranks_first_and_last_action(num_ranks):
    timeline = simulate(build("zb2p", num_ranks, 3 * num_ranks))
    for rank, spans in enumerate(timeline.spans):
        assert spans[0].start == rank and spans[-1].end - spans[0].start == 3 * 3 * num_ranks


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_interleaved_zb_is_interleaved_1f1b_with_later_weight_gradients(stages_per_rank):
    size = 4, 12
    whole = build("interleaved_1f1b", *size, stages_per_rank=stages_per_rank)
    split = build("interleaved_zb", *size, stages_per_rank=stages_per_rank)
    for whole_steps, split_steps in zip(whole.ranks, split.ranks, strict=True):
        without_weights = [str(action).replace("I", "B") for (action,) in split_steps if action.kind != "W"]
        assert without_weights == [str(action) for (action,) in whole_steps]
    assert simulate(split).makespan < simulate(whole).makespan
    assert simulate(split).peak_activations[0] == simulate(whole).peak_activations[0]
