"""Building a schedule by its name: what it costs, and what is refused."""

import pytest

from calls import calls_of
from dualpipe.schedule import build
from schedules import SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_building_is_cheap(name):
    """A million calls take about 0.15 s. No other test builds this size, for which an order is looked for only once."""
    looks_for_an_order = name in ("dualpipev_half", "v_half", "v_min")
    assert calls_of(build, name, 9, 17) < (1_700_000 if looks_for_an_order else 30_000)


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
