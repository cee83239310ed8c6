"""The state that a `torch.optim.Optimizer` keeps for a parameter, saved and restored by the name of the parameter.

Nothing depends on the order of parameters or groups of the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dualpipe.checkpoint.manifest import StoredTensor

VALUES = "values"  # key of a tensor with everything in a state that is no tensor: JSON as bytes
_VALUES_ALIGNMENT = 256  # the values are padded to a multiple of this many bytes
# Keys of a parameter group that select how the optimizer computes, not what. Loading does not change them.
_SWITCHES = ("params", "foreach", "fused", "capturable", "differentiable")


class ParameterState:
    """The state that any `torch.optim.Optimizer` keeps for a parameter. The other entries of a state are tensors.

    Saving stores `tensors`. Loading fills `load_targets`, and `restore` hands them to the optimizer. An optimizer that
    never took a step has no state, so its keys are unknown: loading makes the tensors that the checkpoint has.

    Args:
        optimizer: the optimizer, which need not have taken a step yet.
        group: the parameter group of `parameter`.
        parameter: the parameter.
        configured: hyperparameters that are set by a configuration: they are not saved, and loading keeps them.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor,
        configured: Iterable[str] = (),
    ) -> None:
        self.group = group
        self.kind = type(optimizer).__name__
        self.saved_by = self.kind  # class that saved the state: known once `read_hyperparameters` is called
        self._state = optimizer.state
        self._parameter = parameter
        self._excluded = {*_SWITCHES, *configured}
        self._targets: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state by key, sharing memory, and all other values as JSON under `VALUES`.

        Raises:
            ValueError: another process could not restore the state: a key is no string or has a "/"; a value is
                neither a tensor nor JSON; or a plain tensor belongs to a sharded parameter.
        """
        state = self._state.get(self._parameter, {})
        for key in state:
            if not isinstance(key, str) or "/" in key or key == VALUES:
                raise ValueError(f"an optimizer's state must have strings as keys, without a '/' and not {VALUES!r}; "
                                 f"it has {key!r}")
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for key, tensor in tensors.items():
            if isinstance(self._parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.dim():
                raise ValueError(f"an optimizer keeps {key!r} of a sharded parameter as a plain tensor "
                                 f"{tuple(tensor.shape)}, whose place is unknown; it must be a DTensor")
        values = {"kind": self.kind, "state": {key: value for key, value in state.items() if key not in tensors},
                  "group": {key: value for key, value in self.group.items() if key not in self._excluded}}
        try:
            text = json.dumps(values, default=tensor_to_number).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"an optimizer can keep tensors, and what JSON can hold: {error}") from error
        # Pad, so that the text has the same size after a change of the learning rate. Then the assignment of boxes to
        # ranks stays valid.
        text += b" " * (-len(text) % _VALUES_ALIGNMENT)
        return tensors | {VALUES: torch.tensor(list(text), dtype=torch.uint8, device="cpu")}

    def load_targets(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Return tensors to read a checkpoint into, by key: always one for `VALUES`, and one for each key of `stored`.

        Args:
            stored: the tensors of this parameter's state in the checkpoint, by key.
        """
        self._values = {}
        self._targets = {key: self._load_target(key, tensor) for key, tensor in stored.items()}
        return {VALUES: torch.empty(0, dtype=torch.uint8, device="cpu")} | self._targets

    def _load_target(self, key: str, stored: StoredTensor) -> Tensor:
        """Return the optimizer's tensor if it fits; else a new one, distributed like the parameter if shapes agree."""
        dtype, shape, _ = stored
        parameter = self._parameter
        if key == VALUES:
            return torch.empty(shape, dtype=torch.uint8, device="cpu")
        current = self._state.get(parameter, {}).get(key)
        if isinstance(current, Tensor) and (tuple(current.shape), current.dtype) == (shape, dtype):
            return current
        if shape and shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        # torch keeps step counts on the host unless a kernel reads them.
        on_device = bool(shape) or self.group.get("capturable") or self.group.get("fused")
        tensor = torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
        if shape and isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return tensor

    def read_hyperparameters(self) -> dict[str, Any] | None:
        """Parse the values, once they are read, and return the saved hyperparameters of the group.

        Returns None if the checkpoint has no values for the parameter, and that was allowed.

        Raises:
            ValueError: the values are damaged.
        """
        if VALUES not in self._targets:
            return None
        try:
            self._values = json.loads(bytes(self._targets.pop(VALUES).tolist()))
            self.saved_by = self._values["kind"]
            group = self._values["group"]
            if type(self._values["state"]) is not dict or type(group) is not dict:
                raise TypeError("no JSON objects")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"the values of an optimizer are damaged: {error}") from error
        self._values["group"] = {key: value for key, value in group.items() if key not in self._excluded}
        return self._values["group"]

    def restore(self) -> None:
        """Replace the optimizer's state and hyperparameters by those of the checkpoint, once everything is read."""
        if not self._values:
            return
        self._state.pop(self._parameter, None)
        state = self._values["state"] | self._targets
        if state:
            self._state[self._parameter] = state
        for key, value in self._values["group"].items():
            current = self.group.get(key)
            if isinstance(current, Tensor):
                self.group[key] = torch.full_like(current, value)  # a new tensor: groups may share the current one
            else:
                self.group[key] = tuple(value) if isinstance(current, tuple) else value


def is_allowed(name: str, allow: Iterable[str]) -> bool:
    """Return True if the name matches one of the globs."""
    return any(fnmatchcase(name, pattern) for pattern in allow)


def check_groups(states: Mapping[str, ParameterState], allow: Sequence[str]) -> set[str]:
    """Check that the saved hyperparameters fit the current groups; return the names of states to leave uninitialized.

    These are states that an optimizer of another class has saved. They are not loaded.

    Args:
        states: the states by name, with their values read.
        allow: globs of names whose state may be left uninitialized.

    Raises:
        ValueError: a state of another optimizer class is not in `allow`; or parameters that share a group now were
            saved with different hyperparameters.
    """
    first_of_group: dict[int, tuple[str, dict[str, Any]]] = {}
    uninitialized: set[str] = set()
    for name, state in states.items():
        values = state.read_hyperparameters()
        if values is None:
            continue
        if state.saved_by != state.kind:
            if not is_allowed(name, allow):
                raise ValueError(f"{name} is the state of the optimizer {state.saved_by}, which {state.kind} cannot "
                                 "continue: name it in `allow` to start it from nothing")
            uninitialized.add(name)
            continue
        first_name, expected = first_of_group.setdefault(id(state.group), (name, values))
        differing = [key for key in expected.keys() | values.keys() if expected.get(key, ...) != values.get(key, ...)]
        if differing:
            raise ValueError(f"{name} and {first_name} are in one group of the optimizer, but were saved with "
                             f"different {', '.join(sorted(differing))}: group the parameters as they were")
    return uninitialized


def tensor_to_number(value: Any) -> Any:
    """Convert a tensor with one element, such as a learning rate, to a number that JSON can hold.

    Raises TypeError for anything else.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{brief(value)} is a {type(value).__name__}")
