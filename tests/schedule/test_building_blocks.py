"""Orders of building blocks, repeated and squeezed: by hand, within the memory, and never later than before."""

import pytest

from dualpipe.schedule import Costs, Schedule, build, simulate, validate
from dualpipe.schedule.builders import number_microbatches
from dualpipe.schedule.building_blocks import Policy, building_block, building_blocks, repeat, squeeze
from dualpipe.schedule.search.anneal import orders_of
from dualpipe.schedule.types import v_placement
from searches import held, overlapped


def schedule_of(orders: list, num_microbatches: int) -> Schedule:
    num_ranks = len(orders)
    ranks = tuple(map(number_microbatches, orders))
    return Schedule("blocks", num_ranks, 2 * num_ranks, num_microbatches, ranks, v_placement(num_ranks))


def test_a_block_by_hand():
    """On 2 ranks F0, F1, I1, I0 of the first micro-batch run at ticks 0, 3, 4, 7 of rank 0 and 1, 2, 5, 6 of rank 1."""
    block = building_block(2, (1, 1, 1))
    assert [block.ticks(rank) for rank in range(2)] == [(0, 3, 4, 7), (1, 2, 5, 6)]
    schedule = schedule_of(repeat(block, 2, 2, [4, 4]), 2)
    orders = [" ".join(str(action) for (action,) in steps) for steps in schedule.ranks]
    assert orders == [
        "0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1",
        "1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1",
    ]


def test_two_actions_at_one_tick_are_no_block():
    """On 3 ranks with gaps of one, I1 is 6 ticks after F0: one period."""
    assert not building_block(3, (1, 1, 1)).is_possible(3)
    assert repeat(building_block(3, (1, 1, 1)), 3, 4, [9] * 3) is None


@pytest.mark.parametrize("memory", [2, 3, 5, 8, (3, 8, 8, 5), 100])
@pytest.mark.parametrize("policy", [Policy(), Policy("F", 0.5), Policy("I", 1.0), Policy(split=False)])
def test_blocks_fit_the_memory_and_can_be_run(memory, policy):
    costs = overlapped()
    for num_ranks, num_microbatches in ((1, 3), (2, 1), (4, 9)):
        by_rank = memory[:num_ranks] if isinstance(memory, tuple) else (memory,) * num_ranks
        orders = next(building_blocks(num_ranks, num_microbatches, by_rank))
        repeated = schedule_of(orders, num_microbatches)
        validate(repeated)
        squeezed = schedule_of(squeeze(repeated, orders, costs, by_rank, policy), num_microbatches)
        timeline = simulate(squeezed, costs)
        assert all(used <= allowed for used, allowed in zip(timeline.memory_by_rank, by_rank, strict=True))
        assert held(timeline) <= max(by_rank)
        assert {action for steps in squeezed.ranks for step in steps for action in step if action.kind == "F"} == {
            action for steps in repeated.ranks for step in steps for action in step if action.kind == "F"}


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "v_half"])
@pytest.mark.parametrize("costs", [Costs(), Costs(F=6, B=18, I=8, W=10, p2p=1)])
def test_any_schedule_is_squeezed(name, costs):
    """A pair is taken apart where it saves nothing. With patience, weight gradients do not delay what arrives soon."""
    schedule = build(name, 4, 10)
    before = simulate(schedule, costs)
    policies = [Policy(patience=patience) for patience in (0.0, 0.3, 0.6, 1.0)]
    times = []
    for policy in policies:
        orders = squeeze(schedule, orders_of(schedule), costs, before.memory_by_rank, policy)
        after = simulate(schedule_of(orders, 10), costs)
        assert all(used <= allowed for used, allowed in zip(after.memory_by_rank, before.memory_by_rank, strict=True))
        times.append(after.makespan)
    assert min(times) <= before.makespan
