"""A run's configuration resolved for the ranks that were started: sizes that depend on their number, and the model.

Each rank resolves its own: paths may differ from node to node. What must be the same on all is compared when they meet.
The schedule and the dtype plan are made from this by `StepRunner`: one takes a search on one rank, the other the
dtypes of the checkpoint that the run goes on from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dualpipe.checkpoint.directory import find
from dualpipe.kernels.formats import FORMATS
from dualpipe.parallel import Rule
from dualpipe.parallel.mesh import check_replicate
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.storage import Location
from dualpipe.train.config.model_config import TrainedModel, read_model
from dualpipe.train.config.schema import Config, replace_field
from dualpipe.train.config.source import find_source


@dataclass(frozen=True)
class RunDTypes:
    """The dtypes that a configuration names: [dtypes], train.dtype and optimizer.moments."""

    compute: torch.dtype  # of parameters and activations in the model
    moments: torch.dtype  # of the optimizer
    rules: tuple[Rule, ...]  # exceptions

    @classmethod
    def of(cls, config: Config) -> RunDTypes:
        """Return the dtypes that `config` names."""
        rules = tuple(
            Rule(each.pattern, dtype=_dtype(each.compute), output_dtype=_dtype(each.output),
                 storage=each.storage if each.storage in FORMATS else _dtype(each.storage),
                 reduce=_dtype(each.reduce), save=_dtype(each.save), gather=each.gather)
            for each in config.dtypes.rules
        )
        return cls(dtype_of(config.train.dtype), dtype_of(config.optimizer.moments), rules)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else dtype_of(name)


@dataclass(frozen=True)
class Resolved:
    """A configuration whose parallel.dp and train.num_chunks are those of the run, and what it names: the model and
    the dtypes."""

    config: Config
    model: TrainedModel
    dtypes: RunDTypes
    positions: int | None = None  # that the model is made for, if known

    @classmethod
    def of(cls, config: Config, model: TrainedModel, positions: int | None = None) -> Resolved:
        """Resolve what `config`, which fits the number of ranks, says of `model`."""
        return cls(config, model, RunDTypes.of(config), positions)

    def with_config(self, config: Config) -> Resolved:
        """Resolve other settings for the same model."""
        return Resolved.of(config, self.model, self.positions)


class SavedBatch(NamedTuple):
    """The global batch of the run that saved a checkpoint."""

    sequences: int
    pipelines: int  # that it was cut for
    source: Location  # the checkpoint, or the directory of checkpoints


def resolve(config: Config, world_size: int) -> Resolved:
    """Resolve a configuration for a number of ranks. Raises ValueError as `fit_world` and `read_model` do."""
    fitted = fit_world(config, world_size)
    model = read_model(config)
    return Resolved.of(fitted, model.config, model.positions)


def fit_world(config: Config, world_size: int) -> Config:
    """Return `config` with parallel.dp filled in, and train.num_chunks where train.batch_size is given.

    Raises ValueError for a number of ranks that the layout does not need, that the batch cannot be cut for, or that
    share sequences of fewer tokens than they have chunks, and for a parallel.dp_replicate that does not divide dp.
    """
    parallel, length = config.parallel, config.train.sequence_length
    if parallel.cp > 1 and length < 2 * parallel.cp:
        raise ValueError(f"train.sequence_length = {length} is too short for parallel.cp = {parallel.cp}, whose ranks "
                         f"have two chunks of a sequence each; give at least {2 * parallel.cp} tokens, or have "
                         f"parallel.cp be at most {max(1, length // 2)}")
    pipelines, rest = divmod(world_size, parallel.world_size // parallel.sizes["dp"])
    if rest or pipelines == 0 or parallel.dp not in (0, pipelines):
        sizes = parallel.sizes | {"dp": parallel.dp or "any"}
        raise ValueError(
            f"parallel.{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))} cannot be {world_size}, the number "
            f"of ranks that were started; start {parallel.world_size}, or change parallel.pp or parallel.dp"
        )
    config = replace_field(config, "parallel", "dp", pipelines)
    if config.train.batch_size:
        config = with_batch(config, config.train.batch_size)
    if parallel.dp_replicate > 1:
        check_replicate(pipelines, parallel.dp_replicate, "parallel.dp_replicate")
    return config


def with_batch(config: Config, batch_size: int) -> Config:
    """`config`, whose parallel.dp is known, with as many micro-batches as make a global batch of so many sequences.
    ValueError, with sizes that are possible, where none do."""
    at_once = config.train.micro_batch_size * config.parallel.batch_shards
    num_microbatches, rest = divmod(batch_size, at_once)
    if rest or not num_microbatches:
        parts = config.parallel.dp_replicate
        possible = [size for size in range(parts, batch_size // config.parallel.ep + 1, parts)
                    if batch_size % (size * config.train.micro_batch_size * config.parallel.ep) == 0]
        dp = f", or have parallel.dp be one of {', '.join(map(str, possible))}" if possible else ""
        near = " or ".join(f"{size}" for size in (batch_size - rest, batch_size - rest + at_once) if size)
        raise ValueError(
            f"train.batch_size = {batch_size} is no multiple of {at_once}, which is train.micro_batch_size * dp * ep = "
            f"{config.train.micro_batch_size} * {config.parallel.dp} * {config.parallel.ep}; give {near}{dp}"
        )
    return replace_field(config, "train", "num_chunks", num_microbatches)


def keep_batch(resolved: Resolved, saved: SavedBatch | None) -> tuple[Resolved, str]:
    """Keep the global batch of the checkpoint that a run goes on from, and return what is to be said of it.

    saved: from `saved_batch`. Where the run has another number of pipelines than the one that saved it, another number
    of micro-batches makes up for that. Raises ValueError where none does: another batch than before is to be asked for.
    """
    config = resolved.config
    now = config.parallel.batch_shards
    at_once = config.train.micro_batch_size * now
    batch = at_once * config.train.num_chunks
    if saved is None or saved.pipelines == now or saved.sequences == batch:
        return resolved, ""
    if saved.sequences % at_once == 0:
        kept = with_batch(config, saved.sequences)
        return resolved.with_config(kept), (
            f"train.num_chunks = {kept.train.num_chunks}, so that a step has {saved.sequences} sequences as before, by "
            f"{saved.pipelines} pipelines then and {now} now; train.batch_size would set it"
        )
    if "loader" in config.checkpoint.allow:
        return resolved, (f"WARNING: a step has {batch} sequences, and had {saved.sequences} before: {now} pipelines "
                          f"cannot share these in micro-batches of {config.train.micro_batch_size}")
    raise ValueError(
        f"{config.parallel.world_size} ranks make {now} pipelines, which cannot share the {saved.sequences} sequences "
        f"of a step of the checkpoint in {saved.source} in micro-batches of {config.train.micro_batch_size}; start "
        f"{_possible(config, saved)} ranks, or go on with other batches, {batch} sequences each, by checkpoint.allow = "
        '["loader"]'
    )


def saved_batch(config: Config) -> SavedBatch | None:
    """Return the global batch that a run is to keep, of the checkpoint that it goes on from.

    None where the configuration itself says parallel.dp or train.batch_size, where a new run begins, and where no run
    has saved the checkpoint, such as an imported one.
    """
    if config.parallel.dp or config.train.batch_size:
        return None
    source, _, _ = find_source(config)
    if source is None:
        return None
    saved = find(source).committed[0].manifest.config
    try:
        train, parallel = saved["run"]["train"], saved["run"]["parallel"]
        pipelines = parallel["dp"] * parallel["ep"]
        return SavedBatch(train["micro_batch_size"] * train["num_chunks"] * pipelines, pipelines, source)
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
