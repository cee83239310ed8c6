"""A step of the pipeline, as training runs it, observed: gradients, losses, and what each action hands on."""

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
from dualpipe.train.model_parity.models.uncut import Batch, Boundary, accumulate_wide


class StageGradient(NamedTuple):
    """The whole gradient of a stage's parameter. name: that in the uncut model."""

    stage: int
    name: str
    gradient: Tensor


class ActionResults(Observer):
    """Notes what each forward and backward of a rank hands on to other stages."""

    def __init__(self) -> None:
        self.results: dict[Boundary, list[Tensor]] = {}
        self.actions: dict[Boundary, Action] = {}

    def made(self, recorder: Recorder, what: object, results: tuple[object, ...]) -> None:
        """Keep copies: the pipeline frees tensors as soon as they are sent."""
        if not isinstance(what, Action) or what.kind == "W":
            return
        boundary = Boundary("F" if what.kind == "F" else "B", what.stage, what.microbatch)
        self.results[boundary] = [each.detach().clone() for each in results if isinstance(each, Tensor)]
        self.actions[boundary] = what


class PipelinedModel:
    """This rank's stages in a pipeline. Collective over the mesh."""

    def __init__(self, model: ComparedModel, job: Job, dtype: torch.dtype) -> None:
        place = job.place
        self._model = model
        self._dtype = dtype
        self._device = job.device
        self.schedule = build(model.schedule, place.size("pp"), model.num_chunks)
        mine = self.schedule.rank_stages(place.rank("pp"))
        self.stages = model.build_stages(self.schedule.num_stages, mine, dtype, job.device, job.mesh)
        if job.mesh is None:  # nothing places the stages of a single rank
            accumulate_wide(stage.module for stage in self.stages)
        modules = [stage.module for stage in self.stages]
        self._pipeline = Pipeline(modules, process_group=place.group("pp"), schedule=self.schedule)

    @property
    def has_first(self) -> bool:
        """Return True on the rank of the first stage."""
        return any(stage.number == 0 for stage in self.stages)

    @property
    def has_last(self) -> bool:
        """Return True on the rank of the last stage."""
        return any(stage.number == self.schedule.num_stages - 1 for stage in self.stages)

    def train(self, batch: Batch, counted: Collection[int] | None = None) -> Tensor | None:
        """Run a step from zero gradients; return the losses of the micro-batches on the rank of the last stage.

        counted: the micro-batches whose losses count (default: all). The others run as they do in any step, and their
        losses are multiplied by zero, so that what a single micro-batch adds to a gradient is seen in the order and
        with the accumulation of a whole step.
        """
        self._pipeline.zero_grad()
        num_chunks = self._model.num_chunks
        # Of each row of the batch, so that it is split with the labels.
        weights = torch.zeros(num_chunks, device="cpu")
        weights[list(range(num_chunks) if counted is None else counted)] = 1
        rows = batch.inputs[0].shape[0]
        parts = torch.arange(rows, device="cpu").tensor_split(num_chunks)
        chunk_of_row = torch.cat([torch.full((len(part),), m, device="cpu") for m, part in enumerate(parts)])
        row_weights = weights[chunk_of_row].to(self._device, self._dtype)

        def criterion(*outputs_and_labels: Tensor) -> Tensor:
            *tensors, weight = outputs_and_labels
            return self._model.compute_loss(*tensors) * weight[0]

        losses, _ = self._pipeline.step(
            *(batch.inputs if self.has_first else ()), num_chunks=num_chunks,
            criterion=criterion if self.has_last else None,
            labels=(*batch.labels, row_weights) if self.has_last else (),
        )
        return losses

    def parameters(self) -> list[tuple[int, str, nn.Parameter]]:
        """Return stage, name in the uncut model and parameter, of all that are trained."""
        return [(stage.number, stage.names[own], parameter) for stage in self.stages
                for own, parameter in stage.module.named_parameters(remove_duplicate=False) if parameter.requires_grad]

    def values(self) -> list[StageGradient]:
        """Return the values of the parameters, whole. Collective over the ranks that share them."""
        return [StageGradient(stage, name, _whole(parameter.detach())) for stage, name, parameter in self.parameters()]

    def gradients(self) -> list[StageGradient]:
        """Return the gradients, whole, zeros where there is none. Collective over the ranks that share them."""
        found = []
        for stage, name, parameter in self.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found.append(StageGradient(stage, name, _whole(grad.detach())))
        return found

    def action_of(self, kind: str, stage: int, microbatch: int) -> str:
        """Return the title of the action that made a result: kind "F", "B" (also "I"), or "W" for weight gradients."""
        kinds = {"F": "F", "B": "BI", "W": "BW"}[kind]
        return _title(self.schedule, kinds, stage, microbatch)


def has_bfloat16_values(tensor: Tensor) -> bool:
    """Return True if bfloat16 holds all numbers of a tensor exactly."""
    return bool((tensor == tensor.bfloat16()).all())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else local(tensor)


def _title(schedule: Schedule, kinds: str, stage: int, microbatch: int) -> str:
    """Return the title of the scheduled action of one of some kinds."""
    for steps in schedule.ranks:
        for step in steps:
            for action in step:
                if action.stage == stage and action.microbatch == microbatch and action.kind in kinds:
                    return action.title
    raise AssertionError(f"the schedule {schedule.name!r} runs {kinds} of every stage and micro-batch")
