"""Find the checkpoint that a run resumes from, by its configuration and its checkpoint directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dualpipe.checkpoint.directory import AllDamaged, FoundCheckpoints, find, raise_none_complete
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.rank_process import restart_count
from dualpipe.runtime.storage import Location, as_location, contains, resolve
from dualpipe.train.config.fit import SavedBatch
from dualpipe.train.config.schema import Config

# Ends the error of a run whose checkpoints are all damaged.
START_ANEW = (
    '\ncheckpoint.resume = "never" starts from the initial weights; a path there resumes from another checkpoint')


class ResumeSource(NamedTuple):
    """The checkpoint that a run resumes from.

    path: a checkpoint or a directory of checkpoints, local or remote. None: the run starts from its initial weights.
    compute_dtypes: compute dtypes of the run that saved it, by tensor name. None: a new run.
    notes: lines to print.
    """

    path: Location | None
    compute_dtypes: dict[str, torch.dtype] | None
    notes: list[str]


def saved_settings(manifest_config: Any, table: str) -> Mapping[str, Any]:
    """Return a table of the run's configuration from the `config` of a manifest; empty if no run saved it."""
    settings = manifest_config
    for name in ("run", table):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings if isinstance(settings, Mapping) else {}


def find_source(config: Config) -> ResumeSource:
    """Find the checkpoint that a run resumes from.

    A run that began with a checkpoint of another run resumes from its own checkpoints once it has saved one, so that
    the same command resumes a job that was killed. If checkpoint.resume is "never" or a checkpoint of the run itself,
    it applies only to the first start of the job; restarts resume from the newest checkpoint.

    Raises:
        ValueError: the checkpoint directory has no complete checkpoint although one is needed, or it belongs to
            a run that did not begin with `checkpoint.resume`.
    """
    resume = config.checkpoint.resume
    directory = config.checkpoint_directory
    is_restart = bool(restart_count())
    new_run = ResumeSource(None, None, [])
    if resume == "never" and not is_restart:
        return new_run
    existing = find(directory)
    newest_config = existing.committed[0].manifest.config if existing.committed else None
    began_with = saved_settings(newest_config, "checkpoint").get("resume")
    if is_restart and began_with == resume:
        return _select_newest(directory, existing)  # `resume` was for the first start, which has saved since
    if resume == "never":
        return new_run
    if resume == "auto":
        return _select_newest(directory, existing) if existing.committed or existing.damaged else new_run
    target = as_location(resume)
    if contains(directory, target) or not (existing.committed or existing.damaged):
        return _select_newest(target, find(target))
    if existing.committed and not (isinstance(began_with, str) and resolve(as_location(began_with)) == resolve(target)):
        raise ValueError(f"{directory} has checkpoints of a run that did not begin with checkpoint.resume = "
                         f'{resume!r}; give another output.dir, or checkpoint.resume = "auto" to resume from there')
    note = f"this run began with checkpoint.resume = {resume!r}; it resumes from its own checkpoints"
    return _select_newest(directory, existing, note)


def find_saved_batch(config: Config) -> SavedBatch | None:
    """Return the global batch of the checkpoint that a run resumes from, if the run has to keep it.

    None if the configuration sets parallel.dp or train.batch_size, the run is new, or no run saved the checkpoint (it
    was imported).
    """
    if config.parallel.dp or config.train.batch_size:
        return None
    source = find_source(config).path
    if source is None:
        return None
    saved = find(source).committed[0].manifest.config
    train = saved_settings(saved, "train")
    parallel = saved_settings(saved, "parallel")
    try:
        pipelines = parallel["dp"] * parallel["ep"]
        return SavedBatch(train["micro_batch_size"] * train["num_chunks"] * pipelines, pipelines, source)
    except (KeyError, TypeError):
        return None


def _select_newest(path: Location, checkpoints: FoundCheckpoints, *notes: str) -> ResumeSource:
    """Return the newest of the checkpoints at `path` as the source. Raises ValueError if none is complete."""
    if not checkpoints.committed:
        try:
            raise_none_complete(path, checkpoints.damaged.values())
        except ValueError as error:
            hint = START_ANEW if isinstance(error, AllDamaged) else ""
            raise ValueError(f"checkpoint.resume: {error}{hint}") from error
    dtypes = checkpoints.committed[0].manifest.dtypes
    compute_dtypes = {name: dtype_of(uses["compute"]) for name, uses in dtypes.items()}
    return ResumeSource(path, compute_dtypes, list(notes))
