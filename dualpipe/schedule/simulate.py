"""Times a schedule without running it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dualpipe.schedule.completion import completed
from dualpipe.schedule.costs import Costs
from dualpipe.schedule.types import Action, Schedule, ScheduleError, Step
from dualpipe.schedule.validate import needs


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
        return max((rank[-1].end for rank in (*self.spans, *self.reductions) if rank), default=0.0)

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
        return tuple(_peak(spans) for spans in self.spans)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Each rank runs its steps in order, each as soon as its inputs are there; `costs` are Costs() unless given.

    A result is there `costs.p2p` after the step that yields it where it comes from another rank. Sends and receives
    cost a rank no time and are never waited for otherwise. The actions of a pair start and end together.
    Raises ScheduleError where the steps wait for each other; `validate` says why.
    """
    costs = costs or Costs()
    finished: dict[Action, tuple[float, int]] = {}  # when, on which rank
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    waiting: dict[Action, set[int]] = {}  # ranks, by the action that they wait for
    awake = list(range(len(schedule.ranks)))
    while awake:
        rank = awake.pop()
        awake += _advance(schedule, costs, rank, spans[rank], finished, waiting)
    for rank, steps in enumerate(schedule.ranks):
        if len(spans[rank]) < len(steps):
            raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: step {len(spans[rank])} can never start")
    done = tuple(map(tuple, spans))
    return Timeline(schedule, costs, done, tuple(_reductions(rank, costs, row) for rank, row in enumerate(done)))


def _advance(
    schedule: Schedule,
    costs: Costs,
    rank: int,
    spans: list[Span],
    finished: dict[Action, tuple[float, int]],
    waiting: dict[Action, set[int]],
) -> set[int]:
    """Runs `rank` until an input is missing; returns the ranks that waited for what it has done."""
    woken: set[int] = set()
    for step in schedule.ranks[rank][len(spans) :]:
        start = spans[-1].end if spans else 0.0
        for action in step:
            possible = needs(schedule, action)
            source = next((finished[need] for need in possible if need in finished), None)
            if source is not None:
                start = max(start, source[0] + (costs.p2p if source[1] != rank else 0.0))
            elif possible:
                for need in possible:
                    waiting.setdefault(need, set()).add(rank)
                return woken
        end = start + costs.of(step)
        spans.append(Span(rank, start, end, step))
        for action in step:
            finished[action] = (end, rank)
            woken |= waiting.pop(action, set())
    return woken


def _reductions(rank: int, costs: Costs, spans: tuple[Span, ...]) -> tuple[Reduction, ...]:
    reductions: list[Reduction] = []
    for span, stages in zip(spans, completed([span.step for span in spans])):
        for stage in stages:
            start = max(span.end, reductions[-1].end if reductions else 0.0)
            reductions.append(Reduction(rank, start, start + costs.reduction(stage), stage))
    return tuple(r for r in reductions if r.end > r.start)


def _peak(spans: tuple[Span, ...]) -> int:
    """Steps of one rank do not overlap, so that within one its activations are alive, and freed, together."""
    alive = peak = 0
    for span in spans:
        alive += sum(action.kind == "F" for action in span.step)
        peak = max(peak, alive)
        alive -= sum(action.kind in "BW" for action in span.step)
    return peak
