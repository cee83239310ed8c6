"""What the actions of a trace cost: medians by stage and kind, as `dualpipe schedule --costs` and the search take them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from statistics import median, quantiles
from typing import Any

from dualpipe.schedule.command import costs_from
from dualpipe.schedule.draw import aligned
from dualpipe.schedule.simulate import Costs
from dualpipe.trace.file import read
from dualpipe.trace.measured import Measured


class MeasuredCosts:
    """Costs in milliseconds.

    samples: by stage and kind, of actions that ran alone, and by stage and the kinds of a pair what that took.
    given: the costs as JSON, in the form of `--costs`; assumed: what of them was not measured, in words.
    """

    def __init__(self, measured: Measured) -> None:
        self.samples = defaultdict[tuple[int, str], list[float]](list)
        found, pairs = measured.samples(), defaultdict[tuple[int, str], list[float]](list)
        for step, spans in found.items():
            if len(step) == 1:
                self.samples[step[0].stage, step[0].kind] += [span.cost / 1e3 for span in spans]
        stages, self.assumed = sorted({action.stage for step in found for action in step}), set[str]()
        everywhere = {kind: median([cost for (_, other), costs in self.samples.items() for cost in costs
                                    if other == kind]) for kind in {kind for _, kind in self.samples}}
        own = {stage: self._complete({kind: median(costs) for (other, kind), costs in self.samples.items()
                                      if other == stage}, everywhere) for stage in stages}
        saved = defaultdict[tuple[int, str], list[float]](list)
        for step, spans in found.items():
            if len(step) == 2:  # half of it is saved on each stage
                kinds = "FB" if {action.kind for action in step} == {"F", "B"} else "".join(a.kind for a in step)
                alone = sum(own[action.stage][action.kind] for action in step)
                for action in step:
                    saved[action.stage, kinds] += [alone - span.cost / 1e3 for span in spans]
                    pairs[action.stage, kinds] += [span.cost / 1e3 for span in spans]
        self.samples |= pairs
        for (stage, kinds), times in saved.items():
            own[stage][kinds] = max(0.0, own[stage][kinds[0]] + own[stage][kinds[1]] - median(times))
        self._reductions(measured, own)
        self.given: dict[str, Any] = {
            kind: _rounded(median([costs[kind] for costs in own.values() if kind in costs]))
            for kind in sorted({kind for costs in own.values() for kind in costs})
        } | {"p2p": _rounded(measured.latency / 1e3)}
        self.given["per_stage"] = {f"{stage}": {kind: _rounded(cost) for kind, cost in sorted(costs.items())}
                                   for stage, costs in own.items()}

    @property
    def costs(self) -> Costs:
        """The same for `simulate`."""
        return costs_from(self.given)

    def _complete(self, costs: dict[str, float], everywhere: Mapping[str, float]) -> dict[str, float]:
        """F, B, I and W from those that were measured, on the stage itself or else on others."""
        known = {**{kind: cost for kind, cost in everywhere.items() if kind in "FBIW"}, **costs}
        missing = {kind for kind in "FBIW" if kind not in known}
        self.assumed |= missing
        forward = known.get("F", known.get("B", 2 * known.get("I", 1.0)) / 2)
        if "B" not in costs and {"I", "W"} <= known.keys():
            backward = known["I"] + known["W"]
        else:
            backward = known.get("B", 2 * forward)
        weights = known.get("W", max(0.0, backward - known["I"]) if "I" in known else backward / 2)
        return {"F": forward, "B": backward, "W": weights, "I": known.get("I", max(0.0, backward - weights))}

    def _reductions(self, measured: Measured, own: dict[int, dict[str, float]]) -> None:
        """What is seen of the reduction of a stage's gradients: what its ranks wait for it."""
        for stage, costs in own.items():
            seen = [(rank, span.exposed.total()) for rank, spans in measured.spans.items() for span in spans
                    if span.slice.kind == "reduce" and span.slice.name.endswith(f" stage {stage}")]
            if total := sum(time for _, time in seen):
                costs["R"] = total / 1e3 / max(1, sum(len(measured.runs[rank]) for rank in {rank for rank, _ in seen}))

    def table(self) -> str:
        """By stage and kind: the median, the 10th and the 90th percentile, and of how many."""
        rows = [("stage", "kind", "ms", "10%", "90%", "actions")]
        for (stage, kind), times in sorted(self.samples.items()):
            tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
            rows.append((f"{stage}", kind, *(f"{time:.3g}" for time in (median(times), tenths[0], tenths[-1])),
                         f"{len(times)}"))
        notes = f"p2p: {self.given['p2p']:.3g} ms, from the begin of a send to the end of a receive that waited for it\n"
        if self.assumed:
            notes += (f"not in this schedule: {', '.join(sorted(self.assumed))}; taken as F = B / 2, B = I + W or 2 F, "
                      "W = B / 2\n")
        return aligned(rows) + notes


def report(path: str, out: str | None) -> str:
    """`dualpipe trace costs`: the costs of a trace as a table, written to `out` as JSON."""
    found = MeasuredCosts(Measured(read(path)))
    text = found.table()
    if out is not None:
        with open(out, "w", encoding="utf-8") as file:
            file.write(json.dumps(found.given, indent=2) + "\n")
        text += f"wrote {out}, in milliseconds: dualpipe schedule --costs {out} takes it\n"
    return text


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
