"""Going on with another number of ranks than before, as where a node is missing."""

from __future__ import annotations

from dualpipe.checkpoint.directory import find
from dualpipe.train.config import fit_world, with_batch
from dualpipe.train.resume import find_source
from dualpipe.train.tables import Config


def fit_run(config: Config, world_size: int) -> tuple[Config, str]:
    """`fit_world`, and what is to be said of it.

    Where neither parallel.dp nor train.batch_size is given, a run that goes on in another number of pipelines keeps its
    global batch, by another number of micro-batches, if there is one.
    """
    fitted = fit_world(config, world_size)
    if config.parallel.dp or config.train.batch_size or (source := find_source(config)[0]) is None:
        return fitted, ""
    saved = find(source).committed[0].manifest.config
    try:
        train, parallel = saved["run"]["train"], saved["run"]["parallel"]
        pipelines = parallel["dp"] * parallel["ep"]
        batch = train["micro_batch_size"] * train["num_chunks"] * pipelines
    except (KeyError, TypeError):  # not saved by a run, as an imported one
        return fitted, ""
    now = fitted.parallel.batch_shards
    at_once = fitted.train.micro_batch_size * now
    if pipelines == now or batch % at_once or batch == at_once * fitted.train.num_chunks:
        return fitted, ""
    kept = with_batch(fitted, batch)
    return kept, (f"train.num_chunks = {kept.train.num_chunks}, so that a step has {batch} sequences as before, by "
                  f"{pipelines} pipelines then and {now} now; train.batch_size would set it")
