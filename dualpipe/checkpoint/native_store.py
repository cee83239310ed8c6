"""Writing and reading tensors with the planners and files of `torch.distributed.checkpoint`.

A rank's tensors go into one file, what several ranks hold is written by one of them, and `.metadata` says where
everything lies; `torch.distributed.checkpoint` can read such a directory too. Added here: a checksum of every file,
made while it is written, and reading that runs no code. `.metadata` is a pickle, which torch loads as it is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dualpipe.checkpoint.hub_files import raise_for
from dualpipe.checkpoint.native_state import Part
from dualpipe.parallel.description import METADATA, read_description
from dualpipe.parallel.sharding import short_name

_LARGE = 2**18  # bytes from which hashing in another thread, at 1.5 GB/s, takes longer than to ask for it


class FileInfo(NamedTuple):
    """Of a file of a checkpoint."""

    size: int
    sha256: str


class Written(NamedTuple):
    """What a rank has written."""

    results: list[WriteResult]
    files: dict[str, FileInfo]


# -- writing


def local_plan(parts: Mapping[str, Part]) -> SavePlan:
    """What this rank could write; shards without elements are nobody's."""
    return SavePlan([_write_item(name, part) for name, part in parts.items()
                     if part.tensor.numel() or not prod(part.shape)])  # fmt: skip


def global_plan(folder: Path, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Who writes what; raises ValueError where ranks disagree on a tensor, or its parts overlap or leave a gap."""
    raise_for("all ranks must have the same tensors:", _disagreements(plans))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    plans, metadata = planner.create_global_plan(plans)
    return _Writer(folder).prepare_global_plan(plans), metadata


def _disagreements(plans: list[SavePlan]) -> Iterator[str]:
    """torch keeps one of several with the same place, and does not compare them."""
    known: dict[str | MetadataIndex, tuple[Any, ...]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
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
        cause: BaseException | None = error  # torch's archive, cut short, complains of its own position
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise cause or error from None


def write_metadata(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, FileInfo]:
    """Write where everything lies, flushed to the disk; on one rank, with what all have written."""
    writer = _Writer(folder)
    writer.finish(metadata, results)
    return writer.fs.files


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
        hashing = self._hashing.submit(self.digest.update, data)
        try:
            yield
        finally:
            hashing.result()

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        """Everything is on the disk then; torch closes a stream before it is left."""
        if not self._out.closed:
            self._out.flush()
            os.fsync(self._out.fileno())
            self._out.close()


# -- reading


def read_metadata(folder: Path, files: Collection[str]) -> Metadata:
    """`.metadata` of a checkpoint with these files. Raises ValueError for what no checkpoint of ours can hold."""
    path = folder / METADATA
    found = read_description(path)
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{path}: {name!r} is no tensor but a pickle; refused")
    for index, place in found.storage_data.items():
        if place.relative_path not in files or getattr(place, "transform_descriptors", None):
            raise ValueError(f"{path}: {index.fqn!r} lies in {place.relative_path!r}, none of its files; refused")
    return found


def read_parts(folder: Path, metadata: Metadata, parts: Mapping[str, Part]) -> None:
    """Fill the parts of this rank, whatever parts were written. Shapes must fit; other dtypes are cast."""
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    items: list[ReadItem] = []
    for name, part in parts.items():
        if part.tensor.numel():
            chunk = ChunkStorageMetadata(part.offsets, part.tensor.shape)
            items += create_read_items_for_chunk_list(name, metadata.state_dict_metadata[name], [chunk])
    reader.read_data(LoadPlan(items), _LoadPlanner(parts)).wait()


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = parts

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn].tensor

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:  # torch's would unpickle
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")
