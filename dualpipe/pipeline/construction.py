"""The checks when a pipeline is built: a rank's stages on their own, and what the ranks must agree on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dualpipe.nn.deferral import local
from dualpipe.parallel.fsdp.driver import StageParameters
from dualpipe.parallel.tied import tied_parameters
from dualpipe.pipeline.arguments import require_same
from dualpipe.pipeline.side_inputs import SideSpec
from dualpipe.runtime.dtypes import long_name

_SHOWN = 3  # parameters that are not reduced
_REMEDY = "use dualpipe.parallel.shard or torch's fully_shard"
_UNREDUCED = (f"gradients would differ from one data-parallel rank to the next: {_REMEDY}, or, where you reduce them "
              "yourself, name them in unreduced")


@dataclass(frozen=True)
class TiedEnds:
    """Shapes of the first stage's embeddings and of the last one's matrices, where a config ties them; and what must be
    alike of the copies that each says to have. Empty for a stage on another rank, and where both ends are on one."""

    embeddings: list[list[int]]
    matrices: list[list[int]]
    first_copies: list[str]
    last_copies: list[str]


@dataclass(frozen=True)
class PipelineArguments(TiedEnds):
    """A rank's description of its pipeline when it builds it.

    overlap: whether pairs may overlap; None where nothing here could. side_specs: the fields of the stages'
    `SideSpec`s. reduces, unreduced: see `check_stages`.
    """

    schedule: str
    schedule_checksum: int
    device: str
    batch_dim: int
    rank_mapping: list[int]
    overlap: bool | None
    side_specs: list[list[Any]]
    is_hooked: bool
    has_float64: bool
    reduces: bool
    unreduced: list[str]


@dataclass(frozen=True)
class PipelineAgreement:
    """The conclusion from the descriptions of all ranks.

    overlap: whether pairs overlap. has_copies: whether the ends have copies of tied parameters on two ranks.
    """

    overlap: bool
    side: SideSpec
    norm_dtype: torch.dtype
    has_copies: bool


def compare_pipelines(ranks: Sequence[PipelineArguments]) -> PipelineAgreement:
    """Return what follows from what all ranks say; ValueError where they do not fit together."""
    require_same("(schedule, its checksum, device, batch_dim, rank_mapping)", [
        [r.schedule, r.schedule_checksum, r.device, r.batch_dim, r.rank_mapping] for r in ranks
    ])
    _check_reduced(ranks)
    _check_tied(ranks)
    overlaps = [r.overlap for r in ranks if r.overlap is not None]
    specs = [SideSpec(*fields) for fields in chain.from_iterable(r.side_specs for r in ranks)]
    names = sorted(set(chain.from_iterable(spec.names for spec in specs)))
    side = SideSpec(tuple(names), any(spec.every for spec in specs), any(r.is_hooked for r in ranks))
    return PipelineAgreement(
        overlap=any(overlaps),
        side=side,
        norm_dtype=torch.float64 if any(r.has_float64 for r in ranks) else torch.float32,
        has_copies=any(r.first_copies for r in ranks),
    )


def _check_tied(ends: Sequence[TiedEnds]) -> None:
    """Raise ValueError where weights that are to be one would be trained as two, or copies differ."""
    matrices = list(chain.from_iterable(end.matrices for end in ends))
    if any(shape in matrices for end in ends for shape in end.embeddings):
        raise ValueError("tie_word_embeddings is set, but the first and the last stage are on two ranks and would "
                         "train two weights; use a V-shaped schedule (dualpipev, zbv), give both stages a method "
                         "tied_parameters() that returns their copies, or set it to False in their config")
    first = list(chain.from_iterable(end.first_copies for end in ends))
    last = list(chain.from_iterable(end.last_copies for end in ends))
    if first != last:
        raise ValueError("the tied_parameters() of the first and of the last stage must be copies of one another, of "
                         "one shape, dtype and dtype of gradients, sharded alike, and frozen or not at both ends; they "
                         f"are {first} and {last}")


def _check_reduced(ranks: Sequence[PipelineArguments]) -> None:
    """Raise ValueError where some stages of a pipeline are sharded over several ranks, and others not at all."""
    plain = list(chain.from_iterable(r.unreduced for r in ranks))
    if plain and any(r.reduces for r in ranks):
        raise ValueError(f"some stages are sharded, but not the one with {_some(plain)}; {_UNREDUCED}")


def checked_modules(modules: Any) -> tuple[nn.ModuleList, torch.device | None]:
    """The stages of a rank, and the device of their parameters and buffers, None where they have none. ValueError where
    they are not modules, one is there twice, or they are on several devices."""
    sequence = isinstance(modules, list | tuple | nn.ModuleList | nn.Sequential)
    if not sequence or not all(isinstance(module, nn.Module) for module in modules):
        kinds = [type(m).__name__ for m in modules] if isinstance(modules, list | tuple) else type(modules).__name__
        raise ValueError(f"modules must be a tuple of nn.Modules, got {kinds}")
    if len(set(modules)) < len(modules):
        names = [type(module).__name__ for module in modules]
        raise ValueError(f"one module is given twice in {names}; give each stage a module of its own, which may "
                         "share Parameters with another")
    devices = {t.device for m in modules for t in chain(m.parameters(), m.buffers())}
    if len(devices) > 1 or any(d.type == "meta" for d in devices):
        raise ValueError(f"all stages of a rank must be on one real device, found {sorted(map(str, devices))}")
    return nn.ModuleList(modules), devices.pop() if devices else None


def _copy(parameter: nn.Parameter) -> str:
    """Describe a copy of a tied parameter by all that both ends must share, as its gradients are exchanged."""
    dtype = long_name(parameter.dtype)
    gradient = long_name(parameter.grad_dtype or parameter.dtype)
    own = local(parameter.detach()).shape
    return (f"{dtype}{list(parameter.shape)}" + (f" with {gradient} gradients" if gradient != dtype else "")
            + (f" of which {list(own)} are here" if own != parameter.shape else ""))


def tied_ends(first: nn.Module | None, last: nn.Module | None) -> TiedEnds:
    """Return what a rank has of the ends of a pipeline that may be tied; None stands for a stage on another rank.

    Raises ValueError where both are here, with weights that are to be one, and share no Parameter.
    """
    first_copies = tied_parameters(first)
    last_copies = tied_parameters(last)
    embeddings: list[Tensor] = []
    if first is not None and not first_copies and _ties_embeddings(first):
        embeddings = [m.weight for m in first.modules() if isinstance(m, nn.Embedding)]
    matrices: list[Tensor] = []
    if last is not None and not last_copies and _ties_embeddings(last):
        matrices = [p for p in last.parameters() if p.dim() == 2]
    embedding_shapes = _shapes(embeddings)
    matrix_shapes = _shapes(matrices)
    if first is None or last is None:
        return TiedEnds(embedding_shapes, matrix_shapes, list(map(_copy, first_copies)), list(map(_copy, last_copies)))
    if any(a is not b for a, b in zip_longest(first_copies, last_copies)):
        raise ValueError("the first and the last stage are on one rank and must share the Parameters that their "
                         "tied_parameters() return: give one the other's")
    shares = first is last or bool(set(first.parameters()) & set(last.parameters()))
    if not shares and any(shape in matrix_shapes for shape in embedding_shapes):
        raise ValueError("tie_word_embeddings is set, but the first and the last stage share no Parameter and would "
                         "train two weights; give one the other's, or set it to False in their config")
    return TiedEnds([], [], [], [])


def _ties_embeddings(stage: nn.Module) -> bool:
    return bool(getattr(getattr(stage, "config", None), "tie_word_embeddings", False))


def _shapes(tensors: Iterable[Tensor]) -> list[list[int]]:
    """Return the shapes that there are, each once."""
    return [list(shape) for shape in dict.fromkeys(tensor.shape for tensor in tensors)]


def check_stages(
    stages: Sequence[nn.Module], parameters: Sequence[StageParameters], unreduced: Iterable[str] | str
) -> tuple[bool, list[str]]:
    """Return whether FSDP2 reduces any of a rank's gradients over several ranks, and the first parameter of each stage
    that it has nothing of.

    unreduced: names in their stage, of parameters or modules, with wildcards, whose gradients the caller reduces.

    Raises ValueError for a stage that is sharded together with another one, or in part and does not name the rest, or
    that reduces in another way: DistributedDataParallel and the first FSDP reduce in hooks of one backward, which would
    see a part of a gradient, or nothing, as weight gradients are computed outside of backwards.
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
        missed: list[str] = []
        for path, module in stage.named_modules():
            if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
                raise ValueError(f"module {number} of this rank {'has' if path else 'is'} a {type(module).__name__}"
                                 f"{path and f', {path}'}, which does not reduce the gradients of a pipeline's step: "
                                 f"{_REMEDY} instead")
            for key, param in module.named_parameters(recurse=False):
                name = f"{path}.{key}".lstrip(".")
                # Each of the ranks may have another part of it, as of experts, and so nothing to reduce.
                apart = (isinstance(param, DTensor) and ranks <= set(param.device_mesh.mesh.flatten().tolist())
                         and not any(placed.is_replicate() for placed in param.placements))
                named = any(fnmatchcase(name, pattern) for pattern in patterns)
                if param.requires_grad and (module, key) not in managed and not apart and not named:
                    missed.append(name)
        if places[number] and len(ranks) > 1 and missed:
            raise ValueError(f"module {number} of this rank is sharded in part, but not {_some(missed)}; {_UNREDUCED}")
        plain += missed
    return len(ranks) > 1, plain[:_SHOWN]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
