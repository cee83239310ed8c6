"""Costs for searches of a schedule, and what a schedule holds."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement

from dualpipe.schedule import Costs, Timeline


def overlapped(communication: float = 0.35) -> Costs:
    """A layer of F = 1 of which so much is communication, I = 1 alike, and W = 1 less that, all of it computing.

    A whole backward does I and W, and overlaps itself: max(2 * 0.65, 0.35) = 1.3. A pair takes the longest of the sum
    of computing, the sum of communication, and each alone: F&B max(0.65 + 1.3, 0.7, 1, 1.3) = 1.95.
    """
    compute = 1 - communication
    computing = {"F": compute, "B": 2 * compute, "I": compute, "W": compute}
    sending = {"F": communication, "B": communication, "I": communication, "W": 0.0}
    alone = {"F": 1.0, "B": max(computing["B"], communication), "I": 1.0, "W": compute}
    pairs = {
        (a, b): max(computing[a] + computing[b], sending[a] + sending[b], alone[a], alone[b])
        for a, b in combinations_with_replacement("FBIW", 2)
    }
    return Costs(F=1.0, B=alone["B"], W=alone["W"], I=1.0, FB=pairs["F", "B"], pairs=pairs)


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
