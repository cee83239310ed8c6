"""The state of a run that a checkpoint holds, and what it says of where it comes from."""

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
from dualpipe.train.step.stages import Model


class TrainingState(NamedTuple):
    """The parts of a run's checkpoint."""

    model: Model
    optimizer: Optimizer
    routers: RouterSet
    loader: Loader

    def tensors(self) -> Mapping[str, Tensor | ParameterState]:
        """All of them by name, sharing memory."""
        return model_tensors(self.model, self.optimizer) | self.routers.state_tensors()


def model_tensors(model: Model, optimizer: Optimizer) -> dict[str, Tensor | ParameterState]:
    """Return the tensors of a rank's stages and of their optimizer, by names that no layout changes.

    A last stage of transformers that is alone on its rank has a tied embedding as its head only; it is called the
    embedding, as on the rank of the first stage.
    """
    tensors = training_state(model.stages, optimizer)
    if isinstance(model.config, HubConfig) or not model.config.is_tied:
        return tensors
    embedding = f"{model.config.name_prefix}embed_tokens.weight"
    return {name.replace("lm_head.weight", embedding): tensor for name, tensor in tensors.items()}


def describe(config: Config, model: Model) -> dict[str, Any]:
    """Return a checkpoint's description of its origin."""
    return {"run": dataclasses.asdict(config), "model": model.config.to_dict()}
