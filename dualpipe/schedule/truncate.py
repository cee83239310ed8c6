"""Orders for fewer micro-batches than their pattern needs."""

from __future__ import annotations

from collections.abc import Iterable

from dualpipe.schedule.types import Step


def first_microbatches(steps: Iterable[Step], count: int) -> tuple[Step, ...]:
    """`steps` without what they do for micro-batches from `count` on; half of a pair stays as a step of its own.

    Done on all ranks alike this keeps an order valid: what remains keeps its sequence, hence its dependencies, no
    stream holds more messages, and no more activations are alive than before.
    """
    kept = (tuple(action for action in step if action.microbatch < count) for step in steps)
    return tuple(step for step in kept if step)
