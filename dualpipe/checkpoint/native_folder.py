"""A directory of checkpoints on disk: what is in it, what of it is whole, and how a new one gets in.

    step-00000100/            a committed checkpoint: complete from the moment it has this name
        __0_0.distcp ...      the tensors, a file of each rank that wrote any; .metadata says where each lies
        rank-00000.json ...   the random state of each rank
        manifest.json         step, layout, versions, ..., and size and checksum of every other file
    latest                    the name of the newest, for people and scripts; `latest()` looks for itself
    .tmp-step-00000200-1f...  being written, or left by a job that died
    .del-step-00000050-a0...  being deleted
    .lock                     held by rank 0 of the one job that may save here, as long as it lives

A checkpoint is written under a temporary name, flushed, and renamed; only then are others deleted, each renamed first.
So at any moment a name that begins with "step-" is that of a whole checkpoint, and what begins with ".tmp-" or ".del-"
belongs to the holder of the lock, or to nobody. The newest is the one that was committed last, not that of the highest
step: `sequence` counts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe.checkpoint.native_store import FileInfo, hashed_file, read_metadata

MANIFEST, LATEST = "manifest.json", "latest"
_NAME = re.compile(r"step-(\d{8,})(?:\.\d+)?")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is."""

    step: int
    sequence: int  # of two in one directory, the one that was committed later has the higher
    saved_at: str
    layout: dict[str, int]  # "world", "pp", "dp" and "ep"
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
    """What is in a directory of checkpoints; raises ValueError where it is something else, nothing where it is not."""
    directory = Path(directory)
    if not directory.exists():
        return Found([], {})
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file; give the directory that holds the checkpoints")
    committed, damaged = [], {}
    for path in sorted(directory.iterdir(), reverse=True):
        if _NAME.fullmatch(path.name):
            try:
                committed.append(Checkpoint(path, read_manifest(path)))
            except ValueError as error:
                damaged[path] = str(error)
    return Found(sorted(committed, key=lambda each: -each.manifest.sequence), damaged)


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


def latest(directory: str | PathLike[str]) -> Path | None:
    """The checkpoint that was committed last; None where there never was one.

    Raises ValueError where there are some, all of them without a manifest that can be read: to start from nothing then
    would be wrong. Only manifests are read; `load` goes further back where files are damaged.
    """
    found = scan(directory)
    if not found.committed and found.damaged:
        raise ValueError("\n  ".join([f"{directory} has no checkpoint that is whole:", *found.damaged.values()]))
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
        body = content["manifest"]
        if content["sha256"] != _digest(body):
            raise ValueError("it does not have the checksum that it names")
        files = {name: FileInfo(*info) for name, info in body["files"].items()}
        manifest = Manifest(**body | {"files": files})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if wrong := [name for name in files if Path(name).name != name or name in ("", ".", "..", MANIFEST)]:
        raise ValueError(f"{file} lists {wrong[0]!r}, which is not the plain name of a file; refused")
    return manifest


def verify(path: str | PathLike[str]) -> list[str]:
    """What is wrong with the checkpoint at `path`, a line for each; reads every byte. Nothing: it can be loaded."""
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return [str(error)]
    return verify_files(Path(path), manifest, sorted(manifest.files)) or verify_metadata(Path(path), manifest)


def verify_files(path: Path, manifest: Manifest, names: Iterable[str], *, hashes: bool = True) -> list[str]:
    """What is wrong with these files of a checkpoint; without `hashes` only what can be seen without reading them."""
    return [f"{path / name} {wrong}" for name in names for wrong in _wrong(path / name, manifest.files[name], hashes)]


def verify_metadata(path: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the description of the tensors."""
    try:
        read_metadata(path, manifest.files.keys())
    except ValueError as error:
        return [str(error)]
    return []


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


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# -- saving; rank 0 alone


def lock(directory: Path, patience: float = 10.0) -> int | None:
    """Make the directory and become the one job that saves there: a descriptor to close when done, None where the file
    system has no locks. The system frees it when the process dies; one that was just killed may take a moment, so this
    tries for `patience` seconds. Raises ValueError where another job has it."""
    try:
        _make(directory)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(f"checkpoints cannot be saved to {directory}: {error}") from error
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            os.close(descriptor)
            raise ValueError(f"another job saves to {directory}; end it, or give each a directory") from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            return None


def _make(directory: Path) -> None:
    """With its parents; their new names are on the disk then, as without them what is in it would be lost."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def begin(directory: Path, step: int) -> Path:
    """Remove what dead jobs left, and make the temporary directory of a new checkpoint."""
    for path in directory.iterdir():
        if path.name.startswith((".tmp-step-", ".del-step-")):
            _remove(path)
    folder = directory / f".tmp-{name_of(step)}-{secrets.token_hex(4)}"
    folder.mkdir()
    return folder


def commit(folder: Path, manifest: Manifest) -> Path:
    """Make a complete temporary directory the newest checkpoint; what goes before stays, another of its step too."""
    body = asdict(manifest)
    with hashed_file(folder / MANIFEST, {}) as out:
        out.write(json.dumps({"sha256": _digest(body), "manifest": body}, indent=1).encode())
    sync(folder)
    path = folder.parent / name_of(manifest.step)
    for number in range(1, 1000):
        if not os.path.lexists(path):
            break
        path = folder.parent / f"{name_of(manifest.step)}.{number}"
    os.rename(folder, path)
    sync(folder.parent)
    return path


def retire(path: Path, keep_last: int | None, keep_every: int | None) -> Path:
    """After `path` was committed: delete what it replaces and what need not be kept, and name it as the latest.

    Returns the path that it has then: without a suffix, once another of its step is gone. What cannot be deleted is
    warned about.
    """
    directory, found = path.parent, scan(path.parent)
    newest, *older = found.committed
    assert newest.path == path, (newest.path, path)
    replaced = [each for each in older if each.manifest.step == newest.manifest.step]
    others = [each for each in older if each.manifest.step != newest.manifest.step]
    spare = [] if keep_last is None else others[keep_last - 1 :]
    plain = directory / name_of(newest.manifest.step)
    _name_latest(path)  # before what it named is deleted
    for each in replaced + spare:
        if each in replaced or not keep_every or each.manifest.step % keep_every:
            _delete(each.path)
    if plain in found.damaged:
        _delete(plain)
    if path != plain and not os.path.lexists(plain):
        path = path.rename(plain)
        _name_latest(path)
    return path


def _name_latest(path: Path) -> None:
    temporary = path.parent / f".tmp-{LATEST}"
    temporary.write_text(f"{path.name}\n")
    sync(temporary)
    os.replace(temporary, path.parent / LATEST)
    sync(path.parent)


def name_of(step: int) -> str:
    return f"step-{step:08}"


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    """By another name first, so that a half is never taken for a whole."""
    gone = path.parent / f".del-{path.name}-{secrets.token_hex(4)}"
    try:
        os.rename(path, gone)
        sync(path.parent)
    except OSError as error:
        warnings.warn(f"the old checkpoint {path} cannot be deleted: {error}", stacklevel=2)
        return
    _remove(gone)


def _remove(path: Path) -> None:
    try:
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be deleted: {error}", stacklevel=2)
