"""What any `torch.optim.Optimizer` keeps of a parameter, as tensors with names that no layout changes.

    optimizer/layers.3.mlp.gate.weight/exp_avg      each tensor of its state, by its key
    optimizer/layers.3.mlp.gate.weight/values       JSON as bytes: the rest of its state, its group's hyperparameters

So nothing depends on the order of parameters or groups. Which tensors a state has is known once there is one: loading
makes those that the checkpoint has, so it fills an optimizer that never took a step, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dualpipe.parallel.description import StoredTensor

VALUES = "values"
_PADDED = 256  # bytes of the values, or a multiple
# Of a group: how it computes, not what. Those of the optimizer that is loaded into stay.
_SWITCHES = ("params", "foreach", "fused", "capturable", "differentiable")


class ParameterState:
    """An optimizer's state of one parameter, where `training_state` has tensors.

    Saving takes `tensors`; loading fills what `place` gives, and `restore` hands it to the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
        self._state, self._group, self._parameter = optimizer.state, group, parameter
        self._placed: dict[str, Tensor] = {}
        self._read: dict[str, Any] = {}

    def tensors(self) -> dict[str, Tensor]:
        """By their keys, sharing memory. Raises ValueError for what another process could not make sense of."""
        state = self._state.get(self._parameter, {})
        if wrong := [key for key in state if not isinstance(key, str) or "/" in key or key == VALUES]:
            raise ValueError(f"an optimizer's state must have texts as keys, without a '/' and not {VALUES!r}; it has "
                             f"{wrong[0]!r}")
        found = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for key, tensor in found.items():
            if isinstance(self._parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.dim():
                raise ValueError(f"an optimizer keeps {key!r}, a plain tensor {tuple(tensor.shape)}, of a sharded "
                                 "parameter, so where it belongs is not known; it must be a DTensor")
        values = {"state": {key: value for key, value in state.items() if key not in found},
                  "group": {key: value for key, value in self._group.items() if key not in _SWITCHES}}
        try:
            text = json.dumps(values, default=as_number).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"an optimizer can keep tensors, and what JSON can hold: {error}") from error
        text += b" " * (-len(text) % _PADDED)  # so that another learning rate has the same size, which is planned for
        return found | {VALUES: torch.tensor(list(text), dtype=torch.uint8, device="cpu")}

    def place(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """What a checkpoint with these tensors of the parameter is to be read into. The values are always wanted."""
        self._read = {}
        self._placed = {key: self._like(key, entry) for key, entry in stored.items()}
        return {VALUES: torch.empty(0, dtype=torch.uint8, device="cpu")} | self._placed

    def _like(self, key: str, entry: StoredTensor) -> Tensor:
        now, parameter = self._state.get(self._parameter, {}).get(key), self._parameter
        if isinstance(now, Tensor) and (tuple(now.shape), now.dtype) == (entry.shape, entry.dtype):
            return now
        if key != VALUES and entry.shape and entry.shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
        # torch keeps counts of steps on the host, unless a kernel reads them.
        on_device = bool(entry.shape) or self._group.get("capturable") or self._group.get("fused")
        plain = torch.empty(entry.shape, dtype=entry.dtype, device=parameter.device if on_device else "cpu")
        if key == VALUES or not entry.shape or not isinstance(parameter, DTensor):
            return plain
        mesh = parameter.device_mesh
        return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def understand(self) -> tuple[int, dict[str, Any]] | None:
        """The group that it is in, and the hyperparameters that the values say, once they are read; None without any.

        Raises ValueError where they are not what `tensors` makes.
        """
        if VALUES not in self._placed:  # which was allowed
            return None
        try:
            self._read = json.loads(bytes(self._placed[VALUES].tolist()))
            if {type(self._read["state"]), type(group := self._read["group"])} != {dict}:
                raise TypeError("no JSON objects")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"the values of an optimizer are damaged: {error}") from error
        return id(self._group), group

    def restore(self) -> None:
        """Make the state of the optimizer that of the checkpoint, once all is read."""
        if not self._read:
            return
        state = self._read["state"] | {key: tensor for key, tensor in self._placed.items() if key != VALUES}
        self._state.pop(self._parameter, None)
        if state:
            self._state[self._parameter] = state
        for key, value in self._read["group"].items():
            now = self._group.get(key)
            if isinstance(now, Tensor):
                self._group[key] = torch.full_like(now, value)  # groups may share the one that is there
            elif key not in _SWITCHES:
                self._group[key] = tuple(value) if isinstance(now, tuple) else value


def check_groups(states: Mapping[str, ParameterState]) -> None:
    """Raise ValueError where parameters that share a group now were saved with other hyperparameters."""
    first: dict[int, tuple[str, dict[str, Any]]] = {}
    for name, state in states.items():
        if (found := state.understand()) is None:
            continue
        other, values = first.setdefault(found[0], (name, found[1]))
        if values != found[1]:
            differ = [key for key in values.keys() | found[1].keys() if values.get(key) != found[1].get(key)]
            raise ValueError(f"{name} and {other} are in one group of the optimizer, but were saved with different "
                             f"{', '.join(sorted(differ))}: group the parameters as they were")


def parameter_states(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, ParameterState]:
    """By the names of its parameters; raises ValueError for one without a name."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(f"the optimizer has a parameter {tuple(parameter.shape)} that is in none of the "
                                 "stages: give all modules that it updates")
            found[names[parameter]] = ParameterState(optimizer, group, parameter)
    return found


def as_number(value: Any) -> Any:
    """Such as a learning rate in a tensor."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{brief(value)} is a {type(value).__name__}")
