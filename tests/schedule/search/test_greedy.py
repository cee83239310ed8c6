"""Schedules that the greedy search builds."""

import pytest

from dualpipe.schedule import Costs, build, simulate, validate
from dualpipe.schedule.search.greedy import fill
from searches import held, overlapped


@pytest.mark.parametrize("memory", [2, 3, 6, 9, 100])
def test_what_greedy_makes_fits_and_can_be_run(memory):
    for num_ranks, num_microbatches in ((1, 3), (2, 1), (4, 9)):
        schedule = fill(build("zbv", num_ranks, num_microbatches), overlapped(), memory)
        validate(schedule)
        assert held(simulate(schedule, overlapped())) <= memory
    assert fill(build("zbv", 2, 1), Costs(), 1) is None, "a rank needs room for both of its stages"
