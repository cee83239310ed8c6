"""Spikes: a loss or a gradient norm far above those of the last steps, by robust deviations from their median."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

WINDOW, FEWEST = 128, 32  # steps that a spike is told from
_MAD = 1.4826  # by which a normal distribution's standard deviation is larger than its median absolute deviation


class SpikeDetector:
    """Compares the loss and the gradient norm of each step with those of the steps before.

    threshold: robust deviations above the median from which on a value is a spike; 0: none is. spikes_count: a step
    with a spike counts as one of the steps that later ones are compared with.
    """

    def __init__(self, threshold: float, *, spikes_count: bool) -> None:
        self._threshold, self._spikes_count = threshold, spikes_count
        self._history: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("loss", "grad_norm")}

    def find(self, step: int, values: Mapping[str, Any]) -> str:
        """Describe what is unusual about a step's numbers, "" for nothing.

        Numbers of a step that counts are among those of later ones, so that what stays at another level is usual in the
        end.
        """
        if not self._threshold:
            return ""
        spikes = []
        for name, history in self._history.items():
            value = values[name]
            middle = median(history) if history else value
            spread = _MAD * median(abs(past - middle) for past in history) if history else 0.0
            score = (value - middle) / max(spread, 1e-3 * abs(middle), 1e-12)
            is_spike = len(history) >= FEWEST and not score <= self._threshold
            if is_spike:
                spikes.append(f"{name} {value:.4g} is {score:.3g} robust deviations above the median {middle:.4g} of "
                              f"the last {len(history)} steps")
            if not is_spike or self._spikes_count:
                history.append(value)
        return f"step {step}: {' and '.join(spikes)}" if spikes else ""
