"""Writing tensors with the planners and files of `torch.distributed.checkpoint`.

A rank's tensors go into one file, what several ranks hold is written by one of them, and `tensors.json` says where
everything lies, as does `.metadata`, for torch's readers. Added here: a checksum of every file, made while it is
written, and that a tensor must be whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dualpipe.checkpoint.native_state import REPEATED, Part
from dualpipe.dtypes import short_name
from dualpipe.errors import raise_for
from dualpipe.parallel.description import TENSORS, StoredChunk, StoredTensor, gaps_in, to_json

_SAMPLE = 64  # elements of a part
_LARGE = 2**18  # bytes from which hashing in another thread, at 1.5 GB/s, takes longer than to ask for it


class FileInfo(NamedTuple):
    """Of a file of a checkpoint."""

    size: int
    sha256: str


class Written(NamedTuple):
    """What a rank has written."""

    results: list[WriteResult]
    files: dict[str, FileInfo]


class Sample(NamedTuple):
    """Which stages a rank has, and the first elements of its parts, to tell copies from different tensors."""

    stages: int
    values: dict[str, bytes]


def local_plan(parts: Mapping[str, Part], stages: int) -> SavePlan:
    """What this rank could write; shards without elements are nobody's. `stages`: ranks with the same have the same."""
    plan = SavePlan([_write_item(name, part) for name, part in parts.items()
                     if part.tensor.numel() or not prod(part.shape)])
    values = {name: bytes(part.tensor.reshape(-1)[:_SAMPLE].cpu().view(torch.uint8).tolist())
              for name, part in parts.items()}
    return dataclasses.replace(plan, planner_data=Sample(stages, values))


def global_plan(folder: Path, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Who writes what; raises ValueError where ranks disagree on a tensor, or its parts overlap or leave a gap."""
    raise_for("all ranks must have the same tensors:", _disagreements(plans))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, metadata = planner.create_global_plan(plans)
    raise_for("all ranks together must have all of every tensor; a mesh that spans them must be given, and saving be "
              "called on each:", gaps_in(_described(metadata)))
    return _Writer(folder).prepare_global_plan(plans), metadata


def _disagreements(plans: list[SavePlan]) -> Iterator[str]:
    """torch keeps one of several with the same place, and does not compare them."""
    known: dict[str | MetadataIndex, tuple[Any, ...]] = {}
    seen: dict[MetadataIndex, tuple[int, bytes]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            stages, value = plan.planner_data.stages, plan.planner_data.values[item.index.fqn]
            first = seen.setdefault(item.index, (stages, value))
            if first[0] != stages and first[1] != value:
                yield f"{item.index.fqn} has other values on rank {rank} than in an earlier one's stages; {REPEATED}"
            name, tensor = item.index.fqn, item.tensor_data
            whole, part = (tensor.properties.dtype, tuple(tensor.size)), (name, tuple(tensor.chunk.sizes))
            if known.setdefault(name, whole) != whole or known.setdefault(item.index, part) != part:
                yield f"{name} is {short_name(whole[0])} {whole[1]} on rank {rank}, and another on an earlier one"


def write_parts(folder: Path, plan: SavePlan, parts: Mapping[str, Part]) -> Written:
    """Write what `plan` gives to this rank, flushed to the disk; raises OSError where the disk refuses."""
    writer = _Writer(folder)
    try:
        return Written(writer.write_data(plan, _SavePlanner(parts)).wait(), writer.fs.files)
    except Exception as error:
        raise _cause(error) from None


def _cause(error: BaseException) -> BaseException:
    """What the disk or an interrupt said: torch's archive, cut short, complains of its own position."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) or not isinstance(cause, Exception):
            return cause
        cause = cause.__context__
    return error


def write_description(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, FileInfo]:
    """Write where everything lies, flushed to the disk; on one rank, with what all have written."""
    writer = _Writer(folder)
    writer.finish(metadata, results)
    with writer.fs.create_stream(folder / TENSORS, "wb") as out:
        out.write(to_json(_described(metadata)).encode())
    return writer.fs.files


def _described(metadata: Metadata) -> dict[str, StoredTensor]:
    """Before anything is written, chunks lie nowhere yet."""
    nowhere, places = _StorageInfo("", 0, 0), metadata.storage_data or {}
    described = {}
    for name, entry in metadata.state_dict_metadata.items():
        chunks = []
        for chunk in entry.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets), nowhere)
            chunks.append(StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset,
                                      place.length))
        described[name] = StoredTensor(entry.properties.dtype, tuple(entry.size), tuple(chunks))
    return described


def _write_item(name: str, part: Part) -> WriteItem:
    chunk = ChunkStorageMetadata(part.offsets, part.tensor.shape)
    properties = TensorProperties(dtype=part.tensor.dtype)
    index = MetadataIndex(name, part.offsets)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, part.shape))


class _SavePlanner(DefaultSavePlanner):
    """Hands out parts; plain tensors, so that a process without process groups can write them."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor, said = self._parts[write_item.index.fqn].tensor, write_item.tensor_data
        assert (tensor.dtype, tensor.shape) == (said.properties.dtype, said.chunk.sizes), write_item
        return tensor


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        # Flushed by the files themselves; no copies ahead, for which torch would open the first GPU in every writer.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _Files()

    def write_data(self, plan: SavePlan, planner: DefaultSavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            return super().write_data(plan, planner)
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # torch's would name the temporary directory


class _Files(FileSystem):
    """Remembers size and checksum of every file that it has written and flushed to the disk."""

    def __init__(self) -> None:
        self.files: dict[str, FileInfo] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with hashed_file(Path(path), self.files) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


@contextmanager
def hashed_file(path: Path, files: dict[str, FileInfo]) -> Iterator[HashedStream]:
    """Write a new file to the disk; afterwards `files` has its size and checksum."""
    with open(path, "xb") as out, ThreadPoolExecutor(1) as hashing:
        stream = HashedStream(out, hashing)
        yield stream
        stream.close()
    files[path.name] = FileInfo(stream.tell(), stream.digest.hexdigest())


class HashedStream:
    """A file that can be appended to only."""

    def __init__(self, out: BinaryIO, hashing: ThreadPoolExecutor) -> None:
        self.digest, self._out, self._hashing, self._size = hashlib.sha256(), out, hashing, 0
        self.flush = out.flush

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`, and hash it meanwhile where that takes long; returns its length."""
        if len(data) < _LARGE:
            self.digest.update(data)
            written = self._out.write(data)
        else:
            with self._hashed(data):
                written = self._out.write(data)
        self._size += written
        return written

    @contextmanager
    def _hashed(self, data: bytes | memoryview) -> Iterator[None]:
        """Hash while something else is done; `data` is the caller's, and gone when that is over."""
        try:
            hashing = self._hashing.submit(self.digest.update, data)
        except RuntimeError:  # the interpreter is shutting down, and lets no more threads work
            self.digest.update(data)
            yield
            return
        try:
            yield
        finally:
            hashing.result()

    def tell(self) -> int:
        """Bytes written."""
        return self._size

    def close(self) -> None:
        """Everything is on the disk then; torch closes a stream before it is left."""
        if not self._out.closed:
            self._out.flush()
            os.fsync(self._out.fileno())
            self._out.close()
