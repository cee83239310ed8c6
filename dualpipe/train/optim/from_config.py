"""Build the optimizer that a configuration describes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dualpipe.models import HubConfig
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.schema import ALGORITHMS, OptimizerConfig
from dualpipe.train.optim.groups import (
    ParameterGroup,
    check_groups,
    find_trainable_parameters,
    layer_decay_groups,
)
from dualpipe.train.optim.optimizer import Optimizer


def build_optimizer(
    settings: OptimizerConfig, model: TrainedModel, stages: Iterable[nn.Module], *, moments: torch.dtype,
    masters: Mapping[nn.Parameter, Tensor],
) -> Optimizer:
    """Return the optimizer for the stages of this rank.

    Args:
        settings: the table [optimizer].
        model: the whole model.
        stages: the stages of this rank.
        moments: as in `Optimizer`.
        masters: as in `Optimizer`.

    Raises:
        ValueError: a group matches no parameter of the whole model, or as `Optimizer` does.
    """
    if settings.groups:
        whole_model = find_trainable_parameters(stages_on_meta(model))
        check_groups(settings.groups, [name for name, _ in whole_model.values()])
    if settings.name in ALGORITHMS:  # a group may select Muon with either
        options = {
            "momentum": settings.momentum, "nesterov": settings.nesterov, "coefficients": settings.coefficients,
        }
    else:
        options = json.loads(settings.options) if settings.options else {}
    groups = [ParameterGroup(group.pattern, group.lr, group.weight_decay, group.algorithm) for group in settings.groups]
    if settings.layer_decay < 1:
        prefix = "" if isinstance(model, HubConfig) else model.name_prefix
        groups = [*layer_decay_groups(settings.lr, settings.layer_decay, model.num_hidden_layers, prefix), *groups]
    return Optimizer(
        stages, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
        moments=moments, name=settings.name, options=options, masters=masters, groups=groups,
    )
