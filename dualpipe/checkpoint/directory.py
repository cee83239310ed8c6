"""A directory of checkpoints, on disk or in a store: find complete ones, add a new one, delete old ones.

On disk:

    step-00000100/            a committed checkpoint: complete from the moment it has this name
        rank-00000.safetensors ...   the tensors that each rank wrote, and its random state in the metadata
        tensors.json                 the boxes of each tensor, and the files that they are in
        manifest.json                step, layout, versions, ..., and size and checksum of every other file
    latest                    the name of the newest, for people and scripts; `latest()` scans the directory
    .tmp-step-00000200-1f...  being written, or left by a job that died
    .del-step-00000050-a0...  being deleted
    .lock                     held by rank 0 of the one job that may save to this directory, until it ends

At any moment, a name that begins with "step-" belongs to a complete checkpoint, and a name that begins with ".tmp-" or
".del-" belongs to the holder of the lock, or to no process. A checkpoint is written under a temporary name, flushed,
and renamed. Only then are others deleted, each renamed first.

In a store, such as S3, which cannot rename:

    step-00000100.518203947/  a save; no other writes here, because its number is random
        COMMITTED             the marker: written last, deleted first; the other files are those of a local checkpoint
    latest

A save is committed if it has its marker. The objects of a save are deleted only while it has none. A store has no
locks: a scheduler sees to it that one job saves to a URL. A job that finds a save of another one, begun since its own
start, stops saving with an error.

The newest checkpoint is the one that was committed last (the highest `sequence`), not the one of the highest step.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast

from dualpipe.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    WRITE_MARKER,
    Checkpoint,
    Manifest,
    StoredTensor,
    UnknownLayout,
    identity_of,
    marker_for,
    read_marker,
    write_description,
)
from dualpipe.runtime import storage
from dualpipe.runtime.errors import raise_for
from dualpipe.runtime.files import Lock, lock, replace_file, sync
from dualpipe.runtime.storage import Location, RemotePath, StrLocation, as_location, resolve

_NAME = re.compile(r"step-(\d{8,})(?:\.\d+)?")
_NAME_IN_STORE = re.compile(r"step-\d{8,}\.\d{9}")
_TRIES = 100  # scans while another job deletes old checkpoints and commits new ones

AnyPath = TypeVar("AnyPath", Path, RemotePath)


class FoundCheckpoints(NamedTuple):
    """The checkpoints of a directory: committed ones, newest first, and damaged ones with the reason.

    newer_release: error message if the newest checkpoint is from a later release of this library, and so not damaged
    but not readable either; else "".
    """

    committed: list[Checkpoint]
    damaged: dict[Location, str]
    newer_release: str = ""


def scan(directory: StrLocation) -> FoundCheckpoints:
    """Find the checkpoints of a directory: none if it does not exist.

    Repeats the scan if another job deletes or replaces a checkpoint in the meantime.

    Raises:
        ValueError: `directory` is a file or cannot be read.
    """
    directory = as_location(directory)
    for _ in range(_TRIES):
        checkpoints, is_stable = _scan_once(directory)
        if is_stable:
            break
    checkpoints.committed.sort(key=lambda checkpoint: (checkpoint.manifest.sequence, checkpoint.manifest.saved_at),
                               reverse=True)
    return checkpoints


def _scan_once(directory: Location) -> tuple[FoundCheckpoints, bool]:
    """Read all manifests; return the checkpoints, unsorted, and False if one was deleted or replaced meanwhile."""
    try:
        if isinstance(directory, RemotePath):
            return _read_all(save for save in list_saves(directory) if read_marker(save) is not None)
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory} is a file; give the directory that holds the checkpoints")
        return _read_all(list_saves(directory))
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error}") from error


def list_saves(directory: AnyPath) -> list[AnyPath]:
    """Return the paths in a directory that have the name of a checkpoint; in a store, they may lack their marker."""
    return [directory / name for name in storage.list_names(directory) if _NAME.fullmatch(name)]


def find_unfinished(directory: Location, committed: Collection[Location] = ()) -> list[Location]:
    """Return the saves in a directory that are being written or deleted, or were left so by jobs that died.

    committed: saves that are known to be complete. In a store, copies of local checkpoints without a marker count too.
    """
    if isinstance(directory, RemotePath):
        return [save for save in list_saves(directory) if save not in committed and read_marker(save) is None]
    names = storage.list_names(directory)
    return [directory / name for name in names if name.startswith((".tmp-step-", ".del-step-"))]


def is_copy(save: Location) -> bool:
    """Return True for a local checkpoint that was copied to a store by hand, as its name shows."""
    return isinstance(save, RemotePath) and not _NAME_IN_STORE.fullmatch(save.name)


def _read_all(paths: Iterable[Location]) -> tuple[FoundCheckpoints, bool]:
    """Read the manifests at these paths; return the same as `_scan_once`."""
    committed = []
    damaged = {}
    newer_release = ""
    is_stable = True
    for path in sorted(paths, key=str, reverse=True):
        identity = identity_of(path)
        try:
            committed.append(Checkpoint.read(path))
        except ValueError as error:
            if identity is None or identity != identity_of(path):
                # Deleted or replaced in the meantime: there is a newer one, which the list of names may lack.
                is_stable = False
                continue
            damaged[path] = str(error)
            if isinstance(error, UnknownLayout) and not committed:
                newer_release = str(error)
    return FoundCheckpoints(committed, damaged, newer_release), is_stable


def is_checkpoint(path: Location) -> bool:
    """Return True if `path` is a single checkpoint, and not a directory of checkpoints.

    A path with the name of a checkpoint counts as one even if it does not exist any more.
    """
    if _NAME.fullmatch(path.name):
        return True
    return read_marker(path) is not None if isinstance(path, RemotePath) else os.path.lexists(path / MANIFEST)


def find(path: StrLocation) -> FoundCheckpoints:
    """Find the one checkpoint at `path`, or all checkpoints of the directory `path`.

    Raises:
        ValueError: the checkpoint or the directory cannot be read.
    """
    path = as_location(path)
    try:
        if not is_checkpoint(path):
            return scan(path)
        return FoundCheckpoints([Checkpoint.read(resolve(path))], {})  # links are followed: the caller named this one
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class AllDamaged(ValueError):
    """There are checkpoints, and all of them are damaged."""


def raise_none_complete(path: StrLocation, damaged: Iterable[str]) -> NoReturn:
    """Raise ValueError because `path` has no complete checkpoint; `AllDamaged` if it has damaged ones.

    Args:
        damaged: problems of the damaged checkpoints. Empty: the message says why there are no checkpoints.
    """
    raise_for(f"{path} has no complete checkpoint:", damaged, AllDamaged)
    path = as_location(path)
    if isinstance(path, RemotePath):
        raise ValueError(f"{path} has no checkpoints; give the URL that a run saves to, or one checkpoint below it")
    if not os.path.lexists(path):
        raise ValueError(f"{path} does not exist")
    inside = path / "checkpoints"
    hint = f"give {inside}" if inside.is_dir() else "give the directory that a run saves to, or one checkpoint in it"
    raise ValueError(f"{path} has no checkpoints; {hint}")


def latest(directory: StrLocation) -> Location | None:
    """Return the checkpoint that was committed last, or None if the directory has none.

    Only manifests are read; `load` also goes back to an older checkpoint if files are damaged.

    Raises:
        ValueError: there are checkpoints, but no manifest can be read. Starting a run from nothing would be wrong then.
    """
    checkpoints = scan(directory)
    if checkpoints.committed:
        return checkpoints.committed[0].path
    if checkpoints.damaged:
        raise_none_complete(directory, checkpoints.damaged.values())
    return None


def step_of(path: Location) -> int:
    """Return the step in the name of a checkpoint, or -1 for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def open_directory(
    path: Location, keep_last: int | None = None, keep_every: int | None = None, patience: float = 10.0
) -> Directory[Any]:
    """Open a directory to save checkpoints to it. For arguments and errors see `Directory`."""
    if isinstance(path, RemotePath):
        return StoreDirectory(path, keep_last, keep_every, patience)
    return LocalDirectory(path, keep_last, keep_every, patience)


class Directory(Generic[AnyPath]):
    """A directory that a job saves its checkpoints to. Used on rank 0 only.

    Subclasses say how a save is begun, committed and withdrawn.

    Args:
        path: the directory, created with its parents if it does not exist, or a URL.
        keep_last: number of newest checkpoints to keep. None: keep all.
        keep_every: also keep checkpoints of steps that are multiples of this number.
        patience: seconds to wait for the lock of a local directory. A job that was just killed may hold it for a moment
            longer. The system releases the lock of a process that dies.

    Raises:
        ValueError: the directory cannot be written to, or another job still holds the lock after `patience` seconds.
    """

    def __init__(self, path: AnyPath, keep_last: int | None, keep_every: int | None, patience: float) -> None:
        self.path: AnyPath = path
        self.anomaly = 0  # last step whose result may be wrong: the newest checkpoint before it is kept
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._lock: Lock | None = None
        self._expiring: set[AnyPath] = set()  # no longer counted, but not yet withdrawn: the next save retries
        try:
            self._reserve(patience)
            probe = path / f".tmp-step-{secrets.token_hex(4)}"
            storage.write(probe, [b""])
            storage.remove(probe)
            committed = scan(path).committed
            self._sequence = committed[0].manifest.sequence if committed else -1
            intact = [checkpoint.path for checkpoint in reversed(committed) if not checkpoint.find_damage()]
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ValueError(f"checkpoints cannot be saved to {path}: {error}") from error
            raise
        self._committed: list[AnyPath] = cast(list[AnyPath], intact)

    def close(self) -> None:
        """Release the lock of a local directory, so that other jobs can save there."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def remove_unfinished(self, report_progress: Callable[[], None]) -> list[Location]:
        """Remove leftovers of jobs that died; return their paths.

        report_progress: called repeatedly while files are deleted.
        """
        leftovers = [save for save in find_unfinished(self.path, self._committed) if not is_copy(save)]
        return [save for save in leftovers if _remove(save, report_progress)]

    def begin(self, step: int, report_progress: Callable[[], None]) -> AnyPath:
        """Remove leftovers of jobs that died, and return the folder of a new save.

        Args:
            step: the step of the new checkpoint.
            report_progress: called repeatedly while files are deleted.
        """
        raise NotImplementedError

    def discard(self, folder: AnyPath) -> None:
        """Remove a save that was given up, unless it is committed.

        Another rank may still be writing to it. The next save looks again.
        """
        raise NotImplementedError

    def commit(
        self, folder: AnyPath, manifest: Manifest, stored: Mapping[str, StoredTensor],
        report_progress: Callable[[], None], guard: AbstractContextManager[None],
    ) -> AnyPath:
        """Make a save the newest checkpoint, delete old checkpoints, and return its path.

        Replaces another checkpoint of the same step. Warns about old checkpoints that cannot be deleted.

        Args:
            folder: complete but for the description of its tensors and the manifest.
            manifest: gets its sequence number from this method.
            stored: the tensors of the checkpoint.
            report_progress: called repeatedly while this goes on.
            guard: entered around the one call that commits; raises if the checkpoint must not be committed any more.
        """
        self._sequence += 1
        content = write_description(folder, dataclasses.replace(manifest, sequence=self._sequence), stored)
        report_progress()
        path = self._publish(folder, manifest, content, report_progress, guard)
        try:
            return self._tidy(path, manifest.step, report_progress)
        except OSError as error:
            warnings.warn(f"{path} is saved, but older ones could not be tidied up: {error}", stacklevel=2)
            return path

    def _reserve(self, patience: float) -> None:
        """Keep other jobs from saving to the directory until `close`, where that is possible."""
        raise NotImplementedError

    def _publish(
        self, folder: AnyPath, manifest: Manifest, content: bytes, report_progress: Callable[[], None],
        guard: AbstractContextManager[None],
    ) -> AnyPath:
        """Commit a save with all its files; add it to the committed ones and return its path.

        content: of manifest.json.
        """
        raise NotImplementedError

    def _withdraw(self, checkpoint: AnyPath) -> AnyPath:
        """Make a checkpoint one that is not committed; return the path of its files."""
        raise NotImplementedError

    def _write_latest(self, newest: AnyPath) -> None:
        """Write the name of the newest checkpoint to the file "latest"."""
        raise NotImplementedError

    def _tidy(self, path: AnyPath, step: int, report_progress: Callable[[], None]) -> AnyPath:
        """Delete old checkpoints after `path` was committed; return its path."""
        saves: list[AnyPath] = list_saves(self.path)
        self._committed = [checkpoint for checkpoint in self._committed if checkpoint in saves]
        self._expiring.intersection_update(saves)
        self._update_latest(path)  # before the checkpoint that the file named is deleted
        expired: list[AnyPath] = self._expired(step)
        expired += [save for save in saves if save != path and step_of(save) == step]  # damaged ones too
        expired += sorted(self._expiring)
        for checkpoint in dict.fromkeys(expired):
            self._delete(checkpoint, report_progress)
        return path

    def _delete(self, checkpoint: AnyPath, report_progress: Callable[[], None]) -> None:
        """Delete a checkpoint; warn if that fails. Withdraws it first: a partial one is never taken for complete."""
        self._committed = [other for other in self._committed if other != checkpoint]
        self._expiring.add(checkpoint)
        try:
            withdrawn = self._withdraw(checkpoint)
        except OSError as error:
            warnings.warn(f"{checkpoint} cannot be deleted: {error}; the next save tries again", stacklevel=2)
            return
        self._expiring.discard(checkpoint)
        _remove(withdrawn, report_progress)

    def _update_latest(self, newest: AnyPath) -> None:
        """Update the file "latest". On a full disk, remove it until the next save."""
        target = self.path / "latest"
        try:
            self._write_latest(newest)
        except OSError as error:
            with suppress(OSError):
                storage.remove(target)
            warnings.warn(f"{target} cannot be written: {error}", stacklevel=2)

    @property
    def newest(self) -> AnyPath | None:
        """The complete checkpoint that was committed last."""
        return self._committed[-1] if self._committed else None

    def ignore(self, damaged: Iterable[Location]) -> None:
        """Do not count damaged checkpoints among the `keep_last` newest.

        Each stays on the disk until its step is saved again.
        """
        ignored = {resolve(path) for path in damaged}
        self._committed = [path for path in self._committed if resolve(path) not in ignored]

    def _expired(self, step: int) -> list[AnyPath]:
        """Return the checkpoints of other steps that `keep_last`, `keep_every` and `anomaly` do not keep."""
        if not self._keep_last:
            return []
        others = [checkpoint for checkpoint in self._committed[:-1] if step_of(checkpoint) != step]
        excess = max(0, len(others) - self._keep_last + 1)  # + 1: the newest, which is not in `others`, counts too
        before_anomaly = [checkpoint for checkpoint in self._committed if step_of(checkpoint) < self.anomaly]
        expired = []
        for checkpoint in others[:excess]:
            is_multiple = self._keep_every is not None and step_of(checkpoint) % self._keep_every == 0
            if not is_multiple and checkpoint not in before_anomaly[-1:]:
                expired.append(checkpoint)
        return expired


class LocalDirectory(Directory[Path]):
    """A directory on disk: a rename commits a save."""

    def begin(self, step: int, report_progress: Callable[[], None]) -> Path:
        """Remove leftovers of jobs that died, and make the temporary directory of a new checkpoint."""
        self.remove_unfinished(report_progress)
        folder = self.path / f".tmp-step-{step:08}-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a temporary directory that was not committed; a committed one has another name."""
        shutil.rmtree(folder, ignore_errors=True)

    def _reserve(self, patience: float) -> None:
        _make_durable_directory(self.path)
        self._lock = lock(self.path / ".lock", patience)

    def _publish(
        self, folder: Path, manifest: Manifest, content: bytes, report_progress: Callable[[], None],
        guard: AbstractContextManager[None],
    ) -> Path:
        sync(folder)
        report_progress()
        plain = self.path / f"step-{manifest.step:08}"
        path = plain
        number = 0
        while os.path.lexists(path):  # another checkpoint of the step: it is deleted afterwards
            number += 1
            path = plain.with_name(f"{plain.name}.{number}")
        with guard:
            os.rename(folder, path)
        self._committed.append(path)
        sync(self.path)
        return path

    def _withdraw(self, checkpoint: Path) -> Path:
        renamed = checkpoint.with_name(f".del-{checkpoint.name}-{secrets.token_hex(4)}")
        os.rename(checkpoint, renamed)
        sync(self.path)
        return renamed

    def _write_latest(self, newest: Path) -> None:
        replace_file(self.path / "latest", f"{newest.name}\n")
        sync(self.path)

    def _tidy(self, path: Path, step: int, report_progress: Callable[[], None]) -> Path:
        """Delete old checkpoints after `path` was committed; return its path, now without a suffix if possible."""
        super()._tidy(path, step, report_progress)
        plain = path.with_name(f"step-{step:08}")
        if path == plain or os.path.lexists(plain):
            return path
        self._committed[-1] = path.rename(plain)
        self._update_latest(plain)
        return plain


class StoreDirectory(Directory[RemotePath]):
    """A URL: a marker commits a save."""

    def begin(self, step: int, report_progress: Callable[[], None]) -> RemotePath:
        """Remove leftovers of jobs that died, and return the URL of a new save."""
        self._check_alone()
        self.remove_unfinished(report_progress)
        save = self.path / f"step-{step:08}.{10**8 + secrets.randbelow(9 * 10**8)}"
        self._known.add(save)
        return save

    def discard(self, folder: RemotePath) -> None:
        """Remove a save that was given up. Its marker may be there, although the store gave no answer."""
        if folder not in self._committed:
            self._delete(folder, lambda: None)

    def _reserve(self, patience: float) -> None:
        """Look which saves there are: any other one is of this job, or of another that runs at the same time."""
        self._known = set(list_saves(self.path))
        for save in filter(is_copy, sorted(self._known)):
            if read_marker(save) is None:
                warnings.warn(f"{save} has no {MARKER}, so it is not used, and not removed: it looks like a copy of a "
                              f"local checkpoint; if it is complete, make the object by {WRITE_MARKER}", stacklevel=4)

    def _check_alone(self) -> None:
        """Raise OSError if there is a save that another job has begun since the start of this one."""
        for save in list_saves(self.path):
            if save not in self._known and not is_copy(save):
                raise OSError(f"{save} was begun by another job that saves to {self.path}; end one of the two, or give "
                              "every job its own directory")

    def _publish(
        self, folder: RemotePath, manifest: Manifest, content: bytes, report_progress: Callable[[], None],
        guard: AbstractContextManager[None],
    ) -> RemotePath:
        for name, written in manifest.files.items():
            try:
                size = storage.size(folder / name)
            except FileNotFoundError as error:
                raise OSError(f"{error} any more: was it deleted by another job that saves to {self.path}?") from error
            if size != written.size:
                raise OSError(f"{folder / name} has {size} bytes in the store, of {written.size} that were written")
            report_progress()
        self._check_alone()
        with guard:
            storage.write(folder / MARKER, [marker_for(content)])
        self._committed.append(folder)
        return folder

    def _withdraw(self, checkpoint: RemotePath) -> RemotePath:
        """Delete the marker and check that it is gone: a save with a marker counts as complete."""
        marker = checkpoint / MARKER
        storage.remove(marker)
        if storage.exists(marker):
            raise OSError(f"{marker} is still there after the store has deleted it, so its files stay")
        return checkpoint

    def _write_latest(self, newest: RemotePath) -> None:
        storage.write(self.path / "latest", [f"{newest.name}\n".encode()])


def _make_durable_directory(path: Path) -> None:
    """Make a directory with its parents, and flush their names to the disk: else their contents could be lost."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def _remove(save: Location, report_progress: Callable[[], None]) -> bool:
    """Delete the files of a save that is not committed; warn and return False if that fails."""
    try:
        storage.remove_folder(save, report_progress)
    except OSError as error:
        warnings.warn(f"{save} cannot be deleted: {error}", stacklevel=2)
        return False
    return True
