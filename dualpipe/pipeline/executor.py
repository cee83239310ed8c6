"""Executor of one rank's program for one batch: the only place where a schedule turns into work of stages.

All state of a step is in the `Executor`, which lives as long as the step. The activation between two stages, on two
ranks or on one, arrives as a leaf, so that the backward of every stage runs on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import input_names, is_boundary
from dualpipe.parallel.fsdp.driver import ParametersStep
from dualpipe.pipeline.batch import Batch
from dualpipe.pipeline.compiled_stage import TARGET, RankStages, Target, as_tuple
from dualpipe.pipeline.lower import Instruction, Program
from dualpipe.pipeline.microbatch_state import MicrobatchState, SegmentRecord, Slot, received_state
from dualpipe.pipeline.overlap import Task, walk
from dualpipe.pipeline.p2p import P2PMessages
from dualpipe.pipeline.stage_runner import StageRunner, no_autocast
from dualpipe.runtime.device import annotation
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule.types import Action

Outputs = Tensor | tuple[Tensor, ...] | None

_KIND_NAMES = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight gradients"}


class Executor:
    """Runs `batch` through the `stages` of one rank in one step, in the order of `program`."""

    def __init__(
        self, stages: RankStages, batch: Batch, program: Program, messages: P2PMessages, parameters: ParametersStep,
        store: WeightGradStore,
    ) -> None:
        self._stages = stages
        self._last_stage = stages.count - 1
        self._batch = batch
        self._program = program
        self._messages = messages
        self._parameters = parameters
        self._store = store
        self._recorder = Recorder.current()
        self._train = torch.is_grad_enabled()
        # Without a profiler, its ranges would still cost 5 us per action.
        is_profiled = torch.autograd._profiler_enabled()
        self._annotate = record_function if is_profiled else annotation(stages.device)
        is_hooked = stages.is_hooked
        self._runners = {
            stage: StageRunner(
                compiled, store, autocast=batch.autocast, keep_results=is_hooked,
                wait_for_parameters=partial(parameters.wait, stage) if parameters.must_wait(stage) else None,
            )
            for stage, compiled in stages.compiled.items()
        }
        self._pairs = OverlappedPairs(stages, self._runners, store) if is_hooked else None
        self._states = self._first_states()
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._running_actions: tuple[Action, ...] = ()
        self._place = "at the beginning or end of the step"  # for errors while no action runs

    def run(self) -> tuple[Tensor | None, Outputs]:
        """Run the program; return the losses (num_chunks,) and the outputs; see `Pipeline.step`."""
        depth = self._recorder.depth
        try:
            # Single-threaded: on CUDA, autograd's threads would not see the active store.
            with self._store.activate(), torch.autograd.set_multithreading_enabled(False):
                self._parameters.gather()
                self._messages.start()
                for instruction in self._program.instructions:
                    self._run(instruction)
                self._running_actions = ()
                pending = self._store.pending()
                if pending:
                    raise RuntimeError("deferred weight gradients were never computed, by (stage, micro-batch): "
                                       f"{pending}")
                self._parameters.finish()
            self._backward_to_caller()
            return self._results()
        finally:
            self._recorder.unwind(depth)
            self._store.clear()

    def abandon(self) -> None:
        """Clean up after a failed step, as far as this rank can without others."""
        self._parameters.abandon()

    def running(self) -> str:
        """Return the error prefix that names the running action."""
        names = [
            f"{action} ({_KIND_NAMES[action.kind]} of stage {action.stage}, micro-batch {action.microbatch})"
            for action in self._running_actions
        ]
        return " and ".join(names or [self._place]) + ": "

    def _run(self, instruction: Instruction) -> None:
        """Receive the messages that the actions need, run the actions, and send their results."""
        actions = instruction.actions
        recorder = self._recorder
        merged = instruction.merged
        self._running_actions = merged or actions  # any action of merged work can be the cause of an error
        for message in instruction.incoming:
            slot = message.stage, message.microbatch
            tensors = self._messages.take(message)
            if message.kind == "F":
                self._states[slot] = received_state(tensors, len(self._batch.side_names), slot)
            else:
                self._states[slot].set_gradients(tensors)
            del tensors  # only the state keeps them
        recorder.begin(instruction.kinds, instruction)
        if merged and merged[0] is actions[0]:
            self._store.merge([(action.stage, action.microbatch) for action in merged])
        if self._annotate is None:
            results = self._run_actions(actions)
        else:
            with self._annotate(instruction.name):
                results = self._run_actions(actions)
        if recorder.is_observed:
            for action, result in zip(actions, results):
                recorder.made(action, *result)
        recorder.end()
        for action, outgoing, result in zip(actions, instruction.outgoing, results):
            if len(actions) > 1:
                self._running_actions = (action,)
            if outgoing is not None:
                self._messages.send(outgoing, result)
            else:
                self._hand_over(action, result)
        if instruction.completes:
            self._parameters.complete(instruction.completes)

    def _run_actions(self, actions: tuple[Action, ...]) -> Sequence[Sequence[Tensor]]:
        """Run one action, or two that overlap; return the results of each for the next or previous stage."""
        if len(actions) > 1:
            return self._run_pair(actions)
        (action,) = actions
        for in_flight in self._task(action, is_pair=False):
            if in_flight is not None:
                in_flight.start()
        return (self._finish(action),)

    def _run_pair(self, actions: tuple[Action, ...]) -> Sequence[Sequence[Tensor]]:
        """Run two actions that overlap; return the results of each for the next or previous stage."""
        if self._pairs is not None and self._pairs.can_run(actions):
            forward = next(action for action in actions if action.kind == "F")
            self._begin_forward(self._states[forward.stage, forward.microbatch])
            self._pairs.run(actions, self._states)
            return [self._finish(action) for action in actions]
        order = list(actions)
        if any(self._stages.compiled[action.stage].num_communications for action in actions):
            # Backwards first: the forward's first segment then hides the backward's first communication. In the other
            # order the backward's first segment, the last of its stage, would hide the forward's first communication,
            # but it is shorter. The difference is up to a tenth of a pair's time.
            order.sort(key=lambda action: action.kind not in "BI")

        def turn(index: int) -> None:
            self._running_actions = (order[index],)

        walk([self._task(action, is_pair=True) for action in order], turn)
        results = []
        for action in actions:
            self._running_actions = (action,)
            results.append(self._finish(action))
        return results

    def _task(self, action: Action, *, is_pair: bool) -> Task:
        """Return the task of an action. is_pair: `walk` runs it in turn with the task of another action."""
        slot = action.stage, action.microbatch
        runner = self._runners[action.stage]
        if action.kind == "W":
            # In a pair, one part for each communication of the other action, if that is on a stage like this one.
            return runner.compute_deferred(slot, turns=max(1, runner.compiled.num_communications) if is_pair else 1)
        state = self._states[slot]
        if action.kind == "F":
            self._begin_forward(state)
            return runner.forward(state)
        return runner.backward(state, action.kind, slot)

    def _begin_forward(self, state: MicrobatchState) -> None:
        """Fill the carry of a forward: inputs, side inputs, and on the last stage the criterion with its labels."""
        stage, microbatch = state.slot
        spec = self._stages.specs[stage]
        names = input_names(len(state.inputs))
        carry: dict[str, Any] = dict(zip(names, state.inputs))
        state.begin(carry, names if stage > 0 else ())
        for name in spec.names:
            carry[name] = None
        # Detached: a stage may call requires_grad_() on them, but those in `state.side`, which are sent on, must not
        # require a gradient.
        for name, tensor in zip(self._batch.side_names, state.side):
            if spec.takes(name):
                carry[name] = tensor.detach()
        if stage == self._last_stage:
            target = self._batch.target(microbatch)
            if self._recorder.is_observed:
                target = target._replace(keep_outputs=True)
            carry[TARGET] = target

    def _hand_over(self, action: Action, result: Sequence[Tensor]) -> None:
        """Pass a result that stays on this rank to the next or the previous stage, as a copy, like one that is sent."""
        if action.kind == "F" and action.stage < self._last_stage:
            slot = action.stage + 1, action.microbatch
            self._messages.check_local(*slot, result)
            self._states[slot] = received_state(tuple(map(_copy, result)), len(self._batch.side_names), slot)
        elif action.kind in "BI" and action.stage > 0:
            self._states[action.stage - 1, action.microbatch].set_gradients([gradient.clone() for gradient in result])

    def _backward_to_caller(self) -> None:
        """Run one backward into the caller's graph, from the gradients of the inputs and labels that belong to it."""
        tensors: list[Tensor] = []
        gradients: list[Tensor] = []
        for caller_tensor in self._batch.from_caller:
            gradient = caller_tensor.gradient(self._stages.batch_dim)
            if gradient is not None:
                tensors.append(caller_tensor.tensor)
                gradients.append(gradient)
        if not tensors:
            return
        self._place = "in the backward of the graph from which the inputs or labels of the step come"
        with no_autocast(self._batch.autocast):
            torch.autograd.backward(tensors, gradients)

    # -- states of micro-batches

    def _first_states(self) -> dict[Slot, MicrobatchState]:
        """Return the states of the micro-batches in the first stage; empty on a rank without that stage."""
        batch = self._batch
        side = batch.side or [()] * len(batch.inputs)
        pairs = zip(batch.inputs, side)
        return {(0, i): MicrobatchState(inputs, tensors, (0, i)) for i, (inputs, tensors) in enumerate(pairs)}

    def _finish(self, action: Action) -> Sequence[Tensor]:
        """Return the results of an action: the outputs, the gradients of the inputs, or nothing for a "W"."""
        if action.kind == "W":
            return ()
        slot = action.stage, action.microbatch
        if action.kind == "F":
            return self._finish_forward(slot)
        return self._states.pop(slot).input_gradients()

    def _finish_forward(self, slot: Slot) -> tuple[Tensor, ...]:
        """Keep the results of a forward for its backward and for the caller; return the message to the next stage."""
        stage, microbatch = slot
        state = self._states[slot]
        carry = state.carry
        state.carry = {}
        loss = carry.pop("loss", None)
        names = input_names(len(carry))  # of the outputs: nothing else is left in the carry
        outputs = tuple(map(carry.__getitem__, names))
        if loss is None and not self._stages.compiled[stage].is_module:
            as_tuple(outputs)  # raises ValueError if they are not tensors
        if stage == self._last_stage:
            self._keep(microbatch, outputs, loss)
        if not self._train:
            del self._states[slot]
        elif loss is not None:
            state.gradients = {"loss": torch.ones_like(loss)}
        else:
            state.results = tuple([name for name, tensor in zip(names, outputs) if tensor.requires_grad])
        side = state.side
        state.side = ()
        return (*outputs, *side)

    def _keep(self, microbatch: int, outputs: tuple[Tensor, ...], loss: Tensor | None) -> None:
        """Keep the loss and, if asked for, the outputs of a micro-batch for the caller."""
        if loss is not None or self._train:
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                result = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(f"criterion must return a scalar tensor, got {result}")
            if self._train and not loss.requires_grad:
                raise ValueError("the loss requires no gradient; call step under torch.no_grad() to evaluate")
            kept = loss.detach().clone()
            self._losses[microbatch] = kept if kept.dim() == 0 else kept.reshape(())
        if self._batch.keep_outputs:
            self._outputs[microbatch] = tuple(output.detach().clone() for output in outputs)

    def _results(self) -> tuple[Tensor | None, Outputs]:
        """Return the stacked losses, and the outputs joined along the batch dimension."""
        chunks = range(len(self._losses) or len(self._outputs))
        loss = torch.stack([self._losses[i] for i in chunks]) if self._losses else None
        if not self._outputs:
            return loss, None
        dim = self._stages.batch_dim
        columns = zip(*(self._outputs[i] for i in chunks), strict=True)
        # Outputs that have no batch dimension, such as scalars, are stacked.
        outputs = [torch.stack(parts) if parts[0].dim() <= max(dim, 0) else torch.cat(parts, dim) for parts in columns]
        return loss, outputs[0] if len(outputs) == 1 else tuple(outputs)


def _copy(result: Tensor) -> Tensor:
    """Return a leaf with a copy of a result: the stage may fill its memory again for the next micro-batch."""
    return result.detach().clone().requires_grad_(result.requires_grad)


class OverlappedPairs:
    """Runs pairs of a forward and a backward by DeepSeek's `overlapped_forward_backward` of the stages' type.

    The class method (https://github.com/deepseek-ai/DualPipe) runs the forward of one micro-batch and the backward of
    another, and is free to interleave them. For the forward it takes the inputs; for the backward, the outputs of the
    earlier forward with their gradients, or its loss.
    """

    def __init__(self, stages: RankStages, runners: Mapping[int, StageRunner], store: WeightGradStore) -> None:
        self._stages = stages
        self._runners = runners
        self._store = store

    def can_run(self, actions: tuple[Action, ...]) -> bool:
        """Return True for a pair of a forward and a backward."""
        return sorted(action.kind for action in actions) in (["B", "F"], ["F", "I"])

    def run(self, actions: tuple[Action, ...], states: Mapping[Slot, MicrobatchState]) -> None:
        """Run a pair whose forward has begun.

        Afterwards the forward's results are in `carry` of its micro-batch's state, and the backward's input gradients
        are in `gradients` of the other micro-batch's state.
        """
        forward, backward = sorted(actions, key=lambda action: action.kind != "F")
        forward_state = states[forward.stage, forward.microbatch]
        backward_state = states[backward.stage, backward.microbatch]
        module: Any = self._stages.modules[forward.stage]
        runner = self._runners[forward.stage]
        if runner.wait_for_parameters is not None:
            runner.wait_for_parameters()
        target = forward_state.carry.pop(TARGET, Target(None, ()))
        inputs = {name: value for name, value in forward_state.carry.items() if is_boundary(name)}
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
        backward_state.keep_caller_gradients()
        forward_state.records = [SegmentRecord()]
        forward_state.carry = self._results(as_tuple(outputs), new_loss, target)
        runner.save_for_backward(forward_state.records[0], inputs, forward_state.carry)

    def _results(self, outputs: tuple[Tensor, ...], loss: Tensor | None, target: Target) -> dict[str, Tensor]:
        """Return the results of a forward by name, like a compiled stage."""
        by_name = dict(zip(input_names(len(outputs)), outputs))
        if loss is None:
            return by_name
        if not target.keep_outputs:
            return {"loss": loss}
        return {"loss": loss, **by_name}
