"""Running a bad step again: what is kept of each step to do so, and what is found out that way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.runtime.device import RandomState
from dualpipe.schedule import Action
from dualpipe.train.anomaly.localize import Watch, on_host, run_again, total
from dualpipe.train.checkpointing.bundle import write_bundle
from dualpipe.train.checkpointing.training_state import TrainingState
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.step.step_runner import StepRunner


class Kept(NamedTuple):
    """The state that running a step again needs, besides parameters, which a bad step has not changed."""

    batch: TokenBatch
    random: RandomState
    routers: list[Tensor]
    watch: Watch  # of the step: sums of what its actions gave


class StepReruns:
    """Keeps what it takes to run the steps of `runner` again, and does so. state: of the run, for bundles."""

    def __init__(self, runner: StepRunner, state: TrainingState) -> None:
        self.runner = runner
        self._state = state
        self._changed = runner.routers.changed_by_steps()

    def keep(self, batch: TokenBatch) -> Kept:
        """Return what there is before a step; the host waits for nothing."""
        watch = Watch(self.runner.recorder, total, kinds=(Action,))
        # Of torch alone: nothing else draws numbers in a step, and NumPy's state takes 120 us.
        return Kept(batch, RandomState.capture(), [each.clone() for each in self._changed], watch)

    def restore(self, kept: Kept) -> None:
        """Have routers and random numbers as they were before a step that changed nothing else."""
        torch._foreach_copy_(self._changed, kept.routers)
        kept.random.restore()

    def explain(self, step: int, values: Mapping[str, Any], kept: Kept) -> str:
        """Run a step, from 1, that is not finite again; return what was found, with its bundle written. Collective.

        values: its metrics.
        """
        runner = self.runner
        self.restore(kept)
        seen = [spot for spot, value in on_host(kept.watch.results).items() if not math.isfinite(value)]
        spots = runner.job.ranks.gather(lambda: min(seen, default=None))
        then = min((spot for spot in spots if spot is not None), default=None)
        with runner.recorder.doing("check", "the step again"):
            again = run_again(runner, kept.batch, step)
        self.restore(kept)
        loss = "" if math.isfinite(values["loss"]) or not runner.model.has_last else f", the loss {values['loss']}"
        lines = [f"the gradient norm is {values['grad_norm']} at step {step}{loss}; lower optimizer.lr, lengthen "
                 "optimizer.warmup_steps, or check the data",
                 again.text(f"{runner.recorder.name(then.rank)}, {then.what}" if then else "")]
        try:
            path = write_bundle(runner, self._state, step, kept.batch, values, again.record())
            lines.append(f"all that the step takes is kept: dualpipe replay {path}")
        except OSError as error:  # such as a full disk: what is known must be said all the same
            lines.append(f"what the step takes could not be kept: {error}")
        self.restore(kept)
        return "\n".join(lines)
