"""Packed directories opened for reading, as one long sequence of tokens, and batches of windows of it.

Dimension letters: B sequences of the global batch that a rank reads, T tokens of a sequence, C those of them that it
reads (all, unless context-parallel ranks share the sequence), D depths of multi-token prediction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dualpipe.runtime.files import checksum_of
from dualpipe.train.data.document_index import TextPart, open_index
from dualpipe.train.data.pack import DOCUMENT_TYPE, FORMAT, INDEX, MASKED_FORMAT
from dualpipe.train.data.sources import DOCUMENTS

NO_TARGET = -100  # ignored by `cross_entropy_loss`
CHECKSUM_LIMIT = 1 << 30  # bytes; of larger data only sizes are checked, so that a start does not read terabytes


class PackedTokens:
    """A packed directory, open for reading.

    Attributes:
        path: the directory.
        identity: hash of the index.
        vocab_size: of the tokenizer.
        largest: largest token in the text.
        tokenizer: identity of the tokenizer.
        tokenizer_file: SHA-256 of its tokenizer.json; "" if it has none.
        end_token: name of the token that ends documents; "" for bytes and conversations.
        shards: memory-mapped tokens of every shard.
        masks: memory-mapped loss mask of every shard, uint8. Empty: all tokens count.
        documents: memory-mapped records of type `DOCUMENT_TYPE`.

    Raises:
        ValueError: the directory is incomplete, or its files do not match its index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            index = self._read_index()
            self.vocab_size = int(index["vocab_size"])
            self.largest = int(index["largest"])
            self.tokenizer = str(index["tokenizer"])
            self.tokenizer_file = str(index["tokenizer_file"])
            self.end_token = str(index.get("end_token", ""))
            dtype = np.dtype(index["dtype"]).newbyteorder("<")
            masks = index["masks"] if index["format"] == MASKED_FORMAT else []
            num_shards = len(index["shards"])
            documents_file, *files = self._check_files([index["document_index"], *index["shards"], *masks])
            self.shards = [np.memmap(file, dtype=dtype, mode="r") for file in files[:num_shards]]
            self.masks = [np.memmap(file, dtype=np.uint8, mode="r") for file in files[num_shards:]]
            if masks and list(map(len, self.masks)) != list(map(len, self.shards)):
                raise ValueError("the loss masks do not have one byte per token")
            self.documents = np.load(documents_file, mmap_mode="r", allow_pickle=False)
            if self.documents.dtype != DOCUMENT_TYPE or len(self.documents) != index["documents"]:
                raise ValueError(f"{DOCUMENTS} does not hold the {index['documents']} documents of the index")
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{error}" if isinstance(error, ValueError) else f"{INDEX} lacks or garbles {error}"
            raise ValueError(f"{path} is not a complete packed directory: {problem}; make it again with `dualpipe data "
                             "pack`") from error

    def _read_index(self) -> dict[str, Any]:
        """Read index.json and set `identity`. Raises ValueError if it is not an index of this format."""
        if not (self.path / INDEX).is_file():
            raise ValueError(f"there is no {INDEX}")
        content = (self.path / INDEX).read_bytes()
        self.identity = hashlib.sha256(content).hexdigest()
        try:
            index = json.loads(content.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"{INDEX} is not valid JSON ({error})") from error
        if not isinstance(index, dict) or index.get("format") not in (FORMAT, MASKED_FORMAT):
            raise ValueError(f"{INDEX} is not of the format {FORMAT!r} or {MASKED_FORMAT!r}")
        return index

    def _check_files(self, records: Sequence[dict[str, Any]]) -> list[Path]:
        """Return the paths of files in the index. Raises ValueError if a size or checksum differs from the index."""
        files = [self.path / Path(record["file"]).name for record in records]
        total = sum(record["bytes"] for record in records)
        for file, record in zip(files, records):
            if not file.is_file():
                raise ValueError(f"{file.name} is missing")
            size = file.stat().st_size
            if size != record["bytes"]:
                raise ValueError(f"{file.name} has {size} bytes instead of {record['bytes']}")
            if total <= CHECKSUM_LIMIT and checksum_of(file, "sha256") != record["sha256"]:
                raise ValueError(f"the checksum of {file.name} is wrong")
        return files

    def has_vocabulary_of(self, tokenizer: str) -> bool:
        """Return True if the text has the ids of another tokenizer, whatever chat templates and ends of documents.

        Args:
            tokenizer: identity of the other tokenizer.
        """
        return self.tokenizer.split(":")[:2] == tokenizer.split(":")[:2]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if the text has tokens that a model with `vocab_size` entries cannot embed."""
        if self.largest >= vocab_size:
            raise ValueError(
                f"{self.path} holds the token {self.largest}, but the model's vocab_size is {vocab_size}; set it to at "
                f"least {max(self.vocab_size, self.largest + 1)} or pack the text with the model's tokenizer"
            )


class TokenBatch(NamedTuple):
    """A global batch, or the part of it that a rank reads.

    tokens: (B, C) int64.
    targets: (B, C) int64, or (B, C, 1 + D); see `shift_targets`.
    positions: (B, T) int64, position of every token in its document, from the document's first token in the sequence.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor


class TokenStream:
    """Documents of a packed directory, as one long sequence. Takes no memory per document.

    Args:
        packed: the packed directory.
        part: selection of documents. None: all.
        cache: directory for the scan of very many documents. None: do not cache it.
    """

    def __init__(self, packed: PackedTokens, part: TextPart | None = None, *, cache: Path | None = None) -> None:
        self.packed = packed
        self.part = TextPart(range(len(packed.documents))) if part is None else part
        self.index = open_index(packed.documents, self.part, packed.tokenizer, identity=packed.identity, cache=cache)
        self.num_documents = self.index.num_documents
        self.num_tokens = self.index.num_tokens

    @property
    def fingerprint(self) -> str:
        """A hash of the tokenizer, the content and order of the documents, and the cuts."""
        return self.index.fingerprint

    @property
    def has_loss_mask(self) -> bool:
        """True if some tokens do not count for the loss, as in conversations."""
        return bool(self.packed.masks)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the stream, int64."""
        return self._read(self.packed.shards, start, stop, np.dtype(np.int64))

    def read_mask(self, start: int, stop: int) -> np.ndarray:
        """Return the loss mask of tokens [start, stop): True for tokens that count for the loss."""
        if not self.has_loss_mask:
            return np.ones(stop - start, dtype=bool)
        return self._read(self.packed.masks, start, stop, np.dtype(bool))

    def _read(self, shards: Sequence[np.ndarray], start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        """Return the part of `shards` that belongs to tokens [start, stop) of the stream."""
        skip = self.part.skip
        records, bounds = self.index.span(start + skip, stop + skip)
        values = np.empty(stop - start, dtype=dtype)
        for record, (begin, end) in zip(records, pairwise((bounds - skip).tolist())):
            first = max(start, begin)
            last = min(stop, end)
            to_shard = int(record["offset"]) - begin  # from a place in the stream to a place in the shard
            shard = shards[record["shard"]]
            values[first - start : last - start] = shard[first + to_shard : last + to_shard]
        return values

    def document_bounds(self) -> np.ndarray:
        """Return the start of every document in the stream, and the end of the last one, int64 (D + 1,)."""
        _, bounds = self.index.span(self.part.skip, self.part.skip + self.num_tokens)
        return np.clip(bounds - self.part.skip, 0, self.num_tokens)

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return the positions of tokens [start, stop) in their documents, int64. `start` is position 0."""
        skip = self.part.skip
        _, bounds = self.index.span(start + skip, stop + skip)
        places = np.arange(start, stop)
        document_starts = bounds[np.searchsorted(bounds, places + skip, side="right") - 1] - skip
        return places - np.maximum(document_starts, start)

    def read_windows(
        self, starts: Sequence[int] | np.ndarray, window: int, columns: torch.Tensor | None = None, *, depth: int = 0,
        separate_documents: bool = False, stops: np.ndarray | None = None,
    ) -> TokenBatch:
        """Read a batch of windows. A window that ends beyond the stream goes on at its beginning.

        Args:
            starts: (B,) first token of every window.
            window: T + 1 tokens.
            columns: (C,) the tokens of each sequence to read. None: all. Positions are always of all tokens.
            depth: of `shift_targets`.
            separate_documents: targets must be in the same document.
            stops: (B,) ends of the windows. Tokens from there on only fill the sequence and are not targets. None:
                windows are full.
        """
        rows = np.empty((len(starts), window), dtype=np.int64)
        positions = np.empty((len(starts), window), dtype=np.int64)
        labels = rows
        if self.has_loss_mask or stops is not None:
            labels = np.full_like(rows, NO_TARGET)
        for row, start in enumerate(map(int, starts)):
            size = min(window, self.num_tokens - start)
            for piece, first in ((slice(0, size), start), (slice(size, window), 0)):
                length = piece.stop - piece.start
                if length:
                    rows[row, piece] = self.read(first, first + length)
                    positions[row, piece] = self.positions(first, first + length)
            if labels is not rows:
                size = window if stops is None else int(stops[row]) - start
                counts = self.read_mask(start, start + size)
                labels[row, :size] = np.where(counts, rows[row, :size], NO_TARGET)
        targets = shift_targets(labels, depth, positions if separate_documents else None)
        positions = positions[:, :-1]
        selected: Any = slice(None) if columns is None else columns.numpy()
        arrays = rows[:, :-1][:, selected], targets[:, selected], positions
        return TokenBatch(*(torch.from_numpy(array.copy()) for array in arrays))


def shift_targets(rows: np.ndarray, depth: int = 0, positions: np.ndarray | None = None) -> np.ndarray:
    """Return the targets of all tokens but the last of each row.

    Target k of a token is the token k + 1 places ahead. The MTP layer of depth k also gets the k tokens between the two
    as input: if they are not all among the T tokens, target k is NO_TARGET. With `positions`, it is NO_TARGET too if it
    is in another document, which the token does not see.

    Args:
        rows: (B, T + 1) windows.
        depth: D.
        positions: (B, T + 1) of the tokens in their documents. None: documents are not separate.

    Returns:
        (B, T), or with a depth (B, T, 1 + D).
    """
    length = rows.shape[1] - 1
    by_depth = np.full((len(rows), length, 1 + depth), NO_TARGET)
    for k in range(min(1 + depth, length)):
        ahead = rows[:, k + 1 :]
        if positions is not None:
            in_document = positions[:, k + 1 :] == positions[:, : length - k] + k + 1
            ahead = np.where(in_document, ahead, NO_TARGET)
        by_depth[:, : length - k, k] = ahead
    return by_depth if depth else by_depth[..., 0]
