"""How a checkpoint gets into its directory, and when others leave it: what rank 0 of the job that saves there does.

A checkpoint is written under a temporary name, flushed, and renamed; only then are others deleted, each renamed first.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dualpipe.checkpoint.lock import lock, unlock
from dualpipe.checkpoint.native_folder import (
    FORMAT,
    LATEST,
    MANIFEST,
    Manifest,
    digest_of,
    name_of,
    scan,
    step_of,
    verify_files,
)
from dualpipe.checkpoint.native_store import hashed_file


class _Committed(NamedTuple):
    path: Path
    step: int


class Directory:
    """The directory where one job saves.

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
            _make(path)
            self._lock = lock(path / ".lock", patience)
            probe = path / f".tmp-{name_of(0)}-{secrets.token_hex(4)}"
            probe.mkdir()
            probe.rmdir()
            found = scan(path).committed
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise ValueError(f"checkpoints cannot be saved to {path}: {error}") from error
            raise
        self._sequence = found[0].manifest.sequence if found else -1
        self._committed = [_Committed(each.path, each.manifest.step) for each in reversed(found)
                           if not verify_files(*each, each.manifest.files, hashes=False)]

    def close(self) -> None:
        """Let other jobs save here."""
        unlock(self._lock)
        self._lock = None

    def ignore(self, damaged: Iterable[Path]) -> None:
        """Do not count these among the last that stay. Each goes when another of its step comes."""
        gone = {path.resolve() for path in damaged}
        self._committed = [each for each in self._committed if each.path.resolve() not in gone]

    def begin(self, step: int) -> Path:
        """Remove what dead jobs left, and make the temporary directory of a new checkpoint."""
        for path in self.path.iterdir():
            if path.name.startswith((".tmp-step-", ".del-step-")):
                _remove(path)
        folder = self.path / f".tmp-{name_of(step)}-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder

    def commit(self, folder: Path, manifest: Manifest) -> Path:
        """Make a complete temporary directory the newest checkpoint and delete what need not be kept; returns its path.

        `manifest` gets its sequence here. Another of the same step is replaced. What cannot be deleted is warned about.
        """
        self._sequence += 1
        body = dataclasses.asdict(dataclasses.replace(manifest, sequence=self._sequence))
        with hashed_file(folder / MANIFEST, {}) as out:
            out.write(json.dumps({"format": FORMAT, "sha256": digest_of(body), "manifest": body}, indent=1).encode())
        sync(folder)
        path = self._unused(manifest.step)
        os.rename(folder, path)
        self._committed.append(_Committed(path, manifest.step))
        sync(self.path)
        try:
            return self._tidy(path, manifest.step)
        except OSError as error:
            warnings.warn(f"{path} is saved, but older ones could not be tidied up: {error}", stacklevel=2)
            return path

    def _unused(self, step: int) -> Path:
        """A name for it while another of its step is there."""
        path, number = self.path / name_of(step), 0
        while os.path.lexists(path):
            number += 1
            path = self.path / f"{name_of(step)}.{number}"
        return path

    def _tidy(self, path: Path, step: int) -> Path:
        """After `path` was committed; returns the path that it has then: without a suffix, once the other is gone."""
        self._committed = [each for each in self._committed if each.path.exists()]
        self._name_latest(path)  # before what it named is deleted
        *older, _ = self._committed
        others = [each for each in older if each.step != step]
        spare = others[: max(0, len(others) - self._keep_last + 1)] if self._keep_last else []
        for each in spare:
            if not self._keep_every or each.step % self._keep_every:
                self._delete(each.path)
        for each in self.path.glob(f"{name_of(step)}*"):  # whole or damaged
            if each != path and step_of(each) == step:
                self._delete(each)
        plain = self.path / name_of(step)
        if path != plain and not os.path.lexists(plain):
            path = path.rename(plain)
            self._committed[-1] = _Committed(path, step)
            self._name_latest(path)
        return path

    def _delete(self, path: Path) -> None:
        """By another name first, so that a half is never taken for a whole."""
        gone = path.parent / f".del-{path.name}-{secrets.token_hex(4)}"
        try:
            os.rename(path, gone)
            sync(path.parent)
        except OSError as error:
            warnings.warn(f"the old checkpoint {path} cannot be deleted: {error}", stacklevel=2)
            return
        self._committed = [each for each in self._committed if each.path != path]
        _remove(gone)

    def _name_latest(self, path: Path) -> None:
        """In the file "latest". If the disk is too full even for that, there is none until the next time."""
        temporary, target = self.path / f".tmp-{LATEST}", self.path / LATEST
        try:
            temporary.write_text(f"{path.name}\n")
            sync(temporary)
            os.replace(temporary, target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if target.is_file():
                target.unlink()
            warnings.warn(f"{target} cannot be written: {error}", stacklevel=2)
        sync(self.path)


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(directory: Path) -> None:
    """With its parents; their new names are on the disk then, as without them what is in it would be lost."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def _remove(path: Path) -> None:
    try:
        path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be deleted: {error}", stacklevel=2)
