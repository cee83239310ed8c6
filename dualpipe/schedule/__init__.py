"""Pipeline schedules as data: types, known schedules, validation, simulation and drawing. Pure Python, no torch.

search/ finds better schedules; `by_name` builds all of them. `command` is `dualpipe schedule`.
"""

from dualpipe.schedule.by_name import build
from dualpipe.schedule.draw import to_svg, to_text
from dualpipe.schedule.page import to_html
from dualpipe.schedule.simulate import Costs, Span, Timeline, simulate
from dualpipe.schedule.types import Action, Kind, Schedule, ScheduleError, Step
from dualpipe.schedule.validate import validate

__all__ = [
    "Action", "Costs", "Kind", "Schedule", "ScheduleError", "Span", "Step", "Timeline", "build", "simulate", "to_html",
    "to_svg", "to_text", "validate",
]
