"""The description of one checkpoint: its files, the tensors in them, and checks that all of it is intact.

manifest.json has the step, the layout and versions, and the size and checksum of every other file. tensors.json has the
dtype and shape of each tensor and the boxes that it is stored in, each with the rank that wrote it; the headers of that
rank's files say where in them a box is. Files of a checkpoint are untrusted: everything is checked before it is used,
and no path leads out of the directory.

In a remote store, which cannot rename a directory, a checkpoint also has a marker, the object `COMMITTED`, with the
SHA-256 of manifest.json. It is written last and deleted first: a checkpoint without its marker does not exist.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint.tensors import Box
from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.parallel.mesh import DIMENSIONS, TRAFFIC, Mesh
from dualpipe.runtime import storage
from dualpipe.runtime.dtypes import dtype_of, short_name
from dualpipe.runtime.files import CHECKSUMS, Written, inode
from dualpipe.runtime.storage import Location, RemotePath, StrLocation, as_location

FORMAT = 1  # version of the file format of a checkpoint, all its files together
MANIFEST = "manifest.json"
TENSORS = "tensors.json"
MARKER = "COMMITTED"  # of a remote checkpoint
WRITE_MARKER = f"sha256sum < {MANIFEST} | cut -c-64 > {MARKER}"  # for a checkpoint that was copied to a store
_MARKER_SIZE = 65  # a SHA-256 in hexadecimal and the end of the line
RANDOM = "random"  # metadata key in the first file of a rank: its random state, as JSON


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    step: int
    sequence: int  # commit order in a directory: the later commit has the higher number
    saved_at: str
    layout: dict[str, int]  # from `mesh_layout`
    own_dimensions: list[str]  # names in `layout` that are dimensions of a user's custom mesh
    versions: dict[str, str]
    dtypes: dict[str, dict[str, str]]  # of the plan by tensor and use, from `save._dtype_names`
    config: Any
    extra: Any
    checksum: str  # algorithm, one of `files.CHECKSUMS`
    files: dict[str, Written]

    @property
    def size(self) -> int:
        """The total size of all files, in bytes."""
        return sum(file.size for file in self.files.values())


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: boxes that cover it exactly, each with the rank that wrote it."""

    dtype: torch.dtype | Format
    shape: tuple[int, ...]
    boxes: dict[Box, int]


class UnknownLayout(ValueError):
    """A checkpoint is from a later release: it is intact, but this release does not know its layout."""


class Checkpoint(NamedTuple):
    """A committed checkpoint."""

    path: Location
    manifest: Manifest

    @classmethod
    def read(cls, path: StrLocation) -> Checkpoint:
        """Read the manifest of the checkpoint at `path`.

        Raises:
            UnknownLayout: the checkpoint is from a later release.
            ValueError: there is no complete checkpoint, or its manifest cannot be read or is damaged.
            OSError: the store of a URL cannot be reached, so it is unknown if there is a checkpoint.
        """
        path = as_location(path)
        file = path / MANIFEST
        text = _read_remote_manifest(path) if isinstance(path, RemotePath) else _read_local_manifest(path)
        try:
            manifest = _parse_manifest(text)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
        _check_manifest(file, manifest)
        return cls(path, manifest)

    def still_exists(self) -> bool:
        """Return True if the checkpoint was neither deleted nor replaced by another of its step since it was read."""
        identity = identity_of(self.path)
        try:
            return Checkpoint.read(self.path).manifest.sequence == self.manifest.sequence
        except ValueError:
            # The manifest cannot be read. If this was the same checkpoint before and after the attempt, it is damaged
            # and exists. Otherwise it was deleted or replaced.
            return identity is not None and identity == identity_of(self.path)

    def find_damage(self, names: Iterable[str] | None = None) -> list[str]:
        """Check the files of the checkpoint and return a line for each problem.

        Args:
            names: files to read and compare with their checksums. None: check that all files exist with the right
                size, without reading them.

        Raises:
            OSError: the store of a URL cannot be reached.
        """
        problems = []
        for name in self.manifest.files if names is None else names:
            problem = self._file_problem(name, compare_checksum=names is not None)
            if problem:
                problems.append(problem)
        return problems

    def _file_problem(self, name: str, *, compare_checksum: bool) -> str:
        """Return the problem with a file, or "" if there is none."""
        file = self.path / name
        expected = self.manifest.files[name]
        try:
            size = storage.size(file)
            if size != expected.size:
                return f"{file} has {size} bytes, expected {expected.size}"
            if compare_checksum and storage.checksum(file, self.manifest.checksum) != expected.checksum:
                return f"{file} is damaged: its checksum differs from the one in {MANIFEST}"
        except FileNotFoundError:
            return f"{file} is missing"
        except (ValueError, OSError) as error:
            if isinstance(file, RemotePath):  # a store that cannot be reached is no damage
                raise
            return str(error) if isinstance(error, ValueError) else f"{file} cannot be read: {error}"
        return ""

    def read_tensors(self) -> tuple[dict[str, StoredTensor], list[str]]:
        """Return the tensors by name and no problems, or no tensors and a line for each problem.

        Checks the sizes of all files, and that the boxes of every tensor cover it. Reads no tensor.

        Raises:
            OSError: the store of a URL cannot be reached.
        """
        problems = self.find_damage()
        if problems:
            return {}, problems
        file = self.path / TENSORS
        stored = {}
        try:
            content = storage.read(file)
        except OSError as error:
            if isinstance(file, RemotePath) and not isinstance(error, FileNotFoundError):
                raise
            return {}, [f"{file} cannot be read: {error}"]
        try:
            for name, (dtype, shape, boxes) in json.loads(content.decode("utf-8")).items():
                stored[name] = _parse_tensor(name, dtype, shape, boxes, self.manifest.files)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            return {}, [f"{file} cannot be read: {error}"]
        gaps = find_gaps(stored)
        if gaps:
            return {}, [f"{file}: {gaps[0]}"]
        return stored, []


def _read_local_manifest(path: Path) -> str:
    """Return the text of manifest.json; raise ValueError if it cannot be read."""
    file = path / MANIFEST
    try:
        if path.is_symlink() and path.resolve().parent != path.parent.resolve():
            raise ValueError(f"{path} is a link out of its directory; give {path.resolve()} if that is meant")
        if not file.is_file() or file.is_symlink():
            raise ValueError(f"{path} has no {MANIFEST}, so it is no complete checkpoint")
        return file.read_text(encoding="utf-8", errors="replace")  # the checksum detects replaced characters
    except OSError as error:  # from the disk, or missing permissions
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_remote_manifest(path: RemotePath) -> str:
    """Return the text of manifest.json; raise ValueError if the checkpoint is not committed or it is damaged."""
    marker = read_marker(path)
    if marker is None:
        raise ValueError(f"{path} has no {MARKER}, so it is no complete checkpoint; for a copy of a complete one, make "
                         f"the object by {WRITE_MARKER}")
    try:
        content = storage.read(path / MANIFEST)
    except FileNotFoundError:
        raise ValueError(f"{path} is damaged: it has a {MARKER} and no {MANIFEST}") from None
    if marker != marker_for(content):
        raise ValueError(f"{path / MANIFEST} is damaged: its content does not match {MARKER}")
    return content.decode("utf-8", errors="replace")


def read_marker(path: RemotePath) -> bytes | None:
    """Return the marker of a remote checkpoint, or None if the checkpoint is not committed.

    A marker that is too short commits nothing: its job died while writing, in a store that shows incomplete objects.
    """
    try:
        marker = storage.read(path / MARKER)
    except FileNotFoundError:
        return None
    return marker if len(marker) == _MARKER_SIZE else None


def marker_for(manifest: bytes) -> bytes:
    """Return the marker that commits a checkpoint with this content of manifest.json."""
    return f"{hashlib.sha256(manifest).hexdigest()}\n".encode()


def identity_of(path: Location) -> object | None:
    """Return a value that differs for a later checkpoint of the same name; None if there is no checkpoint."""
    return read_marker(path) if isinstance(path, RemotePath) else inode(path)


def _parse_manifest(text: str) -> Manifest:
    """Return the manifest in the text of a manifest.json; raise an error for one that is damaged."""
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError(f"it has format {content['format']!r}, which this release does not read")
    body = content["manifest"]
    if content["sha256"] != _digest(body):
        raise ValueError("its content does not match its checksum")
    files = {name: Written(*entry) for name, entry in body["files"].items()}
    layout = dict.fromkeys(DIMENSIONS, 1) | body["layout"]
    manifest = Manifest(**body | {"files": files, "layout": layout})
    numbers = [manifest.step, manifest.sequence, layout["world"], *layout.values(),
               *(file.size for file in files.values())]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a step, a size or the layout is not a number")
    texts = [manifest.saved_at, manifest.checksum, *manifest.own_dimensions, *manifest.versions.values(),
             *(file.checksum for file in files.values()),
             *(dtype for uses in manifest.dtypes.values() for dtype in uses.values())]
    if any(type(text) is not str for text in texts):
        raise ValueError("a time, a version, a checksum, a dimension or a dtype is not a string")
    return manifest


def _check_manifest(file: Location, manifest: Manifest) -> None:
    """Raise ValueError for file names outside of the directory, missing files, and features that this release lacks."""
    for name in manifest.files:
        if Path(name).name != name or not name.isprintable() or name in ("", ".", "..", MANIFEST):
            raise ValueError(f"{file} lists {name!r}, which is not the plain name of a file; refused")
    unknown = manifest.layout.keys() - {"world", *TRAFFIC, *manifest.own_dimensions}
    if unknown:
        raise UnknownLayout(f"{file}: the layout has a dimension {min(unknown)!r}, which this release does not "
                            f"know; load it with the one that saved it, {manifest.versions.get('dualpipe')}")
    if manifest.checksum not in CHECKSUMS:
        raise ValueError(f"{file} has checksums by {manifest.checksum!r}, which this release does not know; load it "
                         f"with the one that saved it, {manifest.versions.get('dualpipe')}")
    # Every file that loading reads must have a checksum.
    for name in chain([TENSORS], map(tensor_file_name, range(manifest.layout["world"]))):
        if name not in manifest.files:
            raise ValueError(f"{file} is damaged: it does not list {name}")


def _parse_tensor(name: str, dtype_name: str, shape: Any, boxes: Any, files: Collection[str]) -> StoredTensor:
    """Return a tensor from its entry in tensors.json; raise ValueError for an entry that is damaged."""
    for numbers in (shape, *chain(*((offsets, sizes, [rank]) for offsets, sizes, rank in boxes))):
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{name}: {numbers!r} are not numbers of elements or of a rank")
    dtype = _parse_dtype(dtype_name, name)
    if isinstance(dtype, Format) and len(shape) not in (2, 3):
        raise ValueError(f"{name} in {dtype} must be a matrix or a stack of matrices; its shape is {shape}")
    ranks = {}
    for offsets, sizes, rank in boxes:
        box = f"{name}: the box at {offsets} of shape {sizes}"
        if any(offset + size > length for offset, size, length in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{box} is not inside a tensor of shape {shape}")
        if isinstance(dtype, Format) and not _has_whole_blocks(dtype, shape, offsets, sizes):
            raise ValueError(f"{box} cuts through blocks of {dtype}")
        if tensor_file_name(rank) not in files:
            raise ValueError(f"{box} was written by rank {rank}, of which there is no file")
        ranks[Box(tuple(offsets), tuple(sizes))] = rank
    return StoredTensor(dtype, tuple(shape), ranks)


def _has_whole_blocks(format: Format, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return True if a box has all columns, and starts and ends at a boundary of block rows."""
    first = offsets[-2]
    end = first + sizes[-2]
    has_all_columns = sizes[-1] == shape[-1]
    return has_all_columns and first % format.block[0] == 0 and (end % format.block[0] == 0 or end == shape[-2])


def verify(path: StrLocation) -> list[str]:
    """Read every byte of the checkpoint at `path` and return a line for each problem.

    An empty list means that the checkpoint is intact and can be loaded.

    Raises:
        OSError: the store of a URL cannot be reached, so it is unknown if the checkpoint is intact.
    """
    try:
        checkpoint = Checkpoint.read(path)
    except ValueError as error:
        return [str(error)]
    damage = checkpoint.find_damage(sorted(checkpoint.manifest.files))
    if damage:
        return damage
    _, problems = checkpoint.read_tensors()
    return problems


def write_description(folder: Location, manifest: Manifest, stored: Mapping[str, StoredTensor]) -> bytes:
    """Write tensors.json and manifest.json, the last two files of a checkpoint; return the content of manifest.json.

    Both are on the disk on return.
    """
    entries = {name: (_dtype_name(tensor.dtype), tensor.shape, [(*box, rank) for box, rank in tensor.boxes.items()])
               for name, tensor in stored.items()}
    written = storage.write(folder / TENSORS, [json.dumps(entries).encode()], manifest.checksum)
    body = dataclasses.asdict(manifest) | {"files": dict(sorted({**manifest.files, TENSORS: written}.items()))}
    content = json.dumps({"format": FORMAT, "sha256": _digest(body), "manifest": body}, indent=1).encode()
    storage.write(folder / MANIFEST, [content])
    return content


def _digest(body: Any) -> str:
    """Return the checksum of the body of a manifest, which is stored beside it."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _dtype_name(dtype: torch.dtype | Format) -> str:
    """Return a name such as 'bf16', or 'fp8_block 128x128': a format with the rows and columns of its blocks."""
    return f"{dtype} {dtype.block[0]}x{dtype.block[1]}" if isinstance(dtype, Format) else short_name(dtype)


def _parse_dtype(name: str, tensor: str) -> torch.dtype | Format:
    """Return the dtype or format with a name from `_dtype_name`.

    Raises ValueError for an unknown name, and for a format whose blocks have another size in this release.
    """
    format = FORMATS.get(name.partition(" ")[0])
    if format is not None and name != _dtype_name(format):
        raise ValueError(f"{tensor} is stored in {name}, and this release has {_dtype_name(format)}; load it with the "
                         "release that saved it")
    try:
        return format or dtype_of(name)
    except ValueError as error:
        raise ValueError(f"{tensor} is stored in {name}, which this release does not have; load it with the release "
                         "that saved it") from error


def find_gaps(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return a line for each tensor whose boxes leave elements out or overlap."""
    lines = []
    for name, (_, shape, boxes) in tensors.items():
        covered = sum(box.numel for box in boxes)
        if covered != prod(shape):
            lines.append(f"{name} is incomplete: its parts have {covered} of {prod(shape)} elements")
        elif _overlap(list(boxes)):
            lines.append(f"{name} is invalid: some of its parts overlap")
    return lines


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return True if two boxes of a tensor overlap.

    The edges of all boxes divide the tensor into grid cells. Two boxes overlap if they share a cell.
    """
    edges = [sorted({edge for span in spans for edge in (span.start, span.stop)})
             for spans in zip(*(box.slices for box in boxes))]
    cells: list[tuple[int, ...]] = []
    for box in boxes:
        ranges = [range(bisect_left(dim_edges, span.start), bisect_left(dim_edges, span.stop))
                  for dim_edges, span in zip(edges, box.slices)]
        cells += product(*ranges)
    return len(cells) > len(set(cells))


def tensor_file_name(rank: int, number: int = 0) -> str:
    """Return the name of a rank's tensor file. Ranks with more than one file number them from 0."""
    suffix = f".{number}" if number else ""
    return f"rank-{rank:05}{suffix}.safetensors"


def mesh_layout(mesh: DeviceMesh | None) -> dict[str, int]:
    """Return the number of ranks as "world", and the sizes of all dimensions of the mesh, by name."""
    sizes = Mesh.of(mesh)
    return {"world": sizes.world_size, **sizes.sizes}
