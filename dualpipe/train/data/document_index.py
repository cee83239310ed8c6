"""Lookup of the document that a token of a packed text is in, without a number per document in memory.

The documents that a part of the text selects are known by their numbers and hashes alone. A scan counts their tokens in
blocks of `BLOCK` documents; a lookup searches the counts by bisection and then reads the one block, memory-mapped. A
scan of very many documents is kept on disk, for the other ranks and for later starts.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualpipe.runtime.files import replace_file

BLOCK = 512  # documents: 14 KB to read for a lookup
KEPT_FROM = 1 << 20  # documents from which a scan is kept on disk; one of fewer takes milliseconds
_SCANNED = 16 * BLOCK  # documents that are in memory at a time
_EVERY_HASH = range(1 << 64)


class TextPart(NamedTuple):
    """A part of a packed text: documents chosen by number and hash, without some tokens at both ends."""

    numbers: range
    hashes: range = _EVERY_HASH
    skip: int = 0  # tokens of the first document that are left out
    num_tokens: int | None = None  # after which the part ends, where that is before its last document does

    def select(self, records: np.ndarray) -> np.ndarray:
        """Return the mask (D,) of the documents that belong to the part, of D whose numbers do."""
        if not self.hashes:
            return np.zeros(len(records), dtype=bool)
        hashes = records["hash"]
        return (hashes >= np.uint64(self.hashes.start)) & (hashes <= np.uint64(self.hashes.stop - 1))


class DocumentIndex(NamedTuple):
    """The documents of a part of a text, as one long sequence of tokens that begins with the first of them.

    Dimension letters: B blocks, D documents.
    """

    documents: np.ndarray  # of the whole text, memory-mapped
    part: TextPart
    starts: np.ndarray  # (B + 1,) int64: where each block begins in the sequence, and its end
    num_documents: int
    num_tokens: int  # without what is left out at both ends
    fingerprint: str  # of the tokenizer, the content and order of the documents, and where they are cut

    def span(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the records (D,) of the documents that tokens [start, stop) of the sequence are in, and where each
        begins in it, with the end of the last one (D + 1,)."""
        if start >= stop:
            return self.documents[:0], np.array([start])
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        numbers = self.part.numbers[first * BLOCK : last * BLOCK]
        records = np.asarray(self.documents[numbers.start : numbers.stop])
        records = records[self.part.select(records)]
        bounds = int(self.starts[first]) + np.cumsum(np.append(0, records["length"].astype(np.int64)))
        begin = int(np.searchsorted(bounds, start, side="right")) - 1
        end = int(np.searchsorted(bounds, stop, side="left"))
        return records[begin:end], bounds[begin : end + 1]

    def number_at(self, token: int) -> int:
        """Return the number of the document that a token of the sequence is in; for a part of all hashes."""
        first = int(np.searchsorted(self.starts, token, side="right")) - 1
        before, _ = self.span(int(self.starts[first]), token + 1)
        return self.part.numbers[first * BLOCK] + len(before) - 1


def open_index(
    documents: np.ndarray, part: TextPart, tokenizer: str, *, identity: str, cache: Path | None
) -> DocumentIndex:
    """Index a part of a text, by an earlier scan where one is kept in `cache`. identity: of the text."""
    if cache is None or len(part.numbers) < KEPT_FROM:
        return scan(documents, part, tokenizer)
    key = hashlib.sha256(f"{identity}\n{tokenizer}\n{part}\n{BLOCK}".encode()).hexdigest()[:12]
    table, description = cache / f"documents-{key}.npy", cache / f"documents-{key}.json"
    try:
        values = json.loads(description.read_text(encoding="utf-8"))
        starts = np.load(table, mmap_mode="r", allow_pickle=False)
        if len(starts) == values["starts"]:
            return DocumentIndex(documents, part, starts, values["documents"], values["tokens"], values["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or damaged: made again
    index = scan(documents, part, tokenizer)
    try:
        _keep(index, table, description)
    except OSError as error:
        warnings.warn(f"{table} cannot be written: {error.strerror}; each rank scans the documents itself",
                      stacklevel=1)
        return index
    return index._replace(starts=np.load(table, mmap_mode="r", allow_pickle=False))


def scan(documents: np.ndarray, part: TextPart, tokenizer: str) -> DocumentIndex:
    """Index a part of a text by reading the records of all its documents, some thousands at a time."""
    starts = np.zeros(-(-len(part.numbers) // BLOCK) + 1, dtype=np.int64)
    digest = hashlib.sha256(tokenizer.encode())
    count = 0
    for first in range(0, len(part.numbers), _SCANNED):
        numbers = part.numbers[first : first + _SCANNED]
        records = np.asarray(documents[numbers.start : numbers.stop])
        selected = part.select(records)
        lengths = np.where(selected, records["length"].astype(np.int64), 0)
        of_blocks = np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK))
        block = first // BLOCK + 1
        starts[block : block + len(of_blocks)] = of_blocks
        digest.update(records["hash"][selected].tobytes())
        count += int(selected.sum())
    np.cumsum(starts, out=starts)
    rest = int(starts[-1]) - part.skip
    num_tokens = rest if part.num_tokens is None else part.num_tokens
    if part.skip or num_tokens < rest:
        digest.update(f"{part.skip}:{num_tokens}".encode())
    return DocumentIndex(documents, part, starts, count, num_tokens, digest.hexdigest()[:16])


def _keep(index: DocumentIndex, table: Path, description: Path) -> None:
    """Write what was found by a scan, the description last."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(index.starts))
    replace_file(table, [header.getvalue(), index.starts.tobytes()], is_shared=True)  # by all ranks
    values = {"starts": len(index.starts), "documents": index.num_documents, "tokens": index.num_tokens,
              "fingerprint": index.fingerprint}
    replace_file(description, json.dumps(values) + "\n")
