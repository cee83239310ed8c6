"""Simulation of a schedule: costs of each kind of action, in any one unit of time, and the timeline that they give.

Memory is counted in stage activations. One stage activation is all that a stage keeps of one micro-batch from its
forward for its backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple, cast

from dualpipe.schedule.messages import Result, completed_stages, merged_weights, play, required_input, result
from dualpipe.schedule.types import KINDS, Action, Schedule, ScheduleError, Step

PENDING = 0.5  # fraction of a stage's activations that a deferred weight gradient holds between "I" and "W"
FREES = {"F": 0.0, "B": 1.0, "I": 1 - PENDING, "W": PENDING}  # stage activations freed at an action's end


@dataclass(frozen=True)
class Costs:
    """Costs of the actions of one stage, of overlapping two of them, and of sending. All in one unit of time.

    Args:
        F: forward.
        B: full backward.
        W: weight gradients.
        I: backward of the input only. Default: B - W.
        FB: forward that overlaps a full backward. Default: F + B, nothing saved.
        pairs: other overlapped pairs by their two kinds, in either order: {("F", "I"): 1.7}. Default: the sum of both.
        p2p: time from the end of a step until its result is on another rank. Neither rank is busy meanwhile.
        per_stage: costs of the stages whose costs differ from these: a mapping from stages, or a sequence from stage 0
            on. Their `p2p` and `per_stage` are ignored. If the actions of a pair are on two stages with different
            costs, the time saved by the pair is the mean of two: that saved if both actions were on the first stage,
            and that saved if both were on the second.
        R: reduction of a stage's gradients over data-parallel ranks. It starts when they are complete, and runs beside
            computation.

    Raises:
        ValueError: a cost is negative or not finite, or a pair is shorter than one of its actions.
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
        costs = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("pairs", "per_stage")}
        costs |= {"&".join(kinds): cost for kinds, cost in (self.pairs or {}).items()}
        for name, cost in costs.items():
            if cost is not None and not (isfinite(cost) and cost >= 0):
                raise ValueError(f"cost {name} is {cost}; give a number of 0 or more")
        if self.I is None and self.W > self.B:
            raise ValueError(f"cost W is {self.W}, more than the whole backward B = {self.B}; lower it, or give I too")
        for kinds in self.pairs or {}:
            if len(kinds) != 2 or not set(kinds) <= set(KINDS):
                raise ValueError(f"pairs has a cost for {kinds!r}; give two kinds out of {', '.join(KINDS)}")
        for kinds in (("F", "B"), *(self.pairs or {})):
            pair_cost = self._of_kinds(*kinds)
            longest = max(map(self._of_kinds, kinds))
            if pair_cost < longest * (1 - 1e-9):
                raise ValueError(f"cost {'&'.join(kinds)} is {pair_cost}, less than the {longest} that one of the two "
                                 "takes alone; give as much or more")

    def of(self, step: Step) -> float:
        """Return the duration of `step`. Raises ValueError unless it has one action or two."""
        if len(step) not in (1, 2):
            raise ValueError(f"a step has one action or two, not {len(step)}")
        kinds = [action.kind for action in step]
        if not self.per_stage:
            return self._of_kinds(*kinds)
        costs = [self.on(action.stage) for action in step]
        if all(stage_costs is costs[0] for stage_costs in costs):
            return costs[0]._of_kinds(*kinds)
        savings = (sum(map(stage_costs._of_kinds, kinds)) - stage_costs._of_kinds(*kinds) for stage_costs in costs)
        return sum(map(Costs._of_kinds, costs, kinds)) - sum(savings) / 2

    def on(self, stage: int) -> Costs:
        """Return the costs of `stage`."""
        return cast("Mapping[int, Costs]", self.per_stage or {}).get(stage, self)

    def scaled(self, factor: float) -> Costs:
        """Return the costs of stages that are `factor` times as big. `p2p` stays, as messages keep their size."""
        costs = {name: getattr(self, name) for name in ("F", "B", "W", "I", "FB", "R")}
        per_stage = cast("Mapping[int, Costs] | None", self.per_stage)
        return replace(
            self,
            **{name: cost * factor for name, cost in costs.items() if cost is not None},
            pairs=self.pairs and {kinds: cost * factor for kinds, cost in self.pairs.items()},
            per_stage=per_stage and {stage: stage_costs.scaled(factor) for stage, stage_costs in per_stage.items()},
        )

    def _of_kinds(self, *kinds: str) -> float:
        """Return the cost of an action, or of two overlapping actions of one stage, by their kinds."""
        if len(kinds) == 1:
            return self.B - self.W if kinds == ("I",) and self.I is None else getattr(self, kinds[0])
        if self.FB is not None and set(kinds) == {"F", "B"}:
            return self.FB
        pairs: Mapping[Any, float] = self.pairs or {}
        return pairs.get(kinds, pairs.get(kinds[::-1], sum(map(self._of_kinds, kinds))))


def lengthen_pairs(costs: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Raise the cost of measured pairs that are shorter than one of their actions.

    Noise makes such measurements, and `Costs` refuses them.

    Args:
        costs: milliseconds by kind; two letters for a pair.

    Returns:
        The costs with these pairs as long as their longer action, and a line of text for each changed pair.
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
    """The reduction of the gradients of `stage` over data-parallel ranks, beside the steps of `rank`."""

    rank: int
    start: float
    end: float
    stage: int


@dataclass(frozen=True)
class Timeline:
    """Start and end of each step of a schedule, in the unit of its costs.

    Args:
        schedule: the schedule.
        costs: the costs it is timed with.
        spans: steps of each rank, in order; `spans[r]` belongs to rank r.
        reductions: gradient reductions of each rank that cost anything. Each starts when the stage's gradients are
            complete and the rank's previous reduction has ended.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    reductions: tuple[tuple[Reduction, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the start of the first step to the end of the last step or reduction, over all ranks."""
        return max((row[-1].end for rows in (self.spans, self.reductions) for row in rows if row), default=0.0)

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """Time within the makespan in which a rank does not compute, by rank."""
        return tuple(self.makespan - sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Bubble of all ranks as a fraction of the time of all ranks."""
        total = self.makespan * len(self.spans)
        return sum(self.bubble) / total if total else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """Peak number of live stage activations, by rank.

        Activations live from the start of an "F" until the end of its "B", or of its "W" if the backward is split.
        """
        freed_by_weights = {"F": 0, "B": 1, "I": 0, "W": 1}
        return tuple(int(self._peak(rank, freed_by_weights)) for rank in range(len(self.spans)))

    @cached_property
    def memory_by_rank(self) -> tuple[float, ...]:
        """Peak memory of each rank, in stage activations; after an "I" the fraction `PENDING` of one is still held."""
        return tuple(self._peak(rank, FREES) for rank in range(len(self.spans)))

    @property
    def peak_memory(self) -> float:
        """Peak memory of any rank, in stage activations, as `memory_by_rank` counts it."""
        return max(self.memory_by_rank, default=0.0)

    def _peak(self, rank: int, frees: Mapping[str, float]) -> float:
        """Return the peak of held activations. All activations of a step are allocated, and freed, together."""
        peak = 0.0
        held = 0.0
        for span in self.spans[rank]:
            held += sum(action.kind == "F" for action in span.step)
            peak = max(peak, held)
            held -= sum(frees[action.kind] for action in span.step)
        return peak


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, merged_w: Mapping[int, Sequence[float]] | None = None
) -> Timeline:
    """Compute when each step of a schedule runs.

    Each rank runs its steps in order, each as soon as its inputs are available. An input from another rank is available
    `costs.p2p` after the step that computes it. Sends and receives do not keep a rank busy, and sends never block. The
    two actions of a pair start and end together.

    Args:
        schedule: the schedule; it need not be validated.
        costs: costs of the actions. Default: `Costs()`.
        merged_w: by stage, the costs of a "W" that is merged with others (see `merged_weights`). Item 0 is the cost of
            each "W" if two are merged, item 1 if three are, and so on; the last item also holds for more. A "W" of a
            stage without an entry costs the same merged or not.

    Raises:
        ScheduleError: a step can never start (`validate` says why), or does not have one action or two.
        ValueError: `costs.per_stage` names a stage that the schedule does not have.
    """
    costs = costs or Costs()
    for stage in costs.per_stage or ():
        if stage not in range(schedule.num_stages):
            raise ValueError(f"per_stage has costs of stage {stage}, but the stages of schedule {schedule.name!r} are "
                             f"0 to {schedule.num_stages - 1}; leave it out")
    finish_times: dict[Result, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    rank_ends = [0.0] * len(spans)  # end of the last step so far
    durations: dict[tuple[tuple[str, int], ...], float] = {}  # by the kinds and stages of a step
    merged_costs = _merged_costs(schedule, merged_w) if merged_w else {}

    def arrival(rank: int, action: Action) -> float | None:
        """Return when the action's input is on the rank; None if it is not computed yet."""
        source = required_input(schedule, action)
        if source is None:
            return 0.0
        finished = finish_times.get(source)
        if finished is None or schedule.placement[source[1]] == rank:
            return finished
        return finished + costs.p2p

    def try_run(rank: int, step: Step) -> bool:
        if len(step) not in (1, 2):
            raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}, step {len(spans[rank])}: a step has one "
                                f"action or two, not {len(step)}")
        start = rank_ends[rank]
        for action in step:
            arrived = arrival(rank, action)
            if arrived is None:
                return False
            start = max(start, arrived)
        work = tuple([(action.kind, action.stage) for action in step])
        if work not in durations:
            durations[work] = costs.of(step)
        end = start + merged_costs.get(step, durations[work])
        rank_ends[rank] = end
        spans[rank].append(Span(rank, start, end, step))
        for action in step:
            finish_times[result(action)] = end
        return True

    for rank, remaining in enumerate(play(schedule.ranks, try_run)):
        if remaining:
            raise ScheduleError(f"schedule {schedule.name!r}, rank {rank}: step {len(spans[rank])} can never start; "
                                "validate() says why")
    reductions = tuple(_reductions(rank, row, costs) for rank, row in enumerate(spans))
    return Timeline(schedule, costs, tuple(map(tuple, spans)), reductions)


def _merged_costs(schedule: Schedule, merged_w: Mapping[int, Sequence[float]]) -> dict[Step, float]:
    """Return the cost of each step whose "W" is merged with others."""
    costs: dict[Step, float] = {}
    for steps in schedule.ranks:
        for step, merged in zip(steps, merged_weights(steps)):
            if merged and merged_w.get(step[0].stage):
                stage_costs = merged_w[step[0].stage]  # the first is for two merged "W"
                costs[step] = stage_costs[min(len(merged), len(stage_costs) + 1) - 2]
    return costs


def _reductions(rank: int, spans: Sequence[Span], costs: Costs) -> tuple[Reduction, ...]:
    """Return the gradient reductions of a rank, one after the other, without those that cost nothing."""
    reductions = []
    previous_end = 0.0
    for span, stages in zip(spans, completed_stages([span.step for span in spans])):
        for stage in stages:
            start = max(span.end, previous_end)
            previous_end = start + costs.on(stage).R
            if previous_end > start:
                reductions.append(Reduction(rank, start, previous_end, stage))
    return tuple(reductions)
