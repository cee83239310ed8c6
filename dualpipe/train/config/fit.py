"""Resolve a run's configuration for its number of ranks: sizes that depend on that number, the model, and the dtypes.

Every rank resolves its own configuration, because paths may differ between nodes. The ranks compare the settings that
must be equal when they join. `StepRunner` makes the schedule and the dtype plan from the result. The schedule may take
a search on one rank, and the dtype plan needs the dtypes of the checkpoint that the run resumes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from dualpipe.kernels.formats import FORMATS
from dualpipe.parallel import Rule
from dualpipe.parallel.mesh import check_replicate
from dualpipe.runtime.dtypes import dtype_of
from dualpipe.runtime.storage import Location
from dualpipe.train.config.model_config import TrainedModel, read_model
from dualpipe.train.config.schema import (
    AUTO,
    BYTES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Config,
    DTypeRule,
    replace_field,
)


@dataclass(frozen=True)
class RunDTypes:
    """The dtypes that a configuration names: [dtypes], train.dtype and optimizer.moments.

    compute: dtype of parameters and activations in the model.
    moments: dtype of the optimizer's moments.
    rules: exceptions by pattern.
    """

    compute: torch.dtype
    moments: torch.dtype
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, config: Config) -> RunDTypes:
        """Return the dtypes that `config` names."""
        rules = tuple(_convert_rule(rule) for rule in config.dtypes.rules)
        return cls(dtype_of(config.train.dtype), dtype_of(config.optimizer.moments), rules)


def _convert_rule(rule: DTypeRule) -> Rule:
    """Return a rule of the configuration as a rule of `dualpipe.parallel`."""
    return Rule(
        rule.pattern,
        dtype=_dtype_or_none(rule.compute),
        output_dtype=_dtype_or_none(rule.output),
        storage=rule.storage if rule.storage in FORMATS else _dtype_or_none(rule.storage),
        reduce=_dtype_or_none(rule.reduce),
        save=_dtype_or_none(rule.save),
        gather=rule.gather,
    )


def _dtype_or_none(name: str | None) -> torch.dtype | None:
    """Return the dtype of this name, or None for None."""
    return None if name is None else dtype_of(name)


@dataclass(frozen=True)
class Resolved:
    """A configuration with its model and dtypes.

    config: parallel.dp and train.num_chunks have the values of the run.
    positions: maximum sequence length of the model, None if unknown.
    """

    config: Config
    model: TrainedModel
    dtypes: RunDTypes
    positions: int | None = None

    @classmethod
    def of(cls, config: Config, model: TrainedModel, positions: int | None = None) -> Resolved:
        """Resolve the dtypes of `config`, which already fits the number of ranks, for `model`."""
        return cls(config, model, RunDTypes.of(config), positions)

    def with_config(self, config: Config) -> Resolved:
        """Resolve another configuration for the same model."""
        return Resolved.of(config, self.model, self.positions)


class SavedBatch(NamedTuple):
    """The global batch of the run that saved a checkpoint.

    sequences: size of the global batch.
    pipelines: number of parts that it was split into, dp * ep: pipelines that differ along "cp" only read one part.
    source: the checkpoint, or the directory of checkpoints.
    """

    sequences: int
    pipelines: int
    source: Location


def resolve(config: Config, world_size: int) -> Resolved:
    """Resolve a configuration for `world_size` ranks.

    Raises:
        ValueError: as `fit_world` and `read_model` do.
    """
    fitted = resolve_tokenizer(fit_world(config, world_size))
    model = read_model(config)
    return Resolved.of(fitted, model.config, model.positions)


def resolve_tokenizer(config: Config) -> Config:
    """Replace the tokenizer "auto" by the one of the checkpoint if it has one, else by "bytes"."""
    if config.data.tokenizer != AUTO:
        return config
    checkpoint = config.init.from_hf
    exists = bool(checkpoint) and any(Path(checkpoint, name).is_file() for name in (
        TOKENIZER, TOKENIZER_CONFIG, "tokenizer.model", "vocab.json"))
    return replace_field(config, "data", "tokenizer", checkpoint if exists else BYTES)


def fit_world(config: Config, world_size: int) -> Config:
    """Return `config` with parallel.dp filled in, and train.num_chunks if train.batch_size is set.

    Raises:
        ValueError: the layout cannot have this number of ranks, the batch cannot be split over them, sequences are too
            short for parallel.cp, or parallel.dp_replicate does not divide dp.
    """
    parallel = config.parallel
    length = config.train.sequence_length
    if parallel.cp > 1 and length < 2 * parallel.cp:
        raise ValueError(f"train.sequence_length = {length} is too short for parallel.cp = {parallel.cp}, which splits "
                         f"a sequence into two chunks per rank; give at least {2 * parallel.cp} tokens, or set "
                         f"parallel.cp to at most {max(1, length // 2)}")
    ranks_per_dp = parallel.world_size // parallel.sizes["dp"]
    dp, remainder = divmod(world_size, ranks_per_dp)
    if remainder or dp == 0 or parallel.dp not in (0, dp):
        sizes = parallel.sizes | {"dp": parallel.dp or "any"}
        raise ValueError(
            f"parallel.{' * '.join(sizes)} = {' * '.join(map(str, sizes.values()))} cannot be {world_size}, the number "
            f"of ranks that were started; start {parallel.world_size}, or change parallel.pp or parallel.dp"
        )
    config = replace_field(config, "parallel", "dp", dp)
    if config.train.batch_size:
        config = set_global_batch(config, config.train.batch_size)
    if parallel.dp_replicate > 1:
        check_replicate(dp, parallel.dp_replicate, "parallel.dp_replicate")
    return config


def set_global_batch(config: Config, batch_size: int) -> Config:
    """Return `config` with the train.num_chunks that makes a global batch of `batch_size` sequences.

    Args:
        config: its parallel.dp is known.
        batch_size: sequences of a step of all ranks.

    Raises:
        ValueError: no number of micro-batches makes this batch; the message names sizes that are possible.
    """
    parallel = config.parallel
    micro_batch_size = config.train.micro_batch_size
    unit = micro_batch_size * parallel.batch_shards
    num_microbatches, remainder = divmod(batch_size, unit)
    if remainder or not num_microbatches:
        dp_sizes = _dp_sizes_that_divide(config, batch_size, batch_size // parallel.ep)
        change_dp = f", or set parallel.dp to one of {', '.join(map(str, dp_sizes))}" if dp_sizes else ""
        smaller = batch_size - remainder
        near = " or ".join(f"{size}" for size in (smaller, smaller + unit) if size)
        raise ValueError(
            f"train.batch_size = {batch_size} is not a multiple of {unit}, which is train.micro_batch_size * dp * ep = "
            f"{micro_batch_size} * {parallel.dp} * {parallel.ep}; give {near}{change_dp}"
        )
    return replace_field(config, "train", "num_chunks", num_microbatches)


def _dp_sizes_that_divide(config: Config, batch_size: int, largest: int) -> list[int]:
    """Return the values of parallel.dp, up to `largest`, with which ranks can share a global batch."""
    parallel = config.parallel
    unit = config.train.micro_batch_size * parallel.ep
    return [dp for dp in range(parallel.dp_replicate, largest + 1, parallel.dp_replicate)
            if batch_size % (dp * unit) == 0]


def keep_batch(resolved: Resolved, saved: SavedBatch | None) -> tuple[Resolved, str]:
    """Return `resolved` with the global batch of the checkpoint that a run resumes from, and a line to print or "".

    If the number of pipelines differs from that of the run that saved the checkpoint, the number of micro-batches
    changes.

    Args:
        resolved: the configuration of this run.
        saved: from `saver.find_source`; None to keep none.

    Raises:
        ValueError: no number of micro-batches gives the same batch, and checkpoint.allow does not contain "loader".
    """
    config = resolved.config
    pipelines = config.parallel.batch_shards
    unit = config.train.micro_batch_size * pipelines
    batch = unit * config.train.num_chunks
    if saved is None or saved.pipelines == pipelines or saved.sequences == batch:
        return resolved, ""
    if saved.sequences % unit == 0:
        with_saved_batch = set_global_batch(config, saved.sequences)
        return resolved.with_config(with_saved_batch), (
            f"train.num_chunks = {with_saved_batch.train.num_chunks} keeps the {saved.sequences} sequences of a step: "
            f"{saved.pipelines} pipelines saved the checkpoint, {pipelines} resume it; set train.batch_size to change "
            "the batch"
        )
    if "loader" in config.checkpoint.allow:
        return resolved, (f"WARNING: a step now has {batch} sequences instead of {saved.sequences}: {pipelines} "
                          f"pipelines cannot share these in micro-batches of {config.train.micro_batch_size}")
    raise ValueError(
        f"{config.parallel.world_size} ranks make {pipelines} pipelines, which cannot share the {saved.sequences} "
        f"sequences of a step of the checkpoint in {saved.source} in micro-batches of {config.train.micro_batch_size}; "
        f"start {_possible_world_sizes(config, saved)} ranks, or resume with batches of {batch} sequences by "
        'checkpoint.allow = ["loader"]'
    )


def _possible_world_sizes(fitted: Config, saved: SavedBatch) -> str:
    """Return the numbers of ranks that can share the saved batch, as text.

    The largest is at most the number that saved it or the present number, whichever is larger.
    """
    parallel = fitted.parallel
    largest_dp = max(saved.pipelines, parallel.batch_shards) // parallel.ep
    ranks_per_dp = parallel.world_size // parallel.dp
    dp_sizes = _dp_sizes_that_divide(fitted, saved.sequences, largest_dp)
    return " or ".join(f"{dp * ranks_per_dp}" for dp in dp_sizes) or "another number of"
