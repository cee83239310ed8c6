"""How a checkpoint's files are laid out, before a byte of them is written: a pure function of its tensors.

A safetensors file is the length of its header (8 bytes, little-endian), the header as JSON, padded with spaces to a
multiple of 8, and the tensors' bytes without gaps. So every rank knows where its part of a tensor goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from dualpipe.checkpoint.hub_files import SINGLE
from dualpipe.checkpoint.hub_plan import blocks
from dualpipe.checkpoint.quantized import At
from dualpipe.dtypes import SAFETENSORS_CODES
from dualpipe.models import HubConfig


class NewTensor(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ShardFile(NamedTuple):
    """A file to be written: its name, its first bytes, where each tensor starts, and its size."""

    name: str
    head: bytes
    starts: dict[str, int]
    size: int


def new_tensors(
    config: HubConfig, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype]
) -> list[NewTensor]:
    """The hub's tensors of a model, in its order, in the dtypes of ours that they are part of; without a tied head."""
    found: dict[str, NewTensor] = {}
    for name, shape in shapes.items():
        for part in config.hub_layouts(name, shape)[0]:
            found.setdefault(part.name, NewTensor(part.name, part.shape, dtypes[name]))
    return list(found.values())


def lay_out(tensors: Iterable[NewTensor], max_shard_bytes: int) -> list[ShardFile]:
    """Fill files of at most `max_shard_bytes` of tensors in turn; a larger tensor has one of its own."""
    groups: list[list[NewTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    return [_file(name, group) for name, group in zip([SINGLE] if len(groups) == 1 else names, groups)]


def _file(name: str, tensors: list[NewTensor]) -> ShardFile:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends: dict[str, int] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda t: -t.dtype.itemsize):  # wide ones first, so that all are aligned
        start, end = end, end + tensor.nbytes
        code = SAFETENSORS_CODES[tensor.dtype]
        entries[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [start, end]}
        ends[tensor.name] = start
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    return ShardFile(name, head, {tensor: len(head) + start for tensor, start in ends.items()}, len(head) + end)


def index_of(files: Iterable[ShardFile], tensors: Sequence[NewTensor]) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`."""
    metadata = {"total_parameters": sum(prod(t.shape) for t in tensors), "total_size": sum(t.nbytes for t in tensors)}
    weight_map = {name: file.name for file in files for name in file.starts}
    return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}


# -- who writes what


class Piece(NamedTuple):
    """What a rank holds of a tensor of ours, by its name; `part` as (start, stop) of each dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: tuple[tuple[int, int], ...]

    @property
    def at(self) -> At:
        return tuple(slice(*bounds) for bounds in self.part)

    @property
    def numel(self) -> int:
        return prod(stop - start for start, stop in self.part)


def writers(config: HubConfig, held: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """Of what each rank holds, what it writes: of the ranks that hold the same piece, the first one does.

    Raises:
        ValueError: ranks disagree on a tensor's dtype, or hold parts of a tensor that overlap or do not make it up.
    """
    hub_names: dict[str, str] = {}
    first_of: dict[str, Piece] = {}
    chosen: set[tuple[str, tuple[tuple[int, int], ...]]] = set()
    counts: dict[str, int] = {}
    result: list[list[Piece]] = [[] for _ in held]
    for rank, pieces in enumerate(held):
        for piece in pieces:
            if piece.name not in hub_names:
                hub_names[piece.name] = config.hub_layouts(piece.name, piece.shape)[0][0].name
            hub = hub_names[piece.name]  # the same for a tied head and the embedding
            first = first_of.setdefault(hub, piece)
            if (piece.shape, piece.dtype) != (first.shape, first.dtype):
                raise ValueError(f"{piece.name} is {piece.shape} {piece.dtype} on one rank, {first.shape} "
                                 f"{first.dtype} on another; resolve one plan for the whole model")
            if (hub, piece.part) not in chosen:
                chosen.add((hub, piece.part))
                result[rank].append(piece)
                counts[hub] = counts.get(hub, 0) + piece.numel
    for hub, count in counts.items():
        if count != prod(first_of[hub].shape):
            raise ValueError(f"{first_of[hub].name}: the ranks hold {count} of {prod(first_of[hub].shape)} elements; "
                             "pass the mesh, and all stages of every rank")
    return result


class Write(NamedTuple):
    """A block of a held piece and the bytes of its hub tensor that it is."""

    name: str
    into: At  # in the piece
    transposed: bool
    starts: list[int]  # in elements of the hub's tensor, of runs of equal length
    shape: tuple[int, ...]  # the hub's


def writes(config: HubConfig, piece: Piece) -> Iterator[Write]:
    """Where a piece goes."""
    for block in blocks(config.hub_layouts(piece.name, piece.shape)[0], piece.at):
        yield Write(block.part.name, block.into, block.part.transposed, runs(block.part.shape, block.at),
                    block.part.shape)


def runs(shape: Sequence[int], at: At) -> list[int]:
    """Where the contiguous runs that make up a part of a tensor start; they are equally long.

    Example: rows 1 and 2 of (4, 5) are one run, from 5; columns 1 and 2 of (3, 5) are three, from 1, 6 and 11.
    """
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    partial = [dim for dim, part in enumerate(at) if part.stop - part.start != shape[dim]]
    outer = at[: partial[-1]] if partial else ()  # within the last dimension that is cut, a part is contiguous
    base = sum(part.start * stride for part, stride in zip(at[len(outer) :], strides[len(outer) :]))
    return [base + sum(index * stride for index, stride in zip(indices, strides))
            for indices in product(*(range(part.start, part.stop) for part in outer))]
