"""Costs from text such as "F=1,B=2,FB=2.6", and from JSON, as `dualpipe schedule --costs` takes them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import KINDS


def parse_costs(text: str) -> Costs:
    """Costs from "F=1,B=2,FB=2.6", or from a JSON file. Raises ValueError for what is neither."""
    if not text.endswith(".json"):
        parts = [part.partition("=") for part in text.split(",") if part.strip()]
        return costs_from({name.strip(): value for name, _, value in parts})
    try:
        given = json.loads(Path(text).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{text} is not valid JSON: {error}") from error
    return costs_from(given, what=text)


def costs_from(given: object, base: Costs = Costs(), what: str = "per_stage") -> Costs:  # noqa: B008 - it is frozen
    """Costs from what such a JSON file holds, else those of `base`; names of two kinds other than FB are pairs.

    Raises ValueError where it, which is called `what`, holds something else.
    """
    if not isinstance(given, dict):
        raise ValueError(f"{what} has {given!r}; give an object such as {{\"F\": 1, \"B\": 2}}")
    inner = {name: given.get(name, {}) for name in ("pairs", "per_stage")}
    for name, value in inner.items():
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r}; give an object")
    plain = {field.name for field in fields(Costs)} - inner.keys()
    values, pairs = dict[str, Any](), dict(base.pairs or {})
    for name, value in {**given, **inner["pairs"]}.items():
        if name in inner:
            continue
        if name not in plain and not (len(name) == 2 and set(name) <= set(KINDS)):
            raise ValueError(f"no cost is called {name!r}; known are {', '.join(sorted(plain))}, pairs like FI")
        try:
            cost = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"cost {name} is {value!r}; give a number") from None
        if name in plain:
            values[name] = cost
        else:
            pairs[name[0], name[1]] = cost
    costs = replace(base, **values, pairs=pairs or None)
    for stage in inner["per_stage"]:
        if not stage.isdecimal():
            raise ValueError(f"per_stage has {stage!r}; give the number of a stage")
    stages = {int(stage): costs_from(each, costs) for stage, each in inner["per_stage"].items()}
    return replace(costs, per_stage=stages or None)
