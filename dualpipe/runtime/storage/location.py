"""Locations of checkpoints: `Location` is a `Path` or, for a URL, a `RemotePath`; `StrLocation` may be a string."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TypeAlias

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
LOCAL_FILES = ("file", "local")  # fsspec's protocols for the file system of this machine
_URL_AS_PATH = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")  # `Path` drops one of the two slashes


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL such as s3://bucket/run, with the part of `Path`'s interface that needs no access to the store.

    Not a `PathLike`: code for local files raises TypeError instead of making a folder called "s3:".

    Args:
        protocol: fsspec's name for the kind of store, such as "s3" or "file".
        key: the rest of the URL, without a slash at its end.
    """

    protocol: str
    key: str

    def __str__(self) -> str:
        return f"{self.protocol}://{self.key}"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.protocol, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last component, as of a `Path`."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The URL without its last component."""
        return RemotePath(self.protocol, self.key.rpartition("/")[0])


Location: TypeAlias = Path | RemotePath
StrLocation: TypeAlias = str | PathLike[str] | RemotePath  # arguments of public functions


def as_location(path: StrLocation) -> Location:
    """Return a string or path as a location. A string with "://" is a URL.

    Raises:
        ValueError: a URL in a `Path`, which changes it; a chain of stores such as simplecache::s3://bucket; or the
            URL of files on another host, such as file://host/path.
    """
    if isinstance(path, RemotePath):
        return path
    text = fspath(path)
    match = _URL.fullmatch(text) if isinstance(path, str) else None
    if match:
        protocol, key = match.groups()
        if protocol in LOCAL_FILES and key and not key.startswith("/"):
            raise ValueError(f"{text} names {key.partition('/')[0]!r} as the host of the files, but only those of this "
                             f"machine can be reached; give {protocol}:///path, with three slashes")
        return RemotePath(protocol, key.rstrip("/"))
    if _URL_AS_PATH.match(text):
        raise ValueError(f"{text} looks like a URL that was made a Path, which drops a slash; give it as a string")
    if "::" in text and "://" in text:
        raise ValueError(f"{text} is a chain of stores; give the URL of the store itself: a cache may be out of date")
    return Path(path)


def absolute(location: Location) -> Location:
    """Return a location that does not depend on the working directory."""
    return location if isinstance(location, RemotePath) else location.absolute()


def resolve(location: Location) -> Location:
    """Return the location with symbolic links resolved; URLs have none."""
    return location if isinstance(location, RemotePath) else location.resolve()


def contains(outer: Location, inner: Location) -> bool:
    """Return True if `inner` is `outer` or in it."""
    if isinstance(outer, RemotePath) or isinstance(inner, RemotePath):
        return inner == outer or str(inner).startswith(f"{outer}/")
    return outer.resolve() in (inner.resolve(), *inner.resolve().parents)
