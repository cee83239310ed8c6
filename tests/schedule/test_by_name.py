"""Building a schedule by its name: what it costs, and what is refused."""

import time

import pytest

from dualpipe.schedule import build
from schedules import SCHEDULES


def test_building_is_cheap():
    def seconds():
        start = time.process_time()
        for name in SCHEDULES:
            build(name, 16, 31)
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.2, "other processes make any of them longer"


@pytest.mark.parametrize("arguments, options, message", [
    (("1F1B", 2, 4), {}, "'1f1b'"), (("chimera", 2, 4), {}, ", ".join(SCHEDULES)),
    (("zbv", 0, 4), {}, "num_ranks is 0"),
    (("zbv", 2, -1), {}, "num_microbatches is -1"), (("zbv", 2.0, 4), {}, "num_ranks is 2.0"),
    (("zbv", True, 4), {}, "num_ranks is True"),
    (("interleaved_1f1b", 2, 4), {"stages_per_rank": 0}, "stages_per_rank is 0"),
    (("interleaved_1f1b", 2, 4), {"stage_per_rank": 2}, "'stages_per_rank'"),
    (("zbv", 2, 4), {"stages_per_rank": 2}, "'stages_per_rank'"),
])
def test_wrong_arguments_are_refused_with_a_remedy(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments, **options)
