"""Schedules that were found, kept on disk by what they were searched for.

One JSON file each under $XDG_CACHE_HOME or ~/.cache: CSV cannot hold every pair. A file that is damaged counts as none;
where nothing can be written, nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from dualpipe.schedule.simulate import Costs
from dualpipe.schedule.types import Action, Schedule, ScheduleError
from dualpipe.schedule.validate import validate


def key_of(*inputs: object) -> str:
    """What the file is called: a digest of the inputs, among them Costs."""
    return hashlib.sha256(json.dumps(list(map(_plain, inputs)), default=float).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, Costs):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return sorted((str(key), _plain(each)) for key, each in value.items())
    return float(value) if isinstance(value, int) else value


def _path(key: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"  # RuntimeError: there is no home
    return Path(base, "dualpipe", "schedules", f"{key}.json")


def read(key: str) -> Schedule | None:
    """The schedule that was kept under `key`, proved again; None where there is none that is whole."""
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError, ScheduleError):
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
        ranks = tuple(tuple(tuple(Action(*action) for action in step) for step in steps) for steps in kept["ranks"])
        placement = tuple(kept["placement"])
        schedule = Schedule("auto", len(ranks), len(placement), kept["num_microbatches"], ranks, placement)
        validate(schedule)
        return schedule
    return None


def write(key: str, schedule: Schedule) -> None:
    """Keep a schedule, in a file that is whole or not there."""
    kept = {
        "placement": schedule.placement, "num_microbatches": schedule.num_microbatches,
        "ranks": [[[(a.kind, a.stage, a.microbatch) for a in step] for step in steps] for steps in schedule.ranks],
    }
    with suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")  # others may search for the same
        try:
            temporary.write_text(json.dumps(kept), encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # also where the disk is full
