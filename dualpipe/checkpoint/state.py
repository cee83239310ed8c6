"""The state that a checkpoint holds: tensors by names that no layout changes, and the box of each on this rank.

    layers.3.mlp.experts.gate_up_proj.weight                          a parameter, in at least float32 if trained
    layers.3.mlp.gate.e_score_correction_bias                         a buffer, in its own dtype
    layers.3.mlp.shared_expert.down_proj.weight                       a frozen quantized parameter, as block rows, the
                                                                      bytes that `kernels.formats` describes
    optimizer/layers.3.mlp.experts.gate_up_proj.weight/exp_avg        a tensor of the optimizer's state, by its key
    optimizer/layers.3.mlp.experts.gate_up_proj.weight/values         JSON as bytes: values of torch's optimizers
    stage-3.0.weight                                                  a parameter of a stage whose names repeat

A trained parameter is stored once, as the values that the optimizer updates: the float32 master of a bfloat16
parameter, or, where FSDP2 keeps the shards in float32, the parameter itself. So the master of one layout is the
parameter of another. A bfloat16 parameter is its rounded master, so it is restored bit for bit without being stored.
The same holds for a trained quantized parameter, whose bytes follow from its master.
"""

from __future__ import annotations

import base64
import hashlib
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dualpipe.checkpoint.manifest import StoredTensor
from dualpipe.checkpoint.optimizer_state import ParameterState
from dualpipe.checkpoint.tensors import Box
from dualpipe.kernels.formats import Format
from dualpipe.nn.init import local_part
from dualpipe.quantized import QuantizedTensor
from dualpipe.quantized.quantize_model import quantized_part
from dualpipe.runtime.device import RandomState

OPTIMIZER = "optimizer/"
STAGE_NAMES_HINT = ("give training_state the stages of one model, with the parameter names of the whole model, or the "
                    "numbers of the stages")
_STAGE_NAME = re.compile(rf"(?:{OPTIMIZER})?stage-(\d+)\.")
_CHECKED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

CheckpointState = Mapping[str, Tensor | ParameterState]  # from `training_state`, and any other tensors


def training_state(
    stages: Sequence[nn.Module], optimizer: Any = None, *, numbers: Sequence[int] | None = None
) -> dict[str, Tensor | ParameterState]:
    """Return the tensors of this rank's stages and of their optimizer by name, sharing memory.

    The result is the `state` of `save` and of `load`, which fills it in place. A tied parameter appears once, under its
    first name.

    Args:
        stages: this rank's stages, in ascending order.
        optimizer: one of two kinds. Any `torch.optim.Optimizer`, which need not have taken a step yet: parameters are
            stored in their own dtype, as without an optimizer. Or an object with `state_tensors()`, such as
            `dualpipe.train.optim.optimizer.Optimizer`: it returns, for every parameter, tensors by name or one
            `ParameterState` under the name "". The tensor "master" has the values that the optimizer updates. All
            tensors share memory with the optimizer, and each is distributed like the parameter or replicated. After
            loading, that optimizer must round its masters into the parameters (`round_parameters`).
        numbers: the positions of the stages in the pipeline (`schedule.rank_stages(rank)`), for stages whose
            parameter names repeat. Names then start with the number of the stage, so the checkpoint only fits a
            pipeline of the same stages.

    Raises:
        ValueError: two tensors have the same name; the optimizer has a parameter that is in none of the stages; a
            stage's state dict has a value that is no tensor; or `numbers` does not fit `stages`.
    """
    if numbers is not None and len(numbers) != len(stages):
        raise ValueError(f"got numbers {list(numbers)} for {len(stages)} stages; give one number per stage")
    is_torch_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    extra_tensors = {} if optimizer is None or is_torch_optimizer else optimizer.state_tensors()
    state: dict[str, Tensor | ParameterState] = {}
    names: dict[Tensor, str] = {}
    for index, stage in enumerate(stages):
        prefix = "" if numbers is None else f"stage-{numbers[index]}."
        for name, tensor in stage.state_dict(keep_vars=True).items():  # shards, and only persistent buffers
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is a {type(tensor).__name__}; only tensors can be stored")
            if tensor in names:
                continue
            name = prefix + name
            if name in state:
                raise ValueError(f"two stages have a tensor called {name!r}; {STAGE_NAMES_HINT}")
            names[tensor] = name
            optimizer_tensors = dict(extra_tensors.get(tensor, {}))
            state[name] = optimizer_tensors.pop("master", tensor)
            for key, value in optimizer_tensors.items():
                state[f"{OPTIMIZER}{name}/{key}".rstrip("/")] = value
    for group in optimizer.param_groups if is_torch_optimizer else ():
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(f"the optimizer has a parameter {tuple(parameter.shape)} that is in none of the "
                                 "stages: give all modules that it updates")
            state[OPTIMIZER + names[parameter]] = ParameterState(optimizer, group, parameter)
    return state


def stage_numbers(names: Iterable[str]) -> set[int]:
    """Return the stage numbers in the names of tensors."""
    matches = (_STAGE_NAME.match(name) for name in names)
    return {int(match[1]) for match in matches if match}


class TensorPart(NamedTuple):
    """The part of a tensor on this rank."""

    shape: tuple[int, ...]  # of the complete tensor
    box: Box  # place of the part in the complete tensor
    tensor: Tensor  # the part as a plain tensor, or the block rows of `quantized`
    quantized: QuantizedTensor | None = None

    @property
    def dtype(self) -> torch.dtype | Format:
        """The dtype or format of the values in a file."""
        return self.tensor.dtype if self.quantized is None else self.quantized.format


def parts_of(state: CheckpointState, stored: Mapping[str, StoredTensor] | None = None) -> dict[str, TensorPart]:
    """Return this rank's parts of the tensors of a state, sharing memory.

    Args:
        state: from `training_state`, and any other tensors.
        stored: the tensors of the checkpoint that will be read into the parts; None if the parts are to be saved.

    Raises:
        ValueError: a tensor cannot be stored, or cannot be read into.
    """
    parts = {}
    for name, tensor in _expand(state, stored).items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is a {type(name).__name__}; the names of tensors must be strings")
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name} is a partial sum ({tensor.placements}); redistribute it first")
        local, slices = local_part(tensor)
        shape = tuple(tensor.shape)
        box = Box.from_slices(slices)
        quantized = quantized_part(tensor)
        if quantized is not None:
            parts[name] = TensorPart(shape, box, quantized.block_rows, quantized)
            continue
        if type(local.detach()) is not Tensor:
            raise ValueError(f"{name} is a {type(local).__name__}; only plain tensors can be stored")
        if stored is not None and any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape)):
            raise ValueError(f"{name} is expanded: its elements share memory, so it cannot be loaded into; give a "
                             "contiguous tensor")
        parts[name] = TensorPart(shape, box, local)
    return parts


def _expand(state: CheckpointState, stored: Mapping[str, StoredTensor] | None) -> dict[str, Tensor]:
    """Replace every `ParameterState` by the tensors that are saved, or loaded into, for it."""
    by_parameter: dict[str, dict[str, StoredTensor]] = {}
    for name, entry in (stored or {}).items():
        parameter, _, key = name.rpartition("/")
        by_parameter.setdefault(parameter, {})[key] = entry
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, ParameterState):
            inner = value.tensors() if stored is None else value.load_targets(by_parameter.get(name, {}))
            tensors |= {f"{name}/{key}": tensor for key, tensor in inner.items()}
        else:
            tensors[name] = value
    return tensors


@torch.no_grad()
def find_non_finite(state: CheckpointState, parts: Mapping[str, TensorPart]) -> list[str]:
    """Return the names of parameters, masters and optimizer states that have an element that is infinite or NaN.

    Buffers and quantized parameters are not checked: a buffer, such as a mask, may have such elements, and a quantized
    parameter cannot. Runs on the device without copying a tensor. If all elements are finite, the host waits once per
    device.

    Args:
        state: the complete state.
        parts: parts of this rank, from `parts_of(state)`.
    """
    trained = {name[len(OPTIMIZER) :].rpartition("/")[0] for name in parts if name.startswith(OPTIMIZER)}
    by_dtype: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, part in parts.items():
        tensor = part.tensor
        is_floating = part.quantized is None and part.dtype in _CHECKED_DTYPES
        must_be_finite = name.startswith(OPTIMIZER) or name in trained or isinstance(state.get(name), nn.Parameter)
        if must_be_finite and is_floating and tensor.numel():
            by_dtype.setdefault((tensor.device, tensor.dtype), {})[name] = tensor
    names: dict[torch.device, list[str]] = {}
    norms: dict[torch.device, list[Tensor]] = {}
    for (device, _), tensors in by_dtype.items():
        names.setdefault(device, []).extend(tensors)
        # The 2-norm shows an infinite element or NaN, and takes half as long as a copy of the tensors. The largest
        # absolute value would show it too, but takes four times as long as the copy.
        norms.setdefault(device, []).append(torch.stack([*torch._foreach_norm([*tensors.values()], ord=2)]).double())
    suspects = [name for device, device_norms in norms.items()
                for name, norm in zip(names[device], torch.cat(device_norms).tolist()) if not math.isfinite(norm)]
    return [name for name in suspects if not parts[name].tensor.isfinite().all()]  # the sum of squares may overflow


def capture_random() -> dict[str, Any]:
    """Return the state of the global generators of Python, NumPy, torch, and the current GPU, as JSON."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {"python": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}
    torch_state = RandomState.capture()
    for device, values in (("torch", torch_state.cpu), ("cuda", torch_state.cuda)):
        if values is not None:
            state[device] = base64.b64encode(values.numpy().tobytes()).decode()
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Set all global generators to a state from `capture_random`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch_state = {name: torch.frombuffer(bytearray(base64.b64decode(state[name])), dtype=torch.uint8)
                   for name in ("torch", "cuda") if name in state}
    RandomState(torch_state["torch"], torch_state.get("cuda")).restore()


def derive_random(seed: int, step: int, rank: int) -> None:
    """Seed all global generators with a number that depends only on seed, step and rank."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
