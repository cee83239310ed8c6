"""Detect steps whose loss or gradient norm is not finite or is a spike, and react to them.

A step with a non-finite gradient norm changes nothing: the device ensures that before the host knows it, also for the
step that is queued behind it. All ranks then rerun the batch to find the origin, write a bundle for `dualpipe replay`,
and stop, skip the step, or roll back to a checkpoint and skip the data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.runtime.device import RandomState
from dualpipe.schedule import Action
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import GuardConfig
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.kernel_choice import KernelChoice
from dualpipe.train.replay import ResultWatch, read_values, rerun_step, sum_in_fp32, write_bundle
from dualpipe.train.saver import Saver, TrainingState
from dualpipe.train.step import StepRunner

SPIKE_WINDOW = 128  # earlier steps that a step is compared with
MIN_SPIKE_HISTORY = 32  # fewer steps detect no spike
_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation

# A router has collapsed if its load is this near to the maximum, where one expert gets every token, for this many
# steps in a row. Healthy routers that start this uneven are more even by then.
COLLAPSE_FRACTION = 0.9
COLLAPSE_STEPS = 50


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


class Resolution(NamedTuple):
    """The reaction to a bad step.

    done: number of steps that count.
    rolled_back: the run has loaded a checkpoint.
    text: the line to print.
    """

    done: int
    rolled_back: bool
    text: str


class Guard:
    """The guard of a run. All ranks call the same methods at the same steps.

    Args:
        settings: the table [guard].
        model: the model of the run.
        reruns: reruns steps.
        saver: for checkpoints to roll back to.
        state: of the run.
    """

    def __init__(
        self, settings: GuardConfig, model: TrainedModel, reruns: StepReruns, saver: Saver, state: TrainingState
    ) -> None:
        self._settings = settings
        self._reruns = reruns
        self._saver = saver
        self._state = state
        self._max_load = model.num_experts / model.num_experts_per_tok  # upper bound of load_max_over_mean
        self._bad_in_row = 0  # bad steps without a good one in between
        self._last_bad = 0
        self._poison: Tensor | None = None  # 0 on the device, NaN once a queued step was not finite
        self._spike = ""  # of the step that was checked last
        self._collapsed_steps = 0  # steps in a row in which one expert got nearly every token
        self._spikes = SpikeDetector(settings.spike, include_spikes=settings.on_spike == "warn")

    # -- around a step, on the device

    def snapshot(self, batch: TokenBatch) -> StepSnapshot:
        """Return a snapshot of the state before a step. The host does not wait."""
        return self._reruns.snapshot(batch)

    def poison_norm(self, norm: Tensor) -> Tensor:
        """Return the gradient norm for the optimizer: NaN if it, or that of an earlier queued step, is not finite.

        The host may not yet have read the norm of the earlier step, but the device has it.
        """
        poison = norm - norm  # 0, or NaN if the norm is not finite
        if self._poison is not None:
            poison = poison + self._poison.to(poison.dtype)
        self._poison = poison
        return norm + poison

    # -- once the host knows the numbers of a step

    def check(self, step: int, values: Mapping[str, Any], snapshot: StepSnapshot) -> None:
        """Raise BadStep if a step must not count.

        Args:
            step: counted from 1.
            values: its metrics.
            snapshot: taken before the step.
        """
        if not math.isfinite(values["grad_norm"]):
            raise BadStep(step, values, snapshot)
        if step >= self._last_bad:
            self._bad_in_row = 0
        self._spike = self._spikes.check(step, values)
        if self._spike and self._settings.on_spike == "rollback":
            raise BadStep(step, values, snapshot, self._spike)

    def warnings(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """Yield warnings about the step that was checked last."""
        if self._spike:
            yield f"WARNING: {self._spike}"
        load = metrics.get("load_max_over_mean", 0.0)
        is_collapsed = self._max_load > 1 and load >= COLLAPSE_FRACTION * self._max_load
        self._collapsed_steps = self._collapsed_steps + 1 if is_collapsed else 0
        if self._collapsed_steps == COLLAPSE_STEPS:  # once per collapse
            yield (f"WARNING: for {COLLAPSE_STEPS} steps one expert of some layer got nearly every token "
                   f"(load_max_over_mean {load:.2f}, at most {self._max_load:g}): its router has collapsed; "
                   "raise router.balance, to 0.01 for a start")

    # -- after a bad step

    def resolve(self, bad: BadStep) -> Resolution:
        """React to a bad step as the settings say. Collective.

        Raises:
            FloatingPointError: the run stops.
        """
        self._poison = None
        policy = "rollback" if bad.spike else self._settings.on_nonfinite
        text = bad.spike or self._reruns.explain(bad.step, bad.values, bad.snapshot)
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
            return Resolution(bad.step, rolled_back=False, text=f"{text}\nskipped: the step updates nothing")
        return self._roll_back(bad, text)

    def _roll_back(self, bad: BadStep, text: str) -> Resolution:
        """Load a checkpoint, and skip the batches up to that of the bad step. Raises FloatingPointError without one."""
        loader = self._state.loader
        num_read = bad.step + loader.skipped_batches  # batches up to now, with that of the bad step
        target = self._saver.roll_back(self._state)
        if target is None:
            raise FloatingPointError(f"{text}\nthere is no checkpoint to roll back to; set checkpoint.interval, or "
                                     'guard.on_nonfinite = "skip"')
        loader.step = target
        loader.skipped_batches = num_read - target
        text += f"\nrolled back to step {target}; the data of steps {target + 1} to {bad.step} is skipped"
        return Resolution(target, rolled_back=True, text=text)


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


class StepReruns:
    """Takes snapshots of steps and reruns them.

    Args:
        runner: runs the steps.
        state: of the run, for bundles.
        kernels: of the run, for bundles.
    """

    def __init__(self, runner: StepRunner, state: TrainingState, kernels: KernelChoice) -> None:
        self.runner = runner
        self._kernels = kernels
        self._state = state
        self._router_tensors = runner.routers.changed_by_steps()

    def snapshot(self, batch: TokenBatch) -> StepSnapshot:
        """Return a snapshot of the state before a step. The host does not wait.

        Only torch's random state is included: a step uses no other, and copying NumPy's takes 120 us.
        """
        watch = ResultWatch(self.runner.recorder, sum_in_fp32, kinds=(Action,))
        return StepSnapshot(batch, RandomState.capture(), [tensor.clone() for tensor in self._router_tensors], watch)

    def restore(self, snapshot: StepSnapshot) -> None:
        """Restore routers and random state to those before a step that changed nothing else."""
        torch._foreach_copy_(self._router_tensors, snapshot.routers)
        snapshot.random.restore()

    def explain(self, step: int, values: Mapping[str, Any], snapshot: StepSnapshot) -> str:
        """Rerun a non-finite step and write a bundle; return lines about its origin. Collective.

        Args:
            step: counted from 1.
            values: its metrics.
            snapshot: taken before the step.
        """
        runner = self.runner
        self.restore(snapshot)
        origin = self._find_origin(snapshot)
        with runner.recorder.doing("check", "a rerun of the step"):
            rerun = rerun_step(runner, snapshot.batch, step)
        self.restore(snapshot)
        shows_loss = runner.model.has_last and not math.isfinite(values["loss"])
        loss = f", the loss {values['loss']}" if shows_loss else ""
        lines = [f"the gradient norm is {values['grad_norm']} at step {step}{loss}; lower optimizer.lr, lengthen "
                 "optimizer.warmup_steps, or check the data",
                 rerun.describe(origin)]
        try:
            path = write_bundle(
                runner, self._state, step, snapshot.batch, values, rerun.to_record(),
                expert_gemm=self._kernels.expert_gemm.library, attention=self._kernels.attention.kernel)
            lines.append(f"the step can be run again by: dualpipe replay {path}")
        except OSError as error:  # such as a full disk: the findings are reported all the same
            lines.append(f"the bundle for `dualpipe replay` could not be written: {error}")
        self.restore(snapshot)
        return "\n".join(lines)

    def _find_origin(self, snapshot: StepSnapshot) -> str:
        """Return the rank and the action whose result was the first non-finite one in the step, or "". Collective."""
        recorder = self.runner.recorder
        sums = read_values(snapshot.watch.results)
        nonfinite = [location for location, value in sums.items() if not math.isfinite(value)]
        by_rank = self.runner.job.ranks.gather(lambda: min(nonfinite, default=None))
        first = min((location for location in by_rank if location is not None), default=None)
        return f"{recorder.name(first.rank)}, {first.label}" if first else ""
