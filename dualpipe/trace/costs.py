"""`dualpipe trace costs`: what the actions of a trace cost, as `dualpipe schedule --costs` and the search take it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from dualpipe.schedule.draw import aligned
from dualpipe.schedule.simulate import lengthen_pairs
from dualpipe.schedule.types import KINDS, Step
from dualpipe.trace.file import read
from dualpipe.trace.measured import Measured


class MeasuredCosts:
    """Costs in milliseconds: medians.

    given: as JSON, in the form of `--costs`; assumed: the kinds of which none ran alone.
    """

    def __init__(self, measured: Measured) -> None:
        self.samples = defaultdict[tuple[int, str], list[float]](list)  # by stage, and kind or kinds of a pair
        found = {step: [span.cost / 1e6 for span in spans] for step, spans in measured.samples().items()}
        if not found:
            raise ValueError("no step of training is in the trace by itself, not within something else")
        for step, costs in found.items():
            for action in step:
                self.samples[action.stage, _kinds(step)] += costs
        every = {kind: median([cost for (_, other), costs in self.samples.items() if other == kind for cost in costs])
                 for kind in {kinds for _, kinds in self.samples}}
        self.assumed = [kind for kind in KINDS if kind not in every]
        own = {stage: _alone({kinds: median(costs) for (other, kinds), costs in self.samples.items() if other == stage},
                             every) for stage in sorted({stage for stage, _ in self.samples})}
        saved = defaultdict[tuple[int, str], list[float]](list)
        for step, costs in found.items():
            if len(step) == 2:  # on each of the two stages half of it
                alone = sum(own[action.stage][action.kind] for action in step)
                for action in step:
                    saved[action.stage, _kinds(step)] += [alone - cost for cost in costs]
        for (stage, kinds), times in saved.items():
            own[stage][kinds] = max(0.0, sum(own[stage][kind] for kind in kinds) - median(times))
        for stage, costs_of in own.items():
            if reduced := _reduction(measured, stage):
                costs_of["R"] = reduced
        kinds_of = dict.fromkeys(kind for costs_of in own.values() for kind in costs_of)
        every = {kind: median([each[kind] for each in own.values() if kind in each]) for kind in kinds_of}
        pairs = {kinds: cost for kinds, cost in every.items() if len(kinds) == 2}
        self.corrections: list[str] = []  # pairs that took less than one of their actions
        self.given: dict[str, Any] = {
            **self._corrected("all stages", every | {"p2p": measured.latency / 1e6}),
            "per_stage": {f"{stage}": self._corrected(f"stage {stage}", pairs | costs_of)
                          for stage, costs_of in own.items()},
        }

    def _corrected(self, name: str, costs: Mapping[str, float]) -> dict[str, float]:
        """Costs to six digits, whose pairs take no less than each of their actions."""
        corrected, notes = lengthen_pairs({kinds: float(f"{cost:.6g}") for kinds, cost in costs.items()})
        self.corrections += [f"{name}: {note}" for note in notes]
        return corrected

    def table(self) -> str:
        """By stage and kind: the median, the 10th and the 90th percentile, and of how many."""
        rows: list[tuple[str, ...]] = [("stage", "kind", "ms", "10%", "90%", "of")]
        for (stage, kind), times in sorted(self.samples.items()):
            tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
            told = (median(times), tenths[0], tenths[-1])
            rows.append((f"{stage}", kind, *(f"{time:.3g}" for time in told), f"{len(times)}"))
        notes = f"p2p: {self.given['p2p']:.3g} ms from the begin of a send to the end of a receive that waited for it\n"
        if self.assumed:
            notes += f"none ran alone: {', '.join(self.assumed)}; taken are B = I + W, W = B / 2 and F = 0\n"
        notes += "".join(f"{correction}\n" for correction in self.corrections)
        return aligned(rows) + notes


def _kinds(step: Step) -> str:
    """Such as "F", or "FB" for a pair in either order."""
    return "".join(sorted((action.kind for action in step), key=KINDS.index))


def _alone(costs: Mapping[str, float], every: Mapping[str, float]) -> dict[str, float]:
    """Return the costs of F, B, I and W on a stage: measured, derived from measured ones, or those of other stages."""
    parts = costs["I"] + costs["W"] if {"I", "W"} <= costs.keys() else every.get("I", 0.0) + every.get("W", 0.0)
    backward = costs.get("B", parts if {"I", "W"} <= costs.keys() else every.get("B", parts))
    weights = costs.get("W", every.get("W", backward / 2))
    return {"F": costs.get("F", every.get("F", 0.0)), "B": backward, "W": weights,
            "I": costs.get("I", every.get("I", max(0.0, backward - weights)))}


def _reduction(measured: Measured, stage: int) -> float:
    """The time in which ranks wait for the reduction of a stage's gradients, in milliseconds a step."""
    seen = {rank: sum(span.exposed.total() for span in spans if span.slice.kind == "reduce"
                      and span.slice.name.endswith(f" stage {stage}")) for rank, spans in measured.spans.items()}
    return sum(seen.values()) / 1e6 / max(1, sum(len(measured.runs[rank]) for rank, time in seen.items() if time))


def report(path: str, out: str | None) -> str:
    """The costs of a trace as a table; as JSON in the file `out`."""
    found = MeasuredCosts(Measured(read(path)))
    if out is None:
        return found.table()
    Path(out).write_text(json.dumps(found.given, indent=2) + "\n", encoding="utf-8")
    return f"{found.table()}wrote {out}, in milliseconds, for dualpipe schedule --costs {out}\n"
