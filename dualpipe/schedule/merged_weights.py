"""Merging of neighbouring actions "W": an engine may compute the weight gradients of one stage together.

Consecutive steps that are a single "W" form a run. Any other step ends the run, even a pair that includes a "W". Within
a run, all "W" of one stage are merged, even with a "W" of another stage between them. No step is moved: a stage's
gradients are complete after the same step as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from dualpipe.schedule.types import Action, Step


def merged_weights(steps: Sequence[Step]) -> list[tuple[Action, ...]]:
    """Return for each step of a rank the actions that its "W" is merged with, itself included, in order.

    The tuple of a step that is not merged is empty. Example: in 3W0 4W0 3W1 4W1 4W2, 3W0 is merged with 3W1, and 4W0
    with 4W1 and 4W2.
    """
    merged: list[tuple[Action, ...]] = []
    for is_single_w, run in groupby(steps, key=_is_single_w):
        neighbours = list(run)
        if not is_single_w:
            merged += [()] * len(neighbours)
            continue
        of_stage: defaultdict[int, list[Action]] = defaultdict(list)
        for (action,) in neighbours:
            of_stage[action.stage].append(action)
        for (action,) in neighbours:
            actions = of_stage[action.stage]
            merged.append(tuple(actions) if len(actions) > 1 else ())
    return merged


def _is_single_w(step: Step) -> bool:
    return len(step) == 1 and step[0].kind == "W"
