"""The data of a run: text packed on first use and split, the loader of training batches, and validation batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from dualpipe.nn.attention.sequence_split import SequenceSplit
from dualpipe.parallel.mesh import Mesh
from dualpipe.runtime.device import new_stream
from dualpipe.runtime.files import checksum_of
from dualpipe.runtime.ranks.rank_sync import RankSync
from dualpipe.train.config.load import check_data_paths
from dualpipe.train.config.schema import BYTES, TOKENIZER, Config, DataConfig
from dualpipe.train.data.loader import Loader, read_ahead
from dualpipe.train.data.mixture import Mixture, join_spans, read_spans
from dualpipe.train.data.pack import FORMAT, INDEX, MASKED_FORMAT, pack
from dualpipe.train.data.sequences import Span, choose_evaluation_windows
from dualpipe.train.data.sources import DOCUMENTS, find_sources
from dualpipe.train.data.splits import Splits, open_splits, scan_splits
from dualpipe.train.data.token_stream import PackedTokens, TokenBatch
from dualpipe.train.data.tokenizer import load_tokenizer


class RunData:
    """Training and validation text of a run. Collective.

    Attributes:
        sources: training and validation text of each source; one, except in a mixture.
        evaluated: the sources whose validation text is read: only the first if data.validation_path is set, because all
            sources share that text.
        batch_size: sequences of a global batch.
        loader: loader of training batches.
        validation_windows: bounds of the windows of every validation batch.

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
        ValueError: on all ranks, if text cannot be read, is too short, has tokens beyond `vocab_size`, or has a loss
            mask with a model with multi-token prediction.
    """

    def __init__(
        self, config: Config, ranks: RankSync, place: Mesh, split: SequenceSplit, *, reads: bool, vocab_size: int,
        mtp_depth: int, device: torch.device,
    ) -> None:
        train = config.train
        self._copy_stream = new_stream(device)  # side stream for copies of batches to the device; None on CPU
        min_validation_tokens = train.sequence_length + 1 if train.eval_batches else 0
        cache = Path(config.output.dir)
        paths = ranks.first(partial(_prepare, config))

        def open_sources() -> list[Splits]:
            fraction = config.data.validation_fraction
            return [
                open_splits(train_path, validation_path, fraction, at_least=min_validation_tokens, cache=cache)
                for train_path, validation_path in paths
            ]

        self.sources = ranks.agree(open_sources)  # one node alone may lack the files
        self.evaluated = self.sources[:1] if config.data.validation_path else self.sources
        self._check_sources(vocab_size, mtp_depth)

        num_rows = train.micro_batch_size * train.num_chunks if reads else 0
        rows = range(num_rows * place.batch_shard, num_rows * (place.batch_shard + 1))
        columns = split.token_indices(train.sequence_length) if split.size > 1 else None
        separate_documents = config.data.separate_documents
        self.batch_size = train.micro_batch_size * train.num_chunks * config.parallel.batch_shards
        self.loader = Loader(
            [splits.train for splits in self.sources], sequence_length=train.sequence_length,
            batch_size=self.batch_size, seed=train.seed, rows=rows, columns=columns, depth=mtp_depth,
            separate_documents=separate_documents,
            weights=[source.weight for source in config.data.sources] if len(self.sources) > 1 else (),
        )
        self.validation_windows = self._choose_validation_windows(config, rows)
        self._read_validation = partial(
            read_spans, [splits.validation for splits in self.evaluated], window=train.sequence_length + 1,
            columns=columns, depth=mtp_depth, separate_documents=separate_documents,
        )

    def _check_sources(self, vocab_size: int, mtp_depth: int) -> None:
        """Raise ValueError if the sources do not fit each other or the model."""
        check_tokenizers(self.sources)
        if not self.has_loss_mask and self.evaluated[0].validation.has_loss_mask:
            path = self.evaluated[0].validation.packed.path
            raise ValueError(f"data.validation_path: {path} holds conversations, but all of data.sources hold text, "
                             "whose loss has no mask; give text, or a source with conversations")
        for stream in chain.from_iterable(self.sources):
            stream.packed.check_vocabulary(vocab_size)
        if self.has_loss_mask and mtp_depth:
            raise ValueError(f"mtp.weight: {self.sources[0].train.packed.path} holds conversations, and multi-token "
                             "prediction trains on text alone; set mtp.weight = 0")

    @property
    def has_loss_mask(self) -> bool:
        """True if some tokens do not count for the loss, so that batches have different numbers of targets."""
        return any(splits.train.has_loss_mask for splits in self.sources)

    @property
    def num_validation_tokens(self) -> int:
        """The number of tokens of the validation text."""
        return sum(splits.validation.num_tokens for splits in self.evaluated)

    def _choose_validation_windows(self, config: Config, rows: range) -> list[Span]:
        """Return the bounds of the windows of every validation batch, for the rows of this rank."""
        num_batches = config.train.eval_batches
        if not num_batches or not any(splits.validation.num_documents for splits in self.evaluated):
            return []
        sequence_length = config.train.sequence_length
        if len(self.evaluated) == 1:
            return choose_evaluation_windows(
                self.evaluated[0].validation, sequence_length=sequence_length, batch_size=self.batch_size,
                limit=num_batches, rows=rows)
        # Batches of a mixture have sequences of all sources by weight, spread evenly over the text of each.
        numbers = np.arange(self.batch_size * num_batches)
        sources, _ = Mixture([source.weight for source in config.data.sources], config.train.seed).draws(numbers)
        spans = []
        for number, splits in enumerate(self.evaluated):
            count = int((sources == number).sum())
            at_least_one = max(1, count)  # there is no batch without sequences
            (span,) = choose_evaluation_windows(
                splits.validation, sequence_length=sequence_length, batch_size=at_least_one, limit=1)
            spans.append(span.take(slice(count)))
        batches = join_spans(sources, spans, sequence_length + 1)
        batch_rows = np.array(rows, dtype=np.int64)
        return [batches.take(batch * self.batch_size + batch_rows) for batch in range(num_batches)]

    def source_shares(self, step: int) -> list[float] | None:
        """Return the share of the tokens of each source in the first `step` steps; None if there is one source."""
        num_drawn = self.loader.num_drawn(step)
        if len(num_drawn) == 1:
            return None
        return [count / sum(num_drawn) for count in num_drawn]

    def training_batches(self, stop: int) -> AbstractContextManager[Iterator[TokenBatch]]:
        """Return a context with an iterator over the batches of the remaining steps up to `stop`, read one ahead."""
        return self.loader.batches(stop, self._copy_stream)

    def validation_batches(self) -> AbstractContextManager[Iterator[TokenBatch]]:
        """Return a context with an iterator over the validation batches, read one ahead."""
        return read_ahead(self._read_validation, self.validation_windows, self._copy_stream)


def _prepare(config: Config) -> list[tuple[Path, Path | None]]:
    """Pack and scan the text on rank 0; return the packed directories of training and validation text, by source."""
    check_data_paths(config)
    data = config.data
    cache = Path(config.output.dir)
    paths = [source.path for source in data.sources] or [data.path]
    train_paths = [ensure_packed(path, data, cache) for path in paths]
    validation_path = ensure_packed(data.validation_path, data, cache) if data.validation_path else None
    for train_path in train_paths:
        scan_splits(train_path, validation_path, data.validation_fraction, cache=cache)
    return [(train_path, validation_path) for train_path in train_paths]


def ensure_packed(path: str, data: DataConfig, cache: Path) -> Path:
    """Return the packed directory of a path in [data]. Packs text into a directory below `cache`, on first use.

    Args:
        path: a packed directory, a file or folder of text or records, or "stdlib".
        data: the table [data].
        cache: parent of directories that are packed here.

    Raises:
        ValueError: there is no text, or as `pack` does.
    """
    folder = Path(path)
    if folder.is_dir() and any((folder / name).exists() for name in (INDEX, DOCUMENTS)):
        if data.chat and (folder / INDEX).is_file() and not PackedTokens(folder).masks:
            raise ValueError(f"data.chat = true, but {folder} was packed as text; pack the conversations again with "
                             "`dualpipe data pack --chat`")
        return folder
    sources = find_sources([path])
    if not sources:
        raise ValueError(f"data.path = {path!r} holds no text; give a folder with files")
    tokenizer = load_tokenizer(data.tokenizer, data.end_token, chat=data.chat, chat_template=data.chat_template)
    format = MASKED_FORMAT if data.chat else FORMAT
    digest = hashlib.sha256(f"{format}\n{tokenizer.identity}\n{data.text_key}\n".encode())
    for source in sources:  # files of the same name, size and time are taken for unchanged, without reading them
        stat = source.path.stat()
        digest.update(f"{source.path.resolve()}\0{source.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    target = cache / f"data-{digest.hexdigest()[:12]}"
    if not (target / INDEX).exists():
        pack(sources, tokenizer, target, text_key=data.text_key)
    return target


def check_tokenizers(sources: Sequence[Splits]) -> None:
    """Check that all sources, and training and validation text, have the same tokenizer.

    Between the sources of a mixture, and between them and the validation text, chat templates and ends of documents may
    differ.

    Raises:
        ValueError: two of them were packed with different tokenizers.
    """
    first, *others = [splits.train.packed for splits in sources]
    for packed in others:
        if not packed.has_vocabulary_of(first.tokenizer):
            raise ValueError(f"data.sources: {first.path} was packed with the tokenizer {first.tokenizer!r}, "
                             f"{packed.path} with {packed.tokenizer!r}; pack all with the same")
    validation = sources[0].validation.packed
    if validation.tokenizer == first.tokenizer or (others and validation.has_vocabulary_of(first.tokenizer)):
        return
    raise ValueError(f"{first.path} was packed with the tokenizer {first.tokenizer!r}, {validation.path} with "
                     f"{validation.tokenizer!r}; pack both with the same")


def compare_with_checkpoint(packed: PackedTokens, checkpoint: str) -> str:
    """Return a warning if a text was packed with another tokenizer than that of a checkpoint, else "".

    Args:
        packed: the text.
        checkpoint: directory of the checkpoint that the model starts from, or "".
    """
    path = Path(checkpoint, TOKENIZER)
    if not checkpoint or not path.is_file() or packed.tokenizer_file == checksum_of(path, "sha256"):
        return ""
    used = "as bytes" if packed.tokenizer == BYTES else "with another tokenizer"
    return (f"{packed.path} was packed {used}, but the model starts from a checkpoint with its own tokenizer; set "
            f"data.tokenizer = {checkpoint!r}, or pack the text with it")
