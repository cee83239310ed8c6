"""Read packed token shards, memory-mapped and checked, and split their documents into training and held-out text."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualpipe.train.pack import DOCUMENT_TYPE, DOCUMENTS, FORMAT, INDEX, file_record

CHECKSUM_LIMIT = 1 << 30  # bytes; larger data is checked by size only, so that a start does not read terabytes


class PackedTokens:
    """A packed directory, open for reading.

    Raises:
        ValueError: the directory is not packed, is incomplete, or a file is not what the index says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = _read_index(self.path)
        try:
            self.vocab_size = int(index["vocab_size"])
            self.largest = int(index["largest"])
            self.tokenizer = str(index["tokenizer"])
            records, dtype = [index["document_index"], *index["shards"]], np.dtype(index["dtype"]).newbyteorder("<")
            _check_files(self.path, records)
            self._shards = [np.memmap(self.path / Path(r["file"]).name, dtype=dtype, mode="r") for r in index["shards"]]
        except (KeyError, TypeError) as error:
            raise _damaged(self.path, f"{INDEX} lacks or garbles {error}") from error
        self.documents = np.load(self.path / DOCUMENTS, allow_pickle=False)
        if self.documents.dtype != DOCUMENT_TYPE or len(self.documents) != index["documents"]:
            raise _damaged(self.path, f"{DOCUMENTS} does not hold the {index['documents']} documents of the index")

    def read_document(self, number: int, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of a document."""
        document = self.documents[number]
        offset = int(document["offset"])
        return self._shards[document["shard"]][offset + start : offset + stop]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse tokens that a model with `vocab_size` entries cannot embed."""
        if self.largest >= vocab_size:
            raise ValueError(
                f"{self.path} holds the token {self.largest}, but the model's vocab_size is {vocab_size}; set it to at "
                f"least {max(self.vocab_size, self.largest + 1)} or pack the text with the model's tokenizer"
            )


class TokenStream:
    """Some of the documents of a packed directory, read as one long sequence."""

    def __init__(
        self, packed: PackedTokens, documents: np.ndarray, *, skip: int = 0, num_tokens: int | None = None
    ) -> None:
        """`documents`: numbers of the documents, ascending. `skip`: tokens left out at the start of the first.
        `num_tokens`: of the stream, where it ends before the last document does."""
        self.packed = packed
        self._numbers, self._skip = documents, skip
        ends = np.cumsum(packed.documents["length"][documents], dtype=np.int64) - skip
        self._is_cut = skip > 0 or (num_tokens is not None and num_tokens < ends[-1])
        self._ends = ends if num_tokens is None else np.minimum(ends, num_tokens)

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_documents(self) -> int:
        """Number of documents in the stream."""
        return len(self._numbers)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the tokenizer, the content and order of the documents, and where they are cut."""
        hashes = self.packed.documents["hash"][self._numbers].tobytes()
        cut = f"{self._skip}:{self.num_tokens}" if self._is_cut else ""
        return hashlib.sha256(self.packed.tokenizer.encode() + hashes + cut.encode()).hexdigest()[:16]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream as int64."""
        out = np.empty(stop - start, dtype=np.int64)
        position = start
        index = int(np.searchsorted(self._ends, start, side="right"))
        while position < stop:
            begin = int(self._ends[index - 1]) if index else -self._skip
            end = min(stop, int(self._ends[index]))
            piece = self.packed.read_document(int(self._numbers[index]), position - begin, end - begin)
            out[position - start : end - start] = piece
            position, index = end, index + 1
        return out

    def positions(self, start: int, stop: int) -> np.ndarray:
        """The position of tokens [start, stop) of the stream in their documents, as far as those are inside."""
        numbers = np.arange(start, stop)
        ends = np.concatenate(([0], self._ends))
        return numbers - np.maximum(ends[np.searchsorted(self._ends, numbers, side="right")], start)


class Splits(NamedTuple):
    """Training text and the text that evaluation uses."""

    train: TokenStream
    held_out: TokenStream


def all_documents(packed: PackedTokens) -> TokenStream:
    """Everything in `packed`."""
    return TokenStream(packed, np.arange(len(packed.documents)))


def split_documents(packed: PackedTokens, fraction: float) -> Splits:
    """Hold out about `fraction` of the documents, chosen by a hash of their content.

    The choice depends on nothing else: it is the same in every run, and a copy of a document is on the same side. Where
    it leaves one side without a document, as of a single file, the last `fraction` of all tokens is held out instead.

    Raises:
        ValueError: that is not one token.
    """
    threshold = np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    held_out = packed.documents["hash"] < threshold
    splits = Splits(*(TokenStream(packed, np.flatnonzero(mask)) for mask in (~held_out, held_out)))
    if fraction and not (splits.train.num_documents and splits.held_out.num_documents):
        return _hold_out_last(packed, fraction)
    return splits


def _hold_out_last(packed: PackedTokens, fraction: float) -> Splits:
    lengths = packed.documents["length"].astype(np.int64)
    ends = np.cumsum(lengths)
    total, held_out = int(ends[-1]), int(ends[-1] * fraction)
    if not held_out:
        raise ValueError(
            f"data.validation_fraction = {fraction} holds out none of the {total} tokens in {packed.path}; choose a "
            "larger fraction, give more text, or give data.validation_path"
        )
    cut = total - held_out
    last, first = np.searchsorted(ends, cut), np.searchsorted(ends, cut, side="right")  # the same unless between two
    return Splits(
        TokenStream(packed, np.arange(last + 1), num_tokens=cut),
        TokenStream(packed, np.arange(first, len(ends)), skip=cut - int(ends[first] - lengths[first])),
    )


def unigram_loss(train: TokenStream, held_out: TokenStream, vocab_size: int, max_tokens: int = 1 << 26) -> float:
    """Nats per token of `held_out` under the token frequencies of `train` (first `max_tokens` of each; add-one)."""
    train_counts, counts = (_counts(s, vocab_size, max_tokens) for s in (train, held_out))
    log_p = np.log(train_counts + 1.0) - np.log(train_counts.sum() + vocab_size)
    return float(-(counts * log_p).sum() / counts.sum())


def _counts(stream: TokenStream, vocab_size: int, max_tokens: int, block: int = 1 << 22) -> np.ndarray:
    total = np.zeros(vocab_size, dtype=np.int64)
    end = min(stream.num_tokens, max_tokens)
    for start in range(0, end, block):
        total += np.bincount(stream.read(start, min(end, start + block)), minlength=vocab_size)
    return total


def _read_index(path: Path) -> dict[str, Any]:
    if not (path / INDEX).is_file():
        raise _damaged(path, f"there is no {INDEX}")
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, f"{INDEX} is not valid JSON ({error})") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _damaged(path, f"{INDEX} is not of the format {FORMAT!r}")
    return index


def _check_files(path: Path, records: list[dict[str, Any]]) -> None:
    total = sum(record["bytes"] for record in records)
    for record in records:
        file = path / Path(record["file"]).name
        if not file.is_file():
            raise _damaged(path, f"{file.name} is missing")
        if file.stat().st_size != record["bytes"]:
            raise _damaged(path, f"{file.name} has {file.stat().st_size} bytes instead of {record['bytes']}")
        if total <= CHECKSUM_LIMIT and file_record(file)["sha256"] != record["sha256"]:
            raise _damaged(path, f"the checksum of {file.name} is wrong")


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is not a complete packed directory: {what}; make it again with `dualpipe data pack`")
