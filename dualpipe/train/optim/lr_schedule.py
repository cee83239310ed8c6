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
    """The learning rate of `step`, counted from 0.

    Linear warm-up that reaches `peak` at step `warmup_steps`, then "cosine": half a cosine; "linear"; or "wsd":
    constant, then linear over the last `decay_fraction` of all steps. These reach `min_ratio * peak` at the last step;
    "constant" stays at `peak`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    decay_steps, last = round(decay_fraction * total_steps) if schedule == "wsd" else total_steps, total_steps - 1
    start = max(warmup_steps, last - decay_steps)
    progress = min(1.0, max(0.0, (step - start) / (last - start))) if last > start else float(step > last)
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return peak * (min_ratio + (1.0 - min_ratio) * share)


def run_learning_rate(step: int, optimizer: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of `step`, counted from 0, in a run of `total_steps`, as [optimizer] says."""
    return learning_rate(
        step, peak=optimizer.lr, total_steps=total_steps, warmup_steps=optimizer.warmup_steps,
        schedule=optimizer.schedule, min_ratio=optimizer.min_lr_ratio, decay_fraction=optimizer.decay_fraction,
    )
