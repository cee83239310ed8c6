"""The optimizer of a run, as [optimizer] says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dualpipe.models import HubConfig
from dualpipe.train.config.model_config import TrainedModel, stages_on_meta
from dualpipe.train.config.schema import ALGORITHMS, OptimizerConfig
from dualpipe.train.optim.groups import Group, check_groups, layer_groups, parameter_places
from dualpipe.train.optim.optimizer import Optimizer


def build_optimizer(
    settings: OptimizerConfig, model: TrainedModel, stages: Iterable[nn.Module], *, moments: torch.dtype,
    masters: Mapping[nn.Parameter, Tensor],
) -> Optimizer:
    """Return what updates the parameters of `stages`, a rank's part of `model`.

    moments, masters: see `Optimizer`. Raises ValueError for a group that the whole model has no parameter for.
    """
    if settings.groups:
        check_groups(settings.groups, [name for name, _ in parameter_places(stages_on_meta(model)).values()])
    options = json.loads(settings.options) if settings.options else {}
    if settings.name in ALGORITHMS:  # Muon's: a group may take it beside either
        options = {
            "momentum": settings.momentum, "nesterov": settings.nesterov, "coefficients": settings.coefficients,
        }
    groups = [Group(each.pattern, each.lr, each.weight_decay, each.algorithm) for each in settings.groups]
    if settings.layer_decay < 1:
        prefix = "" if isinstance(model, HubConfig) else model.name_prefix
        groups = [*layer_groups(settings.lr, settings.layer_decay, model.num_hidden_layers, prefix), *groups]
    return Optimizer(
        stages, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
        moments=moments, name=settings.name, options=options, masters=masters, groups=groups,
    )
