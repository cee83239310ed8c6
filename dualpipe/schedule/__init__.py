"""Pipeline schedules as data. Imports no torch."""

from dualpipe.schedule.build import build
from dualpipe.schedule.types import Action, Kind, Schedule, ScheduleError, Step
from dualpipe.schedule.validate import validate

__all__ = ["Action", "Kind", "Schedule", "ScheduleError", "Step", "build", "validate"]
