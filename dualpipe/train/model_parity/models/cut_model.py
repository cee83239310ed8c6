"""Custom models and their cut into stages, as the function of `--model module:function` returns them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
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
    """A stage of the pipeline. names: for the name of each of its parameters, that in the uncut model."""

    number: int
    module: nn.Module
    names: dict[str, str]


class ComparedModel(Protocol):
    """Interface of what parity compares: the uncut model, its stages, and a batch for both.

    num_chunks: micro-batches of a step; schedule: the name of the pipeline's schedule.
    """

    @property
    def num_chunks(self) -> int: ...

    @property
    def schedule(self) -> str: ...

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return the uncut model."""

    def build_stages(
        self, num_stages: int, mine: Sequence[int], dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None
    ) -> list[NamedStage]:
        """Return the stages `mine`, with the weights of the uncut model. Collective over the mesh.

        dtype: what they compute in; see `storage_dtype`. mesh: to place them on; None: nothing is sharded.
        """

    def make_batch(self, seed: int) -> tuple[Tensors, Tensors]:
        """Return inputs and labels of one pipeline's step."""

    def compute_loss(self, *outputs_and_labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""


@dataclass(frozen=True)
class CutModel:
    """The uncut model, and how it is cut, placed and trained.

    whole: the uncut model. Parity works on copies of it.
    cut: `cut(model, num_stages)` returns the stages, made of the modules of `model`, which is a copy of `whole`.
    batch: `batch(seed)` returns inputs and labels of a step of one pipeline, each a tensor or several. Every pipeline
        gets another seed. The first dimension is that of the batch.
    loss: `loss(*outputs, *labels)` of a micro-batch, as training has it: gradients are summed over micro-batches.
    place: `place(stages, mesh, dtype)` does to a rank's stages, in place, what training does to them: shards them,
        gives them their experts' dispatchers, defers weight gradients. dtype: what they are to compute in. By default
        weight gradients are deferred, and the parameters are sharded by FSDP2; experts over ranks (--ep) need a
        `place`.
    names: `names(stage, name)` returns the name in the uncut model of a stage's parameter. By default parameters are
        recognised as those of the copy that was cut, and new ones by their names.
    num_chunks, schedule: micro-batches of a step, and the schedule, by the names of `dualpipe.schedule.build`.
    """

    whole: nn.Module
    cut: Callable[[nn.Module, int], Sequence[nn.Module]]
    batch: Callable[[int], tuple[Tensors, Tensors]]
    loss: Callable[..., Tensor]
    place: Callable[[list[nn.Module], DeviceMesh, torch.dtype], object] | None = None
    names: Callable[[int, str], str] | None = None
    num_chunks: int = 4
    schedule: str = "dualpipev"

    def build_whole(self, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return a copy of the uncut model."""
        return copy.deepcopy(self.whole).to(device, dtype)

    def build_stages(
        self, num_stages: int, mine: Sequence[int], dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None
    ) -> list[NamedStage]:
        """Cut a copy of the uncut model, and place the stages `mine`."""
        whole = self.build_whole(dtype, device)
        shapes = {name: parameter.shape for name, parameter in _all_parameters(whole)}
        known = {id(parameter): name for name, parameter in whole.named_parameters()}
        modules = list(self.cut(whole, num_stages))
        if len(modules) != num_stages or not all(isinstance(module, nn.Module) for module in modules):
            kinds = [type(module).__name__ for module in modules]
            raise ValueError(f"cut(whole, {num_stages}) returned {kinds}; it must return {num_stages} nn.Modules")
        storage = storage_dtype(dtype, mesh)
        for parameter in whole.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(storage)  # with values rounded to `dtype`, as the uncut model's are
        # Of all stages, so that a wrong one is refused on every rank.
        names = [self._names_of(number, module, known, shapes) for number, module in enumerate(modules)]
        stages = [NamedStage(number, modules[number], names[number]) for number in mine]
        self._place([stage.module for stage in stages], dtype, mesh)
        return stages

    def make_batch(self, seed: int) -> tuple[Tensors, Tensors]:
        """Return inputs and labels."""
        pair = self.batch(seed)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"batch({seed}) returned a {type(pair).__name__}; it must return (inputs, labels)")
        inputs, labels = pair
        return inputs, labels

    def compute_loss(self, *outputs_and_labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch."""
        return self.loss(*outputs_and_labels)

    def _names_of(
        self, number: int, stage: nn.Module, known: dict[int, str], shapes: dict[str, torch.Size]
    ) -> dict[str, str]:
        """Return the names in the uncut model of a stage's parameters, before they are sharded."""
        names: dict[str, str] = {}
        for own, parameter in _all_parameters(stage):
            # By identity first: a stage may name its parameters as it likes. A cut that makes parameters anew is
            # trusted to have kept their names, unless it says otherwise.
            name = self.names(number, own) if self.names is not None else known.get(id(parameter), own)
            if name not in shapes:
                raise ValueError(f"stage {number} has a parameter {own!r}, which is none of the uncut model's; make "
                                 "stages of the modules that cut() is given, or give CutModel(names=...)")
            if parameter.shape != shapes[name]:
                raise ValueError(f"{own!r} of stage {number} has shape {list(parameter.shape)}, and {name!r} of the "
                                 f"uncut model {list(shapes[name])}; shard parameters in CutModel(place=...), not in "
                                 "cut()")
            names[own] = name
        return names

    def _place(self, modules: list[nn.Module], dtype: torch.dtype, mesh: DeviceMesh | None) -> None:
        """Do to the stages what training does to them."""
        if mesh is None:
            return
        if self.place is not None:
            self.place(modules, mesh, dtype)
            return
        place = Mesh.of(mesh)
        if place.size("ep") > 1:
            raise ValueError(f"--ep {place.size('ep')}: the model does not say how its experts are placed on ranks; "
                             "give CutModel(place=...), or leave out --ep")
        for module in modules:
            defer_weight_grads(module)
        plan = resolve_dtypes(modules, policy_of(dtype), group=place.group("pp"))
        shard_stages(modules, place.dense if place.replicas > 1 else None, plan)


def storage_dtype(dtype: torch.dtype, mesh: DeviceMesh | None) -> torch.dtype:
    """Return the dtype in which the parameters of stages that compute in `dtype` are stored.

    Sharded ones are stored in at least float32: FSDP2 casts them when it gathers them, and hands out their gradients in
    the dtype of storage. Nothing casts those that are not sharded.
    """
    return torch.promote_types(dtype, torch.float32) if Mesh.of(mesh).replicas > 1 else dtype


def policy_of(dtype: torch.dtype) -> DTypePolicy:
    """Return the policy by which stages compute in `dtype`, and accumulate gradients in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return DTypePolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=dtype)


def _all_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module with their names, tied ones by all of these."""
    return list(module.named_parameters(remove_duplicate=False))
