"""One job at a time in a directory."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import warnings
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock(file: Path, patience: float) -> int | None:
    """A descriptor that holds `file`, None where the file system has no locks. The system frees it with the process.

    Raises ValueError where another process has it for `patience` seconds: one that was just killed may take a moment.
    """
    directory = file.parent
    descriptor, deadline = os.open(file, os.O_RDWR | os.O_CREAT, 0o666), time.monotonic() + patience
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
            warnings.warn(f"{directory} is on a file system without locks: let no other job save there", stacklevel=2)
            return None


def unlock(descriptor: int | None) -> None:
    """Let others have it."""
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of this process may hold the descriptor too
        os.close(descriptor)
