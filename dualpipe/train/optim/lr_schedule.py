"""The learning rate of each step: a linear warm-up to the peak, then a schedule of `SCHEDULES`.

To add a schedule, write its function, give it a name in `SCHEDULES`, and add the name to `LRSchedule` in
`dualpipe.train.config.schema`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dualpipe.train.config.schema import LRSchedule, OptimizerConfig


def learning_rate(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of a step.

    The warm-up reaches the peak at step `warmup_steps`. A decay reaches `min_lr_ratio` of the peak at the last step.

    Args:
        step: counted from 0.
        optimizer: the table [optimizer].
        total_steps: steps of the run.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / (optimizer.warmup_steps + 1)
    height = SCHEDULES[optimizer.schedule](step, optimizer, total_steps)
    return optimizer.lr * (optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * height)


# A schedule returns the height of the learning rate at a step after the warm-up: 1 at the peak, 0 at its lowest.


def constant(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Stay at the peak."""
    return 1.0


def linear(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Decay linearly."""
    return 1.0 - _progress(step, optimizer.warmup_steps, total_steps)


def cosine(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Decay by half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * _progress(step, optimizer.warmup_steps, total_steps)))


def warmup_stable_decay(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Stay at the peak, then decay linearly in the last `decay_fraction` of all steps."""
    decay_steps = round(optimizer.decay_fraction * total_steps)
    first_step = max(optimizer.warmup_steps, total_steps - 1 - decay_steps)
    return 1.0 - _progress(step, first_step, total_steps)


SCHEDULES: dict[LRSchedule, Callable[[int, OptimizerConfig, int], float]] = {
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
    "wsd": warmup_stable_decay,
}


def _progress(step: int, first_step: int, total_steps: int) -> float:
    """Return how much of a decay is done: 0 up to `first_step`, 1 at the last step of the run."""
    last_step = total_steps - 1
    if last_step <= first_step:
        return float(step > last_step)
    return min(1.0, max(0.0, (step - first_step) / (last_step - first_step)))
