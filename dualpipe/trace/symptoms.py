"""Symptoms of an unhealthy step: causes of lost time, the limits from which on they are named, and settings to try.

Shares are fractions of the time of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dualpipe.trace.measured import ALL_TO_ALL

STARVATION = "input starvation"
BUBBLE = "bubble"
EXPOSED = "exposed communication"
LOAD = "load imbalance"

STARVATION_LIMIT = 0.1  # of a step, waiting for the next batch
BUBBLE_LIMIT = 0.15  # of a step, waiting for other ranks of the pipeline beyond the simulation
EXPOSED_LIMIT = 0.25  # of a step, waiting in collectives of experts, contexts and sharded parameters
EXPERT_LOAD_LIMIT = 3.0  # times the mean load of an expert of the layer
RANK_LOAD_LIMIT = 1.5  # times the mean load of the ranks with the same stages

OVERLAP = "[parallel] overlap = true"
_REMEDIES = {  # by kind of communication
    ALL_TO_ALL: "a smaller [parallel] ep or cp",
    "gathers": "[parallel] dp_replicate, or more [train] num_chunks",
    "reductions": "[parallel] dp_replicate, or more [train] num_chunks",
}


class Symptom(NamedTuple):
    """A symptom. cause: its name, which begins the line; text: the rest, with the measured share and a setting."""

    cause: str
    text: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.text}"


def input_starvation(rank: str, share: float) -> Symptom | None:
    """Return the symptom of a rank that waits for its next batch, None below the limit."""
    if share < STARVATION_LIMIT:
        return None
    return Symptom(STARVATION, f"{rank} waits {share:.0%} of a step for its next batch; move the packed text of "
                               "[data] path to a faster disk")


def excess_bubble(rank: str, share: float, simulated: float) -> Symptom | None:
    """Return the symptom of a rank that waits longer for its pipeline than simulated, None below the limit."""
    if share - simulated < BUBBLE_LIMIT:
        return None
    return Symptom(BUBBLE, f"{rank} waits {share:.0%} of a step for other ranks of its pipeline, {simulated:.0%} in "
                           "the simulation; try other [parallel] layers_per_stage")


def exposed_communication(rank: str, shares: Mapping[str, float], *, overlaps: bool = False) -> Symptom | None:
    """Return the symptom of a rank whose communication is not hidden, None below the limit.

    Args:
        rank: name of the rank.
        shares: by kind of communication, as `dualpipe.trace.measured.label` names it.
        overlaps: parallel.overlap is known to be on.
    """
    known = {kind: share for kind, share in shares.items() if kind in _REMEDIES}
    total = sum(known.values())
    if total < EXPOSED_LIMIT:
        return None
    largest = max(known, key=lambda kind: known[kind])
    remedy = _REMEDIES[largest]
    if largest == ALL_TO_ALL and not overlaps:
        remedy = f"{OVERLAP}, or {remedy}"
    return Symptom(EXPOSED, f"{rank} waits {total:.0%} of a step in collectives, {known[largest]:.0%} in {largest}; "
                            f"try {remedy}")


def load_imbalance(subject: str, load: float, limit: float, setting: str = "balance") -> Symptom | None:
    """Return the symptom of uneven loads, None below the limit.

    Args:
        subject: in the singular, such as "an expert of some layer".
        load: over the mean load.
        limit: from which on it is a symptom.
        setting: of the table [router], with its value if known.
    """
    if load < limit:
        return None
    return Symptom(LOAD, f"{subject} gets {load:.1f} times the mean number of tokens; raise [router] {setting}")
