"""The data of one run: its text, packed and split, the loader of training batches, and the held-out batches."""

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
from dualpipe.train.data.loader import (
    Loader,
    TokenBatch,
    evaluation_batches,
    open_splits,
    packed_directory,
    read_ahead,
    scan_splits,
)


class RunData:
    """The text that a run trains on, and what is held out. Collective over `ranks`.

    place: of this rank in the mesh, which says the rows that it reads of a global batch. split: the columns that it
    reads of a sequence. reads: whether this rank reads batches at all. vocab_size, mtp_depth: of the model.
    device: where batches go.

    Raises ValueError, on all ranks, for text that cannot be read, is too short, or is of another vocabulary.
    """

    def __init__(
        self, config: Config, ranks: RankSync, place: Mesh, split: SequenceSplit, *, reads: bool, vocab_size: int,
        mtp_depth: int, device: torch.device,
    ) -> None:
        self._copying = new_stream(device)  # a side stream for batches on their way to the device; None on CPU
        train, data, cache = config.train, config.data, Path(config.output.dir)
        packed = partial(packed_directory, tokenizer=data.tokenizer, cache=cache, text_key=data.text_key)

        def prepare() -> tuple[Path, Path | None]:
            paths = packed(data.path), packed(data.validation_path) if data.validation_path else None
            scan_splits(*paths, data.validation_fraction, cache=cache)
            return paths

        paths = ranks.first(prepare)
        one_sequence = train.sequence_length + 1 if train.eval_batches else 0
        self.splits = open_splits(*paths, data.validation_fraction, at_least=one_sequence, cache=cache)
        for stream in self.splits:
            stream.packed.check_vocabulary(vocab_size)

        rows_of_rank = train.micro_batch_size * train.num_chunks if reads else 0
        rows = range(rows_of_rank * place.batch_shard, rows_of_rank * (place.batch_shard + 1))
        columns = split.token_indices(train.sequence_length) if split.size > 1 else None
        self.batch_size = train.micro_batch_size * train.num_chunks * config.parallel.batch_shards
        """sequences of a global batch"""
        self.loader = Loader(
            self.splits.train, sequence_length=train.sequence_length, batch_size=self.batch_size, seed=train.seed,
            rows=rows, columns=columns, depth=mtp_depth, separate_documents=data.separate_documents,
        )

        held_out = self.splits.held_out
        whole = 0 if data.validation_path else self.splits.train.num_tokens + held_out.num_tokens
        self.held_out: list[list[int]] = []
        """of each batch that is held out, where its windows start"""
        if held_out.num_documents:
            self.held_out = evaluation_batches(
                held_out, sequence_length=train.sequence_length, batch_size=self.batch_size,
                limit=train.eval_batches, rows=rows, fraction_of=whole,
            )
        self._read_held_out = partial(
            held_out.read_windows, window=train.sequence_length + 1, columns=columns, depth=mtp_depth,
            separate_documents=data.separate_documents,
        )

    def training_batches(self, stop: int) -> AbstractContextManager[Iterator[TokenBatch]]:
        """Read the batches of the steps that are left up to `stop`, one ahead."""
        return self.loader.batches(stop, self._copying)

    def held_out_batches(self) -> AbstractContextManager[Iterator[TokenBatch]]:
        """Read the held-out batches, one ahead."""
        return read_ahead(self._read_held_out, self.held_out, self._copying)
