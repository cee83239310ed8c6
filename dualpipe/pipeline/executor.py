"""Executor of one rank's program for one batch: the only place where a schedule turns into work of stages.

All state of a step is in the `Executor`, which lives as long as the step. The activation between two stages, on two
ranks or on one, arrives as a leaf, so that the backward of every stage runs on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import input_names, is_boundary
from dualpipe.parallel.fsdp.driver import ParametersStep
from dualpipe.pipeline.arguments import Batch
from dualpipe.pipeline.deepseek_hook import OverlappedPairs
from dualpipe.pipeline.lower import Instruction, Program
from dualpipe.pipeline.microbatch import MicrobatchState, Slot, received_state
from dualpipe.pipeline.overlap import Task, walk
from dualpipe.pipeline.p2p import P2PMessages
from dualpipe.pipeline.rank_stages import RankStages
from dualpipe.pipeline.stage_program import SIDE, TARGET, as_tuple
from dualpipe.pipeline.stage_runner import StageRunner, detached
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
        autocast = stages.device.type if torch.is_autocast_enabled(stages.device.type) else None
        is_hooked = stages.is_hooked
        self._runners = {
            stage: StageRunner(
                stage_program, store, autocast=autocast, keep_results=is_hooked,
                wait_for_parameters=partial(parameters.wait, stage) if parameters.must_wait(stage) else None,
            )
            for stage, stage_program in stages.programs.items()
        }
        self._pairs = OverlappedPairs(stages, self._runners, store) if is_hooked else None
        self._states = self._first_states()
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._running_actions: tuple[Action, ...] = ()

    def run(self) -> tuple[Tensor | None, Outputs]:
        """Run the program; return the losses (num_chunks,) and the outputs; see `Pipeline.step`."""
        depth = self._recorder.depth
        self._store.merging = self._program.merges
        try:
            # Single-threaded: on CUDA, autograd's threads would not see the running store.
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
        return " and ".join(names or ["at the beginning or end of the step"]) + ": "

    def _run(self, instruction: Instruction) -> None:
        """Receive the messages that the actions need, run the actions, and send their results."""
        actions = instruction.actions
        recorder = self._recorder
        merged = instruction.merged
        self._running_actions = merged or actions  # a share of merged work belongs to all of its actions
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
            self._begin_forward(forward)
            self._pairs.run(actions, self._states)
            return [self._finish(action) for action in actions]
        order = list(actions)
        if any(self._stages.programs[action.stage].num_communications for action in actions):
            # Backwards first: the first segment of a stage hides more than the last, up to a tenth of a pair's time.
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
        """Return the task of an action. is_pair: it runs in turn with that of another action."""
        slot = action.stage, action.microbatch
        runner = self._runners[action.stage]
        if action.kind == "W":  # in a pair, in as many parts as another action of the stage has communications
            return runner.weight_gradients(slot, turns=max(1, runner.program.num_communications) if is_pair else 1)
        state = self._states[slot]
        if action.kind == "F":
            self._begin_forward(action)
            return runner.forward(state)
        return runner.backward(state, action.kind, slot)

    def _begin_forward(self, action: Action) -> None:
        """Fill the carry of a forward: inputs, side inputs, and on the last stage the criterion with its labels."""
        stage = action.stage
        spec = self._stages.specs[stage]
        state = self._states[stage, action.microbatch]
        # Detached: a stage may require a gradient of them, which those that are sent on must not have.
        side: dict[str, Any] = {}
        if state.side:
            side = {n: tensor.detach() for n, tensor in zip(self._batch.side_names, state.side) if spec.takes(n)}
        names = input_names(len(state.inputs))
        state.begin(dict(zip(names, state.inputs)), names if stage > 0 else ())
        carry = state.carry
        if self._stages.programs[stage].is_module:
            carry[SIDE] = side
        else:
            carry |= dict.fromkeys(spec.names) | side
        if stage == self._stages.count - 1:
            target = self._batch.target(action.microbatch)
            if self._recorder.is_observed:  # observers are shown the outputs, not only the loss
                target = target._replace(keep_outputs=True)
            carry[TARGET] = target

    def _hand_over(self, action: Action, result: Sequence[Tensor]) -> None:
        """Pass a result that stays on this rank to the next or the previous stage."""
        if action.kind == "F" and action.stage < self._stages.count - 1:
            slot = action.stage + 1, action.microbatch
            self._messages.check_local(*slot, result)
            self._states[slot] = received_state(tuple(map(detached, result)), len(self._batch.side_names), slot)
        elif action.kind in "BI" and action.stage > 0:
            self._states[action.stage - 1, action.microbatch].set_gradients(result)

    # -- states of micro-batches

    def _first_states(self) -> dict[Slot, MicrobatchState]:
        """Return the states of the micro-batches in the first stage; none on other ranks than its own."""
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
        program = self._stages.programs[stage]
        loss = carry.pop("loss", None)
        results = carry
        if not program.is_module:  # the carry may have inputs that no segment has read
            results = {name: carry[name] for name in program.outputs or carry if is_boundary(name)}
            if loss is None:
                as_tuple([*results.values()])
        outputs = tuple(results.values())
        if stage == self._stages.count - 1:
            self._keep(microbatch, outputs, loss)
        if not self._train:
            del self._states[slot]
        elif loss is not None:
            state.gradients = {"loss": torch.ones_like(loss)}
        else:
            state.results = tuple([name for name, tensor in results.items() if tensor.requires_grad])
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
            self._losses[microbatch] = loss.detach()
        if self._batch.keep_outputs:
            self._outputs[microbatch] = tuple(output.detach() for output in outputs)

    def _results(self) -> tuple[Tensor | None, Outputs]:
        """Return the stacked losses, and the outputs joined along the batch dimension."""
        chunks = range(len(self._losses) or len(self._outputs))
        loss = torch.stack([self._losses[i].reshape(()) for i in chunks]) if self._losses else None
        if not self._outputs:
            return loss, None
        dim = self._stages.batch_dim
        columns = zip(*(self._outputs[i] for i in chunks), strict=True)
        outputs = [torch.stack(parts) if parts[0].dim() <= max(dim, 0) else torch.cat(parts, dim) for parts in columns]
        return loss, outputs[0] if len(outputs) == 1 else tuple(outputs)
