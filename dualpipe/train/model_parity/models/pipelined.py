"""A step of the pipeline, as in training, with its gradients, losses and the results of its actions."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualpipe.nn.deferral import local
from dualpipe.pipeline import Pipeline
from dualpipe.runtime.recorder import Observer, Recorder
from dualpipe.schedule import Action, Schedule, build
from dualpipe.train.launch.distributed import Job
from dualpipe.train.model_parity.models.cut_model import ComparedModel
from dualpipe.train.model_parity.models.unpipelined import Batch, Boundary, accumulate_wide


class StageGradient(NamedTuple):
    """The unsharded gradient of a stage's parameter. name: in the unpipelined model."""

    stage: int
    name: str
    gradient: Tensor


class ActionResults(Observer):
    """Records the results that the forwards and backwards of a rank send to other stages."""

    def __init__(self) -> None:
        self.results: dict[Boundary, list[Tensor]] = {}
        self.actions: dict[Boundary, Action] = {}

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Copy the results of an action: the pipeline frees tensors as soon as they are sent."""
        if not isinstance(what, Action) or what.kind == "W":
            return
        boundary = Boundary("F" if what.kind == "F" else "B", what.stage, what.microbatch)
        self.results[boundary] = [result.detach().clone() for result in results if isinstance(result, Tensor)]
        self.actions[boundary] = what


class PipelinedModel:
    """This rank's stages in a pipeline, in train or eval mode. Collective over the mesh."""

    def __init__(self, model: ComparedModel, job: Job, dtype: torch.dtype, *, training: bool = True) -> None:
        place = job.place
        self._model = model
        self._dtype = dtype
        self._device = job.device
        self.schedule = build(model.schedule, place.size("pp"), model.num_chunks)
        numbers = self.schedule.rank_stages(place.rank("pp"))
        self.stages = model.build_stages(self.schedule.num_stages, numbers, dtype, job.device, job.mesh)
        if job.mesh is None:  # the stages of a single rank are not prepared
            accumulate_wide(stage.module for stage in self.stages)
        modules = [stage.module for stage in self.stages]
        if not training:
            for module in modules:
                module.eval()
        self._pipeline = Pipeline(modules, process_group=place.group("pp"), schedule=self.schedule)

    @property
    def has_first(self) -> bool:
        """True on the rank of the first stage."""
        return any(stage.number == 0 for stage in self.stages)

    @property
    def has_last(self) -> bool:
        """True on the rank of the last stage."""
        return any(stage.number == self.schedule.num_stages - 1 for stage in self.stages)

    def train(self, batch: Batch, counted: Collection[int] | None = None) -> Tensor | None:
        """Run a step from zero gradients; return the losses of the micro-batches on the rank of the last stage.

        counted: numbers of the micro-batches whose losses count; None for all. The losses of the others are multiplied
        by zero. They run nevertheless, so that the contribution of a micro-batch to a gradient has the order and the
        accumulation of a whole step.
        """
        self._pipeline.zero_grad()
        num_chunks = self._model.num_chunks
        labels: tuple[Tensor, ...] = ()
        if self.has_last:
            labels = (*batch.labels, self._row_weights(batch.inputs[0].shape[0], counted))

        def criterion(*outputs_and_labels: Tensor) -> Tensor:
            *tensors, row_weights = outputs_and_labels
            return self._model.compute_loss(*tensors) * row_weights[0]

        losses, _ = self._pipeline.step(
            *(batch.inputs if self.has_first else ()), num_chunks=num_chunks,
            criterion=criterion if self.has_last else None, labels=labels, side=batch.side if self.has_first else None,
        )
        return losses

    def _row_weights(self, num_rows: int, counted: Collection[int] | None) -> Tensor:
        """Return the weight of every row's micro-batch (rows,): 1 if its loss counts, else 0."""
        num_chunks = self._model.num_chunks
        weights = torch.zeros(num_chunks, device="cpu")
        weights[list(range(num_chunks) if counted is None else counted)] = 1
        chunks = torch.arange(num_rows, device="cpu").tensor_split(num_chunks)
        row_weights = torch.cat([weight.expand(len(chunk)) for weight, chunk in zip(weights, chunks)])
        return row_weights.to(self._device, self._dtype)

    def parameters(self) -> list[tuple[int, str, nn.Parameter]]:
        """Return stage number, name in the unpipelined model and parameter, for all parameters with a gradient."""
        return [(stage.number, stage.names[stage_name], parameter) for stage in self.stages
                for stage_name, parameter in stage.module.named_parameters(remove_duplicate=False)
                if parameter.requires_grad]

    def values(self) -> list[StageGradient]:
        """Return the values of the parameters, unsharded. Collective over the ranks that share them."""
        return [StageGradient(stage, name, _unshard(parameter.detach()))
                for stage, name, parameter in self.parameters()]

    def gradients(self) -> list[StageGradient]:
        """Return the gradients, unsharded, zeros for a missing one. Collective over the ranks that share them."""
        gradients = []
        for stage, name, parameter in self.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(StageGradient(stage, name, _unshard(grad.detach())))
        return gradients

    def action_of(self, kind: str, stage: int, microbatch: int) -> str:
        """Return the title of the action with a result of some kind.

        kind: "F", "B" for input gradients (an action "B" or "I"), or "W" for weight gradients (an action "B" or "W").
        """
        action_kinds = {"F": "F", "B": "BI", "W": "BW"}[kind]
        return _title(self.schedule, action_kinds, stage, microbatch)


def has_bfloat16_values(tensor: Tensor) -> bool:
    """Return True if all elements of a tensor are representable in bfloat16."""
    return bool((tensor == tensor.bfloat16()).all())


def _unshard(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else local(tensor)


def _title(schedule: Schedule, kinds: str, stage: int, microbatch: int) -> str:
    """Return the title of the scheduled action whose kind is one of `kinds`."""
    for steps in schedule.ranks:
        for step in steps:
            for action in step:
                if action.stage == stage and action.microbatch == microbatch and action.kind in kinds:
                    return action.title
    raise AssertionError(f"the schedule {schedule.name!r} runs {kinds} of every stage and micro-batch")
