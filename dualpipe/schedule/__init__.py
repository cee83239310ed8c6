"""Pipeline schedules as data. Imports no torch."""

from dualpipe.schedule.types import Action, Kind, Schedule, ScheduleError, Step

__all__ = ["Action", "Kind", "Schedule", "ScheduleError", "Step"]
