"""Runs one rank's program for one batch: the only place where a schedule turns into calls of modules and autograd.

All state of a step is in the `Executor`, which lives as long as the step. An activation that crosses a boundary,
between ranks or within one, arrives as a leaf, so that each stage's backward runs on its own; what is kept of a stage's
output is its gradient edge, not its storage. A stage is a list of segments; one that is a single compute segment, as
any plain module is, takes the short way (`_alone`), the others are walked (`overlap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import (
    Compute,
    input_names,
    label_names,
    more_than_forward,
    output_names,
)
from dualpipe.parallel.fsdp.driver import ParametersStep
from dualpipe.pipeline.arguments import Batch, OwnStages
from dualpipe.pipeline.lower import Instruction, Program
from dualpipe.pipeline.overlap import MicrobatchState, SegmentedStage, Task, detached, no_autocast, run_backward, walk
from dualpipe.pipeline.p2p import P2PMessages
from dualpipe.runtime.device import annotation
from dualpipe.runtime.errors import UpstreamFailed
from dualpipe.runtime.recorder import Recorder
from dualpipe.schedule.types import Action

Outputs = Tensor | tuple[Tensor, ...] | None

_NAMES = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight gradients"}


class Executor:
    """One step on one rank: `batch` through its `stages`, in the order of `program`."""

    def __init__(
        self, stages: OwnStages, batch: Batch, side_names: Sequence[str], program: Program, messages: P2PMessages,
        parameters: ParametersStep, store: WeightGradStore,
    ) -> None:
        self._modules, self._specs, self._last_stage = stages.modules, stages.specs, stages.count - 1
        self._batch, self._side_names, self._batch_dim = batch, side_names, stages.batch_dim
        self._program, self._messages, self._parameters, self._store = program, messages, parameters, store
        self._train = torch.is_grad_enabled()
        self._recorder = Recorder.current()
        self._autocast = stages.device.type if torch.is_autocast_enabled(stages.device.type) else None
        # Asked first whether there is a profiler: idle, its ranges would cost 5 us an action.
        profiled = torch.autograd._profiler_enabled()
        self._annotate = record_function if profiled else annotation(stages.device) or nullcontext
        self._hooked = stages.hooked
        self._segmented: dict[int, SegmentedStage] = {}
        side = batch.side or [()] * len(batch.inputs)
        self._states = {(0, i): MicrobatchState(*both) for i, both in enumerate(zip(batch.inputs, side))}
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._doing: tuple[Action, ...] = ()
        self._begun = 0  # instructions whose communications between segments have been met
        self._broken = False  # whether one of these failed, so that the others cannot be met any more

    def run(self) -> tuple[Tensor | None, Outputs]:
        """Run the program; return the losses (num_chunks,) and the outputs, as `Pipeline.step` does.

        After an error, completes what other ranks wait for, then raises it; `UpstreamFailed` where the cause is on
        another rank.
        """
        depth = self._recorder.depth
        try:
            # Single-threaded: on CUDA, autograd's own threads would not see the running store.
            with self._store.activate(), torch.autograd.set_multithreading_enabled(False):
                try:
                    self._cut_into_segments()
                    self._parameters.gather()
                    self._messages.start()
                    for instruction in self._program.instructions:
                        self._run(instruction)
                    self._doing = ()
                    self._messages.finish()
                    if pending := self._store.pending():
                        raise RuntimeError("deferred weight gradients were never computed, by (stage, micro-batch): "
                                           f"{pending}")
                except BaseException:
                    self._meet_the_others()
                    raise
                finally:
                    self._parameters.finish()
            return self._results()
        finally:
            self._recorder.unwind(depth)
            self._store.clear()

    def where(self) -> str:
        """What an error of `run` is reported with."""
        parts = [f"{a} ({_NAMES[a.kind]} of stage {a.stage}, micro-batch {a.microbatch})" for a in self._doing]
        return " and ".join(parts or ["at the ends of the step"]) + ": "

    def _run(self, instruction: Instruction) -> None:
        """Take what the actions need, run them, and pass on what they give: the outputs of a forward, the input
        gradients of a backward, nothing of a "W"."""
        actions = self._doing = instruction.actions
        for message in instruction.incoming:
            tensors = self._messages.take(message)
            if tensors is None:
                raise UpstreamFailed
            slot = message.stage, message.microbatch
            if message.kind == "F":
                self._states[slot] = self._arrived(tensors)
            else:
                self._states[slot].arrived = tensors
            del tensors  # the state keeps them as long as they are needed
        self._recorder.begin(instruction.kinds, instruction)
        self._begun += 1
        with self._annotate(instruction.name):
            if self._segmented and any(action.stage in self._segmented for action in actions):
                states, tasks = self._tasks(actions)
                walk(tasks)
                self._broken = any(state.broken for state in states)
                results = [self._finished(action, state) for action, state in zip(actions, states)]
            elif self._hooked and sorted(action.kind for action in actions) in (["B", "F"], ["F", "I"]):
                results = self._overlapped(actions)
            else:
                results = [self._alone(action) for action in actions]
        for action, result in zip(actions, results):
            self._recorder.made(action, *result)
        self._recorder.end()
        for action, going, result in zip(actions, instruction.outgoing, results):
            self._doing = (action,)
            if going is not None:
                self._messages.send(going, result)
            elif action.kind == "F" and action.stage < self._last_stage:
                slot = action.stage + 1, action.microbatch
                self._messages.hand_over(*slot, result)
                self._states[slot] = self._arrived(tuple(map(detached, result)))
            elif action.kind in "BI" and action.stage > 0:
                self._states[action.stage - 1, action.microbatch].arrived = result
        if instruction.completes:
            self._parameters.complete(instruction.completes)

    # -- the state of a micro-batch in a stage

    def _arrived(self, message: tuple[Tensor, ...]) -> MicrobatchState:
        """The side inputs are behind the activation."""
        end = len(message) - len(self._side_names)
        return MicrobatchState(message[:end], message[end:])

    def _side(self, stage: int, state: MicrobatchState) -> dict[str, Tensor]:
        """The side inputs that a stage takes. What it asks of them, as a gradient, is not asked of those sent on."""
        if not state.side:
            return {}
        spec, found = self._specs[stage], zip(self._side_names, state.side)
        return {name: tensor.detach() for name, tensor in found if spec.every or name in spec.names}

    def _keep(
        self, stage: int, microbatch: int, state: MicrobatchState, outputs: tuple[Tensor, ...], loss: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Note a forward's results for the backward and the caller; return the message to the next stage."""
        if stage == self._last_stage:
            if loss is not None or self._train:
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                    raise ValueError(f"criterion must return a scalar tensor, got {found}")
                if self._train and not loss.requires_grad:
                    raise ValueError("the loss requires no gradient; call step under torch.no_grad() to evaluate")
                self._losses[microbatch] = loss.detach()
            if self._batch.keep_outputs:
                self._outputs[microbatch] = tuple(t.detach() for t in outputs)
        if not self._train:
            del self._states[stage, microbatch]
        elif loss is not None:
            state.arrived = (torch.ones_like(loss),)
        if self._train and stage not in self._segmented:
            ends = outputs if loss is None else (loss,)
            state.roots = tuple([get_gradient_edge(t) for t in ends if t.requires_grad])
            if self._hooked:
                state.loss, state.outputs = loss, outputs if loss is None else ()
        if state.side:
            outputs, state.side = (*outputs, *state.side), ()
        return outputs

    # -- a stage that is one compute segment

    def _alone(self, action: Action) -> Sequence[Tensor]:
        self._doing = (action,)
        slot = stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            state = self._states[slot]
            inputs = self._inputs(stage, state)
            outputs = as_tuple(self._modules[stage](*inputs, **self._side(stage, state)))
            loss = None
            if stage == self._last_stage and self._batch.criterion is not None:
                loss = self._batch.criterion(*outputs, *self._batch.labels[microbatch])
            return self._keep(*slot, state, outputs, loss)
        with no_autocast(self._autocast), self._store.defer(slot) if action.kind == "I" else self._store.accumulate():
            if action.kind == "W":
                self._store.run(slot)
                return ()
            state = self._states.pop(slot)
            gradients, state.arrived = state.arrived, ()
            if state.roots:
                run_backward(state.roots, gradients)
            return state.input_gradients()

    def _inputs(self, stage: int, state: MicrobatchState) -> tuple[Tensor, ...]:
        """What a forward is called with, once the parameters are there."""
        self._parameters.wait(stage)
        inputs, state.inputs = state.inputs, ()
        if stage > 0:  # asked for before the stage can change their minds
            state.leaves = tuple([x for x in inputs if x.requires_grad])
        return inputs

    def _overlapped(self, actions: tuple[Action, ...]) -> list[Sequence[Tensor]]:
        """A pair through DeepSeek's `overlapped_forward_backward` of the module type."""
        forward, backward = sorted(actions, key=lambda action: action.kind != "F")
        ahead, behind = (forward.stage, forward.microbatch), (backward.stage, backward.microbatch)
        module: Any = self._modules[forward.stage]
        state, state1 = self._states[ahead], self._states.pop(behind)
        inputs = self._inputs(forward.stage, state)
        criterion = self._batch.criterion if forward.stage == self._last_stage else None
        labels = self._batch.labels[forward.microbatch] if criterion else ()
        ends = tuple(t for t in state1.outputs if t.requires_grad)
        gradients = () if state1.loss is not None else tuple(state1.arrived)
        with self._store.defer(behind) if backward.kind == "I" else self._store.accumulate():
            outputs, loss = type(module).overlapped_forward_backward(
                module, list(inputs), criterion, list(labels), self._modules[backward.stage], state1.loss, ends,
                gradients,
            )
        results = {forward: self._keep(*ahead, state, as_tuple(outputs), loss), backward: state1.input_gradients()}
        return [results[action] for action in actions]

    # -- stages that are made of segments

    def _cut_into_segments(self) -> None:
        """Find the stages that are more than one compute segment; the last one has the criterion as one more."""
        batch = self._batch
        for stage, given in batch.segments.items():
            if not more_than_forward(given):
                continue
            segments = list(given)
            outputs = results = output_names(segments)
            if (dtype := getattr(self._modules[stage], "boundary_dtype", None)) is not None:
                segments.append(Compute(partial(_cast, dtype), outputs, outputs))
            if stage == self._last_stage and batch.criterion is not None:
                segments.append(Compute(batch.criterion, (*outputs, *label_names(batch.labels)), "loss"))
                results = (*outputs, "loss") if batch.keep_outputs else ("loss",)
            self._segmented[stage] = SegmentedStage(
                segments, outputs, results, store=self._store, ready=partial(self._parameters.wait, stage),
                autocast=self._autocast,
            )

    def _tasks(
        self, actions: Sequence[Action], error: BaseException | None = None
    ) -> tuple[list[MicrobatchState], list[Task]]:
        """The states of the actions, and what is to be walked, backwards first: the first segment of a stage hides more
        than the last, by up to a tenth of a pair's time.

        error: after a failure, only take part in their communications, for the sake of other ranks.
        """
        states: list[MicrobatchState] = []
        first: list[Task] = []
        then: list[Task] = []
        for action in actions:
            kind, slot, segmented = action.kind, (action.stage, action.microbatch), self._segmented.get(action.stage)
            state = MicrobatchState() if kind == "W" else self._states.setdefault(slot, MicrobatchState())
            state.slot, state.error, state.broken = slot, state.error or error, self._broken
            if segmented is None:
                task = self._plain(action, state)
            elif kind == "F":
                names, labels = input_names(len(state.inputs)), self._batch.labels
                carry = dict.fromkeys(self._specs[action.stage].names) | self._side(action.stage, state)
                carry |= zip(names, state.inputs)
                if action.stage == self._last_stage and self._batch.criterion is not None:
                    carry |= zip(label_names(labels), labels[action.microbatch])
                state.begin(carry, names if action.stage else ())
                task = segmented.forward(state)
            elif kind == "W":  # in as many parts as another action has communications to hide, there and back
                turns = 1 if len(actions) == 1 else max(1, segmented.communications)
                task = segmented.weight_gradients(state, slot, turns=turns)
            else:
                state.gradients, state.arrived = dict(zip(state.results, state.arrived)), ()
                task = segmented.backward(state, kind, slot)
            states.append(state)
            (first if kind in "BI" else then).append(task)
        return states, first + then

    def _plain(self, action: Action, state: MicrobatchState) -> Task:
        """An action of a stage that is one segment, beside one that has several."""
        if state.error is None:
            with state.attempt():
                state.result = self._alone(action)
        yield from ()

    def _finished(self, action: Action, state: MicrobatchState) -> Sequence[Tensor]:
        """The result of an action that was walked; raises its error."""
        self._doing = (action,)
        if state.error is not None:
            raise vars(state).pop("error")  # which nothing else may keep: this frame is in its traceback
        segmented, slot = self._segmented.get(action.stage), (action.stage, action.microbatch)
        if segmented is None or action.kind == "W":
            result, state.result = state.result, ()
            return result
        if action.kind != "F":
            del self._states[slot]
            return state.input_gradients()
        carry, state.carry = state.carry, {}
        names, loss = [name for name in segmented.outputs if name in carry], carry.get("loss")
        outputs = as_tuple([carry[name] for name in names]) if names else ()  # none if the criterion alone reads them
        state.results = tuple(n for n, t in zip(names, outputs) if t.requires_grad) if loss is None else ("loss",)
        return self._keep(*slot, state, outputs, loss)

    # -- the end

    def _meet_the_others(self) -> None:
        """After a failure: receive, send and take part in what the step still owes other ranks."""
        for number, instruction in enumerate(self._program.instructions):
            self._messages.settle(instruction)
            if number >= self._begun and self._segmented:
                with suppress(Exception):  # messages go on all the same
                    states, tasks = self._tasks(instruction.actions, UpstreamFailed())
                    walk(tasks)
                    self._broken = any(state.broken for state in states)
            with suppress(Exception):
                self._parameters.complete(instruction.completes)
        self._messages.finish(failed=True)

    def _results(self) -> tuple[Tensor | None, Outputs]:
        chunks = range(len(self._losses) or len(self._outputs))
        loss = torch.stack([self._losses[i].reshape(()) for i in chunks]) if self._losses else None
        if not self._outputs:
            return loss, None
        columns, dim = zip(*(self._outputs[i] for i in chunks), strict=True), self._batch_dim
        outputs = [torch.stack(parts) if parts[0].dim() <= max(dim, 0) else torch.cat(parts, dim) for parts in columns]
        return loss, outputs[0] if len(outputs) == 1 else tuple(outputs)


def as_tuple(outputs: object) -> tuple[Tensor, ...]:
    """What a stage returned; ValueError where it may not."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    if not isinstance(outputs, tuple | list) or not all(isinstance(t, Tensor) for t in outputs):
        kinds = [type(t).__name__ for t in outputs] if isinstance(outputs, tuple | list) else type(outputs).__name__
        raise ValueError(f"a stage must return a tensor or a tuple of tensors, not {kinds}")
    if not outputs:
        raise ValueError("a stage must return a tensor or a tuple of tensors, not an empty one; return what it was "
                         "given where it has nothing to add")
    return tuple(outputs)


def _cast(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)
