"""What one checkpoint is, by its manifest: which files it has, which tensors are in them, and whether all is whole.

    manifest.json   step, layout, versions, dtypes, configuration, and size and checksum of every other file
    tensors.json    dtype and shape of each tensor, and the boxes that make it up, each with the rank that wrote it

Where in a rank's files a box is, their own headers say. Files of a checkpoint may come from anywhere: what they say is
checked before it is used, and leads nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualpipe.checkpoint.tensors import Box
from dualpipe.dtypes import dtype_of, short_name
from dualpipe.files import CHECKSUMS, Written, checksum_of, write_file
from dualpipe.parallel.mesh import DIMENSIONS

FORMAT = 2  # of all that a checkpoint consists of
MANIFEST, TENSORS = "manifest.json", "tensors.json"
RANDOM = "random"  # in the metadata of a rank's first file, as JSON


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is."""

    step: int
    sequence: int  # of two in one directory, the one that was committed later has the higher
    saved_at: str
    layout: dict[str, int]  # sizes: "world", "pp", "dp" and "ep", and dimensions of a mesh of the user's own
    own_dimensions: list[str]  # the names of those
    versions: dict[str, str]
    dtypes: dict[str, dict[str, str]]  # of the plan, by name: "storage", "compute" and "save"
    config: Any
    extra: Any
    checksum: str  # which one: of `files.CHECKSUMS`
    files: dict[str, Written]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


class Checkpoint(NamedTuple):
    """A committed checkpoint."""

    path: Path
    manifest: Manifest


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, whole in its boxes, each with the rank that wrote it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: dict[Box, int]


def file_of(rank: int, number: int = 0) -> str:
    """The name of a file of tensors: one of those that a rank wrote."""
    return f"rank-{rank:05}{f'.{number}' if number else ''}.safetensors"


# -- reading them


class UnknownLayout(ValueError):
    """A checkpoint is of a later release: it is whole, but this one cannot tell what its parts are."""


def read_manifest(path: str | PathLike[str]) -> Manifest:
    """What the checkpoint at `path` is; raises ValueError where that cannot be told."""
    path = Path(path)
    file = path / MANIFEST
    try:
        if path.is_symlink() and path.resolve().parent != path.parent.resolve():
            raise ValueError(f"{path} is a link out of its directory; give {path.resolve()} if that is meant")
        if not file.is_file() or file.is_symlink():
            raise ValueError(f"{path} has no {MANIFEST}, so it is no complete checkpoint")
        text = file.read_text(encoding="utf-8", errors="replace")  # which its checksum then tells
    except OSError as error:  # of the disk, or of permissions
        raise ValueError(f"{path} cannot be read: {error}") from error
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']!r}, which this release does not read")
        body = content["manifest"]
        if content["sha256"] != _digest_of(body):
            raise ValueError("it does not have the checksum that it names")
        files = {name: Written(*info) for name, info in body["files"].items()}
        manifest = Manifest(**body | {"files": files, "layout": dict.fromkeys(DIMENSIONS, 1) | body["layout"]})
        _check_types(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    for name in files:
        if Path(name).name != name or not name.isprintable() or name in ("", ".", "..", MANIFEST):
            raise ValueError(f"{file} lists {name!r}, which is not the plain name of a file; refused")
    if unknown := manifest.layout.keys() - {"world", *DIMENSIONS, *manifest.own_dimensions}:
        raise UnknownLayout(f"{file}: the layout has a dimension {min(unknown)!r}, which this release does not know; "
                            f"load it with the one that saved it, {manifest.versions.get('dualpipe')}")
    if manifest.checksum not in CHECKSUMS:
        raise ValueError(f"{file} has checksums by {manifest.checksum!r}, which this release does not know")
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError for what would not be understood where it is used."""
    layout, files = manifest.layout, manifest.files.values()
    numbers = [manifest.step, manifest.sequence, layout["world"], *layout.values(), *(info.size for info in files)]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a step, a size or the layout is not a number")
    texts = [manifest.saved_at, manifest.checksum, *manifest.own_dimensions, *manifest.versions.values(),
             *(info.checksum for info in files), *(dtype for of in manifest.dtypes.values() for dtype in of.values())]
    if any(type(text) is not str for text in texts):
        raise ValueError("a time, a version, a checksum, a dimension or a dtype is not a text")


def _digest_of(body: Any) -> str:
    """The checksum that a manifest has of itself."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def stored_in(checkpoint: Checkpoint) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of a checkpoint by name, or what is wrong with their description."""
    file = checkpoint.path / TENSORS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        stored = {name: _stored_tensor(checkpoint.manifest.files, *entry) for name, entry in content.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return {}, [f"{file} cannot be read: {error}"]
    gaps = gaps_in(stored)
    return ({}, [f"{file}: {gaps[0]}"]) if gaps else (stored, [])


def _stored_tensor(files: Mapping[str, Written], dtype: Any, shape: Any, boxes: Any) -> StoredTensor:
    for numbers in (shape, *(numbers for offsets, sizes, rank in boxes for numbers in (offsets, sizes, [rank]))):
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"{numbers!r} are not numbers of elements or of a rank")
    found = {}
    for offsets, sizes, rank in boxes:
        if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a part at {offsets} of sizes {sizes} is not inside a tensor of shape {shape}")
        if file_of(rank) not in files:
            raise ValueError(f"a part was written by rank {rank}, of which there is no file")
        found[Box(tuple(offsets), tuple(sizes))] = rank
    return StoredTensor(dtype_of(dtype), tuple(shape), found)


def gaps_in(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """A line for each tensor whose boxes do not make up the whole."""
    lines = []
    for name, each in tensors.items():
        if (stored := sum(box.numel for box in each.boxes)) != prod(each.shape):
            lines.append(f"{name} is not whole: its parts have {stored} of {prod(each.shape)} elements")
        elif _overlap(each.boxes):
            lines.append(f"{name} is not whole: some of its parts overlap")
    return lines


def _overlap(boxes: Collection[Box]) -> bool:
    """Whether two boxes share a cell of the grid that all their edges make."""
    bounds = [[(part.start, part.stop) for part in box.slices] for box in boxes]
    places = [{edge: place for place, edge in enumerate(sorted({edge for pair in along for edge in pair}))}
              for along in zip(*bounds)]
    cells = [cell for box in bounds
             for cell in product(*(range(at[start], at[stop]) for at, (start, stop) in zip(places, box)))]
    return len(cells) > len(set(cells))


# -- writing them


def write_description(folder: Path, manifest: Manifest, stored: Mapping[str, StoredTensor]) -> None:
    """Complete a checkpoint of which all files but these two are there; on the disk when this returns."""
    described = {name: (short_name(each.dtype), each.shape, [(*box, rank) for box, rank in each.boxes.items()])
                 for name, each in stored.items()}
    written = write_file(folder / TENSORS, [json.dumps(described).encode()], manifest.checksum)
    body = dataclasses.asdict(manifest) | {"files": dict(sorted({**manifest.files, TENSORS: written}.items()))}
    content = {"format": FORMAT, "sha256": _digest_of(body), "manifest": body}
    write_file(folder / MANIFEST, [json.dumps(content, indent=1).encode()])


# -- whether the files are whole


def verify(path: str | PathLike[str]) -> list[str]:
    """What is wrong with the checkpoint at `path`, a line for each; reads every byte. Nothing: it can be loaded."""
    try:
        checkpoint = Checkpoint(Path(path), read_manifest(path))
    except ValueError as error:
        return [str(error)]
    return verify_files(checkpoint, sorted(checkpoint.manifest.files)) or stored_in(checkpoint)[1]


def verify_files(checkpoint: Checkpoint, names: Iterable[str] | None = None) -> list[str]:
    """What is wrong with these files of a checkpoint; None: with all, as far as can be seen without reading them."""
    path, manifest = checkpoint
    wrong = {name: _wrong(path / name, manifest.files[name], "" if names is None else manifest.checksum)
             for name in (manifest.files if names is None else names)}
    return [f"{path / name} {what}" for name, what in wrong.items() if what]


def _wrong(file: Path, said: Written, checksum: str) -> str:
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a plain file; refused"
        if status.st_size != said.size:
            return f"has {status.st_size} bytes, not {said.size}"
        if checksum and checksum_of(file, checksum) != said.checksum:
            return "is damaged: its checksum is not that of the manifest"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    return ""
