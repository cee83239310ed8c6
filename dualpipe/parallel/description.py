"""Which tensors a checkpoint of this library has, and where they lie in its files: `tensors.json`.

torch's own description, `.metadata`, is a pickle, which can run anything when it is read. That is written beside this
one, for torch's readers; no checkpoint is loaded by it here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualpipe.dtypes import dtype_of, short_name

TENSORS = "tensors.json"


class StoredChunk(NamedTuple):
    """A part of a tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor, whole in its chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def to_json(tensors: Mapping[str, StoredTensor]) -> str:
    """What `read_description` reads."""
    return json.dumps({name: [short_name(each.dtype), each.shape, each.chunks] for name, each in tensors.items()})


def read_description(path: Path) -> dict[str, StoredTensor]:
    """The tensors by name, of the file `path`; raises ValueError for anything that is not sound."""
    try:
        tensors = {name: _tensor(*entry) for name, entry in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if gaps := gaps_in(tensors):
        raise ValueError(f"{path}: {gaps[0]}")
    return tensors


def gaps_in(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """A line for each tensor whose chunks do not make up the whole; several that begin at the same place are one."""
    lines = []
    for name, each in tensors.items():
        parts = list({chunk.offsets: chunk for chunk in each.chunks}.values())
        if (stored := sum(prod(part.sizes) for part in parts)) != prod(each.shape):
            lines.append(f"{name} is not whole: its parts have {stored} of {prod(each.shape)} elements")
        elif _overlap(parts):
            lines.append(f"{name} is not whole: some of its parts overlap")
    return lines


def _overlap(parts: Sequence[StoredChunk]) -> bool:
    """Whether two parts share a cell of the grid that all their edges make."""
    bounds = [[(start, start + size) for start, size in zip(part.offsets, part.sizes)] for part in parts]
    places = [{edge: place for place, edge in enumerate(sorted({edge for pair in along for edge in pair}))}
              for along in zip(*bounds)]
    seen: set[tuple[int, ...]] = set()
    for part in bounds:
        for cell in product(*(range(at[start], at[stop]) for at, (start, stop) in zip(places, part))):
            if cell in seen:
                return True
            seen.add(cell)
    return False


def _tensor(dtype: Any, shape: Any, chunks: Any) -> StoredTensor:
    shape = _numbers(shape)
    return StoredTensor(dtype_of(dtype), shape, tuple(_chunk(shape, *chunk) for chunk in chunks))


def _chunk(shape: tuple[int, ...], offsets: Any, sizes: Any, file: Any, start: Any, length: Any) -> StoredChunk:
    offsets, sizes = _numbers(offsets), _numbers(sizes)
    if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"a part at {offsets} of sizes {sizes} is not inside a tensor of shape {shape}")
    return StoredChunk(offsets, sizes, str(file), *_numbers([start, length]))


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are not numbers of elements or bytes")
    return tuple(values)
