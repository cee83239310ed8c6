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
    choose_update,
    find_trainable_parameters,
    layer_decay_groups,
)
from dualpipe.train.optim.offload import MomentStorage
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
        moments: dtype of the moments.
        masters: as in `Optimizer`.

    Raises:
        ValueError: as `check_optimizer` and `Optimizer` do.
    """
    check_optimizer(settings, model)
    if settings.name in ALGORITHMS:  # a group may select Muon with either
        options = {
            "momentum": settings.momentum, "nesterov": settings.nesterov, "coefficients": settings.coefficients,
        }
    else:
        options = json.loads(settings.options) if settings.options else {}
    groups = _parameter_groups(settings)
    if settings.layer_decay < 1:
        prefix = "" if isinstance(model, HubConfig) else model.name_prefix
        groups = [*layer_decay_groups(settings.lr, settings.layer_decay, model.num_hidden_layers, prefix), *groups]
    return Optimizer(
        stages, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
        moments=MomentStorage(moments, on_host=settings.offload), name=settings.name, options=options, masters=masters,
        groups=groups,
    )


def check_optimizer(settings: OptimizerConfig, model: TrainedModel) -> None:
    """Check the groups of the table [optimizer] on the whole model, whatever stages a rank has.

    Raises:
        ValueError: a group matches no parameter, or selects Muon for one that is not a matrix.
    """
    if not settings.groups:
        return
    whole_model = find_trainable_parameters(stages_on_meta(model))
    check_groups(settings.groups, [name for name, _ in whole_model.values()])
    groups = _parameter_groups(settings)
    for parameter, (name, owner) in whole_model.items():
        choose_update(name, owner, parameter, optimizer=settings.name, lr=settings.lr,
                      weight_decay=settings.weight_decay, groups=groups)


def _parameter_groups(settings: OptimizerConfig) -> list[ParameterGroup]:
    return [ParameterGroup(group.pattern, group.lr, group.weight_decay, group.algorithm) for group in settings.groups]
