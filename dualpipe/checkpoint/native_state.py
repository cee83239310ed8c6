"""What a checkpoint holds, by names that no layout changes, and which part of it this rank has.

    layers.3.mlp.experts.gate_up_proj.weight                          a parameter, in at least float32 if trained
    layers.3.mlp.gate.e_score_correction_bias                         a buffer, in its own dtype
    optimizer/layers.3.mlp.experts.gate_up_proj.weight/exp_avg        and exp_avg_sq, step

A trained parameter is stored once, as the values that the optimizer updates: the float32 master of a bfloat16
parameter, or the float32 parameter itself where ranks share its storage. So one layout's master is another's parameter,
and a bfloat16 parameter, being its master rounded, comes back bit for bit without being stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualpipe.nn.init import local_part

OPTIMIZER = "optimizer/"


class OptimizerTensors(Protocol):
    """An optimizer that can be stored, such as `dualpipe.train.optimizer.Optimizer`."""

    def state_tensors(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Of each parameter "master", its values as they are updated, and any others by names of their own.

        All share memory with the optimizer, and are distributed as the parameter is or the same on every rank.
        """


def training_state(stages: Iterable[nn.Module], optimizer: OptimizerTensors | None = None) -> dict[str, Tensor]:
    """The tensors of this rank's stages (ascending) and their optimizer by name, sharing memory: what `save` takes.

    And what `load` fills in place; afterwards the optimizer must round its masters into the parameters
    (`round_parameters`). Tied parameters appear once, by the first name. Without an optimizer parameters are stored in
    the dtype that they have. Raises ValueError where a name means two tensors.
    """
    of_parameter = {} if optimizer is None else optimizer.state_tensors()
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for stage in stages:
        for name, tensor in stage.state_dict(keep_vars=True).items():  # shards, and only what is persistent
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is a {type(tensor).__name__}; only tensors can be stored")
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            own = dict(of_parameter.get(tensor, {}))
            named = {name: own.pop("master", tensor)} | {f"{OPTIMIZER}{name}/{key}": each for key, each in own.items()}
            if twice := sorted(named.keys() & found.keys()):
                raise ValueError(f"two stages have a tensor called {twice[0]!r}; give the stages of one model, whose "
                                 "names are those of the whole")  # fmt: skip
            found |= named
    return found


class Part(NamedTuple):
    """What this rank holds of a tensor: a plain tensor, and where it lies in the whole."""

    shape: torch.Size
    offsets: torch.Size
    tensor: Tensor


def parts_of(state: Mapping[str, Tensor]) -> dict[str, Part]:
    """This rank's parts, sharing memory; raises ValueError for what cannot be stored."""
    parts = {}
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is a {type(name).__name__}; the names of tensors must be texts")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name} is a sum that is not yet reduced ({tensor.placements}); redistribute it first")
        local, place = local_part(tensor)
        if type(local.detach()) is not Tensor:
            raise ValueError(f"{name} is a {type(local).__name__}; only plain tensors can be stored")
        parts[name] = Part(torch.Size(tensor.shape), torch.Size([each.start for each in place]), local)
    return parts
