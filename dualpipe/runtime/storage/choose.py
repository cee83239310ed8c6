"""Choose the storage of a location."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dualpipe.runtime import files
from dualpipe.runtime.files import Written
from dualpipe.runtime.storage.local import LocalStorage
from dualpipe.runtime.storage.location import Location, RemotePath
from dualpipe.runtime.storage.protocol import Storage
from dualpipe.runtime.storage.remote import RemoteStorage

_LOCAL = LocalStorage()
_REMOTE = RemoteStorage()


def storage_of(location: Location) -> Storage:
    """Return the file operations for a location."""
    return _REMOTE if isinstance(location, RemotePath) else _LOCAL


def require_shared(location: Location, num_processes: int) -> None:
    """Raise ValueError if the processes of a job would each have a storage of their own at a location."""
    if isinstance(location, RemotePath) and location.protocol == "memory" and num_processes > 1:
        raise ValueError(f"{location} is in the memory of one process, and this job has {num_processes}; give a "
                         "directory or URL that all of them reach, or start one process")


def write_files(
    folder: Location, contents: Mapping[str, Iterable[bytes | memoryview]], checksum: str = ""
) -> dict[str, Written]:
    """Write files by name into a folder; return their sizes and checksums. See `Storage.write`."""
    if isinstance(folder, RemotePath):
        return {name: _REMOTE.write(folder / name, pieces, checksum) for name, pieces in contents.items()}
    return files.write_files(folder, contents, checksum)
