"""Costs for searches of a schedule, and what a schedule holds."""

from __future__ import annotations

import random

from dualpipe.schedule import Costs, Timeline
from dualpipe.schedule.builders import overlap_costs


def overlapped(communication: float = 0.35) -> Costs:
    """A layer of F = 1 of which so much is communication: F&B takes max(0.65 + 1.3, 0.7, 1, 1.3) = 1.95."""
    return overlap_costs(communication)


def held(timeline: Timeline) -> float:
    """The most that a rank holds, counted at every start and end: one until "B" or "I", half of one until "W"."""
    most = 0.0
    for spans in timeline.spans:
        changes = []
        for span in spans:
            for action in span.step:
                changes += [(span.start, 1, 1.0)] if action.kind == "F" else [
                    (span.end, 0, {"B": -1.0, "I": -0.5, "W": -0.5}[action.kind])]
        now = 0.0
        for _, _, change in sorted(changes):
            now += change
            most = max(most, now)
    return most


def random_costs(seed: int) -> tuple[int, int, Costs]:
    """Ranks, micro-batches and costs: stages that differ, communication of up to half a layer, all pairs."""
    chance = random.Random(seed)
    num_ranks = chance.randint(2, 6)
    stages = {}
    for stage in range(2 * num_ranks):
        stages[stage] = overlapped(chance.uniform(0.05, 0.5)).scaled(chance.uniform(0.8, 1.2))
    return num_ranks, chance.randint(num_ranks, 3 * num_ranks), Costs(p2p=chance.choice((0.0, 0.1)), per_stage=stages)


QUICK = 1_000_000  # effort
