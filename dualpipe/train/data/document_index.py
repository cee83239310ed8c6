"""Find the document of a token in a packed text, without the offset of every document in memory.

A part of a text selects documents by their number and hash alone. A scan counts the selected tokens in blocks of
`BLOCK` documents. A lookup bisects the counts, then reads one block of the memory-mapped records. The scan of very many
documents is cached on disk, for the other ranks and for later starts.
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

BLOCK = 512  # documents: a lookup reads 14 KB
CACHED_FROM = 1 << 20  # documents from which a scan is cached; a scan of fewer takes milliseconds
_SCAN_CHUNK = 16 * BLOCK  # documents in memory at a time
_ALL_HASHES = range(1 << 64)


class TextPart(NamedTuple):
    """A part of a packed text: documents selected by number and hash, optionally cut at both ends.

    numbers: the documents to select from.
    hashes: the hashes of the documents to select.
    skip: tokens to drop at the beginning of the first document.
    num_tokens: tokens of the part. None: up to the end of its last document.
    """

    numbers: range
    hashes: range = _ALL_HASHES
    skip: int = 0
    num_tokens: int | None = None

    def select(self, records: np.ndarray) -> np.ndarray:
        """Return the mask (D,) of documents in the part.

        Args:
            records: (D,) records of documents in `numbers`.
        """
        if not self.hashes:
            return np.zeros(len(records), dtype=bool)
        hashes = records["hash"]
        return (hashes >= np.uint64(self.hashes.start)) & (hashes <= np.uint64(self.hashes.stop - 1))


class DocumentIndex(NamedTuple):
    """The documents of a part of a text as one sequence of tokens, which starts with the first document.

    Dimension letters: B blocks, D documents.

    documents: records of the whole text, memory-mapped.
    part: the selection.
    starts: (B + 1,) int64, the start of every block in the sequence, and the end of the sequence.
    num_documents: number of selected documents.
    num_tokens: number of selected tokens, without those dropped at both ends.
    fingerprint: hash of the tokenizer, the content and order of the documents, and the cuts.
    """

    documents: np.ndarray
    part: TextPart
    starts: np.ndarray
    num_documents: int
    num_tokens: int
    fingerprint: str

    def span(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents that tokens [start, stop) of the sequence are in.

        Returns:
            records: (D,) records of the documents.
            bounds: (D + 1,) start of every document in the sequence, and the end of the last one.
        """
        if start >= stop:
            return self.documents[:0], np.array([start])
        first_block = int(np.searchsorted(self.starts, start, side="right")) - 1
        end_block = int(np.searchsorted(self.starts, stop, side="left"))
        numbers = self.part.numbers[first_block * BLOCK : end_block * BLOCK]
        records = np.asarray(self.documents[numbers.start : numbers.stop])
        records = records[self.part.select(records)]
        lengths = records["length"].astype(np.int64)
        bounds = int(self.starts[first_block]) + np.cumsum(np.append(0, lengths))
        begin = int(np.searchsorted(bounds, start, side="right")) - 1
        end = int(np.searchsorted(bounds, stop, side="left"))
        return records[begin:end], bounds[begin : end + 1]

    def number_at(self, token: int) -> int:
        """Return the number of the document of a token of the sequence. The part must select all hashes."""
        block = int(np.searchsorted(self.starts, token, side="right")) - 1
        records, _ = self.span(int(self.starts[block]), token + 1)
        return self.part.numbers[block * BLOCK] + len(records) - 1


def is_cached(num_documents: int) -> bool:
    """Return True if the scan of this many documents is cached on disk."""
    return num_documents >= CACHED_FROM


def open_index(
    documents: np.ndarray, part: TextPart, tokenizer: str, *, identity: str, cache: Path | None
) -> DocumentIndex:
    """Index a part of a text, from a cached scan if there is one.

    Args:
        documents: records of the whole text.
        part: the selection.
        tokenizer: identity of the tokenizer, for the fingerprint.
        identity: hash of the packed text, for the name of the cached scan.
        cache: directory of cached scans. None: do not cache.
    """
    if cache is None or not is_cached(len(part.numbers)):
        return scan(documents, part, tokenizer)
    key = hashlib.sha256(f"{identity}\n{tokenizer}\n{part}\n{BLOCK}".encode()).hexdigest()[:12]
    table = cache / f"documents-{key}.npy"
    description = cache / f"documents-{key}.json"
    try:
        values = json.loads(description.read_text(encoding="utf-8"))
        starts = np.load(table, mmap_mode="r", allow_pickle=False)
        if len(starts) == values["starts"]:
            return DocumentIndex(documents, part, starts, values["documents"], values["tokens"], values["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing or damaged: scan
    index = scan(documents, part, tokenizer)
    try:
        _save(index, table, description)
    except OSError as error:
        warnings.warn(f"{table} cannot be written: {error.strerror}; each rank scans the documents itself",
                      stacklevel=1)
        return index
    return index._replace(starts=np.load(table, mmap_mode="r", allow_pickle=False))


def scan(documents: np.ndarray, part: TextPart, tokenizer: str) -> DocumentIndex:
    """Index a part of a text by reading the records of all its documents, some thousands at a time.

    Args:
        documents: records of the whole text.
        part: the selection.
        tokenizer: identity of the tokenizer, for the fingerprint.
    """
    num_blocks = -(-len(part.numbers) // BLOCK)
    starts = np.zeros(num_blocks + 1, dtype=np.int64)
    digest = hashlib.sha256(tokenizer.encode())
    num_documents = 0
    for first in range(0, len(part.numbers), _SCAN_CHUNK):
        numbers = part.numbers[first : first + _SCAN_CHUNK]
        records = np.asarray(documents[numbers.start : numbers.stop])
        selected = part.select(records)
        lengths = np.where(selected, records["length"].astype(np.int64), 0)
        block_sizes = np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK))
        block = first // BLOCK + 1
        starts[block : block + len(block_sizes)] = block_sizes
        digest.update(records["hash"][selected].tobytes())
        num_documents += int(selected.sum())
    np.cumsum(starts, out=starts)
    available = int(starts[-1]) - part.skip
    num_tokens = available if part.num_tokens is None else part.num_tokens
    if part.skip or num_tokens < available:
        digest.update(f"{part.skip}:{num_tokens}".encode())
    return DocumentIndex(documents, part, starts, num_documents, num_tokens, digest.hexdigest()[:16])


def _save(index: DocumentIndex, table: Path, description: Path) -> None:
    """Write a scan to disk. The description comes last: a scan without it is not used."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(index.starts))
    replace_file(table, [header.getvalue(), index.starts.tobytes()], is_shared=True)  # read by all ranks
    values = {"starts": len(index.starts), "documents": index.num_documents, "tokens": index.num_tokens,
              "fingerprint": index.fingerprint}
    replace_file(description, json.dumps(values) + "\n")
