"""Custom models and their split into stages, as the function in `--model module:function` returns them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.nn import defer_weight_grads
from dualpipe.parallel import DTypePolicy, resolve_dtypes, shard_stages
from dualpipe.parallel.mesh import Mesh

Tensors = Tensor | Sequence[Tensor]


class NamedStage(NamedTuple):
    """A stage of the pipeline. names: names in the unpipelined model, by the names of the stage's parameters."""

    number: int
    module: nn.Module
    names: dict[str, str]


class ComparedModel(Protocol):
    """Interface of models that parity compares: the unpipelined model, its stages, and a batch for both.

    num_chunks: number of micro-batches in a step; schedule: name of the pipeline's schedule.
    """

    @property
    def num_chunks(self) -> int: ...

    @property
    def schedule(self) -> str: ...

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return the unpipelined model."""

    def build_stages(
        self, num_stages: int, numbers: Sequence[int], dtype: torch.dtype, device: torch.device,
        mesh: DeviceMesh | None,
    ) -> list[NamedStage]:
        """Return the stages with these numbers and the weights of the unpipelined model. Collective over the mesh.

        dtype: compute dtype; see `storage_dtype`. mesh: to shard the stages over; None: not sharded.
        """

    def make_batch(self, seed: int) -> tuple[Tensors, Tensors, Mapping[str, Tensor]]:
        """Return inputs, labels and side inputs of a step of one pipeline."""

    def compute_loss(self, *outputs_and_labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""


@dataclass(frozen=True)
class CutModel:
    """The unpipelined model, and the functions that split it into stages, prepare them and train them.

    Attributes:
        whole: the unpipelined model. Parity works on copies of it.
        cut: `cut(model, num_stages)` returns the stages, made of the modules of `model`, a copy of `whole`.
        batch: `batch(seed)` returns inputs and labels of a step of one pipeline, each a tensor or several with the
            batch as the first dimension. Every pipeline gets another seed. A third value is a dict of side inputs, such
            as position ids, by name: `whole` gets all of them by keyword, and stages as in `Pipeline.step`.
        loss: `loss(*outputs, *labels)` of a micro-batch, as in training: gradients are summed over micro-batches.
        place: `place(stages, mesh, dtype)` prepares a rank's stages in place as for training: it shards them, sets the
            dispatchers of their experts, and defers weight gradients. dtype: compute dtype. By default weight gradients
            are deferred, and parameters are sharded by FSDP2; expert parallelism (--ep) needs a `place`.
        names: `names(stage, name)` returns the name in the unpipelined model of a stage's parameter. By default
            parameters of the copy given to `cut` are recognized, and new ones must have the same names.
        num_chunks: number of micro-batches in a step.
        schedule: name of the schedule, see `dualpipe.schedule.build`.
    """

    whole: nn.Module
    cut: Callable[[nn.Module, int], Sequence[nn.Module]]
    batch: Callable[[int], tuple[Tensors, Tensors] | tuple[Tensors, Tensors, Mapping[str, Tensor]]]
    loss: Callable[..., Tensor]
    place: Callable[[list[nn.Module], DeviceMesh, torch.dtype], object] | None = None
    names: Callable[[int, str], str] | None = None
    num_chunks: int = 4
    schedule: str = "dualpipev"

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return a copy of the unpipelined model."""
        return copy.deepcopy(self.whole).to(device, dtype)

    def build_stages(
        self, num_stages: int, numbers: Sequence[int], dtype: torch.dtype, device: torch.device,
        mesh: DeviceMesh | None,
    ) -> list[NamedStage]:
        """Split a copy of the unpipelined model, and prepare the stages with these numbers."""
        whole = self.build_whole(dtype, device)
        shapes = {name: parameter.shape for name, parameter in _all_parameters(whole)}
        names_by_id = {id(parameter): name for name, parameter in whole.named_parameters()}
        modules = list(self.cut(whole, num_stages))
        if len(modules) != num_stages or not all(isinstance(module, nn.Module) for module in modules):
            kinds = [type(module).__name__ for module in modules]
            raise ValueError(f"cut(whole, {num_stages}) returned {kinds}; it must return {num_stages} nn.Modules")
        storage = storage_dtype(dtype, mesh)
        for parameter in whole.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(storage)  # values stay rounded to `dtype`, as in the whole model
        # Checks all stages, so that an invalid one raises on every rank.
        names = [self._names_of(number, module, names_by_id, shapes) for number, module in enumerate(modules)]
        stages = [NamedStage(number, modules[number], names[number]) for number in numbers]
        self._place([stage.module for stage in stages], dtype, mesh)
        return stages

    def make_batch(self, seed: int) -> tuple[Tensors, Tensors, Mapping[str, Tensor]]:
        """Return inputs, labels and side inputs."""
        parts = self.batch(seed)
        if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
            raise ValueError(f"batch({seed}) returned a {type(parts).__name__}; it must return (inputs, labels), or "
                             "(inputs, labels, side) with a dict of side inputs by name")
        inputs, labels, *rest = parts
        return inputs, labels, rest[0] if rest else {}

    def compute_loss(self, *outputs_and_labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return self.loss(*outputs_and_labels)

    def _names_of(
        self, number: int, stage: nn.Module, names_by_id: dict[int, str], shapes: dict[str, torch.Size]
    ) -> dict[str, str]:
        """Return the names in the unpipelined model of a stage's parameters, which are not yet sharded.

        Raises ValueError for a parameter that is not in the unpipelined model, or has another shape there.
        """
        names: dict[str, str] = {}
        for stage_name, parameter in _all_parameters(stage):
            if self.names is not None:
                name = self.names(number, stage_name)
            else:
                # By identity, as a stage may rename parameters; a parameter that cut() created must keep its name.
                name = names_by_id.get(id(parameter), stage_name)
            if name not in shapes:
                raise ValueError(f"stage {number} has a parameter {stage_name!r}, which the unpipelined model lacks; "
                                 "make stages of the modules that cut() receives, or give CutModel(names=...)")
            if parameter.shape != shapes[name]:
                raise ValueError(f"{stage_name!r} of stage {number} has shape {list(parameter.shape)}, and {name!r} of "
                                 f"the unpipelined model {list(shapes[name])}; shard parameters in "
                                 "CutModel(place=...), not in cut()")
            names[stage_name] = name
        return names

    def _place(self, modules: list[nn.Module], dtype: torch.dtype, mesh: DeviceMesh | None) -> None:
        """Prepare the stages as for training."""
        if mesh is None:
            return
        if self.place is not None:
            self.place(modules, mesh, dtype)
            return
        place = Mesh.of(mesh)
        if place.size("ep") > 1:
            raise ValueError(f"--ep {place.size('ep')} needs CutModel(place=...), which distributes experts over "
                             "ranks; give it, or leave out --ep")
        for module in modules:
            defer_weight_grads(module)
        plan = resolve_dtypes(modules, policy_of(dtype), group=place.group("pp"))
        shard_stages(modules, place.dense if place.replicas > 1 else None, plan)


def storage_dtype(dtype: torch.dtype, mesh: DeviceMesh | None) -> torch.dtype:
    """Return the dtype in which the parameters of stages that compute in `dtype` are stored.

    Sharded parameters are stored in at least float32: FSDP2 casts them when it gathers them, and returns gradients in
    the storage dtype. Parameters that are not sharded are never cast.
    """
    return torch.promote_types(dtype, torch.float32) if Mesh.of(mesh).replicas > 1 else dtype


def policy_of(dtype: torch.dtype) -> DTypePolicy:
    """Return a policy that computes in `dtype` and accumulates gradients in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return DTypePolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=dtype)


def _all_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters of a module, tied parameters under all their names."""
    return list(module.named_parameters(remove_duplicate=False))
