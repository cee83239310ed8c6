"""Pairs of actions through DeepSeek's `overlapped_forward_backward`, if the common type of all stages has it.

The class method (https://github.com/deepseek-ai/DualPipe) takes the inputs of one micro-batch's forward, and the
results and gradients of another micro-batch's, and runs the forward and the backward in any order.
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
    """Runs pairs of a forward and a backward by the method of the stages' type."""

    def __init__(self, stages: RankStages, runners: Mapping[int, StageRunner], store: WeightGradStore) -> None:
        self._stages = stages
        self._runners = runners
        self._store = store

    def can_run(self, actions: tuple[Action, ...]) -> bool:
        """Return True for a pair of a forward and a backward."""
        return sorted(action.kind for action in actions) in (["B", "F"], ["F", "I"])

    def run(self, actions: tuple[Action, ...], states: Mapping[Slot, MicrobatchState]) -> None:
        """Run a pair whose forward has begun.

        The forward leaves its results in the carry of its micro-batch, the backward its gradients in the state of its.
        """
        forward, backward = sorted(actions, key=lambda action: action.kind != "F")
        forward_state = states[forward.stage, forward.microbatch]
        backward_state = states[backward.stage, backward.microbatch]
        module: Any = self._stages.modules[forward.stage]
        runner = self._runners[forward.stage]
        if runner.wait_for_parameters is not None:
            runner.wait_for_parameters()
        target = forward_state.carry.pop(TARGET, Target(None, (), False))
        del forward_state.carry[SIDE]  # empty: the method takes no side inputs
        inputs = dict(forward_state.carry)
        (record,) = backward_state.records
        loss = record.results.pop("loss", None)
        results: tuple[Tensor, ...] = ()
        gradients: tuple[Tensor, ...] = ()
        if loss is None:
            results = tuple(record.results[name] for name in backward_state.results)
            gradients = tuple(backward_state.gradients.values())
        backward_state.gradients = {}
        with self._store.defer(backward_state.slot) if backward.kind == "I" else self._store.accumulate():
            outputs, new_loss = type(module).overlapped_forward_backward(
                module, list(inputs.values()), target.criterion, list(target.labels),
                self._stages.modules[backward.stage], loss, results, gradients,
            )
        for name, leaf in record.leaves.items():
            if leaf.grad is not None:
                backward_state.add_gradient(name, leaf.grad)
        backward_state.records = []
        backward_state.backward_to_caller()
        forward_state.records = [SegmentRecord()]
        forward_state.carry = self._results(as_tuple(outputs), new_loss, target)
        runner.save_for_backward(forward_state.records[0], inputs, forward_state.carry)

    def _results(self, outputs: tuple[Tensor, ...], loss: Tensor | None, target: Target) -> dict[str, Tensor]:
        """Return the results of a forward by name, like a stage's program."""
        by_name = dict(zip(input_names(len(outputs)), outputs))
        if loss is None:
            return by_name
        if not target.keep_outputs:
            return {"loss": loss}
        return {"loss": loss, **by_name}
