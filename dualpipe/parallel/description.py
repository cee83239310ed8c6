"""Which tensors a checkpoint of this library has, and where they lie in its files: `tensors.json`.

torch's own description, `.metadata`, is a pickle, which can run anything when it is read. That is written beside this
one, for torch's readers; no checkpoint is loaded by it here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualpipe.parallel.sharding import dtype_of, short_name

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
    """A line for each tensor whose chunks do not make up the whole. Chunks are taken not to overlap."""
    return [f"{name} is not whole: its parts have {stored} of {prod(each.shape)} elements"
            for name, each in tensors.items()
            if (stored := _elements(each.chunks)) != prod(each.shape)]  # fmt: skip


def _elements(chunks: Iterable[StoredChunk]) -> int:
    """Several that begin at the same place count once."""
    return sum(prod(sizes) for sizes in {chunk.offsets: chunk.sizes for chunk in chunks}.values())


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
