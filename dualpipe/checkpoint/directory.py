"""A directory of checkpoints on disk: what is in it, what of it is whole, and how others get in and out.

    step-00000100/            a committed checkpoint: complete from the moment it has this name
        rank-00000.safetensors ...   the tensors that each rank wrote, and its random state in the metadata
        tensors.json                 of which boxes each tensor is made up, and in which files they are
        manifest.json                step, layout, versions, ..., and size and checksum of every other file
    latest                    the name of the newest, for people and scripts; `latest()` looks for itself
    .tmp-step-00000200-1f...  being written, or left by a job that died
    .del-step-00000050-a0...  being deleted
    .lock                     held by rank 0 of the one job that may save here, as long as it lives

At any moment a name that begins with "step-" is that of a whole checkpoint, and what begins with ".tmp-" or ".del-"
belongs to the holder of the lock, or to nobody: a checkpoint is written under a temporary name, flushed, and renamed;
only then are others deleted, each renamed first. The newest is the one that was committed last, not that of the highest
step: `sequence` counts.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import NamedTuple, NoReturn

from dualpipe.checkpoint.manifest import MANIFEST, Checkpoint, Manifest, StoredTensor, UnknownLayout, write_description
from dualpipe.runtime.errors import raise_for
from dualpipe.runtime.files import lock, node_of, replace_file, sync

_NAME = re.compile(r"step-(\d{8,})(?:\.\d+)?")
_TRIES = 100  # of a reader, beside a job that deletes old checkpoints while new ones come


class FoundCheckpoints(NamedTuple):
    """What of a directory is committed, newest first, and what should be but is damaged, with the reason.

    later: the reason where what is newest is not damaged, but of a later release.
    """

    committed: list[Checkpoint]
    damaged: dict[Path, str]
    later: str = ""


def scan(directory: str | PathLike[str]) -> FoundCheckpoints:
    """What is in a directory of checkpoints, nothing if it does not exist. Raises ValueError where that is unknown."""
    directory = Path(directory)
    for _ in range(_TRIES):
        committed, damaged, is_gone, later = [], {}, False, ""
        try:
            if not directory.exists():
                break
            if not directory.is_dir():
                raise ValueError(f"{directory} is a file; give the directory that holds the checkpoints")
            paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
        except OSError as error:
            raise ValueError(f"{directory} cannot be read: {error}") from error
        for path in sorted(paths, reverse=True):
            node = node_of(path)
            try:
                committed.append(Checkpoint.read(path))
            except ValueError as error:
                if node is not None and node == node_of(path):
                    damaged[path] = str(error)
                    later = str(error) if isinstance(error, UnknownLayout) and not committed else later
                else:  # deleted or replaced meanwhile: there is a newer one, perhaps since after the names were listed
                    is_gone = True
        if not is_gone:
            break
    committed.sort(key=lambda each: (each.manifest.sequence, each.manifest.saved_at), reverse=True)
    return FoundCheckpoints(committed, damaged, later)


def is_checkpoint(path: Path) -> bool:
    """Return True if `path` is, or was, one checkpoint and not a directory of them."""
    return bool(_NAME.fullmatch(path.name)) or os.path.lexists(path / MANIFEST)


def find(path: str | PathLike[str]) -> FoundCheckpoints:
    """The one checkpoint that `path` names, or else those in the directory; raises ValueError where it is neither."""
    path = Path(path)
    if not is_checkpoint(path):
        return scan(path)
    return FoundCheckpoints([Checkpoint.read(path.resolve())], {})  # a link that the caller names is meant


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


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint says; -1 for other names."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


class Directory:
    """The directory where one job saves, in the hands of its rank 0.

    keep_last, keep_every: which checkpoints stay: the last so many, and those of steps that are multiples. None: all.
    """

    def __init__(self, path: Path, keep_last: int | None, keep_every: int | None, patience: float = 10.0) -> None:
        """Make it, with its parents, and take it for this job. The system frees it when the process dies.

        Raises ValueError where nothing can be written, or after `patience` seconds another job still has it: one that
        was just killed may take a moment.
        """
        self.path, self._keep_last, self._keep_every = path, keep_last, keep_every
        self._lock = None
        try:
            missing = [each for each in (path, *path.parents) if not each.exists()]
            path.mkdir(parents=True, exist_ok=True)
            for each in missing:  # without its name on the disk, what is in it would be lost
                sync(each.parent)
            self._lock = lock(path / ".lock", patience)
            probe = path / f".tmp-step-{secrets.token_hex(4)}"
            probe.mkdir()
            probe.rmdir()
            found = scan(path).committed
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ValueError(f"checkpoints cannot be saved to {path}: {error}") from error
            raise
        self._sequence = found[0].manifest.sequence if found else -1
        self._committed = [each.path for each in reversed(found) if not each.damage()]
        self.anomaly = 0  # the last step whose result may be wrong: the newest before it stays

    @property
    def newest(self) -> Path | None:
        """The whole checkpoint that was committed last."""
        return self._committed[-1] if self._committed else None

    def close(self) -> None:
        """Let other jobs save here."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def ignore(self, damaged: Iterable[Path]) -> None:
        """Do not count these among the last that stay. Each goes when another of its step comes."""
        gone = {path.resolve() for path in damaged}
        self._committed = [path for path in self._committed if path.resolve() not in gone]

    def begin(self, step: int, moved: Callable[[], None]) -> Path:
        """Remove what dead jobs left, and make the temporary directory of a new checkpoint.

        moved: called again and again while this goes on, as `commit` does.
        """
        for path in self.path.iterdir():
            if path.name.startswith((".tmp-step-", ".del-step-")):
                _remove(path, moved)
        folder = self.path / f".tmp-step-{step:08}-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def commit(
        self, folder: Path, manifest: Manifest, stored: Mapping[str, StoredTensor], moved: Callable[[], None],
        allowed: AbstractContextManager[None],
    ) -> Path:
        """Make a temporary directory the newest checkpoint and delete what need not be kept; returns its path.

        It is complete but for the description of its tensors and the manifest, which gets its sequence here. Another of
        the same step is replaced. What cannot be deleted is warned about. allowed: is around the one call that commits,
        and may raise instead.
        """
        self._sequence += 1
        write_description(folder, dataclasses.replace(manifest, sequence=self._sequence), stored)
        sync(folder)
        moved()
        path, number = self.path / f"step-{manifest.step:08}", 0
        while os.path.lexists(path):  # another of its step
            number += 1
            path = path.with_name(f"step-{manifest.step:08}.{number}")
        with allowed:
            os.rename(folder, path)
        self._committed.append(path)
        sync(self.path)
        try:
            return self._tidy(path, manifest.step, moved)
        except OSError as error:
            warnings.warn(f"{path} is saved, but older ones could not be tidied up: {error}", stacklevel=2)
            return path

    def _tidy(self, path: Path, step: int, moved: Callable[[], None]) -> Path:
        """After `path` was committed; returns the path that it has then: without a suffix, once the other is gone."""
        self._committed = [each for each in self._committed if each.exists()]
        self._name_latest(path)  # before what it named is deleted
        others = [each for each in self._committed[:-1] if step_of(each) != step]
        old = [each for each in others[: max(0, len(others) - self._keep_last + 1) if self._keep_last else 0]
               if not self._keep_every or step_of(each) % self._keep_every]
        before = [each for each in self._committed if step_of(each) < self.anomaly]
        old = [each for each in old if each not in before[-1:]]
        same = [each for each in self.path.glob(f"step-{step:08}*") if each != path and step_of(each) == step]
        for each in (*old, *same):  # those of the same step may be damaged
            gone = each.with_name(f".del-{each.name}-{secrets.token_hex(4)}")
            try:
                os.rename(each, gone)  # first, so that a half is never taken for a whole
                sync(self.path)
            except OSError as error:
                warnings.warn(f"the old checkpoint {each} cannot be deleted: {error}", stacklevel=2)
                continue
            self._committed = [kept for kept in self._committed if kept != each]
            _remove(gone, moved)
        plain = path.with_name(f"step-{step:08}")
        if path != plain and not os.path.lexists(plain):
            path = path.rename(plain)
            self._committed[-1] = path
            self._name_latest(path)
        return path

    def _name_latest(self, path: Path) -> None:
        """In the file "latest". If the disk is too full even for that, there is none until the next time."""
        target = self.path / "latest"
        try:
            replace_file(target, f"{path.name}\n")
        except OSError as error:
            if target.is_file():
                target.unlink()
            warnings.warn(f"{target} cannot be written: {error}", stacklevel=2)
        sync(self.path)


def _remove(path: Path, moved: Callable[[], None]) -> None:
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        for file in path.iterdir():  # one by one, as large ones take long
            if file.is_file():
                file.unlink()
                moved()
        shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be deleted: {error}", stacklevel=2)
