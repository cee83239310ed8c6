"""File operations for a local directory, or for a store that fsspec reaches by a URL (`s3://bucket/run`).

Imports `runtime.files`.
"""

from dualpipe.runtime.storage.choose import storage_of, write_files
from dualpipe.runtime.storage.location import Location, RemotePath, StrLocation, absolute, as_location

__all__ = ["Location", "RemotePath", "StrLocation", "absolute", "as_location", "storage_of", "write_files"]
