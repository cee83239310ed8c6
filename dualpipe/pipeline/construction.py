"""Construction of a pipeline: validation of a rank's stages, and agreement of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, zip_longest
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dualpipe.nn.accumulators import local
from dualpipe.parallel.fsdp.stage_parameters import StageParameters, modules_of
from dualpipe.parallel.tied import original_number, tied_parameters
from dualpipe.pipeline.batch import require_same
from dualpipe.pipeline.compiled_stage import SideSpec
from dualpipe.runtime.dtypes import long_name

_SHOWN = 3  # maximum number of parameter names in an error
_NUM_CHECKSUMS = 64  # the size of a message between ranks is limited
_NUM_SAMPLES = 4096  # elements of a parameter under a checksum
_SAME_VALUES = ("an embedding of the first stage and a weight of the last stage have the same values, as tied ones "
                "have, and would be trained as two")
_NOT_TIED = "if they are not tied, set tie_word_embeddings to False in the config of a stage"
_REMEDY = "use dualpipe.parallel.shard or torch's fully_shard"
_UNREDUCED = (f"their gradients would differ between data-parallel ranks: {_REMEDY}, or, if you reduce them yourself, "
              "name them in unreduced")


@dataclass(frozen=True)
class TiedEnds:
    """Description of the weights of a rank that may be tied, if the first and the last stage are on different ranks.

    All lists are empty on a rank that has neither of the two stages, and on a rank that has both.

    Attributes:
        embeddings: shapes of the first stage's embeddings, if its config sets `tie_word_embeddings`.
        matrices: shapes of all matrices of the last stage, one of which may be the tied head, if its config sets
            `tie_word_embeddings`.
        first_copies: descriptions of the first stage's `tied_parameters()`, which must equal `last_copies`.
        last_copies: descriptions of the last stage's `tied_parameters()`.
        embedding_values: checksums of the first stage's embeddings, unless its config says that they are not tied.
        matrix_values: checksums of the largest matrices of the last stage, unless its config says so.
    """

    embeddings: list[list[int]]
    matrices: list[list[int]]
    first_copies: list[str]
    last_copies: list[str]
    embedding_values: list[int]
    matrix_values: list[int]


@dataclass(frozen=True)
class PipelineArguments(TiedEnds):
    """Description of a rank's pipeline, which the ranks compare.

    overlap: pairs may overlap; None if no stage of this rank has anything to overlap. side_specs: the fields of the
    stages' `SideSpec`s. reduces, not_reduced: results of `check_stages`; the second names the parameters that
    nobody reduces.
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
    not_reduced: list[str]


@dataclass(frozen=True)
class PipelineAgreement:
    """Conclusion from the descriptions of all ranks.

    Attributes:
        overlap: pairs overlap.
        side: side inputs that the stages of all ranks take.
        norm_dtype: dtype of the gradient norm.
        has_copies: the first and the last stage have copies of tied parameters on two ranks.
    """

    overlap: bool
    side: SideSpec
    norm_dtype: torch.dtype
    has_copies: bool


def compare_pipelines(ranks: Sequence[PipelineArguments]) -> PipelineAgreement:
    """Return the agreement from the descriptions of all ranks. Raises ValueError if they do not match."""
    require_same("(schedule, its checksum, device, batch_dim, rank_mapping)", [
        [r.schedule, r.schedule_checksum, r.device, r.batch_dim, r.rank_mapping] for r in ranks
    ])
    _check_reduced(ranks)
    _check_tied(ranks)
    overlaps = [r.overlap for r in ranks if r.overlap is not None]
    specs = [SideSpec(*fields) for fields in chain.from_iterable(r.side_specs for r in ranks)]
    names = sorted(set(chain.from_iterable(spec.names for spec in specs)))
    side = SideSpec(
        names=tuple(names),
        takes_all=any(spec.takes_all for spec in specs),
        is_hooked=any(r.is_hooked for r in ranks),
    )
    return PipelineAgreement(
        overlap=any(overlaps),
        side=side,
        norm_dtype=torch.float64 if any(r.has_float64 for r in ranks) else torch.float32,
        has_copies=any(r.first_copies for r in ranks),
    )


def _check_tied(ends: Sequence[TiedEnds]) -> None:
    """Raise ValueError if a tied weight would be trained as two, or its copies differ."""
    matrices = list(chain.from_iterable(end.matrices for end in ends))
    if any(shape in matrices for end in ends for shape in end.embeddings):
        raise ValueError("tie_word_embeddings is set, but the first and the last stage are on two ranks and would "
                         "train two weights; use a V-shaped schedule (dualpipev, zbv), give both stages a method "
                         "tied_parameters() that returns their copies, or set it to False in their config")
    values = set(chain.from_iterable(end.matrix_values for end in ends))
    if not values.isdisjoint(chain.from_iterable(end.embedding_values for end in ends)):
        raise ValueError(f"{_SAME_VALUES}, on two ranks; use a V-shaped schedule (dualpipev, zbv), or give both stages "
                         f"a method tied_parameters() that returns their copies; {_NOT_TIED}")
    first = list(chain.from_iterable(end.first_copies for end in ends))
    last = list(chain.from_iterable(end.last_copies for end in ends))
    if first != last:
        raise ValueError(f"the tied_parameters() of the first stage are {first}, those of the last stage {last}; they "
                         "must be copies of each other: same shapes, dtypes, gradient dtypes and sharding, and frozen "
                         "in both stages or in none")


def _check_reduced(ranks: Sequence[PipelineArguments]) -> None:
    """Raise ValueError if some stages of a pipeline are sharded over several ranks, and others are not."""
    plain = list(chain.from_iterable(r.not_reduced for r in ranks))
    if plain and any(r.reduces for r in ranks):
        raise ValueError(f"some stages are sharded, but not the one with {_list_names(plain)}; {_UNREDUCED}")


def validate_modules(modules: Any) -> tuple[nn.ModuleList, torch.device | None]:
    """Return the stages of a rank, and the device of their parameters and buffers; None if they have none.

    Raises ValueError for objects that are no modules, for a module that comes twice, and for several devices.
    """
    sequence = isinstance(modules, list | tuple | nn.ModuleList | nn.Sequential)
    if not sequence or not all(isinstance(module, nn.Module) for module in modules):
        kinds = [type(m).__name__ for m in modules] if isinstance(modules, list | tuple) else type(modules).__name__
        raise ValueError(f"modules must be a tuple of nn.Modules, got {kinds}")
    if len(set(modules)) < len(modules):
        names = [type(module).__name__ for module in modules]
        raise ValueError(f"one module comes twice in {names}; pass a different module for every stage, which may share "
                         "Parameters with another")
    devices = {t.device for m in modules for t in chain(m.parameters(), m.buffers())}
    if len(devices) > 1 or any(d.type == "meta" for d in devices):
        raise ValueError(f"all stages of a rank must be on one real device, got {sorted(map(str, devices))}")
    return nn.ModuleList(modules), devices.pop() if devices else None


def _describe_copy(parameter: nn.Parameter) -> str:
    """Describe a copy of a tied parameter by everything that both copies must share to exchange gradients."""
    dtype = long_name(parameter.dtype)
    text = f"{dtype}{list(parameter.shape)}"
    grad_dtype = long_name(parameter.grad_dtype or parameter.dtype)
    if grad_dtype != dtype:
        text += f" with {grad_dtype} gradients"
    local_shape = local(parameter.detach()).shape
    if local_shape != parameter.shape:
        text += f" of which this rank has {list(local_shape)}"
    return text


def tied_ends(first: nn.Module | None, last: nn.Module | None) -> TiedEnds:
    """Describe the weights of the first and the last stage that may be tied.

    Raises ValueError if both stages are on this rank, and tied weights are not the same Parameter.

    Args:
        first: the first stage; None if it is on another rank.
        last: the last stage; None if it is on another rank.
    """
    first_copies = tied_parameters(first)
    last_copies = tied_parameters(last)
    embeddings: list[Tensor] = []
    if first is not None and not first_copies and _ties_embeddings(first) is not False:
        embeddings = [m.weight for m in first.modules() if isinstance(m, nn.Embedding)]
    matrices: list[Tensor] = []
    if last is not None and not last_copies and _ties_embeddings(last) is not False:
        matrices = [p for p in last.parameters() if p.dim() == 2]
    embedding_shapes = _shapes(embeddings) if _ties_embeddings(first) else []
    matrix_shapes = _shapes(matrices) if _ties_embeddings(last) else []
    if first is None or last is None:
        return TiedEnds(
            embeddings=embedding_shapes,
            matrices=matrix_shapes,
            first_copies=list(map(_describe_copy, first_copies)),
            last_copies=list(map(_describe_copy, last_copies)),
            embedding_values=_checksums(embeddings),
            matrix_values=_checksums(matrices),
        )
    if any(a is not b for a, b in zip_longest(first_copies, last_copies)):
        raise ValueError("the first and the last stage are on one rank, but their tied_parameters() return different "
                         "Parameters; give one stage those of the other, or, if a new head is no longer tied, set "
                         "tie_word_embeddings to False in the config of both stages")
    shares = first is last or bool(set(first.parameters()) & set(last.parameters()))
    if not shares and not set(_checksums(embeddings)).isdisjoint(_checksums(matrices)):
        raise ValueError(f"{_SAME_VALUES} Parameters; give one stage that of the other, and both to "
                         f"dualpipe.parallel.shard_stages if they are sharded; {_NOT_TIED}")
    if not shares and any(shape in matrix_shapes for shape in embedding_shapes):
        raise ValueError("tie_word_embeddings is set, but the first and the last stage share no Parameter and would "
                         "train two weights; give one stage that of the other, or set it to False in their config")
    return TiedEnds([], [], [], [], [], [])


def _ties_embeddings(stage: nn.Module | None) -> bool | None:
    """Return True if the config of a stage ties its embeddings; None if it does not say."""
    ties = getattr(getattr(stage, "config", None), "tie_word_embeddings", None)
    return None if ties is None else bool(ties)


def _checksums(parameters: Iterable[Tensor]) -> list[int]:
    """Return checksums of trained parameters on this rank, of the largest only, without constants.

    Weights that are tied have the same values before they are trained, and others have not.
    """
    checksums: list[int] = []
    trained = [p for p in parameters if p.requires_grad and p.is_floating_point()]
    for parameter in sorted(trained, key=lambda p: p.shape[0], reverse=True)[:_NUM_CHECKSUMS]:
        values = local(parameter.detach()).flatten()
        sample = values[:: max(1, values.numel() // _NUM_SAMPLES)].double().cpu()
        if sample.numel() and bool((sample != sample[0]).any()):
            checksums.append(crc32(repr(parameter.shape).encode(), crc32(sample.numpy().tobytes())))
    return checksums


def _shapes(tensors: Iterable[Tensor]) -> list[list[int]]:
    """Return the distinct shapes of tensors."""
    return [list(shape) for shape in dict.fromkeys(tensor.shape for tensor in tensors)]


def trained_places(stages: nn.Module) -> set[tuple[nn.Module, str]]:
    """Return the places of all trainable parameters: a module and a name in it."""
    return {(module, name) for module in modules_of(stages) for name, param in module._parameters.items()
            if param is not None and param.requires_grad}


def check_stages(
    stages: Sequence[nn.Module], parameters: Sequence[StageParameters], unreduced: Iterable[str] | str
) -> tuple[bool, list[str]]:
    """Check the data-parallel sharding of a rank's stages.

    Raises ValueError for two stages that are sharded together, for tied parameters that are sharded apart, for a stage
    that is sharded in part without naming the rest, and for DistributedDataParallel and FSDP1. Those two reduce
    gradients in hooks of the backward, but a pipeline runs a backward per micro-batch and computes weight gradients
    outside of it: the hooks would reduce incomplete gradients.

    Args:
        stages: the stages of this rank.
        parameters: their parameters under FSDP2.
        unreduced: parameters or modules whose gradients the caller reduces, by their names in the stage, with
            wildcards.

    Returns:
        True if FSDP2 reduces any gradients over several ranks, and the first names of parameters whose gradients are
        reduced neither by it nor by the caller.
    """
    managed_names = [set(stage_parameters.places()) for stage_parameters in parameters]
    managed = set(chain.from_iterable(managed_names))
    if len(managed) != sum(map(len, managed_names)):
        raise ValueError("fully_shard was given modules of two stages together, which are gathered and reduced "
                         "at different times; shard every stage by itself, sharing no parameter")
    _check_sharded_ties(stages, parameters, managed)
    patterns = (unreduced,) if isinstance(unreduced, str) else tuple(unreduced)
    ranks = _sharding_ranks(managed)
    missed: list[str] = []
    for index, stage in enumerate(stages):
        _check_wrappers(index, stage)
        _check_tensor_parallel(index, stage, managed)
        stage_missed = _unreduced_parameters(stage, managed, ranks, patterns)
        if managed_names[index] and len(ranks) > 1 and stage_missed:
            raise ValueError(f"module {index} of this rank is sharded in part, but not {_list_names(stage_missed)}; "
                             f"{_UNREDUCED}")
        missed += stage_missed
    return len(ranks) > 1, missed[:_SHOWN]


def _check_sharded_ties(
    stages: Sequence[nn.Module], parameters: Sequence[StageParameters], managed: Collection[tuple[nn.Module, str]]
) -> None:
    """Raise ValueError for a parameter that was tied, and that FSDP2 has sharded in one place, or apart in several."""
    names: dict[tuple[nn.Module, str], str] = {}
    originals: list[tuple[int, tuple[nn.Module, str]]] = []
    for index, (stage, stage_parameters) in enumerate(zip(stages, parameters)):
        originals += stage_parameters.originals()
        for path, module in stage.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                names.setdefault((module, key), f"{path}.{key} of module {index}".lstrip("."))
                number = original_number(parameter) if parameter.requires_grad else None
                if number is not None and (module, key) not in managed:
                    originals.append((number, (module, key)))
    first_places: dict[int, tuple[nn.Module, str]] = {}
    for number, place in originals:
        first = first_places.setdefault(number, place)
        if first != place:
            raise ValueError("a tied parameter was sharded apart and would be trained as two weights, "
                             f"{names[first]} and {names[place]} of this rank; give the stages to "
                             "dualpipe.parallel.shard_stages together, or tied modules of one stage to one call "
                             "fully_shard([module_a, module_b])")


def _sharding_ranks(managed: Iterable[tuple[nn.Module, str]]) -> set[int]:
    """Return the ranks over which parameters, by module and name, are sharded."""
    parameters = [getattr(module, name) for module, name in managed]
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


def _check_wrappers(index: int, stage: nn.Module) -> None:
    """Raise ValueError for a stage with DistributedDataParallel or FSDP1. index: of the stage on this rank."""
    for path, module in stage.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            kind = type(module).__name__
            place = f"has a {kind}, {path}" if path else f"is a {kind}"
            raise ValueError(f"module {index} of this rank {place}, which does not reduce the gradients of a "
                             f"pipeline's step: {_REMEDY} instead")


def _check_tensor_parallel(index: int, stage: nn.Module, managed: Collection[tuple[nn.Module, str]]) -> None:
    """Raise ValueError for layers that `parallelize_module` has split.

    index: of the stage on this rank. managed: parameters under FSDP2, which shards over one dimension of a mesh.
    """
    for path, module in stage.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                continue
            num_shardings = sum(placement.is_shard() for placement in parameter.placements)
            if num_shardings > ((module, key) in managed):
                name = f"{path}.{key}".lstrip(".")
                raise ValueError(f"module {index} of this rank is tensor parallel: {name} is placed "
                                 f"{parameter.placements} over {parameter.device_mesh}; there is no tensor parallelism "
                                 "in a pipeline: give the stage plain parameters, and the ranks to dp, ep or cp")


def _unreduced_parameters(
    stage: nn.Module, managed: Collection[tuple[nn.Module, str]], ranks: Collection[int], patterns: Sequence[str]
) -> list[str]:
    """Return the names of trainable parameters whose gradients must be reduced, but are not.

    Args:
        stage: the stage.
        managed: parameters under FSDP2, by module and name.
        ranks: the ranks over which FSDP2 shards parameters.
        patterns: names of parameters or modules that the caller reduces, with wildcards.
    """
    all_patterns = [*patterns, *(f"{pattern}.*" for pattern in patterns)]
    names = []
    for path, module in stage.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{key}".lstrip(".")
            if not parameter.requires_grad or (module, key) in managed or _is_distributed(parameter, ranks):
                continue
            if not any(fnmatchcase(name, pattern) for pattern in all_patterns):
                names.append(name)
    return names


def _is_distributed(parameter: nn.Parameter, ranks: Collection[int]) -> bool:
    """Return True if a parameter is sharded over all of `ranks`, like experts: its gradient needs no reduction."""
    if not isinstance(parameter, DTensor):
        return False
    if not set(ranks) <= set(parameter.device_mesh.mesh.flatten().tolist()):
        return False
    return not any(placement.is_replicate() for placement in parameter.placements)


def _list_names(names: Sequence[str]) -> str:
    """Return the first names as text."""
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
