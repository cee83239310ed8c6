"""The data of a run: packed and split text, the loader of training batches, and the validation batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.device import new_stream
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.train.config.schema import Config
from dualpipe.train.data.loader import Loader, read_ahead
from dualpipe.train.data.splits import choose_evaluation_windows, ensure_packed, open_splits, scan_splits
from dualpipe.train.data.token_stream import TokenBatch


class RunData:
    """Training and validation text of a run. Collective.

    Attributes:
        splits: training and validation text.
        batch_size: sequences of a global batch.
        loader: loader of training batches.
        validation_windows: starts of the windows of every validation batch.

    Args:
        config: configuration of the run.
        ranks: all ranks. Rank 0 packs the text.
        place: place of this rank in the mesh, which selects the rows of a global batch to read.
        split: selects the columns of a sequence to read.
        reads: False for a rank that needs no batches, between the first and the last stage.
        vocab_size: of the model.
        mtp_depth: of the model.
        device: device of the batches.

    Raises:
        ValueError: on all ranks, if text cannot be read, is too short, or has tokens beyond `vocab_size`.
    """

    def __init__(
        self, config: Config, ranks: RankSync, place: Mesh, split: SequenceSplit, *, reads: bool, vocab_size: int,
        mtp_depth: int, device: torch.device,
    ) -> None:
        train = config.train
        self._copy_stream = new_stream(device)  # side stream for copies of batches to the device; None on CPU
        min_validation_tokens = train.sequence_length + 1 if train.eval_batches else 0
        cache = Path(config.output.dir)
        train_path, validation_path = ranks.first(partial(_prepare, config))
        self.splits = open_splits(train_path, validation_path, config.data.validation_fraction,
                                  at_least=min_validation_tokens, cache=cache)
        for stream in self.splits:
            stream.packed.check_vocabulary(vocab_size)

        num_rows = train.micro_batch_size * train.num_chunks if reads else 0
        rows = range(num_rows * place.batch_shard, num_rows * (place.batch_shard + 1))
        columns = split.token_indices(train.sequence_length) if split.size > 1 else None
        separate_documents = config.data.separate_documents
        self.batch_size = train.micro_batch_size * train.num_chunks * config.parallel.batch_shards
        self.loader = Loader(
            self.splits.train, sequence_length=train.sequence_length, batch_size=self.batch_size, seed=train.seed,
            rows=rows, columns=columns, depth=mtp_depth, separate_documents=separate_documents,
        )
        self.validation_windows = self._choose_validation_windows(config, rows)
        self._read_validation = partial(
            self.splits.validation.read_windows, window=train.sequence_length + 1, columns=columns, depth=mtp_depth,
            separate_documents=separate_documents,
        )

    def _choose_validation_windows(self, config: Config, rows: range) -> list[list[int]]:
        """Return the starts of the windows of every validation batch, for the rows of this rank."""
        text, validation = self.splits
        if not validation.num_documents:
            return []
        fraction_of = 0 if config.data.validation_path else text.num_tokens + validation.num_tokens
        return choose_evaluation_windows(
            validation, sequence_length=config.train.sequence_length, batch_size=self.batch_size,
            limit=config.train.eval_batches, rows=rows, fraction_of=fraction_of,
        )

    def training_batches(self, stop: int) -> AbstractContextManager[Iterator[TokenBatch]]:
        """Return a context with an iterator over the batches of the remaining steps up to `stop`, read one ahead."""
        return self.loader.batches(stop, self._copy_stream)

    def validation_batches(self) -> AbstractContextManager[Iterator[TokenBatch]]:
        """Return a context with an iterator over the validation batches, read one ahead."""
        return read_ahead(self._read_validation, self.validation_windows, self._copy_stream)


def _prepare(config: Config) -> tuple[Path, Path | None]:
    """Pack and scan the text on rank 0; return the packed directories of training and validation text."""
    data = config.data
    cache = Path(config.output.dir)
    train_path = ensure_packed(data.path, tokenizer=data.tokenizer, cache=cache, text_key=data.text_key)
    validation_path = None
    if data.validation_path:
        validation_path = ensure_packed(data.validation_path, tokenizer=data.tokenizer, cache=cache,
                                        text_key=data.text_key)
    scan_splits(train_path, validation_path, data.validation_fraction, cache=cache)
    return train_path, validation_path
