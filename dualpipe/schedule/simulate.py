"""Times a schedule without running it: what each kind of work costs, in any one unit of time, and when each runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple, cast

from dualpipe.schedule.messages import Result, completed, need, play, result
from dualpipe.schedule.types import KINDS, Schedule, ScheduleError, Step

PENDING = 0.5  # of a stage's activations, what a weight gradient keeps between "I" and "W"
FREES = {"F": 0.0, "B": 1.0, "I": 1 - PENDING, "W": PENDING}  # stage activations, at an action's end


@dataclass(frozen=True)
class Costs:
    """Costs of the actions of one stage, of overlapping them, and of sending.

    F, B, W, I: a forward, a whole backward, the weight gradients, a backward for the input only. I is B - W unless
        given.
    FB: a forward overlapped with a whole backward; F + B, nothing saved, unless given.
    pairs: costs of other overlapped pairs by their two kinds, in either order: {("F", "I"): 1.7}. Their sum unless
        given.
    p2p: from the end of a step until its result is on another rank. It takes no time of either rank.
    per_stage: the Costs of stages that differ from these, by stage; a sequence gives them from stage 0 on. Their own
        `p2p` and `per_stage` are not used. A pair from two stages saves the mean of what it saves on each.
    R: reducing a stage's gradients over data-parallel ranks, once they are complete and beside the computing.

    Raises ValueError for a cost that is negative or not finite, and a pair that is shorter than one of its actions.
    """

    F: float = 1.0
    B: float = 2.0
    W: float = 1.0
    I: float | None = None  # noqa: E741 - the name of the kind
    FB: float | None = None
    pairs: Mapping[tuple[str, str], float] | None = None
    p2p: float = 0.0
    per_stage: Mapping[int, Costs] | Sequence[Costs] | None = None
    R: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.per_stage, Sequence):
            object.__setattr__(self, "per_stage", dict(enumerate(self.per_stage)))
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("pairs", "per_stage")}
        given |= {"&".join(kinds): cost for kinds, cost in (self.pairs or {}).items()}
        for name, cost in given.items():
            if cost is not None and not (isfinite(cost) and cost >= 0):
                raise ValueError(f"cost {name} is {cost}; give a number of 0 or more")
        if self.I is None and self.W > self.B:
            raise ValueError(f"cost W is {self.W}, more than the whole backward B = {self.B}; lower it, or give I too")
        for kinds in self.pairs or {}:
            if len(kinds) != 2 or not set(kinds) <= set(KINDS):
                raise ValueError(f"pairs has a cost for {kinds!r}; give two kinds out of {', '.join(KINDS)}")
        for kinds in (("F", "B"), *(self.pairs or {})):
            if (both := self._of_kinds(*kinds)) < (longest := max(map(self._of_kinds, kinds))) * (1 - 1e-9):
                raise ValueError(f"cost {'&'.join(kinds)} is {both}, less than the {longest} that one of the two takes "
                                 "alone; give as much or more")

    def of(self, step: Step) -> float:
        """How long `step` takes; ValueError unless it is one action or two."""
        if len(step) not in (1, 2):
            raise ValueError(f"a step has one action or two, not {len(step)}")
        kinds = [action.kind for action in step]
        if not self.per_stage:
            return self._of_kinds(*kinds)
        costs = [self.on(action.stage) for action in step]
        if all(on is costs[0] for on in costs):
            return costs[0]._of_kinds(*kinds)
        saved = (sum(map(on._of_kinds, kinds)) - on._of_kinds(*kinds) for on in costs)
        return sum(map(Costs._of_kinds, costs, kinds)) - sum(saved) / 2

    def on(self, stage: int) -> Costs:
        """The costs of `stage`."""
        return cast("Mapping[int, Costs]", self.per_stage or {}).get(stage, self)

    def scaled(self, factor: float) -> Costs:
        """The same for stages that are `factor` times as big; what crosses between them, `p2p`, stays as it is."""
        given = {name: cost for name in ("F", "B", "W", "I", "FB", "R") if (cost := getattr(self, name)) is not None}
        stages = cast("Mapping[int, Costs] | None", self.per_stage)
        return replace(
            self,
            **{name: cost * factor for name, cost in given.items()},
            pairs=self.pairs and {kinds: cost * factor for kinds, cost in self.pairs.items()},
            per_stage=stages and {stage: costs.scaled(factor) for stage, costs in stages.items()},
        )

    def _of_kinds(self, *kinds: str) -> float:
        """The cost of an action, or of two of one stage that overlap."""
        if len(kinds) == 1:
            return self.B - self.W if kinds == ("I",) and self.I is None else getattr(self, kinds[0])
        if self.FB is not None and set(kinds) == {"F", "B"}:
            return self.FB
        given: Mapping[Any, float] = self.pairs or {}
        return given.get(kinds, given.get(kinds[::-1], sum(map(self._of_kinds, kinds))))


def lengthen_pairs(costs: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Correct measured pairs that are shorter than one of their actions, as noise makes them and `Costs` refuses them.

    costs: by kinds, of a pair by two letters. Returns them with the longer cost, and a line for each one that changed.
    """
    corrected = dict(costs)
    notes = []
    for pair in (name for name in costs if len(name) == 2 and set(name) <= set(KINDS)):
        longer = max(pair, key=lambda kind: costs.get(kind, 0.0))
        if costs[pair] < costs.get(longer, 0.0):
            corrected[pair] = costs[longer]
            notes.append(f"{pair} measured {costs[pair]:.6g} ms, less than {longer} alone: "
                         f"taken as {costs[longer]:.6g} ms")
    return corrected, notes


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
        return max((row[-1].end for rows in (self.spans, self.reductions) for row in rows if row), default=0.0)

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """Per rank, the time within the makespan that it does not compute."""
        return tuple(self.makespan - sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time that is bubble."""
        total = self.makespan * len(self.spans)
        return sum(self.bubble) / total if total else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Per rank, the most stage activations alive at once: from the start of an "F" until the end of its "B", or of
        its "W" where the backward is split."""
        return tuple(int(self._peak(rank, {"F": 0, "B": 1, "I": 0, "W": 1})) for rank in range(len(self.spans)))

    @cached_property
    def peak_memory(self) -> float:
        """The most that a rank holds at once, in stage activations, of which `PENDING` of one is left after an "I"."""
        return max((self._peak(rank, FREES) for rank in range(len(self.spans))), default=0.0)

    def _peak(self, rank: int, frees: Mapping[str, float]) -> float:
        """Steps of one rank do not overlap, so that within one its activations are alive, and freed, together."""
        peak = held = 0.0
        for span in self.spans[rank]:
            held += sum(action.kind == "F" for action in span.step)
            peak = max(peak, held)
            held -= sum(frees[action.kind] for action in span.step)
        return peak


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Each rank runs its steps in order, each as soon as its inputs are there; `costs` are Costs() unless given.

    A result is there `costs.p2p` after the step that yields it where it comes from another rank. Sends and receives
    cost a rank no time and are never waited for otherwise. The actions of a pair start and end together.
    Raises ScheduleError where the steps wait for each other, of which `validate` says why, or one of them has not one
    action or two; ValueError for costs of a stage that there is not.
    """
    costs = costs or Costs()
    for stage in costs.per_stage or ():
        if stage not in range(schedule.num_stages):
            raise ValueError(f"per_stage has costs of stage {stage}, but the stages of schedule {schedule.name!r} are "
                             f"0 to {schedule.num_stages - 1}; leave it out")
    finished: dict[Result, float] = {}  # when
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    ends = [0.0] * len(spans)  # of the ranks' last steps so far
    durations: dict[tuple[tuple[str, int], ...], float] = {}  # by the kinds and stages of a step

    def run(rank: int, step: Step) -> bool:
        if len(step) not in (1, 2):
            raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}, step {len(spans[rank])}: a step has one "
                                f"action or two, not {len(step)}")
        start = ends[rank]
        for action in step:
            if taken := need(schedule, action):
                there = finished.get(taken)
                if there is None:
                    return False
                start = max(start, there if schedule.placement[taken[1]] == rank else there + costs.p2p)
        work = tuple([(action.kind, action.stage) for action in step])
        if work not in durations:
            durations[work] = costs.of(step)
        ends[rank] = end = start + durations[work]
        spans[rank].append(Span(rank, start, end, step))
        for action in step:
            finished[result(action)] = end
        return True

    for rank, left in enumerate(play(schedule.ranks, run)):
        if left:
            raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: step {len(spans[rank])} can never start")
    reductions = []
    for rank, steps in enumerate(schedule.ranks):
        row, free = [], 0.0  # when the one before is done
        for span, stages in zip(spans[rank], completed(steps)):
            for stage in stages:
                row.append(Reduction(rank, max(span.end, free), max(span.end, free) + costs.on(stage).R, stage))
                free = row[-1].end
        reductions.append(tuple(reduction for reduction in row if reduction.end > reduction.start))
    return Timeline(schedule, costs, tuple(map(tuple, spans)), tuple(reductions))
