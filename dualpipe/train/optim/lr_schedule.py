"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Literal

from dualpipe.train.config.schema import OptimizerConfig


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0,
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine", min_ratio: float = 0.1,
    decay_fraction: float = 0.2,
) -> float:
    """Return the learning rate of `step`, counted from 0.

    A linear warm-up reaches `peak` at step `warmup_steps`. The decay after it reaches `min_ratio * peak` at the last
    step.

    Args:
        step: counted from 0.
        peak: largest learning rate.
        total_steps: steps of the run.
        warmup_steps: steps of the linear warm-up.
        schedule: "cosine": half a cosine. "linear": linear. "wsd": constant, then linear. "constant": `peak`, without
            a decay.
        min_ratio: last learning rate, as a fraction of `peak`.
        decay_fraction: for "wsd", fraction of all steps in which the learning rate decays.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    decay_steps = round(decay_fraction * total_steps) if schedule == "wsd" else total_steps
    last = total_steps - 1
    start = max(warmup_steps, last - decay_steps)
    if last > start:
        progress = min(1.0, max(0.0, (step - start) / (last - start)))
    else:
        progress = float(step > last)
    height = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return peak * (min_ratio + (1.0 - min_ratio) * height)


def run_learning_rate(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of `step`, counted from 0, for the settings of a run with `total_steps` steps."""
    return learning_rate(
        step, peak=optimizer.lr, total_steps=total_steps, warmup_steps=optimizer.warmup_steps,
        schedule=optimizer.schedule, min_ratio=optimizer.min_lr_ratio, decay_fraction=optimizer.decay_fraction,
    )
