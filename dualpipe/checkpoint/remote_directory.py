"""The checkpoints of a job in a store that cannot rename: S3, GCS and others that fsspec reaches.

    step-00000100.518203947/     a save; no other job writes here, because its number is random
        rank-00000.safetensors, tensors.json, manifest.json     like in a local directory
        COMMITTED                the marker: written last, deleted first
    index.json                   all saves, with the number of ranks of each; written before a save begins
    latest                       the name of the newest, for people and scripts
    .lock, .lock-ID              the lease of the one job that may save here, or the last that did

A listing may be late, so nothing depends on one. Saves are found by the index. A save is committed if its marker can be
read by key. The objects of a save are deleted only while it has no marker. They are those with known keys, and any
others that the listing shows.

Two jobs cannot harm each other even if one wrongly considers the other dead. The one that commits writes its marker and
then reads the lock; the one that cleans has written the lock and then reads the marker. So either the first learns that
it has lost the lock, and deletes its marker, or the second finds the marker, and deletes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from enum import Enum, auto
from itertools import count

from dualpipe.checkpoint.directory import INDEX, Directory, Retention, read_index, remote_saves, step_of
from dualpipe.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    TENSORS,
    WRITE_MARKER,
    Checkpoint,
    Manifest,
    StoredTensor,
    marker_for,
    read_marker,
    tensor_file_name,
    write_description,
)
from dualpipe.runtime.storage.choose import storage_of
from dualpipe.runtime.storage.lease import Lease, LeaseLost
from dualpipe.runtime.storage.location import Location, RemotePath
from dualpipe.runtime.storage.remote import RemoteStorage

_SAVE_NAME = re.compile(r"step-\d{8,}\.\d{9}")  # those of local checkpoints have no such number


class SaveState(Enum):
    """The state of an entry of the index or the listing of a URL."""

    COMMITTED = auto()  # has a marker
    UNFINISHED = auto()  # a save of a job, which still runs or has died
    COPY = auto()  # has a manifest, but no marker, and no job began it here: copied by hand from a local directory
    UNKNOWN = auto()  # neither: it is being copied, or a late listing shows it after it was deleted


def states_of_saves(directory: RemotePath, committed: Collection[RemotePath] = ()) -> dict[RemotePath, SaveState]:
    """Return the state of each save below a URL. committed: saves that are known to have a marker."""
    index = read_index(directory)
    states = {}
    for save in sorted(remote_saves(directory)):
        if save in committed or read_marker(save) is not None:
            states[save] = SaveState.COMMITTED
        elif index.get(save.name):  # the number of ranks; 0 in an index that was made from a listing
            states[save] = SaveState.UNFINISHED
        elif _exists(save / MANIFEST):
            states[save] = SaveState.COPY
        elif _SAVE_NAME.fullmatch(save.name):
            states[save] = SaveState.UNFINISHED
        else:
            states[save] = SaveState.UNKNOWN
    return states


def _exists(path: RemotePath) -> bool:
    try:
        storage_of(path).size(path)
    except FileNotFoundError:
        return False
    return True


class RemoteDirectory(Retention[RemotePath]):
    """The URL that a job saves its checkpoints to. Used on rank 0 only. Has the interface of `Directory`.

    Args:
        path: the URL.
        keep_last: number of newest checkpoints to keep. None: keep all.
        keep_every: also keep checkpoints of steps that are multiples of this number.
        patience: seconds to wait for another job that saves there. If there may be one, `Lease` waits for ten seconds
            even if `patience` is less.

    Raises:
        ValueError: the store cannot be reached or written to, or another job saves there.
    """

    def __init__(self, path: RemotePath, keep_last: int | None, keep_every: int | None, patience: float = 10.0) -> None:
        self.path = path
        self._store = RemoteStorage()
        self._lease: Lease | None = None
        self._expiring: set[RemotePath] = set()  # no longer counted, but not yet deleted: the next save retries
        with self._closed_on_error(path):
            self._lease = Lease(path, patience)
            super().__init__(path, keep_last, keep_every)
            states = states_of_saves(path, self._committed)
            index = read_index(path)
            self._saves = {save.name: index.get(save.name, 0) for save, state in states.items()
                           if state in (SaveState.COMMITTED, SaveState.UNFINISHED)}  # ranks by name
            for save in (save for save, state in states.items() if state is SaveState.COPY):
                warnings.warn(f"{save} has no {MARKER}, so it is not used, and not removed: it looks like a copy of a "
                              f"local checkpoint; if it is complete, make the object by {WRITE_MARKER}", stacklevel=3)

    def close(self) -> None:
        """Release the lease, so that other jobs can save here."""
        if self._lease is not None:
            self._lease.release()
        self._lease = None

    def remove_unfinished(self, report_progress: Callable[[], None]) -> list[Location]:
        """Remove the unfinished saves of jobs that died; return their URLs.

        report_progress: called repeatedly while objects are deleted.
        """
        self._check_lease()
        leftovers: list[Location] = []
        for save, state in states_of_saves(self.path, self._committed).items():
            if state is not SaveState.UNFINISHED:
                continue
            try:
                names = self._expected_objects(save)
                self._delete_marker(save)
                self._delete_objects(save, names, report_progress)
            except OSError as error:
                warnings.warn(f"{save} cannot be deleted: {error}", stacklevel=2)
                continue
            self._saves.pop(save.name, None)
            self._expiring.discard(save)
            leftovers.append(save)
        if leftovers:
            self._write_index()
        return leftovers

    def begin(self, step: int, num_ranks: int, report_progress: Callable[[], None]) -> RemotePath:
        """Remove the unfinished saves of jobs that died; return the URL of a new save, which is in the index.

        Args:
            step: the step of the new checkpoint.
            num_ranks: ranks that will write it.
            report_progress: called repeatedly while objects are deleted.
        """
        self.remove_unfinished(report_progress)
        save = self.path / f"step-{step:08}.{10**8 + secrets.randbelow(9 * 10**8)}"
        self._saves[save.name] = num_ranks
        self._write_index()
        return save

    def commit(
        self, folder: RemotePath, manifest: Manifest, stored: Mapping[str, StoredTensor],
        report_progress: Callable[[], None], guard: AbstractContextManager[None],
    ) -> RemotePath:
        """Make a save the newest checkpoint, delete old checkpoints, and return its URL.

        Replaces another checkpoint of the same step. Warns about old checkpoints that cannot be deleted.

        Args:
            folder: of a save that lacks only the description of its tensors, the manifest and the marker.
            manifest: gets its sequence number from this method.
            stored: the tensors of the checkpoint.
            report_progress: called repeatedly during the commit.
            guard: entered around the one call that commits; raises if the checkpoint must not be committed any more.
        """
        self._sequence += 1
        content = write_description(folder, dataclasses.replace(manifest, sequence=self._sequence), stored)
        report_progress()
        for name, written in manifest.files.items():
            size = self._store.size(folder / name)
            if size != written.size:
                raise OSError(f"{folder / name} has {size} bytes in the store, of {written.size} that were written")
            report_progress()
        self._check_lease()
        with guard:
            self._write_marker(folder, content)
        self._committed.append(folder)
        try:
            self._tidy(folder, report_progress)
        except OSError as error:
            warnings.warn(f"{folder} is saved, but older ones could not be tidied up: {error}", stacklevel=2)
        return folder

    def discard(self, folder: RemotePath) -> None:
        """Remove a save that was given up, unless it is committed.

        It stays in the index: another rank may still be writing to it. The next save looks again.
        """
        if folder in self._committed:
            return
        try:
            self._delete_marker(folder)
            self._delete_objects(folder, (), lambda: None)
        except OSError as error:
            self._expiring.add(folder)
            warnings.warn(f"{folder} is not complete and cannot be deleted: {error}; the next save tries again",
                          stacklevel=2)

    def _write_marker(self, folder: RemotePath, manifest: bytes) -> None:
        """Commit a save, unless another job has taken the lease. manifest: the content of manifest.json."""
        self._store.write(folder / MARKER, [marker_for(manifest)])
        try:
            self._check_lease()
        except LeaseLost:
            self._delete_marker(folder)
            raise

    def _delete_marker(self, save: RemotePath) -> None:
        """Delete the marker of a save and check that it is gone: a save with a marker counts as complete."""
        self._store.delete(save / MARKER)
        if _exists(save / MARKER):
            raise OSError(f"{save / MARKER} is still there after the store has deleted it, so its files stay")

    def _tidy(self, newest: RemotePath, report_progress: Callable[[], None]) -> None:
        """Delete old checkpoints after `newest` was committed."""
        try:
            self._store.write(self.path / "latest", [f"{newest.name}\n".encode()])
        except OSError as error:
            warnings.warn(f"{self.path / 'latest'} cannot be written: {error}", stacklevel=2)
        step = step_of(newest)
        same_step = [self.path / name for name in self._saves
                     if name != newest.name and step_of(self.path / name) == step]
        for checkpoint in dict.fromkeys([*self._expired(step), *same_step, *sorted(self._expiring)]):
            self._delete(checkpoint, report_progress)
        self._write_index()

    def _delete(self, checkpoint: RemotePath, report_progress: Callable[[], None]) -> None:
        """Delete a checkpoint, its marker first; warn if that fails. The next save retries."""
        self._committed = [other for other in self._committed if other != checkpoint]
        self._expiring.add(checkpoint)
        try:
            names = self._expected_objects(checkpoint)
            self._delete_marker(checkpoint)
            self._delete_objects(checkpoint, names, report_progress)
            self._saves.pop(checkpoint.name, None)
            self._expiring.discard(checkpoint)
        except OSError as error:
            warnings.warn(f"the old checkpoint {checkpoint} cannot be deleted: {error}", stacklevel=2)

    def _delete_objects(
        self, save: RemotePath, expected: Iterable[str], report_progress: Callable[[], None]
    ) -> None:
        """Delete the objects of a save that has no marker: all that are listed, and those named in `expected`.

        The manifest goes first. If the job is killed here, the rest is then not taken for a copy of a checkpoint.
        """
        for name in dict.fromkeys([MANIFEST, *expected, *self._store.names(save)]):
            self._store.delete(save / name)
            report_progress()
        self._store.delete_folder(save)

    def _expected_objects(self, save: RemotePath) -> list[str]:
        """Return the names of a save's objects without a listing, which may be late."""
        try:
            return [*Checkpoint.read(save).manifest.files, MANIFEST]
        except ValueError:
            return [*self._written_by_ranks(save), TENSORS, MANIFEST]

    def _written_by_ranks(self, save: RemotePath) -> Iterable[str]:
        """Yield the names of the tensor files that exist. Every rank writes its files in order."""
        for rank in range(self._saves.get(save.name, 0)):
            for number in count():
                name = tensor_file_name(rank, number)
                try:
                    self._store.size(save / name)
                except FileNotFoundError:
                    break
                yield name

    def _write_index(self) -> None:
        self._store.write(self.path / INDEX, [json.dumps(self._saves, indent=1).encode()])

    def _check_lease(self) -> None:
        if self._lease is None:
            raise LeaseLost(f"the lease on {self.path} is released")
        self._lease.check()


def open_directory(
    path: Location, keep_last: int | None, keep_every: int | None, patience: float = 10.0
) -> Directory | RemoteDirectory:
    """Return the directory to save to at a location. For arguments and errors see `Directory`."""
    if isinstance(path, RemotePath):
        return RemoteDirectory(path, keep_last, keep_every, patience)
    return Directory(path, keep_last, keep_every, patience)
