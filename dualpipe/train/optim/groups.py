"""Parameter groups: the algorithm, the learning rate and the weight decay of every parameter, by its name and type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from dualpipe.nn import RMSNorm, Router
from dualpipe.parallel.precision.dtype_plan import matches
from dualpipe.train.config.schema import OptimizerGroup

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, RMSNorm)
_SCALE_NAMES = ("sinks", "A_log")  # parameters that are not matrices, whatever their shape
_ROUTER_NAMES = {"gate", "router", "shared_expert_gate"}  # modules of transformers' models


def find_trainable_parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, tuple[str, nn.Module]]:
    """Return the name and the owning module of every trainable parameter. A tied parameter appears once."""
    parameters: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for module in modules:
        for path, owner in module.named_modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.requires_grad:
                    parameters.setdefault(parameter, (f"{path}.{name}".lstrip("."), owner))
    return parameters


def is_matrix(name: str, owner: nn.Module, parameter: Tensor) -> bool:
    """Return True for a matrix or a stack of matrices: linear layers, experts, embeddings, convolutions.

    The shape alone is not enough: biases of experts are stacked, (E, N), and the scale of a norm may have several
    dimensions.
    """
    is_scale = isinstance(owner, _NORMS) or name.rpartition(".")[2] in _SCALE_NAMES
    return parameter.dim() >= 2 and not name.endswith("bias") and not is_scale


def is_hidden_matrix(name: str, owner: nn.Module, parameter: Tensor) -> bool:
    """Return True for a matrix, or a stack of them, that maps hidden states to hidden states: Muon updates these.

    Embeddings, heads, routers and convolutions along the sequence are excluded.
    """
    has_excluded_name = not _ROUTER_NAMES.union(["lm_head"]).isdisjoint(name.split("."))
    has_excluded_type = isinstance(owner, nn.Embedding | nn.Conv1d | Router)
    return (not has_excluded_name and not has_excluded_type and parameter.dim() <= 3
            and is_matrix(name, owner, parameter))


def choose_algorithm(
    name: str, owner: nn.Module, parameter: Tensor, *, optimizer: str, groups: Iterable[OptimizerGroup]
) -> str:
    """Return the algorithm that updates a parameter: "adamw", "muon", or the import path of a custom optimizer.

    Args:
        name: of the parameter.
        owner: module of the parameter.
        parameter: the parameter.
        optimizer: the `name` of `Optimizer`.
        groups: the last matching group with an algorithm wins.
    """
    algorithm = optimizer
    if optimizer == "muon" and not is_hidden_matrix(name, owner, parameter):
        algorithm = "adamw"
    for group in groups:
        if group.algorithm and matches(group.pattern, name):
            algorithm = group.algorithm
    return algorithm


class UpdateRule(NamedTuple):
    """The update of a parameter.

    algorithm: from `choose_algorithm`.
    lr_factor: factor on the learning rate of the optimizer.
    weight_decay: decoupled weight decay.
    """

    algorithm: str
    lr_factor: float
    weight_decay: float


def choose_update(
    name: str, owner: nn.Module, parameter: Tensor, *, optimizer: str, lr: float, weight_decay: float,
    groups: Sequence[OptimizerGroup],
) -> UpdateRule:
    """Return the update of a parameter by `Optimizer`.

    Args:
        name: of the parameter.
        owner: module of the parameter.
        parameter: the parameter.
        optimizer: the `name` of `Optimizer`.
        lr: peak learning rate.
        weight_decay: of matrices; other parameters have none.
        groups: exceptions. Of several matching groups that set a field, the last one wins.

    Raises:
        ValueError: a group selects Muon for a parameter that is not a matrix.
    """
    algorithm = choose_algorithm(name, owner, parameter, optimizer=optimizer, groups=groups)
    decays = is_matrix(name, owner, parameter)
    if algorithm == "muon" and not (decays and parameter.dim() <= 3):
        raise ValueError(f"optimizer.groups: {name} {tuple(parameter.shape)} is neither a matrix nor a stack of "
                         "matrices, which Muon requires; leave it to adamw")
    lr_factor = 1.0
    decay = weight_decay if decays else 0.0
    for group in groups:
        if not matches(group.pattern, name):
            continue
        if group.lr is not None:
            lr_factor = group.lr / lr
        if group.weight_decay is not None:
            decay = group.weight_decay
    return UpdateRule(algorithm, lr_factor, decay)


def layer_decay_groups(lr: float, decay: float, num_layers: int, prefix: str = "") -> list[OptimizerGroup]:
    """Return groups whose learning rates are multiplied by `decay` from each layer to the one before it.

    The embedding comes before layer 0. The head and its norm keep `lr`. For fine-tuning (arXiv:2003.10555, section
    3.3). Example: with 2 layers and a decay of 0.5, layer 1 has lr / 2, layer 0 lr / 4, the embedding lr / 8.

    Args:
        lr: peak learning rate of the head.
        decay: the factor.
        num_layers: layers of the model.
        prefix: of the names of layers and embedding.
    """
    names = [f"{prefix}embed_tokens", *(f"{prefix}layers.{index}" for index in range(num_layers))]
    return [OptimizerGroup(name, lr=lr * decay ** (num_layers + 1 - depth)) for depth, name in enumerate(names)]
