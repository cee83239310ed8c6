"""Runs one rank's program for one batch: the only place where a schedule turns into calls of modules and autograd.

All state of a step is in the `Executor`, which lives as long as the step. An activation that crosses a boundary,
between ranks or within one, arrives as a leaf, so that each stage's backward runs on its own; what is kept of a stage's
output is its gradient edge, not its storage. A stage is a list of segments; one that is a single compute segment, as
any plain module is, takes the short way (`_forward`, `_backward`), the others are walked (`overlap`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.profiler import record_function

from dualpipe.device import annotation
from dualpipe.errors import UpstreamFailed
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Compute, input_names, label_names, more_than_forward, output_names
from dualpipe.parallel.fsdp import ParametersStep
from dualpipe.pipeline.arguments import Batch, OwnStages
from dualpipe.pipeline.lower import Instruction, Program
from dualpipe.pipeline.overlap import (
    MicrobatchState,
    SegmentedStage,
    Task,
    detached,
    no_autocast,
    run_backward,
    walk,
)
from dualpipe.pipeline.p2p import P2PMessages
from dualpipe.schedule.types import Action

Slot = tuple[int, int]  # (stage, micro-batch)
Outputs = Tensor | tuple[Tensor, ...] | None

_NO_RANGE = nullcontext()
_NAMES = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight gradients"}


class Executor:
    """One step on one rank: `batch` through its `stages`, in the order of `program`."""

    def __init__(
        self,
        stages: OwnStages,
        batch: Batch,
        side_names: Sequence[str],
        program: Program,
        messages: P2PMessages,
        parameters: ParametersStep,
        store: WeightGradStore,
    ) -> None:
        self._modules, self._specs, self._last_stage = stages.modules, stages.specs, stages.count - 1
        self._batch, self._side_names, self._batch_dim = batch, side_names, stages.batch_dim
        self._program, self._messages, self._parameters, self._store = program, messages, parameters, store
        self._train = torch.is_grad_enabled()
        self._autocast = stages.device.type if torch.is_autocast_enabled(stages.device.type) else None
        # Asked first whether there is a profiler: idle, its ranges would cost 5 us an action.
        profiled = torch.autograd._profiler_enabled()
        self._annotate = record_function if profiled else annotation(stages.device) or _unnamed
        self._hooked = overlaps_by_itself(stages.modules.values())
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
        try:
            # Single-threaded: on CUDA, autograd's own threads would not see the running store.
            with self._store.activate(), torch.autograd.set_multithreading_enabled(False):
                try:
                    self._segmented = self._in_segments()
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
            self._store.clear()

    def where(self) -> str:
        """What an error of `run` is reported with."""
        if not self._doing:
            return "at the ends of the step: "
        parts = (f"{a} ({_NAMES[a.kind]} of stage {a.stage}, micro-batch {a.microbatch})" for a in self._doing)
        return " and ".join(parts) + ": "

    def _run(self, instruction: Instruction) -> None:
        """Take what the actions need, run them, and pass on what they give."""
        actions = self._doing = instruction.actions
        for transfer in instruction.incoming:
            taken = self._messages.take(transfer)
            if taken is None:
                raise UpstreamFailed
            for message, tensors in taken:
                slot = message.stage, message.microbatch
                if message.kind == "F":
                    self._states[slot] = self._arrived(tensors)
                else:
                    self._states[slot].arrived = tensors
        self._begun += 1
        with self._annotate(instruction.name):
            if self._segmented and any(action.stage in self._segmented for action in actions):
                jobs = self._jobs(actions)
                walk(job.task for job in jobs)
                results = self._finished(actions, jobs)
            elif self._hooked and sorted(action.kind for action in actions) in (["B", "F"], ["F", "I"]):
                results = self._overlapped(actions)
            else:
                results = [self._alone(action) for action in actions]
        for number, (action, going, result) in enumerate(zip(actions, instruction.outgoing, results)):
            self._doing = (action,)
            if going is not None:
                if going.second is None:
                    self._messages.send(going, (result,))
                elif action.kind == "F":
                    self._messages.send(going, (result, results[1 - number]))
            elif action.kind == "F" and action.stage < self._last_stage:
                slot = action.stage + 1, action.microbatch
                self._messages.hand_over(*slot, result)
                self._states[slot] = self._arrived(tuple(map(detached, result)))
            elif action.kind in "BI" and action.stage > 0:
                self._states[action.stage - 1, action.microbatch].arrived = result
        if instruction.completes:
            self._parameters.complete(instruction.completes)

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

    # -- a stage that is one compute segment

    def _alone(self, action: Action) -> Sequence[Tensor]:
        """The result of an action: outputs of a forward, input gradients of a backward, nothing of a "W"."""
        self._doing = (action,)
        slot = action.stage, action.microbatch
        if action.kind == "F":
            return self._forward(slot)
        with no_autocast(self._autocast):
            if action.kind == "B":
                return self._backward(slot)
            if action.kind == "W":
                self._store.run(slot)
                return ()
            with self._store.defer(slot):
                return self._backward(slot)

    def _forward(self, slot: Slot) -> tuple[Tensor, ...]:
        stage, microbatch = slot
        self._parameters.wait(stage)
        state = self._states[slot]
        inputs, state.inputs = state.inputs, ()
        state.leaves = self._leaves(stage, inputs)
        outputs = as_tuple(self._modules[stage](*inputs, **self._side(stage, state)))
        loss = None
        if stage == self._last_stage and self._batch.criterion is not None:
            loss = self._batch.criterion(*outputs, *self._batch.labels[microbatch])
        return self._keep(slot, state, outputs, loss)

    def _leaves(self, stage: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs whose gradients the stage before expects; asked for before this stage can change their minds."""
        return tuple([x for x in inputs if x.requires_grad]) if stage > 0 else ()

    def _keep(
        self, slot: Slot, state: MicrobatchState, outputs: tuple[Tensor, ...], loss: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Note a forward's results for the backward and the caller; return what goes to the next stage."""
        if slot[0] == self._last_stage:
            self._note(slot[1], outputs, loss)
        if self._train:
            ends = outputs if loss is None else (loss,)
            state.roots = tuple([get_gradient_edge(t) for t in ends if t.requires_grad])
            if loss is not None:
                state.arrived = (torch.ones_like(loss),)
            if self._hooked:
                state.loss, state.outputs = loss, outputs if loss is None else ()
        return self._leave(slot, state, outputs)

    def _note(self, microbatch: int, outputs: tuple[Tensor, ...], loss: Tensor | None) -> None:
        """Keep what the caller gets of the last stage."""
        if loss is not None or self._train:
            self._losses[microbatch] = _checked_loss(loss)
        if self._batch.keep_outputs:
            self._outputs[microbatch] = tuple(t.detach() for t in outputs)

    def _leave(self, slot: Slot, state: MicrobatchState, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The message to the next stage; the side inputs are let go of."""
        if not self._train:
            del self._states[slot]
        if state.side:
            outputs, state.side = (*outputs, *state.side), ()
        return outputs

    def _backward(self, slot: Slot) -> Sequence[Tensor]:
        state = self._states.pop(slot)
        gradients, state.arrived = state.arrived, ()
        if state.roots:
            run_backward(state.roots, gradients)
        return _input_gradients(state)

    def _overlapped(self, actions: tuple[Action, ...]) -> list[Sequence[Tensor]]:
        """A pair through DeepSeek's `overlapped_forward_backward` of the module type."""
        forward, backward = sorted(actions, key=lambda action: action.kind != "F")
        slot0, slot1 = (forward.stage, forward.microbatch), (backward.stage, backward.microbatch)
        module0: Any = self._modules[forward.stage]
        module1 = self._modules[backward.stage]
        self._parameters.wait(forward.stage)
        state0, state1 = self._states[slot0], self._states.pop(slot1)
        inputs0, state0.inputs = state0.inputs, ()
        criterion = self._batch.criterion if forward.stage == self._last_stage else None
        labels = self._batch.labels[forward.microbatch] if criterion else ()
        state0.leaves, outputs1 = self._leaves(forward.stage, inputs0), [t for t in state1.outputs if t.requires_grad]
        gradients = () if state1.loss is not None else tuple(state1.arrived)
        with self._store.defer(slot1) if backward.kind == "I" else nullcontext():
            outputs0, loss0 = type(module0).overlapped_forward_backward(
                module0, list(inputs0), criterion, list(labels), module1, state1.loss, tuple(outputs1), gradients
            )
        results = {forward: self._keep(slot0, state0, as_tuple(outputs0), loss0), backward: _input_gradients(state1)}
        return [results[action] for action in actions]

    # -- stages that are made of segments

    def _in_segments(self) -> dict[int, SegmentedStage]:
        """The stages that are more than one compute segment; the last one has the criterion as one more."""
        batch, stages = self._batch, {}
        for stage, segments in batch.segments.items():
            if more_than_forward(segments):
                segments = list(segments)
                outputs = results = output_names(segments)
                if (dtype := getattr(self._modules[stage], "boundary_dtype", None)) is not None:
                    segments.append(Compute(partial(_cast, dtype), outputs, outputs))
                if stage == self._last_stage and batch.criterion is not None:
                    segments.append(Compute(batch.criterion, (*outputs, *label_names(batch.labels)), "loss"))
                    results = (*outputs, "loss") if batch.keep_outputs else ("loss",)
                ready = partial(self._parameters.wait, stage)
                stages[stage] = SegmentedStage(
                    segments, outputs, results, store=self._store, ready=ready, autocast=self._autocast
                )
        return stages

    def _jobs(self, actions: tuple[Action, ...], error: BaseException | None = None) -> list[Job]:
        """Backwards first: the first segment of a stage hides more than the last, by up to a tenth of a pair's time.

        error: after a failure, only take part in their communications, for the sake of other ranks.
        """
        jobs = [Job(action, self._state(action, error)) for action in actions]
        for job in jobs:
            job.task = self._task(job, alone=len(jobs) == 1)
        return sorted(jobs, key=lambda job: job.action.kind not in "BI")

    def _state(self, action: Action, error: BaseException | None) -> MicrobatchState:
        slot = action.stage, action.microbatch
        state = MicrobatchState() if action.kind == "W" else self._states.setdefault(slot, MicrobatchState())
        state.error, state.broken = state.error or error, self._broken
        return state

    def _task(self, job: Job, *, alone: bool) -> Task:
        kind, stage, state = job.action.kind, job.action.stage, job.state
        slot, segmented = (stage, job.action.microbatch), self._segmented.get(stage)
        if segmented is None:
            return self._plain(job)
        if kind == "W":  # in as many parts as another action has communications to hide, there and back
            return segmented.weight_gradients(state, slot, turns=1 if alone else max(1, segmented.communications))
        if kind != "F":
            if not state.gradients:  # that of the loss is there already
                state.gradients, state.arrived = dict(zip(state.results, state.arrived)), ()
            return segmented.backward(state, kind, slot)
        names = input_names(len(state.inputs))
        carry = dict.fromkeys(self._specs[stage].names) | self._side(stage, state) | dict(zip(names, state.inputs))
        if stage == self._last_stage and self._batch.criterion is not None:
            carry |= zip(label_names(self._batch.labels), self._batch.labels[job.action.microbatch])
        state.begin(carry, names if stage else ())
        return segmented.forward(state)

    def _plain(self, job: Job) -> Task:
        """An action of a stage that is one segment, beside one that has several."""
        if job.state.error is None:
            with job.state.attempt():
                job.result = self._alone(job.action)
        yield from ()

    def _finished(self, actions: tuple[Action, ...], jobs: Sequence[Job]) -> list[Sequence[Tensor]]:
        """The results of the actions, by action; raises the first one's error."""
        self._broken = self._broken or any(job.state.broken for job in jobs)
        by_action = {job.action: job for job in jobs}
        for action in actions:
            state, self._doing = by_action[action].state, (action,)
            error, state.error = state.error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # whose traceback has this frame
        return [self._finish(by_action[action]) for action in actions]

    def _finish(self, job: Job) -> Sequence[Tensor]:
        action, state = job.action, job.state
        segmented, slot = self._segmented.get(action.stage), (action.stage, action.microbatch)
        if segmented is None or action.kind == "W":
            return job.result
        if action.kind != "F":
            del self._states[slot]
            return state.input_gradients()
        carry, state.carry = state.carry, {}
        if self._train and "loss" in carry:
            state.gradients = {"loss": torch.ones_like(carry["loss"])}
        found = tuple(carry[name] for name in segmented.outputs if name in carry)
        outputs = found and as_tuple(found)  # of the last stage, nothing where the criterion alone reads them
        if action.stage == self._last_stage:
            self._note(action.microbatch, outputs, carry.get("loss"))
        return self._leave(slot, state, outputs)

    # -- the end

    def _meet_the_others(self) -> None:
        """After a failure: receive, send and take part in what the step still owes other ranks."""
        for number, instruction in enumerate(self._program.instructions):
            self._messages.settle(instruction)
            if number >= self._begun and self._segmented:
                with suppress(Exception):  # messages go on all the same
                    jobs = self._jobs(instruction.actions, UpstreamFailed())
                    walk(job.task for job in jobs)
                    self._broken = self._broken or any(job.state.broken for job in jobs)
            self._parameters.complete_after_failure(instruction.completes)
        self._messages.settle_sends()

    def _results(self) -> tuple[Tensor | None, Outputs]:
        chunks = range(len(self._losses) or len(self._outputs))
        loss = torch.stack([self._losses[i].reshape(()) for i in chunks]) if self._losses else None
        if not self._outputs:
            return loss, None
        columns = zip(*(self._outputs[i] for i in chunks), strict=True)
        outputs = tuple(_join(parts, self._batch_dim) for parts in columns)
        return loss, outputs[0] if len(outputs) == 1 else outputs


@dataclass
class Job:
    """An action that is walked, beside another one or alone."""

    action: Action
    state: MicrobatchState
    task: Any = None  # a `Task`
    result: Sequence[Tensor] = ()


def _unnamed(name: str) -> AbstractContextManager[None]:
    return _NO_RANGE


def overlaps_by_itself(modules: Iterable[nn.Module]) -> bool:
    """Whether the stages are of one type that offers DeepSeek's hook."""
    types = {type(module) for module in modules}
    return len(types) == 1 and hasattr(types.pop(), "overlapped_forward_backward")


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


def _input_gradients(state: MicrobatchState) -> list[Tensor]:
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in state.leaves]


def _checked_loss(loss: Tensor | None) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"criterion must return a scalar tensor, got {shape}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError("the loss requires no gradient; call step under torch.no_grad() to evaluate")
    return loss.detach()


def _cast(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)


def _join(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    return torch.stack(parts) if parts[0].dim() <= max(dim, 0) else torch.cat(parts, dim)
