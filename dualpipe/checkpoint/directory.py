"""A directory of checkpoints on disk: find complete ones, add a new one, delete old ones.

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
and renamed. Only then are others deleted, each renamed first. The newest checkpoint is the one that was committed last
(the highest `sequence`), not the one of the highest step.

`remote_directory` writes to object stores. The functions that find checkpoints serve both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Generic, NamedTuple, NoReturn, TypeVar, cast

from dualpipe.checkpoint.manifest import (
    MANIFEST,
    Checkpoint,
    Manifest,
    StoredTensor,
    UnknownLayout,
    identity_of,
    read_marker,
    write_description,
)
from dualpipe.runtime.errors import raise_for
from dualpipe.runtime.files import lock, replace_file, sync
from dualpipe.runtime.storage.choose import storage_of
from dualpipe.runtime.storage.location import Location, RemotePath, StrLocation, as_location, resolve

INDEX = "index.json"  # in a store: the saves below a URL, also those that a listing does not show yet
_NAME = re.compile(r"step-(\d{8,})(?:\.\d+)?")
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
            return _read_all(path for path in remote_saves(directory) if read_marker(path) is not None)
        return _read_all(_local_checkpoints(directory))
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error}") from error


def _local_checkpoints(directory: Path) -> list[Path]:
    """Return the paths of a directory that have the name of a checkpoint."""
    if not directory.exists():
        return []
    if not directory.is_dir():
        raise ValueError(f"{directory} is a file; give the directory that holds the checkpoints")
    return [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]


def remote_saves(directory: RemotePath) -> list[RemotePath]:
    """Return the saves below a URL, committed or not.

    The index is read by its key, so it has every save that has begun. The listing finds them if the index is lost.
    """
    names = {*read_index(directory), *filter(_NAME.fullmatch, storage_of(directory).names(directory))}
    return [directory / name for name in names]


def read_index(directory: RemotePath) -> dict[str, int]:
    """Return the saves in the index of a URL: their names, each with the number of ranks that write it.

    Empty if there is no index, or only a part of one.
    """
    try:
        text = storage_of(directory).read(directory / INDEX)
    except FileNotFoundError:
        return {}
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: ranks for name, ranks in content.items() if _NAME.fullmatch(name) and isinstance(ranks, int)}


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


def raise_none_complete(path: StrLocation, damaged: Iterable[str]) -> NoReturn:
    """Raise ValueError because `path` has no complete checkpoint.

    Args:
        damaged: problems of the damaged checkpoints. Empty: the message says why there are no checkpoints.
    """
    raise_for(f"{path} has no complete checkpoint:", damaged)
    path = as_location(path)
    if isinstance(path, RemotePath):
        raise ValueError(f"{path} has no checkpoints; give the URL that a run saves to, or one checkpoint below it")
    if not os.path.lexists(path):
        raise ValueError(f"{path} does not exist")
    inside = path / "checkpoints"
    hint = f"give {inside}" if inside.is_dir() else "give the directory that a run saves to, or one checkpoint in it"
    raise ValueError(f"{path} has no checkpoints; {hint}")


none_whole = raise_none_complete  # the former name


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


class Retention(Generic[AnyPath]):
    """The complete checkpoints of a directory, and which of them are kept.

    Args:
        path: the directory.
        keep_last: number of newest checkpoints to keep. None: keep all.
        keep_every: also keep checkpoints of steps that are multiples of this number.
    """

    def __init__(self, path: AnyPath, keep_last: int | None, keep_every: int | None) -> None:
        self.anomaly = 0  # last step whose result may be wrong: the newest checkpoint before it is kept
        self._keep_last = keep_last
        self._keep_every = keep_every
        committed = scan(path).committed
        self._sequence = committed[0].manifest.sequence if committed else -1
        intact = [checkpoint.path for checkpoint in reversed(committed) if not checkpoint.find_damage()]
        self._committed: list[AnyPath] = cast(list[AnyPath], intact)

    def close(self) -> None:
        """Release the directory, so that other jobs can save there."""
        raise NotImplementedError

    @contextmanager
    def _closed_on_error(self, path: AnyPath) -> Iterator[None]:
        """Call `close` after an error inside the `with` block; raise ValueError for an OSError."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ValueError(f"checkpoints cannot be saved to {path}: {error}") from error
            raise

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


class Directory(Retention[Path]):
    """The local directory that a job saves its checkpoints to. Used on rank 0 only.

    Args:
        path: created with its parents if it does not exist.
        keep_last: number of newest checkpoints to keep. None: keep all.
        keep_every: also keep checkpoints of steps that are multiples of this number.
        patience: seconds to wait for the lock. A job that was just killed may hold it for a moment longer. The system
            releases the lock of a process that dies.

    Raises:
        ValueError: the directory cannot be written to, or another job still holds the lock after `patience` seconds.
    """

    def __init__(self, path: Path, keep_last: int | None, keep_every: int | None, patience: float = 10.0) -> None:
        self.path = path
        self._lock = None
        with self._closed_on_error(path):
            _make_durable_directory(path)
            self._lock = lock(path / ".lock", patience)
            probe = path / f".tmp-step-{secrets.token_hex(4)}"
            probe.mkdir()
            probe.rmdir()
            super().__init__(path, keep_last, keep_every)

    def close(self) -> None:
        """Release the lock, so that other jobs can save to the directory."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def remove_unfinished(self, report_progress: Callable[[], None]) -> list[Location]:
        """Remove leftovers of jobs that died; return their paths.

        report_progress: called repeatedly while files are deleted.
        """
        leftovers: list[Location] = []
        for path in self.path.iterdir():
            if path.name.startswith((".tmp-step-", ".del-step-")):
                _remove(path, report_progress)
                leftovers.append(path)
        return leftovers

    def begin(self, step: int, num_ranks: int, report_progress: Callable[[], None]) -> Path:
        """Remove leftovers of jobs that died, and make the temporary directory of a new checkpoint.

        Args:
            step: the step of the new checkpoint.
            num_ranks: ranks that will write it.
            report_progress: called repeatedly while files are deleted.
        """
        self.remove_unfinished(report_progress)
        folder = self.path / f".tmp-step-{step:08}-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a temporary directory that was not committed; a committed one has another name."""
        shutil.rmtree(folder, ignore_errors=True)

    def commit(
        self, folder: Path, manifest: Manifest, stored: Mapping[str, StoredTensor],
        report_progress: Callable[[], None], guard: AbstractContextManager[None],
    ) -> Path:
        """Make a temporary directory the newest checkpoint, delete old checkpoints, and return its path.

        Replaces another checkpoint of the same step. Warns about old checkpoints that cannot be deleted.

        Args:
            folder: complete but for the description of its tensors and the manifest.
            manifest: gets its sequence number from this method.
            stored: the tensors of the checkpoint.
            report_progress: called repeatedly while this goes on.
            guard: entered around the one call that commits; raises if the checkpoint must not be committed any more.
        """
        self._sequence += 1
        write_description(folder, dataclasses.replace(manifest, sequence=self._sequence), stored)
        sync(folder)
        report_progress()
        path = self._free_name(manifest.step)
        with guard:
            os.rename(folder, path)
        self._committed.append(path)
        sync(self.path)
        try:
            return self._tidy(path, manifest.step, report_progress)
        except OSError as error:
            warnings.warn(f"{path} is saved, but older ones could not be tidied up: {error}", stacklevel=2)
            return path

    def _free_name(self, step: int) -> Path:
        """Return a path for a checkpoint of this step, with a number as suffix if there are others of the step."""
        path = self.path / f"step-{step:08}"
        number = 0
        while os.path.lexists(path):
            number += 1
            path = path.with_name(f"step-{step:08}.{number}")
        return path

    def _tidy(self, path: Path, step: int, report_progress: Callable[[], None]) -> Path:
        """Delete old checkpoints after `path` was committed; return its path, now without a suffix if possible."""
        self._committed = [checkpoint for checkpoint in self._committed if checkpoint.exists()]
        self._update_latest(path)  # before the checkpoint that the file named is deleted
        same_step = [other for other in self.path.glob(f"step-{step:08}*")  # damaged ones too
                     if other != path and step_of(other) == step]
        for checkpoint in (*self._expired(step), *same_step):
            self._delete(checkpoint, report_progress)
        plain = path.with_name(f"step-{step:08}")
        if path != plain and not os.path.lexists(plain):
            path = path.rename(plain)
            self._committed[-1] = path
            self._update_latest(path)
        return path

    def _delete(self, checkpoint: Path, report_progress: Callable[[], None]) -> None:
        """Delete a checkpoint; warn if that fails. Renames it first: a partial one is never taken for complete."""
        renamed = checkpoint.with_name(f".del-{checkpoint.name}-{secrets.token_hex(4)}")
        try:
            os.rename(checkpoint, renamed)
            sync(self.path)
        except OSError as error:
            warnings.warn(f"the old checkpoint {checkpoint} cannot be deleted: {error}", stacklevel=2)
            return
        self._committed = [other for other in self._committed if other != checkpoint]
        _remove(renamed, report_progress)

    def _update_latest(self, path: Path) -> None:
        """Write the name of `path` to the file "latest". On a full disk, remove the file until the next save."""
        target = self.path / "latest"
        try:
            replace_file(target, f"{path.name}\n")
        except OSError as error:
            if target.is_file():
                target.unlink()
            warnings.warn(f"{target} cannot be written: {error}", stacklevel=2)
        sync(self.path)


def _make_durable_directory(path: Path) -> None:
    """Make a directory with its parents, and flush their names to the disk: else their contents could be lost."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def _remove(path: Path, report_progress: Callable[[], None]) -> None:
    """Delete a file or a directory; warn if that fails. Large files take long, so report progress after each file."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        for file in path.iterdir():
            if file.is_file():
                file.unlink()
                report_progress()
        shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be deleted: {error}", stacklevel=2)
