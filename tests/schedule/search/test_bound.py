"""Lower bounds of a schedule's time: by hand, and against every order."""

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

import pytest

from dualpipe.schedule import Costs, Schedule, build, simulate
from dualpipe.schedule.search import driver
from dualpipe.schedule.search.anneal import Timing
from dualpipe.schedule.search.bound import least_work, lower_bounds
from dualpipe.schedule.types import v_placement
from searches import overlapped, random_costs


def test_bounds():
    """Work of 8 * 2 * 1.95 = 31.2 follows three forwards before the last rank's first; or 8 * 2 * 3, and seven."""
    assert max(lower_bounds(v_placement(4), 8, overlapped())) == pytest.approx(34.2)
    assert least_work(v_placement(4), 8, overlapped()) == pytest.approx(31.2)
    assert lower_bounds(v_placement(8), 8, Costs()) == tuple(range(48, 56))
    assert max(lower_bounds(v_placement(2), 1, Costs())) == 9, "4 forwards, 4 backwards, and the weights of stage 0"
    assert max(lower_bounds((0, 1, 0, 1), 1, Costs(p2p=1))) == 9 + 6


def test_the_bound_of_a_memory():
    """Half of DualPipeV's 22.75 beyond the work is out of reach for 8 ranks.

    The last rank's first gradient comes after 8 forwards and 3 backwards, before which it computes 0.65 for each of 9
    forwards; 31.2 is the work.
    """
    assert max(lower_bounds(v_placement(4), 8, overlapped(), [9] * 4)) == pytest.approx(11 + 31.2 - 9 * 0.65)
    assert max(lower_bounds(v_placement(8), 16, overlapped(), [17.5] * 8)) == pytest.approx(23 + 62.4 - 17 * 0.65)
    assert 23 + 62.4 - 17 * 0.65 > 62.4 + 22.75 / 2


def test_memory_without_a_limit_is_memory_for_all_forwards():
    """The first backward of 2 micro-batches on 4 ranks comes late: every forward, and more, fits before it."""
    assert lower_bounds(v_placement(4), 2, overlapped()) == lower_bounds(v_placement(4), 2, overlapped(), [4] * 4)


def test_no_schedule_is_faster_than_the_bound():
    for seed in range(15):
        num_ranks, num_microbatches, costs = random_costs(seed)
        for name in driver.FAMILIES:
            timeline = simulate(build(name, num_ranks, num_microbatches), costs)
            bounds = lower_bounds(timeline.schedule.placement, num_microbatches, costs, timeline.memory_by_rank)
            assert timeline.makespan >= max(bounds)


def every_order(stages: list[int], num_microbatches: int) -> Iterator[list[tuple]]:
    """Yield every order of a rank: each step one action or two, each backward a "B" or an "I" with its "W" later."""
    def extended(order, left):
        if not any(left.values()):
            yield order
            return
        works = [work for work in left if left[work]]
        for step in (*((work,) for work in works), *combinations_with_replacement(works, 2)):
            rest = dict(left)
            for kind, stage in step:
                rest[kind, stage] -= 1
            if min(rest.values()) < 0:
                continue
            yield from extended([*order, step], rest)
    for split in product(range(num_microbatches + 1), repeat=len(stages)):
        counts = {}
        for stage, inputs in zip(stages, split):
            counts |= {("F", stage): num_microbatches, ("B", stage): num_microbatches - inputs, ("I", stage): inputs,
                       ("W", stage): inputs}
        yield from extended([], counts)


@pytest.mark.parametrize("placement, num_microbatches, memory, best", [
    ((0,), 2, 2, (6, 3.9, 6.25)), ((0,), 2, 1, (6, 4.6, 7)), ((0, 1), 1, 1, (5, 4.3, 6)),
    ((0, 1), 2, 2, (7, 5.9, 8.5)), ((0, 1), 2, 1, (10, 8.6, 12)), ((0, 0), 1, 2, (6, 4.6, 7)),
])
def test_the_bound_against_every_order(placement, num_microbatches, memory, best):
    """The bound is at most the best time over all orders, up to 207 for each rank.

    It equals the best time for costs without a gain from overlap, if a rank holds two micro-batches.
    """
    for costs, least in zip((Costs(), overlapped(), Costs(F=1, B=2.5, W=1.5, FB=2.75, p2p=0.25)), best):
        num_ranks = 1 + max(placement)
        empty = Schedule("s", num_ranks, len(placement), num_microbatches, ((),) * num_ranks, placement)
        timing = Timing(empty, costs, [memory] * num_ranks)
        owned = [[s for s, owner in enumerate(placement) if owner == rank] for rank in range(num_ranks)]
        ranks = [
            [steps for order in every_order(stages, num_microbatches) if (steps := timing.timed_steps(rank, order))]
            for rank, stages in enumerate(owned)
        ]
        times = (timing.times([*orders]) for orders in product(*ranks))
        assert min(max(each.ends()) for each in times if each) == pytest.approx(least)
        bound = max(lower_bounds(placement, num_microbatches, costs, [memory] * num_ranks))
        assert bound <= least + 1e-9
        assert bound == least or costs != Costs() or (len(placement), num_microbatches, memory) == (2, 2, 1)
