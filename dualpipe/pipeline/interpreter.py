"""Runs one rank's program for one batch: the only place where a schedule turns into calls of modules and autograd.

All state of a step is in the `Interpreter`, which lives as long as the step. Tensors are named by (stage, micro-batch).
An activation that crosses a boundary, between ranks or within one, arrives as a leaf, so that each stage's backward
runs on its own; what is kept of a stage's output is its gradient edge, not its storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe.errors import UpstreamFailed
from dualpipe.nn.deferral import WeightGradStore
from dualpipe.nn.segments import Compute, input_names, label_names, more_than_forward, output_names
from dualpipe.parallel.fsdp import ParametersStep
from dualpipe.pipeline.arguments import Batch
from dualpipe.pipeline.overlap import SegmentedStage
from dualpipe.pipeline.program import Instruction, Program
from dualpipe.pipeline.side import SideInputs
from dualpipe.pipeline.traffic import Traffic
from dualpipe.pipeline.walker import Job, Walker
from dualpipe.schedule.types import Action

Slot = tuple[int, int]  # (stage, micro-batch)


class Saved(NamedTuple):
    """What a stage's backward starts from and ends at."""

    leaves: tuple[Tensor, ...]
    roots: tuple[GradientEdge, ...]
    seed: Tensor | None  # the gradient of the loss, on the last stage
    loss: Tensor | None  # this and the outputs are kept only for modules that overlap by themselves
    outputs: tuple[Tensor, ...]


class Interpreter:
    """One step on one rank.

    modules: this rank's stages by number; last_stage: the number of the pipeline's last stage; parameters, side: of
    all of this rank's; annotate: makes the profiler's range for a name, where one is wanted; autocast: the device
    type for which the caller enabled it.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        last_stage: int,
        *,
        parameters: ParametersStep,
        program: Program,
        traffic: Traffic,
        store: WeightGradStore,
        batch: Batch,
        side: SideInputs,
        annotate: Callable[[str], AbstractContextManager] | None,
        autocast: str | None,
    ) -> None:
        self._modules, self._last_stage, self._parameters = modules, last_stage, parameters
        self._program, self._traffic, self._store, self._batch = program, traffic, store, batch
        self._side, self._annotate, self._autocast = side, annotate, autocast
        self._activations: dict[Slot, tuple[Tensor, ...]] = {(0, i): x for i, x in enumerate(batch.inputs)}
        self._gradients: dict[Slot, Sequence[Tensor]] = {}
        self._saved: dict[Slot, Saved] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, tuple[Tensor, ...]] = {}
        self._overlaps = overlaps_by_itself(modules.values())
        self._walker = Walker({}, store, autocast)
        self._walked = 0  # instructions whose communications between segments have been met
        self.doing: tuple[Action, ...] = ()  # what an error is reported with

    def run(self) -> None:
        """Run the program. After an error, complete the messages and reductions that other ranks wait for, then raise
        it; `UpstreamFailed` where the cause is on another rank."""
        try:
            self._walker = self._make_walker()
            self._parameters.gather()
            self._traffic.start()
            for instruction in self._program.instructions:
                self._step(instruction)
            self.doing = ()
            self._traffic.finish()
            if pending := self._store.pending():
                raise RuntimeError(f"deferred weight gradients were never computed, by (stage, micro-batch): {pending}")
        except BaseException:
            self._traffic.drain(self._after_failure())
            raise
        finally:
            self._parameters.finish()

    def _step(self, instruction: Instruction) -> None:
        self.doing = instruction.actions
        for transfer in instruction.incoming:
            tensors = self._traffic.take(transfer)
            if tensors is None:
                raise UpstreamFailed
            kind, slot = transfer.message.kind, (transfer.message.stage, transfer.message.microbatch)
            if kind == "F":
                self._activations[slot] = self._side.arrive(slot, tensors)
            else:
                self._gradients[slot] = tensors
        self._walked += 1
        if self._annotate is None:
            results = self._compute(instruction.actions)
        else:
            with self._annotate(instruction.name):
                results = self._compute(instruction.actions)
        for action, transfer, result in zip(instruction.actions, instruction.outgoing, results):
            if self._side.names and action.kind == "F":
                result = (*result, *self._side.leave((action.stage, action.microbatch)))
            if transfer is not None:
                self._traffic.send(transfer, result)
            else:
                self._hand_over(action, result)
        if instruction.completes:
            self._parameters.complete(instruction.completes)

    def _hand_over(self, action: Action, result: Sequence[Tensor]) -> None:
        """Pass a result to the neighbouring stage on this rank; the ends of the pipeline have none."""
        if action.kind == "F":
            if action.stage < self._last_stage:
                slot = action.stage + 1, action.microbatch
                self._traffic.hand_over(*slot, result)
                self._activations[slot] = self._side.arrive(slot, tuple(map(_leaf, result)))
        elif action.kind != "W" and action.stage > 0:
            self._gradients[action.stage - 1, action.microbatch] = result

    def _make_walker(self) -> Walker:
        """For the stages that are made of segments; the last one has the criterion as one more."""
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
                stages[stage] = SegmentedStage(segments, outputs, results, self._autocast)
        return Walker(stages, self._store, self._autocast)

    def _after_failure(self) -> Callable[[Instruction], None]:
        """What the step owes other ranks besides messages: communications between segments, and reductions."""
        remaining = iter(range(len(self._program.instructions)))

        def owed(instruction: Instruction) -> None:
            if next(remaining) >= self._walked:
                with suppress(Exception):  # messages go on all the same
                    self._walk(instruction.actions, UpstreamFailed())
            self._parameters.complete_after_failure(instruction.completes)

        return owed

    # -- actions

    def _compute(self, actions: tuple[Action, ...]) -> list[Sequence[Tensor]]:
        """The result of each action: outputs of a forward, input gradients of a backward, nothing of a "W"."""
        if self._overlaps and len(actions) == 2 and not self._walker.stages:
            by_kind = {action.kind: action for action in actions}
            backward = by_kind.get("B") or by_kind.get("I")
            if "F" in by_kind and backward is not None:
                outputs, gradients = self._overlapped(by_kind["F"], backward)
                return [outputs if action.kind == "F" else gradients for action in actions]
        if any(action.stage in self._walker.stages for action in actions):
            jobs = self._walk(actions)
            for self.doing, job in zip(((action,) for action in actions), jobs):
                if job.passage.error is not None:
                    raise job.passage.error
            return [job.finish() for job in jobs]
        return [self._single(action) for action in actions]

    def _single(self, action: Action) -> Sequence[Tensor]:
        self.doing = (action,)
        slot = action.stage, action.microbatch
        if action.kind == "F":
            return self._forward(slot)
        if self._autocast is not None:  # around a step it is meant for the forwards
            with torch.autocast(self._autocast, enabled=False):
                return self._gradients_of(action.kind, slot)
        return self._gradients_of(action.kind, slot)

    def _gradients_of(self, kind: str, slot: Slot) -> Sequence[Tensor]:
        if kind == "B":
            return self._backward(slot)
        if kind == "W":
            self._store.run(slot)
            return ()
        with self._store.defer(slot):
            return self._backward(slot)

    def _forward(self, slot: Slot) -> tuple[Tensor, ...]:
        stage, microbatch = slot
        self._parameters.wait(stage)
        inputs = self._activations.pop(slot)
        leaves = self._leaves(stage, inputs)
        outputs = _as_tuple(self._modules[stage](*inputs, **self._side.taken(slot)))
        loss = None
        if stage == self._last_stage and self._batch.criterion is not None:
            loss = self._batch.criterion(*outputs, *self._batch.labels[microbatch])
        return self._keep(slot, leaves, outputs, loss)

    def _leaves(self, stage: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs whose gradients the stage before expects; asked for before this stage can change their minds."""
        return tuple([x for x in inputs if x.requires_grad]) if stage > 0 else ()

    def _keep(
        self, slot: Slot, leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...], loss: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Book a forward's results for the backward and the caller; return what goes to the next stage."""
        stage, microbatch = slot
        last = stage == self._last_stage
        if loss is not None:
            self.losses[microbatch] = _checked_loss(loss)
        if last and self._batch.keep_outputs:
            self.outputs[microbatch] = tuple(t.detach() for t in outputs)
        if torch.is_grad_enabled():
            ends = (loss,) if last else outputs
            roots = tuple([get_gradient_edge(t) for t in ends if t.requires_grad])
            seed = torch.ones_like(loss) if last else None
            kept = outputs if self._overlaps and not last else ()
            self._saved[slot] = Saved(leaves, roots, seed, loss if self._overlaps else None, kept)
        return outputs

    def _backward(self, slot: Slot) -> Sequence[Tensor]:
        saved = self._saved.pop(slot)
        gradients = (saved.seed,) if saved.seed is not None else self._gradients.pop(slot)
        if saved.roots:
            # What torch.autograd.backward calls after checks that cost 7 of 24 us and hold here by construction.
            Variable._execution_engine.run_backward(
                saved.roots, tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        return _input_gradients(saved)

    # -- stages made of segments

    def _walk(self, actions: tuple[Action, ...], error: BaseException | None = None) -> list[Job]:
        """Run the actions in turn; `error`: only take part in their communications, for the sake of other ranks."""
        jobs = [self._job(action, len(actions), error) for action in actions]
        # Backwards first: the first segment of a stage hides more than the last, by up to a tenth of a pair's time.
        self._walker.walk([j for a, j in zip(actions, jobs) if a.kind in "BI"] +
                          [j for a, j in zip(actions, jobs) if a.kind not in "BI"])
        return jobs

    def _job(self, action: Action, count: int, error: BaseException | None) -> Job:
        slot = action.stage, action.microbatch
        if action.stage not in self._walker.stages:
            return self._walker.plain(lambda: self._single(action), error)
        if action.kind == "W":
            return self._walker.weights(slot, error, alone=count == 1)
        if action.kind != "F":
            return self._walker.backward(action.kind, slot, self._gradients.pop(slot, ()), error)
        inputs = self._activations.pop(slot, ())
        names = input_names(len(inputs))
        carry = self._side.carried(slot) | dict(zip(names, inputs))
        if action.stage == self._last_stage and self._batch.criterion is not None:
            carry |= zip(label_names(self._batch.labels), self._batch.labels[action.microbatch])
        ready = partial(self._parameters.wait, action.stage)
        return self._walker.forward(
            slot, carry, names if action.stage else (), error, ready, partial(self._book, slot)
        )

    def _book(self, slot: Slot, carry: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Of a forward in segments: note the loss, and what the caller wants; return what goes to the next stage."""
        stage, microbatch = slot
        if "loss" in carry:
            self.losses[microbatch] = _checked_loss(carry["loss"])
        found = tuple(carry[name] for name in self._walker.stages[stage].outputs if name in carry)
        outputs = found and _as_tuple(found)  # of the last stage, nothing where the criterion alone reads them
        if stage == self._last_stage and self._batch.keep_outputs:
            self.outputs[microbatch] = tuple(t.detach() for t in outputs)
        return outputs

    def _overlapped(self, forward: Action, backward: Action) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
        """A pair through DeepSeek's `overlapped_forward_backward` of the module type."""
        slot0, slot1 = (forward.stage, forward.microbatch), (backward.stage, backward.microbatch)
        module0, module1 = self._modules[forward.stage], self._modules[backward.stage]
        self._parameters.wait(forward.stage)
        inputs0, saved = self._activations.pop(slot0), self._saved.pop(slot1)
        criterion = self._batch.criterion if forward.stage == self._last_stage else None
        labels = self._batch.labels[forward.microbatch] if criterion else ()
        leaves0, outputs1 = self._leaves(forward.stage, inputs0), tuple(t for t in saved.outputs if t.requires_grad)
        with self._store.defer(slot1) if backward.kind == "I" else nullcontext():
            outputs0, loss0 = type(module0).overlapped_forward_backward(
                module0, list(inputs0), criterion, list(labels),
                module1, saved.loss, outputs1, tuple(self._gradients.pop(slot1, ())),
            )
        return self._keep(slot0, leaves0, _as_tuple(outputs0), loss0), _input_gradients(saved)


def _cast(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)


def _input_gradients(saved: Saved) -> list[Tensor]:
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in saved.leaves]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _as_tuple(outputs: object) -> tuple[Tensor, ...]:
    if isinstance(outputs, Tensor):
        return (outputs,)
    if not isinstance(outputs, tuple | list) or not all(isinstance(t, Tensor) for t in outputs):
        kinds = [type(t).__name__ for t in outputs] if isinstance(outputs, tuple | list) else type(outputs).__name__
        raise ValueError(f"a stage must return a tensor or a tuple of tensors, not {kinds}")
    if not outputs:
        raise ValueError("a stage must return a tensor or a tuple of tensors, not an empty one; return what it was "
                         "given where it has nothing to add")
    return tuple(outputs)


def _checked_loss(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"criterion must return a scalar tensor, got {shape}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError("the loss requires no gradient; call step under torch.no_grad() to evaluate")
    return loss.detach()


def overlaps_by_itself(modules: Iterable[nn.Module]) -> bool:
    """Whether the stages are of one type that offers DeepSeek's hook."""
    types = {type(module) for module in modules}
    return len(types) == 1 and hasattr(types.pop(), "overlapped_forward_backward")
