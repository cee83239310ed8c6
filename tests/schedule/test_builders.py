"""Known schedules: their orders by hand and as torch has them, their times and their memory."""

import pytest

from dualpipe.schedule import Costs, Schedule, build, simulate, validate
from schedules import SCHEDULES


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


@pytest.mark.parametrize("num_ranks, num_microbatches", [(2, 2), (4, 8), (4, 16), (8, 24), (2, 3), (4, 5), (8, 15)])
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


@pytest.mark.parametrize("num_ranks", [*range(1, 7), *slow(7, 8, 13, 16)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_is_valid(name, num_ranks):
    for num_microbatches in range(1, 4 * num_ranks + 1):
        validate(build(name, num_ranks, num_microbatches))


@pytest.mark.parametrize("size, makespan, activations", [((8, 9), 75, 18), ((4, 5), 39, 10), ((4, 10), 73, 11)])
def test_known_times_of_interleaved_1f1b_for_no_multiple_of_the_ranks(size, makespan, activations):
    timeline = simulate(build("interleaved_1f1b", *size), Costs(F=1, B=2))
    assert timeline.makespan == makespan and max(timeline.peak_activations) == activations


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


@pytest.mark.parametrize("name", ["zbv", "v_half"])
def test_no_bubble_in_the_steady_state(name):
    """With F = I = W a rank idles only while the first forward reaches it and the last gradients leave it."""
    for num_ranks in (2, 3, 4, 8):
        times = [simulate(build(name, num_ranks, m)).makespan for m in (2 * num_ranks, 4 * num_ranks)]
        assert times[1] - times[0] == 6 * 2 * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 16])
def test_v_half_holds_half_of_what_1f1b_does_in_less_time(num_ranks):
    """1F1B holds P micro-batches of a stage that is as big as two of the V; here one or two halves are more."""
    size = num_ranks, 3 * num_ranks
    half, whole = simulate(build("v_half", *size)), simulate(build("1f1b", *size), Costs().scaled(2))
    few = 1 if num_ranks % 2 else 2
    assert max(half.peak_activations) == half.peak_memory == num_ranks + few
    assert max(whole.peak_activations) == whole.peak_memory == num_ranks, "of stages that are each two of the V's"
    assert half.makespan < whole.makespan or num_ranks == 1


def test_v_half_by_hand():
    """Offsets 0, 4, 8, 13 of F0, F1, I1, I0 on rank 0 of 2, and 2, 3, 10, 12 on rank 1; period 6."""
    schedule = build("v_half", 2, 2)
    assert rank_order(schedule, 0) == "0F0 3F0 0F1 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1"
    assert rank_order(schedule, 1) == "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1"
