"""Pipeline schedules as data: types, the known families, proof, timing, pictures. Imports no torch.

search/ looks for better orders, and by_name/ is above both: schedules by name, and the command. Imports nothing.
"""

from dualpipe.schedule.by_name.build import build
from dualpipe.schedule.draw import to_svg, to_text
from dualpipe.schedule.page import to_html
from dualpipe.schedule.simulate import Costs, Span, Timeline, simulate
from dualpipe.schedule.types import Action, Kind, Schedule, ScheduleError, Step
from dualpipe.schedule.validate import validate

__all__ = [
    "Action", "Costs", "Kind", "Schedule", "ScheduleError", "Span", "Step", "Timeline", "build", "simulate", "to_html",
    "to_svg", "to_text", "validate",
]
