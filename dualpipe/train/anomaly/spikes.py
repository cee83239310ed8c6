"""Spikes: a loss or a gradient norm far above those of the last steps, in robust deviations from their median."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

WINDOW = 128  # earlier steps that a step is compared with
MIN_HISTORY = 32  # fewer steps detect no spike
_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


class SpikeDetector:
    """Compares the loss and the gradient norm of each step with those of earlier steps.

    Args:
        threshold: robust deviations above the median from which a value is a spike. 0: no detection.
        include_spikes: later steps are compared with spikes too. A value that stays on a new level then stops being a
            spike.
    """

    def __init__(self, threshold: float, *, include_spikes: bool) -> None:
        self._threshold = threshold
        self._include_spikes = include_spikes
        self._history: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("loss", "grad_norm")}

    def check(self, step: int, values: Mapping[str, Any]) -> str:
        """Add a step to the history; return a description of its spikes, or "".

        Args:
            step: for the description.
            values: "loss" and "grad_norm".
        """
        if not self._threshold:
            return ""
        spikes = []
        for name, history in self._history.items():
            value = values[name]
            middle = median(history) if history else value
            spread = _MAD * median(abs(past - middle) for past in history) if history else 0.0
            score = (value - middle) / max(spread, 1e-3 * abs(middle), 1e-12)
            is_spike = len(history) >= MIN_HISTORY and not score <= self._threshold  # NaN is a spike
            if is_spike:
                spikes.append(f"{name} {value:.4g} is {score:.3g} robust deviations above the median {middle:.4g} of "
                              f"the last {len(history)} steps")
            if not is_spike or self._include_spikes:
                history.append(value)
        return f"step {step}: {' and '.join(spikes)}" if spikes else ""
