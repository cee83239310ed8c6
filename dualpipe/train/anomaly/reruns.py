"""Rerun a bad step: take a snapshot before every step, and explain a non-finite one by running it a second time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe.runtime.device import RandomState
from dualpipe.schedule import Action
from dualpipe.train.anomaly.localize import ResultWatch, read_values, rerun_step, sum_in_fp32
from dualpipe.train.checkpointing.bundle import write_bundle
from dualpipe.train.checkpointing.training_state import TrainingState
from dualpipe.train.data.token_stream import TokenBatch
from dualpipe.train.step.kernel_choice import KernelChoice
from dualpipe.train.step.step_runner import StepRunner


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
