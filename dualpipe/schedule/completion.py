"""When a stage is done: after which step of its rank its gradients are complete.

That is where data parallelism reduces them. The place follows from the order of the actions, so that a schedule need
not hold it and one from elsewhere has it too; the engine, the simulator and the picture all take it from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dualpipe.schedule.types import Step


def completed(steps: Sequence[Step], kinds: Iterable[str] = "BW") -> tuple[tuple[int, ...], ...]:
    """For each step, the stages whose last action of `kinds` it holds, ascending.

    Example: of the steps (0I0), (0I1), (0W0), (0W1) the last one completes stage 0. With kinds "F", stages are done
    after their last forward, as in an evaluation.
    """
    wanted, seen = set(kinds), set()
    stages_of_step = []
    for step in reversed(steps):
        last = {action.stage for action in step if action.kind in wanted} - seen
        seen |= last
        stages_of_step.append(tuple(sorted(last)))
    return tuple(reversed(stages_of_step))
