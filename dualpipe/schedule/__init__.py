"""Pipeline schedules as data: built by name or by hand, proved, timed and drawn. Imports no torch.

Imports `runtime`.
"""

from dualpipe.schedule.build import build
from dualpipe.schedule.draw import to_svg, to_text
from dualpipe.schedule.page import to_html
from dualpipe.schedule.simulate import Costs, Span, Timeline, simulate
from dualpipe.schedule.types import Action, Kind, Schedule, ScheduleError, Step
from dualpipe.schedule.validate import validate

__all__ = [
    "Action", "Costs", "Kind", "Schedule", "ScheduleError", "Span", "Step", "Timeline", "build", "simulate", "to_html",
    "to_svg", "to_text", "validate",
]
