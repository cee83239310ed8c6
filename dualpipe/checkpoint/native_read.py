"""Reading tensors of a checkpoint: any part of them, whatever parts were written."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from dualpipe.checkpoint.native_state import Part
from dualpipe.parallel.description import TENSORS, StoredChunk, StoredTensor, read_description


def read_stored(folder: Path, files: Collection[str]) -> dict[str, StoredTensor]:
    """What tensors a checkpoint with these files has. Raises ValueError for a description that is not sound."""
    stored = read_description(folder / TENSORS)
    for name, tensor in stored.items():
        for chunk in tensor.chunks:
            if chunk.file not in files:
                raise ValueError(f"{folder / TENSORS}: {name!r} lies in {chunk.file!r}, none of its files; refused")
    return stored


def read_parts(folder: Path, stored: Mapping[str, StoredTensor], parts: Mapping[str, Part]) -> None:
    """Fill the parts of this rank. Shapes must be those stored; other dtypes are cast.

    Raises RuntimeError where a file does not hold what its description says.
    """
    by_file: dict[str, list[tuple[StoredChunk, torch.dtype, Part]]] = {}
    for name, part in parts.items():
        for chunk in stored[name].chunks:
            if _overlap(chunk, part) is not None:
                by_file.setdefault(chunk.file, []).append((chunk, stored[name].dtype, part))
    for file, wanted in by_file.items():
        with open(folder / file, "rb") as stream:
            for chunk, dtype, part in sorted(wanted, key=lambda each: each[0].start):
                view = _create_file_view(stream, chunk.start, chunk.length)
                try:
                    tensor = torch.load(view, map_location="cpu", weights_only=True)
                except pickle.UnpicklingError as error:
                    raise RuntimeError(f"{folder / file} at {chunk.start}: {error}") from error
                if not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, chunk.sizes):
                    raise RuntimeError(f"{folder / file} does not hold {dtype} {chunk.sizes} at {chunk.start}, as it "
                                       "should")
                source, target = _overlap(chunk, part)
                part.tensor[target].copy_(tensor[source])


def stored_dtype(file: Path, start: int, length: int) -> torch.dtype:
    """Of the tensor that lies there, by its own header."""
    with open(file, "rb") as stream:
        return torch.load(_create_file_view(stream, start, length), map_location="meta", weights_only=True).dtype


def _overlap(chunk: StoredChunk, part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where what both have lies in each; None where that is nothing."""
    source, target = [], []
    for stored_at, stored, at, size in zip(chunk.offsets, chunk.sizes, part.offsets, part.tensor.shape, strict=True):
        start, stop = max(stored_at, at), min(stored_at + stored, at + size)
        if start >= stop:
            return None
        source.append(slice(start - stored_at, stop - stored_at))
        target.append(slice(start - at, stop - at))
    return tuple(source), tuple(target)
