"""Going on with another number of ranks than before, as where a node is missing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dualpipe.checkpoint.directory import find
from dualpipe.train.checkpointing import find_source
from dualpipe.train.config.load import fit_world, with_batch
from dualpipe.train.config.schema import Config


class SavedBatch(NamedTuple):
    """The global batch of the run that saved a checkpoint."""

    sequences: int
    pipelines: int  # that it was cut for


def fit_run(config: Config, world_size: int) -> tuple[Config, str]:
    """`fit_world`, and what is to be said of it.

    Where neither parallel.dp nor train.batch_size is given, a run that goes on in another number of pipelines keeps its
    global batch, by another number of micro-batches. Raises ValueError where there is none such: another batch than
    before is to be asked for.
    """
    fitted = fit_world(config, world_size)
    if config.parallel.dp or config.train.batch_size or (source := find_source(config)[0]) is None:
        return fitted, ""
    saved = _saved_batch(source)
    now = fitted.parallel.batch_shards
    at_once = fitted.train.micro_batch_size * now
    if saved is None or saved.pipelines == now or saved.sequences == at_once * fitted.train.num_chunks:
        return fitted, ""
    if saved.sequences % at_once == 0:
        kept = with_batch(fitted, saved.sequences)
        return kept, (f"train.num_chunks = {kept.train.num_chunks}, so that a step has {saved.sequences} sequences as "
                      f"before, by {saved.pipelines} pipelines then and {now} now; train.batch_size would set it")
    batch = at_once * fitted.train.num_chunks
    if "loader" in config.checkpoint.allow:
        return fitted, (f"WARNING: a step has {batch} sequences, and had {saved.sequences} before: {now} pipelines "
                        f"cannot share these in micro-batches of {fitted.train.micro_batch_size}")
    raise ValueError(
        f"{world_size} ranks make {now} pipelines, which cannot share the {saved.sequences} sequences of a step of the "
        f"checkpoint in {source} in micro-batches of {fitted.train.micro_batch_size}; start {_possible(fitted, saved)} "
        f"ranks, or go on with other batches, {batch} sequences each, by checkpoint.allow = [\"loader\"]"
    )


def _saved_batch(source: Path) -> SavedBatch | None:
    """Return the batch of a directory's newest checkpoint; None where no run has saved it, such as an imported one."""
    saved = find(source).committed[0].manifest.config
    try:
        train, parallel = saved["run"]["train"], saved["run"]["parallel"]
        pipelines = parallel["dp"] * parallel["ep"]
        return SavedBatch(train["micro_batch_size"] * train["num_chunks"] * pipelines, pipelines)
    except (KeyError, TypeError):
        return None


def _possible(fitted: Config, saved: SavedBatch) -> str:
    """The numbers of ranks that can share the saved batch, up to as many as saved it or are here."""
    parallel, size = fitted.parallel, fitted.train.micro_batch_size
    most = max(saved.pipelines, parallel.batch_shards) // parallel.ep
    ranks = parallel.world_size // parallel.dp
    found = [dp * ranks for dp in range(parallel.dp_replicate, most + 1, parallel.dp_replicate)
             if saved.sequences % (dp * parallel.ep * size) == 0]
    return " or ".join(map(str, found)) or "another number of"
