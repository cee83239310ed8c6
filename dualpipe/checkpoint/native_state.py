"""What a checkpoint holds, by names that no layout changes, and which part of it this rank has.

    layers.3.mlp.experts.gate_up_proj.weight                          a parameter, in at least float32 if trained
    layers.3.mlp.gate.e_score_correction_bias                         a buffer, in its own dtype
    optimizer/layers.3.mlp.experts.gate_up_proj.weight/exp_avg        and exp_avg_sq, step; see `native_optimizer`
    stage-3.0.weight                                                  of stages whose names repeat, by their numbers

A trained parameter is stored once, as the values that the optimizer updates: the float32 master of a bfloat16
parameter, or the float32 parameter itself where ranks share its storage. So one layout's master is another's parameter,
and a bfloat16 parameter, being its master rounded, comes back bit for bit without being stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualpipe.checkpoint.native_optimizer import ParameterState, parameter_states
from dualpipe.nn.init import local_part
from dualpipe.parallel.description import StoredTensor

OPTIMIZER = "optimizer/"
REPEATED = "give training_state the stages of one model, with the names of the whole, or the numbers of the stages"
_NUMBERED = re.compile(rf"(?:{OPTIMIZER})?stage-(\d+)\.")

State = Mapping[str, Tensor | ParameterState]  # what `training_state` gives, and any tensors besides


class OptimizerTensors(Protocol):
    """An optimizer that can be stored, such as `dualpipe.train.optimizer.Optimizer`."""

    def state_tensors(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Of each parameter "master", its values as they are updated, and any others by names of their own.

        All share memory with the optimizer, and are distributed as the parameter is or the same on every rank.
        """


def training_state(
    stages: Sequence[nn.Module], optimizer: OptimizerTensors | torch.optim.Optimizer | None = None, *,
    numbers: Sequence[int] | None = None,
) -> dict[str, Tensor | ParameterState]:
    """The tensors of this rank's stages (ascending) and their optimizer by name, sharing memory: what `save` takes.

    And what `load` fills in place. Any `torch.optim.Optimizer` will do, before its first step too; parameters are then
    stored in the dtype that they have, as without one. After loading, an optimizer with masters of its own must round
    them into the parameters (`round_parameters`). Tied parameters appear once, by the first name.

    numbers: those of these stages in the pipeline (`schedule.rank_stages(rank)`), where names repeat from stage to
        stage: each is then behind its stage's number, so the checkpoint fits a pipeline of the same stages alone.

    Raises ValueError where a name means two tensors, and for a parameter of the optimizer that no stage has.
    """
    if numbers is not None and len(numbers) != len(stages):
        raise ValueError(f"numbers must be those of the {len(stages)} stages given; got {list(numbers)}")
    ours = {} if optimizer is None or isinstance(optimizer, torch.optim.Optimizer) else optimizer.state_tensors()
    found: dict[str, Tensor | ParameterState] = {}
    names: dict[Tensor, str] = {}
    for index, stage in enumerate(stages):
        for name, tensor in stage.state_dict(keep_vars=True).items():  # shards, and only what is persistent
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is a {type(tensor).__name__}; only tensors can be stored")
            if tensor in names:
                continue
            name = name if numbers is None else f"stage-{numbers[index]}.{name}"
            if name in found:
                raise ValueError(f"two stages have a tensor called {name!r}; {REPEATED}")
            names[tensor] = name
            own = dict(ours.get(tensor, {}))
            found |= {name: own.pop("master", tensor)} | {f"{OPTIMIZER}{name}/{key}": each for key, each in own.items()}
    if isinstance(optimizer, torch.optim.Optimizer):
        found |= {OPTIMIZER + name: state for name, state in parameter_states(optimizer, names).items()}
    return found


def numbered(names: Iterable[str]) -> set[int]:
    """The numbers of stages that are in names."""
    return {int(found[1]) for name in names if (found := _NUMBERED.match(name))}


def states_in(state: State) -> dict[str, ParameterState]:
    """Of the parameters of an optimizer of torch's."""
    return {name: each for name, each in state.items() if isinstance(each, ParameterState)}


def placed(state: State, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """What a checkpoint with these tensors is to be read into."""
    own: dict[str, dict[str, StoredTensor]] = {}
    for name, entry in stored.items():
        of, _, key = name.rpartition("/")
        own.setdefault(of, {})[key] = entry
    return _expanded(state, {name: each.place(own.get(name, {})) for name, each in states_in(state).items()})


def _expanded(state: State, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    plain = {name: each for name, each in state.items() if not isinstance(each, ParameterState)}
    return plain | {f"{name}/{key}": tensor for name, of in tensors.items() for key, tensor in of.items()}


class Part(NamedTuple):
    """What this rank holds of a tensor: a plain tensor, and where it lies in the whole."""

    shape: torch.Size
    offsets: torch.Size
    tensor: Tensor


def parts_of(state: State) -> dict[str, Part]:
    """This rank's parts, sharing memory; raises ValueError for what cannot be stored."""
    parts = {}
    for name, tensor in _expanded(state, {name: each.tensors() for name, each in states_in(state).items()}).items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is a {type(name).__name__}; the names of tensors must be texts")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name} is a sum that is not yet reduced ({tensor.placements}); redistribute it first")
        local, place = local_part(tensor)
        if type(local.detach()) is not Tensor:
            raise ValueError(f"{name} is a {type(local).__name__}; only plain tensors can be stored")
        parts[name] = Part(torch.Size(tensor.shape), torch.Size([each.start for each in place]), local)
    return parts
