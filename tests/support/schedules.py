"""Schedules that tests go through by name: all that `build` knows, so that a new one is tested by itself."""

from dualpipe.schedule.by_name import BUILDERS

EXCLUDED = {
    "auto": "searches for seconds; see tests/schedule/search/ and tests/pipeline/test_found_schedules.py",
}
SCHEDULES = tuple(name for name in BUILDERS if name not in EXCLUDED)
