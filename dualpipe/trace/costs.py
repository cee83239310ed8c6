"""`dualpipe trace costs`: costs of the actions in a trace, in the form that `dualpipe schedule --costs` reads."""

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

KindCosts = dict[str, float]  # milliseconds by kind, or by the two kinds of a pair


class MeasuredCosts:
    """Median costs of the actions in a trace, in milliseconds.

    Attributes:
        samples: all measured costs, by stage and by kind or kinds of a pair.
        json_costs: the costs in the JSON form of `--costs`.
        assumed_kinds: kinds of which no action ran alone.
        corrections: lines of text about pairs that took less time than one of their actions.

    Raises:
        ValueError: the trace has no step of training, or only steps inside another entry of the recorder.
    """

    def __init__(self, measured: Measured) -> None:
        step_costs = {step: [span.cost / 1e6 for span in spans] for step, spans in measured.samples().items()}
        if not step_costs:
            raise ValueError("the trace has no step of training outside of other activities; call Pipeline.step "
                             "outside of them")
        self.samples: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        for step, costs in step_costs.items():
            for action in step:
                self.samples[action.stage, _kinds(step)] += costs
        medians = self._medians_of_all_stages()
        self.assumed_kinds = [kind for kind in KINDS if kind not in medians]
        stage_costs = {stage: unpaired_costs(self._medians_of(stage), medians) for stage in self._stages()}
        _add_pairs(stage_costs, step_costs)
        for stage, costs_of_stage in stage_costs.items():
            reduction = _reduction_ms(measured, stage)
            if reduction:
                costs_of_stage["R"] = reduction
        self.corrections: list[str] = []
        self.json_costs = self._to_json(stage_costs, latency=measured.latency / 1e6)

    def _stages(self) -> list[int]:
        return sorted({stage for stage, _ in self.samples})

    def _medians_of(self, stage: int) -> KindCosts:
        return {kinds: median(costs) for (other, kinds), costs in self.samples.items() if other == stage}

    def _medians_of_all_stages(self) -> KindCosts:
        costs_by_kinds: defaultdict[str, list[float]] = defaultdict(list)
        for (_, kinds), costs in self.samples.items():
            costs_by_kinds[kinds] += costs
        return {kinds: median(costs) for kinds, costs in costs_by_kinds.items()}

    def _to_json(self, stage_costs: Mapping[int, KindCosts], latency: float) -> dict[str, Any]:
        """Return the JSON form: medians over stages, and the costs of each stage.

        A stage on which a pair of two kinds did not run gets the median of the other stages for it.
        """
        names = dict.fromkeys(name for costs in stage_costs.values() for name in costs)
        medians = {name: median([costs[name] for costs in stage_costs.values() if name in costs]) for name in names}
        pairs = {name: cost for name, cost in medians.items() if len(name) == 2}
        all_stages = self._corrected("all stages", {**medians, "p2p": latency})
        per_stage = {f"{stage}": self._corrected(f"stage {stage}", {**pairs, **costs})
                     for stage, costs in stage_costs.items()}
        return {**all_stages, "per_stage": per_stage}

    def _corrected(self, name: str, costs: Mapping[str, float]) -> KindCosts:
        """Return costs with six digits in which no pair takes less time than one of its actions."""
        corrected, notes = lengthen_pairs({kinds: float(f"{cost:.6g}") for kinds, cost in costs.items()})
        self.corrections += [f"{name}: {note}" for note in notes]
        return corrected

    def table(self) -> str:
        """Return a table by stage and kind: median, 10th and 90th percentile, and number of samples."""
        rows: list[tuple[str, ...]] = [("stage", "kind", "ms", "10%", "90%", "of")]
        for (stage, kinds), costs in sorted(self.samples.items()):
            deciles = quantiles(costs, n=10, method="inclusive") if len(costs) > 1 else costs
            columns = (f"{cost:.3g}" for cost in (median(costs), deciles[0], deciles[-1]))
            rows.append((f"{stage}", kinds, *columns, f"{len(costs)}"))
        notes = (f"p2p: {self.json_costs['p2p']:.3g} ms from the start of a send to the end of a receive that waited "
                 "for it\n")
        if self.assumed_kinds:
            notes += f"none ran alone: {', '.join(self.assumed_kinds)}; taken are B = I + W, W = B / 2 and F = 0\n"
        notes += "".join(f"{correction}\n" for correction in self.corrections)
        return aligned(rows) + notes


def _kinds(step: Step) -> str:
    """Return the kinds of a step, such as "F", or "FB" for a pair in either order."""
    return "".join(sorted((action.kind for action in step), key=KINDS.index))


def unpaired_costs(costs: Mapping[str, float], medians: Mapping[str, float]) -> KindCosts:
    """Return the costs of F, B, I and W on a stage.

    Each is measured on the stage, derived from costs measured there, or the median of all stages, in this order.
    """
    split = costs if {"I", "W"} <= costs.keys() else medians
    split_backward = split.get("I", 0.0) + split.get("W", 0.0)
    if "B" in costs:
        backward = costs["B"]
    elif split is costs:
        backward = split_backward
    else:
        backward = medians.get("B", split_backward)
    weights = costs.get("W", medians.get("W", backward / 2))
    inputs = costs.get("I", medians.get("I", max(0.0, backward - weights)))
    return {"F": costs.get("F", medians.get("F", 0.0)), "B": backward, "W": weights, "I": inputs}


def _add_pairs(stage_costs: Mapping[int, KindCosts], step_costs: Mapping[Step, list[float]]) -> None:
    """Add the costs of pairs to those of the stages.

    The cost of a pair with both actions on a stage is the sum of their costs alone, less the median saving of all pairs
    with an action on that stage. For a pair on two stages, the simulator takes the mean of two savings: see `Costs`.
    """
    savings: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for step, costs in step_costs.items():
        if len(step) == 2:
            apart = sum(stage_costs[action.stage][action.kind] for action in step)
            for action in step:
                savings[action.stage, _kinds(step)] += [apart - cost for cost in costs]
    for (stage, kinds), times in savings.items():
        apart = sum(stage_costs[stage][kind] for kind in kinds)
        stage_costs[stage][kinds] = max(0.0, apart - median(times))


def _reduction_ms(measured: Measured, stage: int) -> float:
    """Return the time that a rank waits for the reduction of a stage's gradients, in milliseconds per step."""
    waited = {
        rank: sum(span.exposed.total() for span in spans
                  if span.slice.kind == "reduce" and span.slice.name.endswith(f" stage {stage}"))
        for rank, spans in measured.spans.items()
    }
    num_runs = sum(len(measured.runs[rank]) for rank, time in waited.items() if time)
    return sum(waited.values()) / 1e6 / max(1, num_runs)


def report(path: str, out: str | None) -> str:
    """Return the costs in the trace `path` as a table, and write them as JSON to the file `out`, if any.

    Raises ValueError if the trace cannot be read or has no step of training, and OSError if `out` cannot be written.
    """
    costs = MeasuredCosts(Measured(read(path)))
    if out is None:
        return costs.table()
    Path(out).write_text(json.dumps(costs.json_costs, indent=2) + "\n", encoding="utf-8")
    return f"{costs.table()}wrote {out}, in milliseconds, for dualpipe schedule --costs {out}\n"
