"""Schedules that were found, kept on disk by what they were searched for.

One JSON file each under $XDG_CACHE_HOME or ~/.cache: CSV cannot hold every pair. A file that is damaged counts as none;
where nothing can be written, nothing is kept.
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
    """What the file is called: a digest of the inputs, which their `repr` tells apart."""
    return hashlib.sha256(repr(inputs).encode()).hexdigest()[:32]


def _path(key: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # RuntimeError: there is no home
    return Path(base, "dualpipe", "schedules", f"{key}.json")


def read(key: str) -> Schedule | None:
    """The schedule that was kept under `key`, proved again; None where there is none that is whole."""
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
        ranks = tuple(tuple(tuple(map(Action.read, step)) for step in steps) for steps in kept["ranks"])
        placement = tuple(kept["placement"])
        schedule = Schedule("auto", len(ranks), len(placement), kept["num_microbatches"], ranks, placement)
        validate(schedule)
        return schedule
    return None


def write(key: str, schedule: Schedule) -> None:
    """Keep a schedule, in a file that is whole or not there."""
    kept = {"placement": schedule.placement, "num_microbatches": schedule.num_microbatches,
            "ranks": [[[*map(str, step)] for step in steps] for steps in schedule.ranks]}
    with suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(kept), is_shared=True)  # others may search for the same
