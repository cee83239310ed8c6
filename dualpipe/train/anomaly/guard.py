"""The answer to steps whose loss or gradient is not finite or leaps.

A step whose loss or gradient norm is infinite or NaN changes nothing: the device sees to that, also for the step that
is queued behind it, before the host knows. Then all ranks run its batch again to find where it begins, keep what it
takes to do so later (`dualpipe replay`), and stop, leave it out, or go back to a checkpoint and leave out its data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from dualpipe.train.anomaly.reruns import Kept, StepReruns
from dualpipe.train.anomaly.spikes import SpikeDetector
from dualpipe.train.checkpointing.saver import Saver
from dualpipe.train.checkpointing.training_state import TrainingState
from dualpipe.train.config.model_config import TrainedModel
from dualpipe.train.config.schema import GuardConfig
from dualpipe.train.data.token_stream import TokenBatch

# A router has collapsed that is so near the limit, where one expert gets every token, for so many steps in a row:
# routers that start at the limit have left it by then.
NEAR, PATIENCE = 0.9, 50


class BadStep(Exception):
    """A step, from 1, that must not count as it is. values: its metrics, kept: see `Kept`; why: what is wrong."""

    def __init__(self, step: int, values: Mapping[str, Any], kept: Kept, why: str = "") -> None:
        super().__init__(why)
        self.step, self.values, self.kept, self.why = step, values, kept, why


class Resolution(NamedTuple):
    """The way a run goes on after a bad step.

    done: the steps that count. went_back: whether to a checkpoint. text: to be said.
    """

    done: int
    went_back: bool
    text: str


class Guard:
    """The guard of a run, as `config.guard` says. Every rank calls the same methods at the same steps.

    model: what is trained; reruns: run steps again; saver, state: for checkpoints to go back to.
    """

    def __init__(
        self, settings: GuardConfig, model: TrainedModel, reruns: StepReruns, saver: Saver, state: TrainingState
    ) -> None:
        self._settings = settings
        self._reruns = reruns
        self._saver = saver
        self._state = state
        self._load_limit = model.num_experts / model.num_experts_per_tok  # of load_max_over_mean
        self._in_row = 0  # bad steps without a good one between
        self._until = 0  # the last of them
        self._passed: Tensor | None = None  # 0 on the device, NaN once a queued step was not finite
        self._spiked = ""  # what was
        self._near = 0  # steps in a row in which one expert got nearly every token
        self._spikes = SpikeDetector(settings.spike, spikes_count=settings.on_spike == "warn")

    # -- around a step, on the device

    def keep(self, batch: TokenBatch) -> Kept:
        """Return what there is before a step; the host waits for nothing."""
        return self._reruns.keep(batch)

    def judge(self, norm: Tensor) -> Tensor:
        """The norm that the optimizer goes by: NaN also where that of a step before was not finite, which the host does
        not know yet."""
        found = norm - norm  # 0, or NaN
        if self._passed is not None:
            found = found + self._passed.to(found.dtype)
        self._passed = found
        return norm + found

    # -- once the host knows a step's numbers

    def check(self, step: int, values: Mapping[str, Any], kept: Kept) -> None:
        """Raise BadStep where a step must not count."""
        if not math.isfinite(values["grad_norm"]):
            raise BadStep(step, values, kept)
        if step >= self._until:
            self._in_row = 0
        self._spiked = self._spikes.find(step, values)
        if self._spiked and self._settings.on_spike == "rollback":
            raise BadStep(step, values, kept, self._spiked)

    def warnings(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """Yield the warnings about the step that was checked last."""
        if self._spiked:
            yield f"WARNING: {self._spiked}"
        load, limit = metrics.get("load_max_over_mean", 0.0), self._load_limit
        self._near = self._near + 1 if limit > 1 and load >= NEAR * limit else 0
        if self._near == PATIENCE:  # once in a collapse
            yield (f"WARNING: for {PATIENCE} steps one expert of some layer got nearly every token "
                   f"(load_max_over_mean {load:.2f}, at most {limit:g}): its router has collapsed; "
                   "raise router.balance, to 0.01 for a start")

    # -- what follows from a bad step

    def resolve(self, bad: BadStep) -> Resolution:
        """Return how the run goes on after a bad step, or raise FloatingPointError. Collective."""
        loader, spiked = self._state.loader, bool(bad.why)
        self._passed = None
        policy = "rollback" if spiked else self._settings.on_nonfinite
        text = bad.why or self._reruns.explain(bad.step, bad.values, bad.kept)
        self._in_row, self._until = self._in_row + 1, bad.step
        self._saver.anomaly(bad.step)
        if policy == "stop" or self._in_row > self._settings.limit:
            if policy != "stop":
                text += f"\nthe run stops, as it is one more than guard.limit = {self._settings.limit} in a row"
            raise FloatingPointError("\n".join(filter(None, [text, self._saver.advice(bad.step)])))
        if policy == "skip":
            done = loader.step = bad.step
            self._saver.save(self._state, done)
            return Resolution(done, went_back=False, text=f"{text}\nleft out: nothing is updated by it")
        taken = bad.step + loader.skipped_batches  # batches until now, with that of the bad step
        target = self._saver.go_back(self._state)
        if target is None:
            raise FloatingPointError(f"{text}\nthere is no checkpoint to go back to; set checkpoint.interval, or "
                                     'guard.on_nonfinite = "skip"')
        loader.step = target
        loader.skipped_batches = taken - target
        went_on = f"back to step {target}; the data of steps {target + 1} to {bad.step} is left out"
        return Resolution(target, went_back=True, text=f"{text}\n{went_on}")
