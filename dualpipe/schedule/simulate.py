"""Times a schedule without running it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dualpipe.schedule.costs import Costs
from dualpipe.schedule.messages import completed, needs
from dualpipe.schedule.types import Action, Schedule, ScheduleError, Step


class Span(NamedTuple):
    """A step of `rank` from `start` to `end`."""

    rank: int
    start: float
    end: float
    step: Step


class Reduction(NamedTuple):
    """The gradients of `stage` on their way between data-parallel ranks, beside the steps of `rank`."""

    rank: int
    start: float
    end: float
    stage: int


@dataclass(frozen=True)
class Timeline:
    """When each step of a schedule runs, in the unit of its costs. `spans[r]` are those of rank r, in order.

    `reductions[r]` are those of rank r where they cost anything: each starts when the stage's gradients are complete
    and the one before it is done.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    reductions: tuple[tuple[Reduction, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the start of the first step to the end of the last step or reduction, over all ranks."""
        ends = [rank[-1].end for rank in self.spans if rank] + [rank[-1].end for rank in self.reductions if rank]
        return max(ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the time that it computes."""
        return tuple(sum(self.costs.of(span.step) for span in spans) for spans in self.spans)

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """Per rank, the time within the makespan that it does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time that is bubble."""
        total = self.makespan * len(self.spans)
        return sum(self.bubble) / total if total else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per rank, the most stage activations alive at once.

        One is alive from the start of its "F" until the end of its "B", or of its "W" where the backward is split.
        """
        return tuple(map(_peak, self.spans))


def _peak(spans: tuple[Span, ...]) -> int:
    """Steps of one rank do not overlap, so that within one its activations are alive, and freed, together."""
    alive = peak = 0
    for span in spans:
        alive += sum(action.kind == "F" for action in span.step)
        peak = max(peak, alive)
        alive -= sum(action.kind in "BW" for action in span.step)
    return peak


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Each rank runs its steps in order, each as soon as its inputs are there; `costs` are Costs() unless given.

    A result is there `costs.p2p` after the step that yields it where it comes from another rank. Sends and receives
    cost a rank no time and are never waited for otherwise. The actions of a pair start and end together.
    Raises ScheduleError where the steps wait for each other; `validate` says why.
    """
    costs = costs or Costs()
    finished: dict[Action, tuple[float, int]] = {}  # when, on which rank
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    moving = True
    while moving:
        moving = False
        for rank, (steps, done) in enumerate(zip(schedule.ranks, spans)):
            while len(done) < len(steps):
                step = steps[len(done)]
                ready = _ready(schedule, costs.p2p, rank, step, finished)
                if ready is None:
                    break
                start = max(ready, done[-1].end if done else 0.0)
                done.append(Span(rank, start, start + costs.of(step), step))
                finished |= dict.fromkeys(step, (done[-1].end, rank))
                moving = True
    for rank, steps in enumerate(schedule.ranks):
        if len(spans[rank]) < len(steps):
            raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: step {len(spans[rank])} can never start")
    reductions = tuple(_reductions(rank, costs, row) for rank, row in enumerate(spans))
    return Timeline(schedule, costs, tuple(map(tuple, spans)), reductions)


def _ready(
    schedule: Schedule, p2p: float, rank: int, step: Step, finished: dict[Action, tuple[float, int]]
) -> float | None:
    """When all inputs of a step are there; None where one of them does not exist yet."""
    ready = 0.0
    for action in step:
        possible = needs(schedule, action)
        source = next((finished[need] for need in possible if need in finished), None)
        if source is not None:
            ready = max(ready, source[0] + (p2p if source[1] != rank else 0.0))
        elif possible:
            return None
    return ready


def _reductions(rank: int, costs: Costs, spans: list[Span]) -> tuple[Reduction, ...]:
    reductions: list[Reduction] = []
    for span, stages in zip(spans, completed([span.step for span in spans])):
        for stage in stages:
            start = max(span.end, reductions[-1].end if reductions else 0.0)
            reductions.append(Reduction(rank, start, start + costs.on(stage).R, stage))
    return tuple(r for r in reductions if r.end > r.start)
