"""Pairs of actions through DeepSeek's `overlapped_forward_backward`, for stages that are all of one type with it.

The method belongs to the type (https://github.com/deepseek-ai/DualPipe): it is given the inputs of one micro-batch's
forward and the results and gradients of another's, and runs both as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import input_names
from dualpipe.pipeline.microbatch import MicrobatchState, SegmentRecord, Slot
from dualpipe.pipeline.rank_stages import RankStages
from dualpipe.pipeline.stage_program import SIDE, TARGET, Target, as_tuple
from dualpipe.pipeline.stage_runner import StageRunner
from dualpipe.schedule.types import Action


class OverlappedPairs:
    """Runs pairs of a forward and a backward by the hook of the stages' type."""

    def __init__(self, stages: RankStages, runners: Mapping[int, StageRunner], store: WeightGradStore) -> None:
        self._stages = stages
        self._runners = runners
        self._store = store

    def takes(self, actions: tuple[Action, ...]) -> bool:
        """Return True for a forward and a backward that overlap."""
        return sorted(action.kind for action in actions) in (["B", "F"], ["F", "I"])

    def run(self, actions: tuple[Action, ...], states: Mapping[Slot, MicrobatchState]) -> None:
        """Run a pair, whose forward has begun: it leaves its results in its carry, the backward its gradients in its
        state."""
        forward, backward = sorted(actions, key=lambda action: action.kind != "F")
        ahead = states[forward.stage, forward.microbatch]
        behind = states[backward.stage, backward.microbatch]
        module: Any = self._stages.modules[forward.stage]
        runner = self._runners[forward.stage]
        if runner.wait_for_parameters is not None:
            runner.wait_for_parameters()
        target = ahead.carry.pop(TARGET, Target(None, (), False))
        del ahead.carry[SIDE]  # none: the hook has no argument for any
        inputs = dict(ahead.carry)
        (record,) = behind.records
        loss = record.results.pop("loss", None)
        ends = () if loss is not None else tuple(record.results[name] for name in behind.results)
        gradients = () if loss is not None else tuple(behind.gradients.values())
        behind.gradients = {}
        with self._store.defer(behind.slot) if backward.kind == "I" else self._store.accumulate():
            outputs, new_loss = type(module).overlapped_forward_backward(
                module, list(inputs.values()), target.criterion, list(target.labels),
                self._stages.modules[backward.stage], loss, ends, gradients,
            )
        for name, leaf in record.leaves.items():
            if leaf.grad is not None:
                behind.add_gradient(name, leaf.grad)
        behind.records = []
        behind.return_to_caller()
        ahead.records = [SegmentRecord()]
        ahead.carry = self._results(as_tuple(outputs), new_loss, target)
        runner.keep(ahead.records[0], inputs, ahead.carry)

    def _results(self, outputs: tuple[Tensor, ...], loss: Tensor | None, target: Target) -> dict[str, Tensor]:
        """Return the results of a forward by name, as a stage's own program does."""
        named = dict(zip(input_names(len(outputs)), outputs))
        if loss is None:
            return named
        return {"loss": loss, **(named if target.keep_outputs else {})}
