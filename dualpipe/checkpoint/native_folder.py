"""A directory of checkpoints on disk: what is in it, and what of it is whole.

    step-00000100/            a committed checkpoint: complete from the moment it has this name
        __0_0.distcp ...      the tensors, a file of each rank that wrote any
        tensors.json          where each tensor lies; .metadata says it again, for torch's readers
        rank-00000.json ...   the random state of each rank
        manifest.json         step, layout, versions, ..., and size and checksum of every other file
    latest                    the name of the newest, for people and scripts; `latest()` looks for itself
    .tmp-step-00000200-1f...  being written, or left by a job that died
    .del-step-00000050-a0...  being deleted
    .lock                     held by rank 0 of the one job that may save here, as long as it lives

At any moment a name that begins with "step-" is that of a whole checkpoint, and what begins with ".tmp-" or ".del-"
belongs to the holder of the lock, or to nobody; see `native_commit`. The newest is the one that was committed last, not
that of the highest step: `sequence` counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dualpipe.checkpoint.native_read import read_stored
from dualpipe.checkpoint.native_store import FileInfo
from dualpipe.errors import raise_for
from dualpipe.parallel.description import StoredTensor
from dualpipe.parallel.mesh import DIMENSIONS

FORMAT = 1  # of all that is described here
MANIFEST, LATEST = "manifest.json", "latest"
_NAME = re.compile(r"step-(\d{8,})(?:\.\d+)?")
_TRIES = 100  # of a reader, beside a job that deletes old checkpoints while new ones come


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is."""

    step: int
    sequence: int  # of two in one directory, the one that was committed later has the higher
    saved_at: str
    layout: dict[str, int]  # "world", "pp", "dp" and "ep", and dimensions of a mesh of the user's own
    versions: dict[str, str]
    dtypes: dict[str, dict[str, str]]  # of the plan, by name: "storage", "compute" and "save"
    config: Any
    extra: Any
    files: dict[str, FileInfo]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


class Checkpoint(NamedTuple):
    """A committed checkpoint."""

    path: Path
    manifest: Manifest


class Found(NamedTuple):
    """Of a directory: what is committed, newest first, and what should be but is damaged, with the reason."""

    committed: list[Checkpoint]
    damaged: dict[Path, str]


# -- looking


def scan(directory: str | PathLike[str]) -> Found:
    """What is in a directory of checkpoints, nothing if it does not exist. Raises ValueError where that is unknown."""
    directory = Path(directory)
    try:
        if not directory.exists():
            return Found([], {})
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error}") from error
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file; give the directory that holds the checkpoints")
    for _ in range(_TRIES):
        found, gone = _scan(directory)
        if not gone:
            break
    return found


def _scan(directory: Path) -> tuple[Found, bool]:
    """And whether one was deleted meanwhile: then there is a newer one, perhaps since after the names were listed."""
    committed, damaged, gone = [], {}, False
    try:
        paths = sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), reverse=True)
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error}") from error
    for path in paths:
        try:
            committed.append(Checkpoint(path, read_manifest(path)))
        except ValueError as error:
            if os.path.lexists(path):
                damaged[path] = str(error)
            else:
                gone = True
    committed.sort(key=lambda each: (each.manifest.sequence, each.manifest.saved_at), reverse=True)
    return Found(committed, damaged), gone


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is, or was, one checkpoint and not a directory of them."""
    return bool(_NAME.fullmatch(path.name)) or os.path.lexists(path / MANIFEST)


def find(path: str | PathLike[str]) -> Found:
    """The one checkpoint that `path` names, or else those in the directory; raises ValueError where it is neither."""
    path = Path(path)
    if not is_checkpoint(path):
        return scan(path)
    path = path.resolve()  # a link that the caller names is meant
    return Found([Checkpoint(path, read_manifest(path))], {})


def is_still_there(checkpoint: Checkpoint) -> bool:
    """Whether it was neither deleted nor replaced by another of its step."""
    try:
        return read_manifest(checkpoint.path).sequence == checkpoint.manifest.sequence
    except ValueError:
        return os.path.lexists(checkpoint.path)  # damaged


def none_whole(path: str | PathLike[str], damaged: Iterable[str]) -> NoReturn:
    """Raise ValueError: of all that is at `path` each is damaged, or else why there is nothing."""
    raise_for(f"{path} has no checkpoint that is whole:", damaged)
    if not os.path.lexists(path):
        raise ValueError(f"{path} does not exist")
    inside = Path(path) / "checkpoints"
    hint = f"give {inside}" if inside.is_dir() else "give the directory that a run saves to, or one checkpoint in it"
    raise ValueError(f"{path} has no checkpoints; {hint}")


def latest(directory: str | PathLike[str]) -> Path | None:
    """The checkpoint that was committed last; None where there never was one.

    Raises ValueError where there are some, all of them without a manifest that can be read: to start from nothing then
    would be wrong. Only manifests are read; `load` goes further back where files are damaged.
    """
    found = scan(directory)
    if not found.committed and found.damaged:
        none_whole(directory, found.damaged.values())
    return found.committed[0].path if found.committed else None


def read_manifest(path: str | PathLike[str]) -> Manifest:
    """What the checkpoint at `path` is; raises ValueError where that cannot be told."""
    try:
        return _read_manifest(Path(path))
    except OSError as error:  # of the disk, or of permissions
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_manifest(path: Path) -> Manifest:
    if path.is_symlink() and path.resolve().parent != path.parent.resolve():
        raise ValueError(f"{path} is a link out of its directory; give {path.resolve()} if that is meant")
    file = path / MANIFEST
    if not file.is_file() or file.is_symlink():
        raise ValueError(f"{path} has no {MANIFEST}, so it is no complete checkpoint")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']!r}, which this release does not read")
        body = content["manifest"]
        if content["sha256"] != digest_of(body):
            raise ValueError("it does not have the checksum that it names")
        files = {name: FileInfo(*info) for name, info in body["files"].items()}
        manifest = Manifest(**body | {"files": files})
        _check_types(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if wrong := [name for name in files if not _is_plain(name)]:
        raise ValueError(f"{file} lists {wrong[0]!r}, which is not the plain name of a file; refused")
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise ValueError for what would not be understood where it is used."""
    layout, files = manifest.layout, manifest.files.values()
    if not layout.keys() >= {"world", *DIMENSIONS}:
        raise ValueError(f"the layout is {layout}")
    numbers = [manifest.step, manifest.sequence, *layout.values(), *(info.size for info in files)]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a step, a size or the layout is not a number")
    texts = [manifest.saved_at, *manifest.versions.values(), *(info.sha256 for info in files),
             *(dtype for of in manifest.dtypes.values() for dtype in of.values())]
    if any(type(text) is not str for text in texts):
        raise ValueError("a time, a version, a checksum or a dtype is not a text")


def _is_plain(name: str) -> bool:
    return Path(name).name == name and name.isprintable() and name not in ("", ".", "..", MANIFEST)


def verify(path: str | PathLike[str]) -> list[str]:
    """What is wrong with the checkpoint at `path`, a line for each; reads every byte. Nothing: it can be loaded."""
    try:
        checkpoint = Checkpoint(Path(path), read_manifest(path))
    except ValueError as error:
        return [str(error)]
    return verify_files(*checkpoint, sorted(checkpoint.manifest.files)) or stored_in(checkpoint)[1]


def verify_files(path: Path, manifest: Manifest, names: Iterable[str], *, hashes: bool = True) -> list[str]:
    """What is wrong with these files of a checkpoint; without `hashes` only what can be seen without reading them."""
    return [f"{path / name} {wrong}" for name in names for wrong in _wrong(path / name, manifest.files[name], hashes)]


def stored_in(checkpoint: Checkpoint) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of a checkpoint by name, or what is wrong with their description."""
    try:
        return read_stored(checkpoint.path, checkpoint.manifest.files.keys()), []
    except (OSError, ValueError) as error:
        return {}, [str(error)]


def _wrong(file: Path, said: FileInfo, hashes: bool) -> Iterator[str]:
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            yield "is not a plain file; refused"
        elif status.st_size != said.size:
            yield f"has {status.st_size} bytes, not {said.size}"
        elif hashes:
            with open(file, "rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != said.sha256:
                    yield "is damaged: its checksum is not that of the manifest"
    except FileNotFoundError:
        yield "is missing"
    except OSError as error:
        yield f"cannot be read: {error}"


def digest_of(body: Any) -> str:
    """The checksum that a manifest has of itself."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def step_of(path: Path) -> int:
    """That the name of a checkpoint says; -1 for other names."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def name_of(step: int) -> str:
    """Of the directory of a checkpoint."""
    return f"step-{step:08}"
