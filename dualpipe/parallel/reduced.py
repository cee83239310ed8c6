"""Whether the gradients of a pipeline's stages are reduced over its data-parallel ranks: all of them, and by FSDP2.

A pipeline runs many backwards in a step and computes weight gradients outside of them. DistributedDataParallel and the
first FSDP reduce in hooks of one backward, which would then see a part of a gradient, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import chain

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dualpipe.parallel.fsdp import StageParameters

_REMEDY = "use dualpipe.parallel.shard or torch's fully_shard"
_SHOWN = 3


def check_stages(
    stages: Sequence[nn.Module], parameters: Sequence[StageParameters], unreduced: Iterable[str] | str
) -> tuple[bool, list[str]]:
    """Whether FSDP2 reduces any of a rank's gradients over several ranks, and the first parameters of those stages that
    it has nothing of; for `check_ranks`.

    unreduced: names in their stage, of parameters or modules, with wildcards, whose gradients are the caller's to
    reduce. Raises ValueError for a stage that reduces in another way, is sharded together with another one, or in part
    and does not name the rest.
    """
    unreduced = (unreduced,) if isinstance(unreduced, str) else tuple(unreduced)
    patterns = [*unreduced, *(f"{pattern}.*" for pattern in unreduced)]
    places = [set(its.places()) for its in parameters]
    managed = set(chain.from_iterable(places))
    if len(managed) != sum(map(len, places)):
        raise ValueError("fully_shard was given modules of two stages together, which are gathered and reduced "
                         "at different times; shard each stage by itself, sharing no parameter")
    meshes = {param.device_mesh for module, name in managed if isinstance(param := getattr(module, name), DTensor)}
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    plain: list[str] = []
    for number, stage in enumerate(stages):
        for name, module in stage.named_modules():
            if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
                raise ValueError(f"module {number} of this rank {'has' if name else 'is'} a {type(module).__name__}"
                                 f"{name and f', {name}'}, which does not reduce the gradients of a pipeline's step: "
                                 f"{_REMEDY} instead")
        missed = [name for name in _unsharded(stage, places[number], ranks)
                  if not any(fnmatchcase(name, pattern) for pattern in patterns)]
        if places[number] and len(ranks) > 1 and missed:
            raise ValueError(f"module {number} of this rank is sharded in part, but not {_some(missed)}; {_told()}")
        plain += missed
    return len(ranks) > 1, plain[:_SHOWN]


def check_ranks(ranks: Sequence[tuple[bool, list[str]]]) -> None:
    """Raise ValueError where some stages of a pipeline are sharded over several ranks, and others not at all."""
    plain = list(chain.from_iterable(names for _, names in ranks))
    if plain and any(reduces for reduces, _ in ranks):
        raise ValueError(f"some stages are sharded, but not the one with {_some(plain)}; {_told()}")


def _told() -> str:
    return (f"gradients would differ from one data-parallel rank to the next: {_REMEDY}, or, where you reduce them "
            "yourself, name them in unreduced")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _unsharded(stage: nn.Module, places: set[tuple[nn.Module, str]], ranks: set[int]) -> list[str]:
    """The names of the stage's trainable parameters that FSDP2 has not, and of which no rank has a part of its own."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in stage.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if param.requires_grad and (module, name) not in places and not _apart(param, ranks)
    ]


def _apart(param: nn.Parameter, ranks: set[int]) -> bool:
    """Whether each of the ranks has another part of the parameter, as of experts, and so nothing to reduce."""
    if not isinstance(param, DTensor) or any(placed.is_replicate() for placed in param.placements):
        return False
    return ranks <= set(param.device_mesh.mesh.flatten().tolist())
