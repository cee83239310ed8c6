"""Groups of parameters: which algorithm updates each, at which share of the learning rate, with which weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from dualpipe.nn import RMSNorm, Router
from dualpipe.parallel.precision.plan import matches
from dualpipe.runtime.errors import nearest
from dualpipe.train.config.schema import OptimizerGroup

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, RMSNorm)
_SCALES = ("sinks", "A_log")  # names of parameters
_ROUTERS = {"gate", "router", "shared_expert_gate"}  # names of modules of transformers' models


class Group(NamedTuple):
    """What holds of the parameters that `pattern`, as of `dualpipe.parallel.Rule`, matches, instead of what else would.

    lr: the peak of their learning rate. algorithm: "muon" or "adamw".
    """

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None
    algorithm: str | None = None


def layer_groups(lr: float, decay: float, num_layers: int, prefix: str = "") -> list[Group]:
    """Learning rates that are multiplied by `decay` from each layer to the one before, and to the embedding, as for
    fine-tuning (arXiv:2003.10555, section 3.3); those of the head and its norm stay. prefix: of their names."""
    names = [f"{prefix}embed_tokens", *(f"{prefix}layers.{index}" for index in range(num_layers))]
    return [Group(name, lr * decay ** (num_layers + 1 - depth)) for depth, name in enumerate(names)]


def parameter_places(modules: Iterable[nn.Module]) -> dict[nn.Parameter, tuple[str, nn.Module]]:
    """The parameters that are trained, each once, with their names and the modules that own them."""
    found: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for place, owner in (each for module in modules for each in module.named_modules()):
        for own, parameter in owner.named_parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(parameter, (f"{place}.{own}".lstrip("."), owner))
    return found


def is_matrix(name: str, owner: nn.Module, parameter: Tensor) -> bool:
    """Return True for a matrix that multiplies, or a stack of such: linear layers, experts, embeddings, convolutions.

    Shapes alone do not tell: the experts' biases are stacked, (E, N), and a norm's scale may have several dimensions.
    """
    is_scale = isinstance(owner, _NORMS) or name.rpartition(".")[2] in _SCALES
    return parameter.dim() >= 2 and not name.endswith("bias") and not is_scale


def takes_muon(name: str, owner: nn.Module, parameter: Tensor) -> bool:
    """Return True for a matrix that maps hidden values to others, or a stack of such: no embedding, head or router, and
    no convolution along a sequence."""
    is_named_so = not _ROUTERS.union(["lm_head"]).isdisjoint(name.split("."))
    is_of_hidden = not is_named_so and not isinstance(owner, nn.Embedding | nn.Conv1d | Router)
    return is_of_hidden and parameter.dim() <= 3 and is_matrix(name, owner, parameter)


def algorithm_of(
    optimizer: str, groups: Iterable[Group | OptimizerGroup], name: str, owner: nn.Module, parameter: Tensor
) -> str:
    """What updates a parameter where `Optimizer` is given that name and these groups."""
    found = "adamw" if optimizer == "muon" and not takes_muon(name, owner, parameter) else optimizer
    for group in groups:
        if group.algorithm and matches(group.pattern, name):
            found = group.algorithm
    return found


class Update(NamedTuple):
    """How a parameter is updated."""

    algorithm: str
    lr_share: float  # of the optimizer's learning rate
    weight_decay: float


def update_of(
    name: str, owner: nn.Module, parameter: Tensor, *, optimizer: str, lr: float, weight_decay: float,
    groups: Sequence[Group],
) -> Update:
    """Return how `Optimizer` updates a parameter. Raises ValueError where a group gives Muon what is no matrix."""
    algorithm = algorithm_of(optimizer, groups, name, owner, parameter)
    multiplies = is_matrix(name, owner, parameter)
    if algorithm == "muon" and not (multiplies and parameter.dim() <= 3):
        raise ValueError(f"optimizer.groups: {name} {tuple(parameter.shape)} is no matrix, nor a stack of them, "
                         "which Muon is for; leave it to adamw")
    share = 1.0
    decay = weight_decay if multiplies else 0.0
    for group in groups:
        if matches(group.pattern, name):
            share = share if group.lr is None else group.lr / lr
            decay = decay if group.weight_decay is None else group.weight_decay
    return Update(algorithm, share, decay)


def check_groups(groups: Iterable[OptimizerGroup], names: Sequence[str]) -> None:
    """Raise ValueError for a group that no trained parameter of the whole model, by its `names`, is in."""
    for group in groups:
        if not any(matches(group.pattern, name) for name in names):
            near = ", ".join(nearest(group.pattern, names, 3, cutoff=0.0))
            raise ValueError(f"optimizer.groups: no trained parameter matches {group.pattern!r}; nearest: {near}")
