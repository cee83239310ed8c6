"""The state of a run that a checkpoint holds, and what it says of where it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from dualpipe.checkpoint import training_state
from dualpipe.checkpoint.state import ParameterState
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
        return training_state(self.model.stages, self.optimizer) | self.routers.state_tensors()


def describe(config: Config, model: Model) -> dict[str, Any]:
    """Return a checkpoint's description of its origin."""
    return {"run": dataclasses.asdict(config), "model": model.config.to_dict()}
