"""Who reads which part of a Hugging Face checkpoint, as pure functions of headers, configuration, layout and rank.

    model_tensors(config)        every tensor of ours: its shape and how it is shared among ranks
    held(tensor, layout, rank)   the part of it that a rank holds
    find_origins(...)            where it is on the hub; what is missing or misshapen
    Origin.reads(part)           the blocks of the hub's tensors that fill a part: what loading reads as well
    plan_reads(...)              all that a rank reads, for layouts that need not run

Example: 4 experts, ep 2, dp 2; rank 1 (dp 0, ep 1) holds `gate_up_proj.weight[2:4, 0:I]` of (4, 2I, H), and so reads
the `gate_proj.weight` of experts 2 and 3 and no `up_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache, reduce
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch

from dualpipe.checkpoint.hub_files import Header, TensorInfo
from dualpipe.checkpoint.quantized import At, Mxfp4, Stored, find_stored
from dualpipe.models import HubConfig, build_stages
from dualpipe.models.hub import Part
from dualpipe.nn import GroupedLinear
from dualpipe.schedule.types import v_placement

_NAMED = 3  # tensors of each kind that are wrong


class Layout(NamedTuple):
    """Sizes of a mesh from `dualpipe.parallel.mesh.build_mesh`."""

    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return prod(self)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pp, dp, ep) of a rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"ranks of {self} are 0 to {self.size - 1}; got {rank}")
        return rank // (self.dp * self.ep), rank // self.ep % self.dp, rank % self.ep


class Kind(Enum):
    """How the ranks of a stage share a tensor."""

    DENSE = "over dp x ep"
    EXPERTS = "over ep, then dp"
    BUFFER = "whole on each"


class OurTensor(NamedTuple):
    """A parameter or persistent buffer of the model."""

    shape: tuple[int, ...]
    kind: Kind


@lru_cache(maxsize=16)  # the ranks of one pipeline place have the same, and cutting many layers well takes a second
def model_tensors(
    config: HubConfig, num_stages: int = 1, only: tuple[int, ...] | None = None
) -> Mapping[str, OurTensor]:
    """All tensors of a model, or those of some of its stages. Nothing is allocated."""
    with torch.device("meta"):
        stages = build_stages(config, num_stages, only=only)
    found = {}
    for stage in stages:
        params = dict(stage.named_parameters(remove_duplicate=False))
        experts = {f"{path}.{name}" for path, module in stage.named_modules() if isinstance(module, GroupedLinear)
                   for name, _ in module.named_parameters(recurse=False)}
        for name, tensor in stage.state_dict(keep_vars=True).items():
            kind = Kind.EXPERTS if name in experts else Kind.DENSE if name in params else Kind.BUFFER
            found[name] = OurTensor(tuple(tensor.shape), kind)
    return MappingProxyType(found)


def rank_tensors(
    config: HubConfig, layout: Layout, rank: int, num_stages: int | None = None
) -> dict[str, tuple[tuple[int, ...], At]]:
    """Of every tensor of a rank, the whole shape and the part that it holds. Two stages a rank in a V, or one of
    `num_stages` = pp. A rank that has both the embedding and a head tied to it has it under both names."""
    num_stages = 2 * layout.pp if num_stages is None else num_stages
    placements = {2 * layout.pp: v_placement(layout.pp), layout.pp: tuple(range(layout.pp))}
    if num_stages not in placements:
        raise ValueError(f"num_stages must be pp ({layout.pp}) or twice that; got {num_stages}")
    stages = tuple(stage for stage, on in enumerate(placements[num_stages]) if on == layout.coordinates(rank)[0])
    tensors = model_tensors(config, num_stages, stages)
    return {name: (tensor.shape, held(tensor, layout, rank)) for name, tensor in tensors.items()}


def held(tensor: OurTensor, layout: Layout, rank: int) -> At:
    """The part that a rank holds, as `shard_experts` and `shard` cut it.

    Raises `ValueError` for experts that cannot be divided evenly.
    """
    _, dp, ep = layout.coordinates(rank)
    part = [slice(0, size) for size in tensor.shape]
    if tensor.kind is Kind.BUFFER or not part:
        return tuple(part)
    if tensor.kind is Kind.DENSE or layout.ep == 1:  # one expert-parallel rank: experts are as any parameter
        part[0] = _chunk(part[0], layout.dp * layout.ep, dp * layout.ep + ep)
        return tuple(part)
    if tensor.shape[0] % layout.ep:
        raise ValueError(f"{tensor.shape[0]} experts cannot be divided evenly among {layout.ep} expert-parallel ranks")
    part[0] = _chunk(part[0], layout.ep, ep)
    free = (dim for dim in range(1, len(part)) if tensor.shape[dim] % layout.dp == 0)
    dim = next(free, 0)
    part[dim] = _chunk(part[dim], layout.dp, dp)
    return tuple(part)


def _chunk(whole: slice, ranks: int, rank: int) -> slice:
    """As `torch.chunk` cuts it: the last ones may be smaller, or empty."""
    each = -(-(whole.stop - whole.start) // ranks)
    return slice(*(min(whole.start + each * index, whole.stop) for index in (rank, rank + 1)))


# -- from the hub's tensors to ours


class Block(NamedTuple):
    """Where a hub's tensor and a part of ours overlap."""

    part: Part
    at: At  # in the hub's tensor
    into: At  # in the part of ours


def blocks(parts: Iterable[Part], wanted: At) -> Iterator[Block]:
    """The blocks of the hub's tensors that make up the part `wanted` of a tensor of ours."""
    for part in parts:
        both = [slice(max(p.start, w.start), min(p.stop, w.stop)) for p, w in zip(part.where, wanted)]
        if any(b.start >= b.stop for b in both):
            continue
        at = [_shifted(b, p.start) for b, p in zip(both, part.where)][len(both) - len(part.shape) :]
        if part.transposed:
            at[-2:] = at[:-3:-1]
        yield Block(part, tuple(at), tuple(_shifted(b, w.start) for b, w in zip(both, wanted)))


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start - by, part.stop - by)


class Read(NamedTuple):
    """A part of a tensor in the files."""

    name: str
    at: At

    def nbytes(self, header: Header) -> int:
        return prod(part.stop - part.start for part in self.at) * header[self.name].dtype.itemsize


@dataclass(frozen=True)
class Origin:
    """Where a tensor of ours is on the hub."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    stored: Mapping[str, Stored]  # by the name of the part

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest that holds its values as well as the hub's own loaders do."""
        return reduce(torch.promote_types, (stored.dtype for stored in self.stored.values()))

    @property
    def value_dtype(self) -> torch.dtype:
        """The one in which they are read: that of the files, or float32 where they are computed from FP8."""
        return reduce(torch.promote_types, (stored.value_dtype for stored in self.stored.values()))

    def reads(self, wanted: At) -> Iterator[tuple[Block, Stored, list[Read]]]:
        """What must be read for a part of it."""
        for block in blocks(self.parts, wanted):
            stored = self.stored[block.part.name]
            yield block, stored, [Read(*raw) for raw in stored.raw(block.at)]


def plan_reads(
    header: Header,
    config: HubConfig,
    layout: Layout,
    rank: int,
    *,
    num_stages: int | None = None,
    block: tuple[int, int] | None = None,
) -> list[Read]:
    """All that a rank reads to load its share of a checkpoint, in the order of its tensors.

    `block` as `quantized.fp8_block` tells. Raises `ValueError` for what is missing or misshapen, and for a layout that
    the model cannot be cut into.
    """
    tensors = rank_tensors(config, layout, rank, num_stages)
    if config.tie_word_embeddings and "embed_tokens.weight" in tensors:
        tensors.pop("lm_head.weight", None)
    search = find_origins(config, {name: shape for name, (shape, _) in tensors.items()}, header, block)
    search.check("the checkpoint does not fit the model", header)
    return [r for name, (_, part) in tensors.items() for *_, reads in search.found[name].reads(part) for r in reads]


# -- finding them, and what is wrong


@dataclass
class Search:
    """What `find_origins` found, by our names, and what it did not, by the hub's."""

    found: dict[str, Origin]
    missing: dict[str, None]
    wrong: dict[str, str]  # misshapen, or stored in a way that cannot be read
    used: set[str]

    def check(self, what: str, header: Header, unexpected: Collection[str] = ()) -> None:
        """Raise one ValueError for all that is wrong, if anything is: the first ones of each kind and how many more.

        Missing names come with the most similar ones that are there, first of those that nobody wants.
        """
        first = []
        for name in list(self.missing)[:_NAMED]:
            near = get_close_matches(name, unexpected or header, n=1)
            first.append(f"{name}: missing" + (f", the nearest is {near[0]}" if near else ""))
        first += list(self.wrong.values())[:_NAMED]
        first += [f"{name}: unexpected, the model has no such tensor" for name in list(unexpected)[:_NAMED]]
        if first:
            more = len(self.missing) + len(self.wrong) + len(unexpected) - len(first)
            first += [f"and {more:,} more"] if more else []
            raise ValueError(f"{what}: {'; '.join(first)} (is this checkpoint complete, and its config.json the one "
                             "that it was written with?)")


def find_origins(
    config: HubConfig, shapes: Mapping[str, Sequence[int]], header: Header, block: tuple[int, int] | None
) -> Search:
    """Where the tensors of ours with these names are, and what stands in the way of the others.

    Of several ways to store one, the first that is complete is taken, or else that of which most is there.
    """
    search = Search({}, {}, {}, set())
    for name, shape in shapes.items():
        layouts = config.hub_layouts(name, shape)
        parts = max(layouts, key=lambda parts: sum(_present(part, header) for part in parts) / len(parts))
        assert sum(prod(p.stop - p.start for p in part.where) for part in parts) == prod(shape), name
        resolved = [_resolved(part, header, block, search) for part in parts]
        if all(resolved):
            stored = {part.name: stored for part, stored in resolved}
            search.found[name] = Origin(tuple(shape), tuple(part for part, _ in resolved), stored)
    return search


def _present(part: Part, header: Header) -> bool:
    return part.name in header or any(name in header for name in Mxfp4(part.name, ()).names)


def _resolved(
    part: Part, header: Header, block: tuple[int, int] | None, search: Search
) -> tuple[Part, Stored] | None:
    """How it is stored, and `transposed` as it applies to that."""
    search.used.update((part.name, f"{part.name}_scale_inv", *Mxfp4(part.name, ()).names))
    try:
        stored = find_stored(header, part.name, block)
    except ValueError as error:
        search.wrong[part.name] = str(error)
        return None
    if stored is None:
        search.missing[part.name] = None
        return None
    if part.transposed and isinstance(stored, Mxfp4):  # whose blocks have inputs last, as ours do
        *experts, rows, columns = part.shape
        part = Part(part.name, (*experts, columns, rows), part.where)
    if not stored.dtype.is_floating_point:
        search.wrong[part.name] = f"{part.name}: {stored.dtype}, which parameters in floating point would round"
        return None
    if stored.shape != part.shape:
        search.wrong[part.name] = f"{part.name}: {stored.shape} in the checkpoint, {part.shape} in the model"
        return None
    return part, stored


def check_header(config: HubConfig, header: Header, block: tuple[int, int] | None) -> dict[str, Origin]:
    """Where every tensor of the model is.

    Raises:
        ValueError: for tensors that are missing, unexpected or misshapen, or stored in a way that cannot be read.
    """
    search = find_origins(config, shapes_of(model_tensors(config)), header, block)
    unexpected = [name for name in header if name not in search.used and not config.ignored_on_hub(_plain(name))]
    search.check(f"the checkpoint does not fit the model ({config.model_type})", header, unexpected)
    return search.found


def carried(config: HubConfig, header: Header) -> dict[str, TensorInfo]:
    """What an export takes along of a checkpoint as it is: the layers for multi-token prediction that it announces.

    If one of them is missing, none behind it: config.json can say only how many there are.
    """
    layer_of = {name: config.carried_layer(name) for name in header}
    layers = config.carried_layers
    stop = next((layer for layer in layers if layer not in layer_of.values()), layers.stop)
    return {name: header[name] for name, layer in layer_of.items() if layer is not None and layer < stop}


def shapes_of(tensors: Mapping[str, OurTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _plain(name: str) -> str:
    """The name of the tensor that scales or blocks belong to."""
    for end in ("_scale_inv", "_blocks", "_scales"):
        name = name.removesuffix(end)
    return name
