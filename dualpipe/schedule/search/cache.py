"""Cache of found schedules on disk, by the inputs of the search.

Each schedule is a file under $XDG_CACHE_HOME or ~/.cache. It is JSON because torch's CSV cannot hold every pair. A
damaged file is ignored, and where nothing can be written, nothing is cached.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from dualpipe.runtime.files import replace_file
from dualpipe.schedule.types import Action, Schedule
from dualpipe.schedule.validate import validate


def key_of(*inputs: object) -> str:
    """Return the name of the file: a digest of the `repr` of all inputs."""
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]


def _path(key: str) -> Path:
    """Return the path of the file. Raises RuntimeError if there is no home directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "dualpipe", "schedules", f"{key}.json")


def read(key: str) -> Schedule | None:
    """Return the schedule cached under `key`, validated again; None if there is none or its file is damaged."""
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        content = json.loads(_path(key).read_text(encoding="utf-8"))
        ranks = tuple(tuple(tuple(map(Action.read, step)) for step in steps) for steps in content["ranks"])
        placement = tuple(content["placement"])
        schedule = Schedule("auto", len(ranks), len(placement), content["num_microbatches"], ranks, placement)
        validate(schedule)
        return schedule
    return None


def write(key: str, schedule: Schedule) -> None:
    """Cache a schedule under `key`. The file is written whole or not at all."""
    content = {
        "placement": schedule.placement,
        "num_microbatches": schedule.num_microbatches,
        "ranks": [[[*map(str, step)] for step in steps] for steps in schedule.ranks],
    }
    with suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(content), is_shared=True)  # other processes may search for the same
