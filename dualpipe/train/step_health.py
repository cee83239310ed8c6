"""Health of a run's steps: a warning when a cause of lost time has lasted for several steps.

Each cause is named once, and again only after it has gone away.

The causes are found in data that a run has anyway: entries of the recorder, the reports of all ranks, and the metrics
of the routers. No collective is added, and no device is waited for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from dualpipe.runtime.recorder import BEGAN, ENDED, KIND, RANKS, WHAT, Entry, Recorder
from dualpipe.schedule.read_costs import costs_from
from dualpipe.schedule.simulate import lengthen_pairs, simulate
from dualpipe.schedule.types import KINDS, Schedule
from dualpipe.trace.costs import unpaired_costs
from dualpipe.trace.measured import ALL_TO_ALL
from dualpipe.trace.symptoms import (
    BUBBLE,
    EXPERT_LOAD_LIMIT,
    EXPOSED,
    LOAD,
    STARVATION,
    Symptom,
    excess_bubble,
    exposed_communication,
    input_starvation,
    load_imbalance,
)
from dualpipe.train.config.schema import Config

PATIENCE = 10  # steps in a row with a symptom before it is named, and without it before it may be named again
LOAD_PATIENCE = 100  # the same for loads of experts, which even out only in the first steps of training

# A router has collapsed if its load is this near to the maximum, where one expert gets every token, for this many
# steps in a row. Healthy routers that start this uneven are more even by then.
COLLAPSE = "router collapse"
COLLAPSE_FRACTION = 0.9
COLLAPSE_PATIENCE = 50

_COLLECTIVES = {"all_to_all": ALL_TO_ALL, "gather": "gathers", "reduce": "reductions"}  # kinds of entries


class StepWaits(NamedTuple):
    """Waits of a rank for others in one step, in seconds.

    Attributes:
        pipeline: for messages of other ranks of the pipeline.
        collectives: in collectives, by kind of communication.
        costs: of each action or pair, without waits for messages and parameters, by its kinds, such as "F" or "FB".
    """

    pipeline: float
    collectives: dict[str, float]
    costs: dict[str, list[float]]


def measure_waits(entries: Iterable[Entry]) -> StepWaits | None:
    """Return the waits in the entries of a step; None if the recorder no longer holds the first of them.

    entries: of `Recorder.entries`, on a rank whose host waits for messages, that is on CPU.
    """
    pipeline = 0.0
    collectives = Counter[str]()
    costs: defaultdict[str, list[float]] = defaultdict(list)
    action_end = 0
    waited_until = 0  # waits within waits are not counted twice
    kinds = ""  # of the latest action or pair
    is_complete = False
    for entry in entries:
        is_complete = is_complete or entry[KIND] == "data"  # the first entry of a step
        seconds = (entry[ENDED] - entry[BEGAN]) / 1e9
        if hasattr(entry[WHAT], "actions"):
            kinds = "".join(sorted(entry[KIND], key=KINDS.index))
            costs[kinds].append(seconds)
            action_end = entry[ENDED]
            continue
        is_wait = entry[KIND] == "receive" or entry[KIND] in _COLLECTIVES
        if not (is_wait and entry[RANKS]) or entry[ENDED] <= waited_until:
            continue
        waited_until = entry[ENDED]
        if entry[KIND] == "receive":
            pipeline += seconds
        else:
            collectives[_COLLECTIVES[entry[KIND]]] += seconds
        # A wait inside an action is no part of its cost. All-to-alls are, as in `trace.measured.Activity.cost`.
        if entry[BEGAN] < action_end and entry[KIND] != "all_to_all":
            costs[kinds][-1] -= seconds
    return StepWaits(pipeline, dict(collectives), dict(costs)) if is_complete else None


def simulated_idle(schedule: Schedule, place: int, costs: dict[str, list[float]]) -> float:
    """Return the seconds that a rank is idle until its last action, if all ranks are as fast as this one.

    place: of the rank in its pipeline. costs: from `StepWaits`.
    """
    medians = {kinds: median(seconds) for kinds, seconds in costs.items()}
    lengthened, _ = lengthen_pairs({**medians, **unpaired_costs(medians, medians)})
    spans = simulate(schedule, costs_from(lengthened)).spans[place]
    return spans[-1].end - sum(span.end - span.start for span in spans)


class StepHealth:
    """Finds the symptoms of the steps of a run, on the rank that reports.

    Args:
        config: configuration of the run.
        schedule: of its pipelines.
        place: of this rank in its pipeline.
        recorder: of this rank.
        max_load: largest possible load of an expert over the mean; 1 without experts.
    """

    def __init__(self, config: Config, schedule: Schedule, place: int, recorder: Recorder, max_load: float) -> None:
        self._router = config.router
        self._overlaps = config.parallel.overlap
        self._schedule = schedule
        self._place = place
        self._recorder = recorder
        self._max_load = max_load
        self._simulated = 0.0  # idle seconds of this rank in the simulation; 0 until that has run
        self._streaks = {
            STARVATION: _Streak(PATIENCE), BUBBLE: _Streak(PATIENCE), EXPOSED: _Streak(PATIENCE),
            LOAD: _Streak(LOAD_PATIENCE), COLLAPSE: _Streak(COLLAPSE_PATIENCE),
        }

    def lines(
        self, seconds: float, *, starved: int, data_wait: float, load: float | None, waits: StepWaits | None
    ) -> Iterator[str]:
        """Yield a line for every cause that has now lasted long enough.

        Args:
            seconds: duration of the step.
            starved: the rank that waited longest for its batch.
            data_wait: seconds that it waited.
            load: of the fullest expert over the mean; None without experts.
            waits: of this rank; None if they are not known.
        """
        symptoms = [input_starvation(self._recorder.name(starved), data_wait / seconds)]
        if load is not None:
            symptoms.append(self._uneven_load(load))
        if waits is not None:
            name = self._recorder.name(self._recorder.rank)
            shares = {kind: time / seconds for kind, time in waits.collectives.items()}
            symptoms.append(exposed_communication(name, shares, overlaps=self._overlaps))
            symptoms.append(self._excess_bubble(name, seconds, waits))
        present = {symptom.cause: symptom for symptom in symptoms if symptom is not None}
        for cause, streak in self._streaks.items():
            if streak.is_due(present=cause in present):
                yield f"WARNING: for {streak.patience} steps, {present[cause]}"

    def _uneven_load(self, load: float) -> Symptom | None:
        """Return the symptom of a router that has collapsed, or else of uneven loads."""
        if self._max_load <= 1:
            return None
        if load >= COLLAPSE_FRACTION * self._max_load:
            return Symptom(COLLAPSE, f"one expert of some layer got nearly every token (load_max_over_mean {load:.2f}, "
                                     f"at most {self._max_load:g}); raise [router] balance, to 0.01 for a start")
        setting = f"balance (now {self._router.balance:g})"
        if self._router.bias_update_rate:
            setting = f"bias_update_rate (now {self._router.bias_update_rate:g})"
        limit = min(EXPERT_LOAD_LIMIT, (1 + self._max_load) / 2)
        return load_imbalance("an expert of some layer", load, limit, setting)

    def _excess_bubble(self, name: str, seconds: float, waits: StepWaits) -> Symptom | None:
        """Return the symptom of a bubble above the simulated one.

        The simulation runs only before the symptom would be named, with the costs of that step.
        """
        share = waits.pipeline / seconds
        is_due_next = self._streaks[BUBBLE].steps == PATIENCE - 1
        if is_due_next and waits.costs and excess_bubble(name, share, self._simulated / seconds):
            self._simulated = simulated_idle(self._schedule, self._place, waits.costs)
        return excess_bubble(name, share, self._simulated / seconds)


class _Streak:
    """Steps in a row with a symptom; or, once it has been named, without it."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.steps = 0
        self._is_named = False

    def is_due(self, *, present: bool) -> bool:
        """Count a step; return True if the symptom is to be named now."""
        self.steps = self.steps + 1 if present != self._is_named else 0
        if self.steps < self.patience:
            return False
        self.steps = 0
        self._is_named = not self._is_named
        return self._is_named
