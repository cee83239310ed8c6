"""The checkpoint that a run goes on from, by its configuration and what is in its directory of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dualpipe.checkpoint.directory import FoundCheckpoints, find, none_whole
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.rank_process import starts_before
from dualpipe.runtime.storage import Location, as_location
from dualpipe.runtime.storage.location import contains, resolve
from dualpipe.train.config.schema import Config


def saved_settings(found: Any, table: str) -> Mapping[str, Any]:
    """Return a table of the run's configuration in a manifest's `config`; empty where no run saved it."""
    for name in ("run", table):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def find_source(config: Config) -> tuple[Location | None, dict[str, torch.dtype] | None, list[str]]:
    """Find what to go on from, the dtypes that its tensors were computed in, and what must be said; None: a new run.

    A run that began with a checkpoint of another one goes on from its own, once it has saved any: so a job that is
    started again with the same command goes on. One that is to begin anew, or goes back to an earlier checkpoint of its
    own, does so in the first of its starts alone.
    """
    resume, own = config.checkpoint.resume, config.checkpoint_directory
    path, found, notes = own, find(own) if resume != "never" or starts_before() else FoundCheckpoints([], {}), []
    saved = found.committed[0].manifest.config if found.committed else None
    began = saved_settings(saved, "checkpoint").get("resume")
    if starts_before() and began == resume:
        pass  # what to begin with was for the first start, which has saved since
    elif resume == "never":
        return None, None, []
    elif resume != "auto":
        source = as_location(resume)
        if contains(own, source) or not (found.committed or found.damaged):
            path, found = source, find(source)
        elif found.committed and not (isinstance(began, str) and resolve(as_location(began)) == resolve(source)):
            raise ValueError(f"{own} has checkpoints of a run that did not begin with checkpoint.resume = {resume!r}; "
                             'give another output.dir, or checkpoint.resume = "auto" to go on from there')
        else:
            notes = [f"checkpoint.resume = {resume!r} is where this run began; it goes on from its own checkpoints"]
    if not found.committed:
        if resume == "auto" and not found.damaged:
            return None, None, []
        try:
            none_whole(path, found.damaged.values())
        except ValueError as error:
            raise ValueError(f"checkpoint.resume: {error}") from error
    return path, {name: dtype_of(of["compute"]) for name, of in found.committed[0].manifest.dtypes.items()}, notes
