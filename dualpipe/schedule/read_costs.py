"""Parsing of `dualpipe schedule --costs`: text such as "F=1,B=2,FB=2.6", or a JSON file."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import KINDS

_NESTED = ("pairs", "per_stage")  # fields of `Costs` that are JSON objects


def parse_costs(text: str) -> Costs:
    """Parse costs from text such as "F=1,B=2,FB=2.6", or read them from a JSON file if `text` ends with ".json".

    Raises ValueError for text or a file that does not hold costs or cannot be read.
    """
    if not text.endswith(".json"):
        assignments = [part.partition("=") for part in text.split(",") if part.strip()]
        return costs_from({name.strip(): value for name, _, value in assignments})
    try:
        content = json.loads(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the costs {text}: {error.strerror}; give the path of a JSON file") from error
    except ValueError as error:
        raise ValueError(f"{text} is not valid JSON: {error}") from error
    return costs_from(content, source=text)


def costs_from(
    content: object, base: Costs = Costs(), source: str = "per_stage",  # noqa: B008 - the default is frozen
) -> Costs:
    """Return the costs in the content of a JSON file.

    Args:
        content: an object with the names of the fields of `Costs`. A name of two kinds, such as "FI", is a pair in
            `Costs.pairs`, except for the field "FB".
        base: costs of the names that `content` leaves out.
        source: name of `content` in error messages.

    Raises:
        ValueError: `content` is not such an object.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{source} has {content!r}; give an object such as {{\"F\": 1, \"B\": 2}}")
    nested = {name: content.get(name, {}) for name in _NESTED}
    for name, value in nested.items():
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r}; give an object")
    scalar_names = {field.name for field in fields(Costs)}.difference(_NESTED)
    scalars: dict[str, Any] = {}
    pairs = dict(base.pairs or {})
    for name, value in {**content, **nested["pairs"]}.items():
        if name in _NESTED:
            continue
        if name not in scalar_names and not (len(name) == 2 and set(name) <= set(KINDS)):
            raise ValueError(f"no cost is called {name!r}; known are {', '.join(sorted(scalar_names))}, pairs like FI")
        try:
            cost = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"cost {name} is {value!r}; give a number") from None
        if name in scalar_names:
            scalars[name] = cost
        else:
            pairs[name[0], name[1]] = cost
    costs = replace(base, **scalars, pairs=pairs or None)
    for stage in nested["per_stage"]:
        if not stage.isdecimal():
            raise ValueError(f"per_stage has {stage!r}; give the number of a stage")
    stages = {int(stage): costs_from(stage_content, costs) for stage, stage_content in nested["per_stage"].items()}
    return replace(costs, per_stage=stages or None)
