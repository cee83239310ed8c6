"""Detect steps whose loss or gradient norm is not finite or is a spike, and react to them.

A step with a non-finite gradient norm changes nothing: the device ensures that before the host knows it, also for the
step that is queued behind it. All ranks then rerun the batch to find the origin, write a bundle for `dualpipe replay`,
and stop, skip the step, or roll back to a checkpoint and skip the data. `replay.py` has the rerun and the bundle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.runtime.device import RandomState
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.kernel_choice import KernelChoice
from dualpipe.train.replay import ResultWatch, find_origin, rerun_step, sum_in_fp32, write_bundle
from dualpipe.train.saver import Saver, TrainingState
from dualpipe.train.step import StepRunner

SPIKE_WINDOW = 128  # earlier steps that a step is compared with
MIN_SPIKE_HISTORY = 32  # fewer steps detect no spike
_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


class StepSnapshot(NamedTuple):
    """The state that a rerun of a step needs, besides parameters, which a bad step does not change.

    batch: of the step.
    random: random state before the step.
    routers: router tensors before the step.
    watch: records sums of the results of the step's actions.
    """

    batch: TokenBatch
    random: RandomState
    routers: list[Tensor]
    watch: ResultWatch


class BadStep(Exception):
    """A step must not count.

    Args:
        step: counted from 1.
        values: its metrics.
        snapshot: taken before the step.
        spike: description of the spike. "": the gradient norm is not finite.
    """

    def __init__(self, step: int, values: Mapping[str, Any], snapshot: StepSnapshot, spike: str = "") -> None:
        super().__init__(spike)
        self.step = step
        self.values = values
        self.snapshot = snapshot
        self.spike = spike


class Guard:
    """The guard of a run, as [guard] configures it. All ranks call the same methods at the same steps.

    Args:
        runner: runs the steps, and reruns bad ones.
        state: of the run.
        kernels: of the run, for bundles.
        saver: for checkpoints to roll back to.
    """

    def __init__(self, runner: StepRunner, state: TrainingState, kernels: KernelChoice, saver: Saver) -> None:
        self._settings = runner.config.guard
        self._runner = runner
        self._state = state
        self._kernels = kernels
        self._saver = saver
        self._router_tensors = runner.routers.changed_by_steps()
        self._zero_or_nan: Tensor | None = None  # 0 on the device, NaN once a queued step was not finite
        self._spikes = SpikeDetector(self._settings.spike, include_spikes=self._settings.on_spike == "warn")
        self._bad_in_row = 0  # bad steps without a good one in between
        self._last_bad = 0

    # -- around a step, on the device

    def snapshot(self, batch: TokenBatch) -> StepSnapshot:
        """Return a snapshot of the state before a step. The host does not wait.

        Only torch's random state is included: a step uses no other, and copying NumPy's takes 120 us.
        """
        watch = ResultWatch(self._runner.recorder, sum_in_fp32)
        return StepSnapshot(batch, RandomState.capture(), [tensor.clone() for tensor in self._router_tensors], watch)

    def propagate_nan(self, norm: Tensor) -> Tensor:
        """Return the gradient norm for the optimizer: NaN if it, or that of an earlier queued step, is not finite.

        The host may not yet have read the norm of the earlier step, but the device has it.
        """
        zero_or_nan = norm - norm  # 0, or NaN if the norm is not finite
        if self._zero_or_nan is not None:
            zero_or_nan = zero_or_nan + self._zero_or_nan.to(zero_or_nan.dtype)
        self._zero_or_nan = zero_or_nan
        return norm + zero_or_nan

    # -- once the host knows the numbers of a step

    def check(self, step: int, values: Mapping[str, Any], snapshot: StepSnapshot) -> str:
        """Raise BadStep if a step must not count. Else return a warning about it, or "".

        Args:
            step: counted from 1.
            values: its metrics.
            snapshot: taken before the step.
        """
        if not math.isfinite(values["grad_norm"]):
            raise BadStep(step, values, snapshot)
        if step >= self._last_bad:
            self._bad_in_row = 0
        spike = self._spikes.check(step, values)
        if spike and self._settings.on_spike == "rollback":
            raise BadStep(step, values, snapshot, spike)
        return f"WARNING: {spike}" if spike else ""

    # -- after a bad step

    def resolve(self, bad: BadStep) -> tuple[int, str]:
        """React to a bad step as the settings say. Collective.

        Returns:
            The number of completed steps: that of the bad step if it is skipped, a lower one after a rollback; and the
            text to print.

        Raises:
            FloatingPointError: the run stops.
        """
        self._zero_or_nan = None
        policy = "rollback" if bad.spike else self._settings.on_nonfinite
        text = bad.spike or self._explain(bad)
        self._bad_in_row += 1
        self._last_bad = bad.step
        self._saver.mark_anomaly(bad.step)
        if policy == "stop" or self._bad_in_row > self._settings.limit:
            if policy != "stop":
                text += f"\nthe run stops: more than guard.limit = {self._settings.limit} bad steps in a row"
            hint = self._saver.suggest_older_checkpoint(bad.step)
            raise FloatingPointError("\n".join(filter(None, [text, hint])))
        if policy == "skip":
            self._state.loader.step = bad.step
            self._saver.save(self._state, bad.step)
            return bad.step, f"{text}\nskipped: the step updates nothing"
        return self._roll_back(bad, text)

    def _explain(self, bad: BadStep) -> str:
        """Rerun a non-finite step and write a bundle; return lines about its origin. Collective.

        Afterwards, the state is again that before the step.
        """
        runner = self._runner
        batch = bad.snapshot.batch
        self._restore(bad.snapshot)
        origin = find_origin(runner, bad.snapshot.watch)
        with runner.recorder.doing("check", "a rerun of the step"):
            rerun = rerun_step(runner, batch, bad.step)
        self._restore(bad.snapshot)
        norm = bad.values["grad_norm"]
        loss = bad.values["loss"]
        loss_text = f", the loss {loss}" if runner.model.has_last and not math.isfinite(loss) else ""
        lines = [f"the gradient norm is {norm} at step {bad.step}{loss_text}; lower optimizer.lr, lengthen "
                 "optimizer.warmup_steps, or check the data",
                 rerun.describe(origin)]
        try:
            path = write_bundle(runner, self._state, self._kernels, bad.step, batch, bad.values, rerun)
            lines.append(f"the step can be run again by: dualpipe replay {path}")
        except OSError as error:  # such as a full disk: the findings are reported all the same
            lines.append(f"the bundle for `dualpipe replay` could not be written: {error}")
        self._restore(bad.snapshot)
        return "\n".join(lines)

    def _restore(self, snapshot: StepSnapshot) -> None:
        """Restore routers and random state to those before a step that changed nothing else."""
        torch._foreach_copy_(self._router_tensors, snapshot.routers)
        snapshot.random.restore()

    def _roll_back(self, bad: BadStep, text: str) -> tuple[int, str]:
        """Load a checkpoint, and skip the batches up to that of the bad step. Raises FloatingPointError without one.

        Returns the step of the checkpoint, and `text` with another line.
        """
        loader = self._state.loader
        num_read = bad.step + loader.skipped_batches  # batches up to now, with that of the bad step
        target = self._saver.roll_back(self._state)
        if target is None:
            raise FloatingPointError(f"{text}\nthere is no checkpoint to roll back to; set checkpoint.interval, or "
                                     'guard.on_nonfinite = "skip"')
        loader.step = target
        loader.skipped_batches = num_read - target
        return target, f"{text}\nrolled back to step {target}; the data of steps {target + 1} to {bad.step} is skipped"


class SpikeDetector:
    """Detects a loss or a gradient norm far above those of earlier steps, in robust deviations from their median.

    Args:
        threshold: robust deviations above the median from which a value is a spike. 0: no detection.
        include_spikes: later steps are compared with spikes too. A value that stays on a new level then stops being a
            spike.
    """

    def __init__(self, threshold: float, *, include_spikes: bool) -> None:
        self._threshold = threshold
        self._include_spikes = include_spikes
        self._history: dict[str, deque[float]] = {name: deque(maxlen=SPIKE_WINDOW) for name in ("loss", "grad_norm")}

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
            is_spike = len(history) >= MIN_SPIKE_HISTORY and not score <= self._threshold  # NaN is a spike
            if is_spike:
                spikes.append(f"{name} {value:.4g} is {score:.3g} robust deviations above the median {middle:.4g} of "
                              f"the last {len(history)} steps")
            if not is_spike or self._include_spikes:
                history.append(value)
        return f"step {step}: {' and '.join(spikes)}" if spikes else ""
