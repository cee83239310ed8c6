"""The models of a comparison in bfloat16: the unpipelined model in float64 and in bfloat16, and the pipeline."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualpipe.runtime.recorder import Recorder
from dualpipe.train.launch.distributed import Job
from dualpipe.train.model_parity.bf16.module_names import ModuleNames
from dualpipe.train.model_parity.bf16.routes import PipelinePosition, Replay, Routes, UnpipelinedPosition, choosing
from dualpipe.train.model_parity.models.cut_model import ComparedModel
from dualpipe.train.model_parity.models.pipelined import PipelinedModel
from dualpipe.train.model_parity.models.unpipelined import (
    Batch,
    StagesInSequence,
    UnpipelinedStep,
    make_batches,
    stop_random_numbers,
    tied_names,
    train_whole,
)

BF16 = torch.bfloat16


class UnpipelinedModel(NamedTuple):
    """The unpipelined model in one dtype, its modules by name, and the batches of all pipelines."""

    whole: nn.Module
    modules: dict[nn.Module, str]
    batches: list[Batch]


class ReplayedModels:
    """The models, with weights rounded to bfloat16, and routed like the unpipelined model in float64.

    Construction and `train` are collective.

    Attributes:
        note: see `stop_random_numbers`.
    """

    def __init__(self, model: ComparedModel, job: Job) -> None:
        self._model = model
        self._device = job.device
        self._replica = job.place.replica
        narrow = job.ranks.agree(lambda: model.build_whole(BF16, job.device))
        batches = job.ranks.agree(lambda: make_batches(model, job.place.replicas, BF16, job.device))
        self.note = job.ranks.agree(lambda: stop_random_numbers(model, narrow, batches[0]))
        exact = job.ranks.agree(lambda: copy.deepcopy(narrow).double())
        self.tied = tied_names(narrow)
        self.routes = Routes()
        self._names = ModuleNames(narrow, self.tied)
        self._narrow = UnpipelinedModel(narrow, self._names.of_whole(narrow), batches)
        self._exact = UnpipelinedModel(exact, self._names.of_whole(exact), [batch.double() for batch in batches])
        self.pipelined = PipelinedModel(model, job, BF16, training=narrow.training)
        self.modules: dict[nn.Module, str] = {}  # names in the unpipelined model of the modules of this rank's stages
        self._stage_of: dict[nn.Module, int] = {}
        for stage in self.pipelined.stages:
            modules = self._names.of(stage.module, stage.names)
            self.modules |= modules
            self._stage_of |= dict.fromkeys(modules, stage.number)

    def record(self) -> UnpipelinedStep:
        """Run a step of the unpipelined model in float64, and record its routes."""
        position = UnpipelinedPosition()
        whole, modules, batches = self._exact
        with choosing(modules, position, self.routes.record):
            return train_whole(self._model, whole, batches, before_microbatch=position.begin)

    def train_unpipelined(self, dtype: torch.dtype, only: int | None = None) -> tuple[UnpipelinedStep, Replay]:
        """Run a step of the unpipelined model in float64 or bfloat16. only: see `train_whole`."""
        whole, modules, batches = self._unpipelined(dtype)
        replay = Replay(self.routes)
        position = UnpipelinedPosition()
        with choosing(modules, position, replay.choose):
            step = train_whole(self._model, whole, batches, only, before_microbatch=position.begin)
        return step, replay

    def train(self, counted: Collection[int] | None = None) -> tuple[Tensor | None, Replay]:
        """Run a step of the pipeline; return its losses, None on ranks without the last stage.

        counted: see `PipelinedModel.train`.
        """
        replay = Replay(self.routes)
        position = PipelinePosition(self._replica, self._stage_of)
        with Recorder.current().observed_by(position), choosing(self.modules, position, replay.choose):
            losses = self.pipelined.train(self._narrow.batches[self._replica], counted)
        return losses, replay

    def train_in_sequence(self, dtype: torch.dtype) -> tuple[StagesInSequence, UnpipelinedStep]:
        """Build all stages in this process, and run a step of them in float64 or bfloat16."""
        count = self.pipelined.schedule.num_stages
        stages = self._model.build_stages(count, range(count), BF16, self._device, None)
        modules: dict[nn.Module, str] = {}
        for stage in stages:
            if not self._narrow.whole.training:
                stage.module.eval()
            stage.module.to(dtype)  # float64 keeps the values rounded to bfloat16
            modules |= self._names.of(stage.module, stage.names)
        sequence = StagesInSequence(self._model, stages)
        position = UnpipelinedPosition()
        with choosing(modules, position, Replay(self.routes).choose):
            step = sequence.train(self._unpipelined(dtype).batches, self._replica, before_microbatch=position.begin)
        return sequence, step

    def check_weights(self) -> None:
        """Raise ValueError if the weights of the stages differ from the unpipelined model's.

        Collective over the ranks that share them.
        """
        expected = dict(self._narrow.whole.named_parameters(remove_duplicate=False))
        for stage, name, value in self.pipelined.values():
            if not torch.equal(value.to(BF16), expected[name].detach().to(BF16)):
                raise ValueError(f"the weights {name!r} of stage {stage} differ from the unpipelined model's before "
                                 "any step; compare in float64, which prints by how much")

    def _unpipelined(self, dtype: torch.dtype) -> UnpipelinedModel:
        return self._narrow if dtype is BF16 else self._exact
