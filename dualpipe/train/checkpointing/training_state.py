"""The state of a run that a checkpoint holds, and the description of its origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from dualpipe.checkpoint import training_state
from dualpipe.checkpoint.optimizer_state import ParameterState
from dualpipe.models import HubConfig
from dualpipe.nn.routing.router_set import RouterSet
from dualpipe.train.config.schema import Config
from dualpipe.train.data.loader import Loader
from dualpipe.train.optim.optimizer import Optimizer
from dualpipe.train.step.model import Model


class TrainingState(NamedTuple):
    """The objects of a run whose state a checkpoint holds."""

    model: Model
    optimizer: Optimizer
    routers: RouterSet
    loader: Loader

    def tensors(self) -> Mapping[str, Tensor | ParameterState]:
        """Return the tensors of model, optimizer and routers by name, sharing memory."""
        return model_tensors(self.model, self.optimizer) | self.routers.state_tensors()


def model_tensors(model: Model, optimizer: Optimizer) -> dict[str, Tensor | ParameterState]:
    """Return the tensors of a rank's stages and of their optimizer, by names that are the same in every layout.

    In a model of transformers with a tied embedding, a rank with the last stage but not the first holds the embedding
    as its head only. The tensor is named after the embedding, as on the rank of the first stage.
    """
    tensors = training_state(model.stages, optimizer)
    if isinstance(model.config, HubConfig) or not model.config.is_tied:
        return tensors
    embedding = f"{model.config.name_prefix}embed_tokens.weight"
    return {name.replace("lm_head.weight", embedding): tensor for name, tensor in tensors.items()}


def describe(config: Config, model: Model) -> dict[str, Any]:
    """Return the description of a checkpoint's origin: the configuration of the run and of the model, as JSON."""
    return {"run": dataclasses.asdict(config), "model": model.config.to_dict()}
