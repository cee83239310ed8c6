"""What one checkpoint is, by its manifest: which files it has, which tensors are in them, and whether all is whole.

tensors.json has dtype and shape of each tensor, and the boxes that make it up, each with the rank that wrote it. Where
in that rank's files a box is, their own headers say. Files of a checkpoint may come from anywhere: what they say is
checked before it is used, and leads nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import stat
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from dualpipe.checkpoint.tensors import Box
from dualpipe.kernels.formats import FORMATS, Format
from dualpipe.parallel.mesh import DIMENSIONS, TRAFFIC, Mesh
from dualpipe.runtime.dtypes import dtype_of, short_name
from dualpipe.runtime.files import CHECKSUMS, Written, checksum_of, node_of, write_file

FORMAT = 2  # of all that a checkpoint consists of
MANIFEST, TENSORS = "manifest.json", "tensors.json"
RANDOM = "random"  # in the metadata of a rank's first file, as JSON


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is."""

    step: int
    sequence: int  # of two in one directory, the one that was committed later has the higher
    saved_at: str
    layout: dict[str, int]  # of `layout_of`
    own_dimensions: list[str]  # of its names, those of a mesh of the user's own
    versions: dict[str, str]
    dtypes: dict[str, dict[str, str]]  # of the plan, by name: "storage", "compute", "save"; "stored" or "gathered" in
    config: Any
    extra: Any
    checksum: str  # which one: of `files.CHECKSUMS`
    files: dict[str, Written]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, whole in its boxes, each with the rank that wrote it."""

    dtype: torch.dtype | Format
    shape: tuple[int, ...]
    boxes: dict[Box, int]


class UnknownLayout(ValueError):
    """A checkpoint is of a later release: it is whole, but this one cannot tell what its parts are."""


class Checkpoint(NamedTuple):
    """A committed checkpoint."""

    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Checkpoint:
        """What is at `path`, by its manifest; raises ValueError where that cannot be told."""
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
            layout = dict.fromkeys(DIMENSIONS, 1) | body["layout"]
            manifest = Manifest(**body | {"files": files, "layout": layout})
            numbers = [manifest.step, manifest.sequence, layout["world"], *layout.values(),
                       *(info.size for info in files.values())]
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError("a step, a size or the layout is not a number")
            texts = [manifest.saved_at, manifest.checksum, *manifest.own_dimensions, *manifest.versions.values(),
                     *(info.checksum for info in files.values()),
                     *(dtype for of in manifest.dtypes.values() for dtype in of.values())]
            if any(type(text) is not str for text in texts):
                raise ValueError("a time, a version, a checksum, a dimension or a dtype is not a text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
        for name in files:
            if Path(name).name != name or not name.isprintable() or name in ("", ".", "..", MANIFEST):
                raise ValueError(f"{file} lists {name!r}, which is not the plain name of a file; refused")
        if unknown := layout.keys() - {"world", *TRAFFIC, *manifest.own_dimensions}:
            raise UnknownLayout(f"{file}: the layout has a dimension {min(unknown)!r}, which this release does not "
                                f"know; load it with the one that saved it, {manifest.versions.get('dualpipe')}")
        if manifest.checksum not in CHECKSUMS:
            raise ValueError(f"{file} has checksums by {manifest.checksum!r}, which this release does not know")
        for name in chain([TENSORS], map(file_of, range(layout["world"]))):  # all that is read has a checksum
            if name not in files:
                raise ValueError(f"{file} is damaged: it does not list {name}")
        return cls(path, manifest)

    def is_there(self) -> bool:
        """Return True if it was neither deleted nor replaced by another of its step since it was read."""
        node = node_of(self.path)
        try:
            return Checkpoint.read(self.path).manifest.sequence == self.manifest.sequence
        except ValueError:
            return node is not None and node == node_of(self.path)  # damaged, not replaced at this moment

    def damage(self, names: Iterable[str] | None = None) -> list[str]:
        """What is wrong with these of its files; None: with all, as far as can be seen without reading them."""
        wrong = []
        for name in self.manifest.files if names is None else names:
            file, said = self.path / name, self.manifest.files[name]
            try:
                status = file.lstat()
                if not stat.S_ISREG(status.st_mode):
                    wrong.append(f"{file} is not a plain file; refused")
                elif status.st_size != said.size:
                    wrong.append(f"{file} has {status.st_size} bytes, not {said.size}")
                elif names is not None and checksum_of(file, self.manifest.checksum) != said.checksum:
                    wrong.append(f"{file} is damaged: its checksum is not that of the manifest")
            except FileNotFoundError:
                wrong.append(f"{file} is missing")
            except OSError as error:
                wrong.append(f"{file} cannot be read: {error}")
        return wrong

    def tensors(self) -> tuple[dict[str, StoredTensor], list[str]]:
        """By name what is in it, or what is wrong, as far as can be seen without reading the tensors."""
        if wrong := self.damage():
            return {}, wrong
        file, stored = self.path / TENSORS, {}
        try:
            for name, (dtype, shape, boxes) in json.loads(file.read_text(encoding="utf-8")).items():
                found = {}
                for numbers in (shape, *chain(*((offsets, sizes, [rank]) for offsets, sizes, rank in boxes))):
                    if not isinstance(numbers, list) or any(type(each) is not int or each < 0 for each in numbers):
                        raise ValueError(f"{numbers!r} are not numbers of elements or of a rank")
                if isinstance(held := _dtype_of(dtype, name), Format) and len(shape) not in (2, 3):
                    raise ValueError(f"{name} {shape} is no matrix, or stack of them, as those in {held} are")
                for offsets, sizes, rank in boxes:
                    if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
                        raise ValueError(f"a part at {offsets} of sizes {sizes} is not inside a tensor of shape "
                                         f"{shape}")
                    first, end = (offsets[-2], offsets[-2] + sizes[-2]) if isinstance(held, Format) else (0, 0)
                    if isinstance(held, Format) and (sizes[-1] != shape[-1] or first % held.block[0]
                                                     or (end % held.block[0] and end != shape[-2])):
                        raise ValueError(f"a part at {offsets} of sizes {sizes} cuts through blocks of {held}")
                    if file_of(rank) not in self.manifest.files:
                        raise ValueError(f"a part was written by rank {rank}, of which there is no file")
                    found[Box(tuple(offsets), tuple(sizes))] = rank
                stored[name] = StoredTensor(held, tuple(shape), found)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            return {}, [f"{file} cannot be read: {error}"]
        gaps = gaps_in(stored)
        return ({}, [f"{file}: {gaps[0]}"]) if gaps else (stored, [])


def verify(path: str | PathLike[str]) -> list[str]:
    """What is wrong with the checkpoint at `path`, a line for each; reads every byte. Nothing: it can be loaded."""
    try:
        checkpoint = Checkpoint.read(path)
    except ValueError as error:
        return [str(error)]
    return checkpoint.damage(sorted(checkpoint.manifest.files)) or checkpoint.tensors()[1]


def write_description(folder: Path, manifest: Manifest, stored: Mapping[str, StoredTensor]) -> None:
    """Complete a checkpoint of which all files but these two are there; on the disk when this returns."""
    described = {name: (_name_of(each.dtype), each.shape, [(*box, rank) for box, rank in each.boxes.items()])
                 for name, each in stored.items()}
    written = write_file(folder / TENSORS, [json.dumps(described).encode()], manifest.checksum)
    body = dataclasses.asdict(manifest) | {"files": dict(sorted({**manifest.files, TENSORS: written}.items()))}
    content = {"format": FORMAT, "sha256": _digest_of(body), "manifest": body}
    write_file(folder / MANIFEST, [json.dumps(content, indent=1).encode()])


def _digest_of(body: Any) -> str:
    """The checksum that a manifest has of itself."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _name_of(dtype: torch.dtype | Format) -> str:
    """'bf16', or 'fp8_block 128x128': a format with the rows and columns of its blocks."""
    return f"{dtype} {dtype.block[0]}x{dtype.block[1]}" if isinstance(dtype, Format) else short_name(dtype)


def _dtype_of(name: str, tensor: str) -> torch.dtype | Format:
    """What `_name_of` names; raises ValueError for a format of other blocks than here."""
    format = FORMATS.get(name.partition(" ")[0])
    if format is not None and name != _name_of(format):
        raise ValueError(f"{tensor} is stored in {name}, and this release has {_name_of(format)}; load it with the one "
                         "that saved it")
    try:
        return format or dtype_of(name)
    except ValueError as error:
        raise ValueError(f"{tensor} is stored in {name}, which this release does not have; load it with the one that "
                         "saved it") from error


def gaps_in(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """A line for each tensor whose boxes do not make up the whole."""
    lines = []
    for name, (_, shape, boxes) in tensors.items():
        if (stored := sum(box.numel for box in boxes)) != prod(shape):
            lines.append(f"{name} is not whole: its parts have {stored} of {prod(shape)} elements")
            continue
        # All edges make a grid; boxes overlap where they share a cell of it.
        edges = [sorted({edge for part in along for edge in (part.start, part.stop)})
                 for along in zip(*(box.slices for box in boxes))]
        cells = [cell for box in boxes for cell in product(*(
            range(bisect_left(at, part.start), bisect_left(at, part.stop)) for at, part in zip(edges, box.slices)
        ))]
        if len(cells) > len(set(cells)):
            lines.append(f"{name} is not whole: some of its parts overlap")
    return lines


def file_of(rank: int, number: int = 0) -> str:
    """The name of a file of tensors: one of those that a rank wrote."""
    return f"rank-{rank:05}{f'.{number}' if number else ''}.safetensors"


def layout_of(mesh: DeviceMesh | None) -> dict[str, int]:
    """Sizes by name: "world", "pp", "dp", "ep", and those of other dimensions that a mesh of one's own has."""
    sizes = Mesh.of(mesh)
    return {"world": sizes.world_size, **sizes.sizes}
