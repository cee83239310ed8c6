"""What a checkpoint holds, by names that no layout changes, and which box of each tensor this rank has.

    layers.3.mlp.experts.gate_up_proj.weight                          a parameter, in at least float32 if trained
    layers.3.mlp.gate.e_score_correction_bias                         a buffer, in its own dtype
    layers.3.mlp.shared_expert.down_proj.weight                       a frozen one that is quantized, as its block rows
    optimizer/layers.3.mlp.experts.gate_up_proj.weight/exp_avg        a tensor of the optimizer's state, by its key
    optimizer/layers.3.mlp.experts.gate_up_proj.weight/values         JSON as bytes: the rest, of torch's optimizers
    stage-3.0.weight                                                  of stages whose names repeat, by their numbers

A trained parameter is stored once, as the values that the optimizer updates: the float32 master of a bfloat16
parameter, or the float32 parameter itself where ranks share its storage. So one layout's master is another's parameter,
and a bfloat16 parameter, being its master rounded, comes back bit for bit without being stored; as does a quantized one
that is trained, whose bytes its master gives. Nothing depends on the order of parameters or groups of an optimizer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from reprlib import repr as brief
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from dualpipe.checkpoint.manifest import StoredTensor
from dualpipe.checkpoint.tensors import Box
from dualpipe.kernels.formats import Format
from dualpipe.nn.init import local_part
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.device import RandomState

OPTIMIZER, VALUES = "optimizer/", "values"
REPEATED = "give training_state the stages of one model, with the names of the whole, or the numbers of the stages"
_NUMBERED = re.compile(rf"(?:{OPTIMIZER})?stage-(\d+)\.")
_PADDED = 256  # bytes of the values, or a multiple
_CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Of an optimizer's group how it computes, not what. Those of the optimizer that is loaded into stay.
_SWITCHES = ("params", "foreach", "fused", "capturable", "differentiable")


class ParameterState:
    """The state that any `torch.optim.Optimizer` keeps of a parameter, where `training_state` has tensors.

    Saving takes `tensors`; loading fills what `place` gives, and `restore` hands it to the optimizer. Which tensors a
    state has is known once there is one: loading makes those that the checkpoint has, so it fills an optimizer that
    never took a step, too.

    configured: hyperparameters that are not saved, and stay as they are, because they follow from a configuration.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor,
        configured: Iterable[str] = (),
    ) -> None:
        self._state, self.group, self._parameter = optimizer.state, group, parameter
        self.kind = self.saved_by = type(optimizer).__name__  # the latter once the values are read
        self._left_out = {*_SWITCHES, *configured}
        self._placed: dict[str, Tensor] = {}
        self._read: dict[str, Any] = {}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their keys, sharing memory, and the values.

        Raises ValueError for what another process could not make sense of.
        """
        state = self._state.get(self._parameter, {})
        if wrong := [key for key in state if not isinstance(key, str) or "/" in key or key == VALUES]:
            raise ValueError(f"an optimizer's state must have texts as keys, without a '/' and not {VALUES!r}; it has "
                             f"{wrong[0]!r}")
        found = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for key, tensor in found.items():
            if isinstance(self._parameter, DTensor) and not isinstance(tensor, DTensor) and tensor.dim():
                raise ValueError(f"an optimizer keeps {key!r}, a plain tensor {tuple(tensor.shape)}, of a sharded "
                                 "parameter, so where it belongs is not known; it must be a DTensor")
        values = {"kind": self.kind, "state": {key: value for key, value in state.items() if key not in found},
                  "group": {key: value for key, value in self.group.items() if key not in self._left_out}}
        try:
            text = json.dumps(values, default=as_number).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(f"an optimizer can keep tensors, and what JSON can hold: {error}") from error
        text += b" " * (-len(text) % _PADDED)  # so that another learning rate has the same size, which is planned for
        return found | {VALUES: torch.tensor(list(text), dtype=torch.uint8, device="cpu")}

    def place(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """What a checkpoint with these tensors of the parameter is to be read into. The values are always wanted."""
        parameter, state = self._parameter, self._state.get(self._parameter, {})
        self._read, self._placed = {}, {}
        for key, (dtype, shape, _) in stored.items():
            now = state.get(key)
            if key == VALUES:
                tensor = torch.empty(shape, dtype=torch.uint8, device="cpu")
            elif isinstance(now, Tensor) and (tuple(now.shape), now.dtype) == (shape, dtype):
                tensor = now
            elif shape and shape == tuple(parameter.shape):
                tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:  # torch keeps counts of steps on the host, unless a kernel reads them
                on_device = bool(shape) or self.group.get("capturable") or self.group.get("fused")
                tensor = torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
                if shape and isinstance(parameter, DTensor):
                    mesh = parameter.device_mesh
                    tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
            self._placed[key] = tensor
        return {VALUES: torch.empty(0, dtype=torch.uint8, device="cpu")} | self._placed

    def hyperparameters(self) -> dict[str, Any] | None:
        """Those of the group, by the values, once these are read; None without any, as was allowed.

        Raises ValueError where they are not what `tensors` makes.
        """
        if VALUES not in self._placed:
            return None
        try:
            self._read = json.loads(bytes(self._placed.pop(VALUES).tolist()))
            if {type(self._read["state"]), type(group := self._read["group"])} != {dict}:
                raise TypeError("no JSON objects")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"the values of an optimizer are damaged: {error}") from error
        self.saved_by = self._read.get("kind", self.kind)
        self._read["group"] = {key: value for key, value in group.items() if key not in self._left_out}
        return self._read["group"]

    def restore(self) -> None:
        """Make the state of the optimizer that of the checkpoint, once all is read."""
        if not self._read:
            return
        self._state.pop(self._parameter, None)
        if state := self._read["state"] | self._placed:
            self._state[self._parameter] = state
        for key, value in self._read["group"].items():
            now = self.group.get(key)
            if isinstance(now, Tensor):
                self.group[key] = torch.full_like(now, value)  # groups may share the one that is there
            else:
                self.group[key] = tuple(value) if isinstance(now, tuple) else value


def is_allowed(name: str, allow: Iterable[str]) -> bool:
    """Return True if one of the globs matches."""
    return any(fnmatchcase(name, pattern) for pattern in allow)


def check_groups(states: Mapping[str, ParameterState], allow: Sequence[str]) -> set[str]:
    """The names of those that another class of optimizer has saved, which are not to be loaded: they begin anew.

    Raises ValueError where none of the globs of `allow` matches such a name, and where parameters that share a group
    now were saved with other hyperparameters.
    """
    first: dict[int, tuple[str, dict[str, Any]]] = {}
    anew: set[str] = set()
    for name, state in states.items():
        if (values := state.hyperparameters()) is None:
            continue
        if state.saved_by != state.kind:
            if not is_allowed(name, allow):
                raise ValueError(f"{name} is the state of the optimizer {state.saved_by}, which {state.kind} does not "
                                 "go on from: name it in `allow`, and it begins anew")
            anew.add(name)
            continue
        other, expected = first.setdefault(id(state.group), (name, values))
        if differ := [key for key in expected.keys() | values.keys() if expected.get(key, ...) != values.get(key, ...)]:
            raise ValueError(f"{name} and {other} are in one group of the optimizer, but were saved with different "
                             f"{', '.join(sorted(differ))}: group the parameters as they were")
    return anew


CheckpointState = Mapping[str, Tensor | ParameterState]  # what `training_state` gives, and any tensors besides


def training_state(
    stages: Sequence[nn.Module], optimizer: Any = None, *, numbers: Sequence[int] | None = None
) -> dict[str, Tensor | ParameterState]:
    """The tensors of this rank's stages (ascending) and their optimizer by name, sharing memory: what `save` takes.

    And what `load` fills in place. Tied parameters appear once, by the first name.

    optimizer: any of `torch.optim`, before its first step too; parameters are stored in the dtype that they have, as
        without one. Or one with `state_tensors()`, as `dualpipe.train.optim.optimizer.Optimizer`: by parameter
        "master", its values as they are updated, and others by names of their own, which share memory with the
        optimizer and are distributed as the parameter is or the same on every rank; or by no name one
        `ParameterState`. After loading it must round its masters into the parameters (`round_parameters`).
    numbers: those of these stages in the pipeline (`schedule.rank_stages(rank)`), where names repeat from stage to
        stage: each is then behind its stage's number, so the checkpoint fits a pipeline of the same stages alone.

    Raises ValueError where a name means two tensors, and for a parameter of the optimizer that no stage has.
    """
    if numbers is not None and len(numbers) != len(stages):
        raise ValueError(f"numbers must be those of the {len(stages)} stages given; got {list(numbers)}")
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    ours = {} if optimizer is None or groups else optimizer.state_tensors()
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
            found |= {name: own.pop("master", tensor)} | {
                f"{OPTIMIZER}{name}/{key}".rstrip("/"): each for key, each in own.items()}
    for group in groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(f"the optimizer has a parameter {tuple(parameter.shape)} that is in none of the "
                                 "stages: give all modules that it updates")
            found[OPTIMIZER + names[parameter]] = ParameterState(optimizer, group, parameter)
    return found


def numbered(names: Iterable[str]) -> set[int]:
    """The numbers of stages that are in names."""
    return {int(found[1]) for name in names if (found := _NUMBERED.match(name))}


class TensorPart(NamedTuple):
    """What this rank holds of a tensor."""

    shape: tuple[int, ...]  # of the whole
    box: Box  # in it
    tensor: Tensor  # a plain one, of that box; or the block rows of
    quantized: QuantizedTensor | None = None

    @property
    def dtype(self) -> torch.dtype | Format:
        """Dtype or format of the numbers, in a file."""
        return self.tensor.dtype if self.quantized is None else self.quantized.format


def parts_of(state: CheckpointState, stored: Mapping[str, StoredTensor] | None = None) -> dict[str, TensorPart]:
    """This rank's parts, sharing memory; raises ValueError for what cannot be stored.

    stored: what a checkpoint has that is to be read into them; None: they are to be saved.
    """
    by_parameter: dict[str, dict[str, StoredTensor]] = {}
    for name, entry in (stored or {}).items():
        parameter, _, key = name.rpartition("/")
        by_parameter.setdefault(parameter, {})[key] = entry
    tensors: dict[str, Tensor] = {}
    for name, each in state.items():
        if isinstance(each, ParameterState):
            own = each.tensors() if stored is None else each.place(by_parameter.get(name, {}))
            tensors |= {f"{name}/{key}": tensor for key, tensor in own.items()}
        else:
            tensors[name] = each
    parts = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is a {type(name).__name__}; the names of tensors must be texts")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name} is a sum that is not yet reduced ({tensor.placements}); redistribute it first")
        local, place = local_part(tensor)
        if (quantized := quantized_part(tensor)) is not None:
            parts[name] = TensorPart(tuple(tensor.shape), Box.at(place), quantized.block_rows, quantized)
            continue
        if type(local.detach()) is not Tensor:
            raise ValueError(f"{name} is a {type(local).__name__}; only plain tensors can be stored")
        if stored is not None and any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape)):
            raise ValueError(f"{name} is expanded: its elements share memory, so it cannot be loaded into")
        parts[name] = TensorPart(tuple(tensor.shape), Box.at(place), local)
    return parts


@torch.no_grad()
def not_finite(state: CheckpointState, parts: Mapping[str, TensorPart]) -> list[str]:
    """Which of these parts of a state have an infinite number or NaN: of its parameters, their masters, and what the
    optimizer keeps of them. Buffers, such as masks, may; quantized parameters cannot.

    On the device, without a copy of any; the host waits once for each device where all is well.
    """
    trained = {name[len(OPTIMIZER) :].rpartition("/")[0] for name in parts if name.startswith(OPTIMIZER)}
    kinds: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, part in parts.items():
        tensor, is_numbers = part.tensor, part.quantized is None and part.dtype in _CHECKED
        is_meant = name.startswith(OPTIMIZER) or name in trained or isinstance(state.get(name), nn.Parameter)
        if is_meant and is_numbers and tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
    names: dict[torch.device, list[str]] = {}
    norms: dict[torch.device, list[Tensor]] = {}
    for (device, _), tensors in kinds.items():
        names.setdefault(device, []).extend(tensors)
        # Of squares, as that takes half as long as a copy, and the largest number four times one.
        norms.setdefault(device, []).append(torch.stack([*torch._foreach_norm([*tensors.values()], ord=2)]).double())
    suspects = [name for device, numbers in norms.items()
                for name, number in zip(names[device], torch.cat(numbers).tolist()) if not math.isfinite(number)]
    return [name for name in suspects if not parts[name].tensor.isfinite().all()]  # or the sum is too large


def as_number(value: Any) -> Any:
    """What JSON holds in place of a tensor with one element, such as a learning rate."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{brief(value)} is a {type(value).__name__}")


def capture_random() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's global generators, and the current GPU's, as JSON can hold it."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}
    of_torch = RandomState.capture()
    for device, numbers in (("torch", of_torch.cpu), ("cuda", of_torch.cuda)):
        if numbers is not None:
            state[device] = base64.b64encode(numbers.numpy().tobytes()).decode()
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Continue where `capture_random` was called."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    saved = {name: torch.frombuffer(bytearray(base64.b64decode(state[name])), dtype=torch.uint8)
             for name in ("torch", "cuda") if name in state}
    RandomState(saved["torch"], saved.get("cuda")).restore()


def derive_random(seed: int, step: int, rank: int) -> None:
    """Seed all generators with a number that depends on these three alone."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
